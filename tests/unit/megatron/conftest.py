"""A small Megatron model and small corpora in this process: one rank, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import prepared  # noqa: F401
import pytest
import torch
from corpora import write_corpus

from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_model
from harness.megatron.step import MegatronStep
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.records import SequenceView

VOCAB = 256


@pytest.fixture
def chunks() -> Iterator[list[torch.nn.Module]]:
    with runtime.start("cpu"):
        parallel = ParallelConfig()
        join(parallel, 1)
        # Larger initial weights than in training, so that attention is far from uniform and a leak would show.
        model = ModelConfig(num_layers=3, hidden_size=64, ffn_hidden_size=128, init_std=0.2)
        yield build_model(model, parallel, vocab_size=VOCAB, device=torch.device("cpu"))


@pytest.fixture
def job() -> Iterator[runtime.Runtime]:
    with runtime.start("cpu") as started:
        yield started


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "a", 200, seed=1)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "b", 60, seed=2)


@contextmanager
def one_rank(model: ModelConfig, **options: Any) -> Iterator[MegatronStep]:
    """A step of a job of one rank, for as long as the job lasts."""
    parallel = ParallelConfig()
    with runtime.start("cpu") as job:
        yield MegatronStep(model, parallel, join(parallel, 1), device=job.device, **options)


def make_sequence(length: int, seed: int) -> SequenceView:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, size=length).astype(np.uint8)
    mask[0] = 1
    mask[-1] = 0
    return SequenceView(rng.integers(0, VOCAB, size=length).astype(np.int32), mask)
