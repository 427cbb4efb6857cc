"""The step bench measures what it says: the same batches on both sides, and FLOPs by their formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.bench.step import QUICK, bench_step, step_flops
from harness.bench.workspace import Workspace
from harness.records import SequenceView
from harness.schedule import SequenceCost
from harness.thd import build_thd_batch


def test_flops_of_a_step_count_real_tokens_three_times() -> None:
    rows = [
        build_thd_batch(
            [SequenceView(np.ones(n + 1, dtype=np.int32), np.zeros(n + 1, dtype=np.uint8)) for n in lengths]
        )
        for lengths in ((3, 5), (7,))
    ]
    assert step_flops(SequenceCost(linear=10.0, quadratic=2.0), SimpleNamespace(rows=rows)) == 3 * (10 * 15 + 2 * 83)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take minutes for a model this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_bench_gives_its_figures_on_a_small_model(tmp_path) -> None:
    said: list[str] = []
    settings = replace(QUICK, packs=8, global_batch=4, steps=3, workers=0)
    with Workspace(tmp_path) as workspace:
        report = bench_step(settings, workspace, said.append)
    figures = {figure.name: figure for figure in report.figures}
    assert len(figures["loop, a step"].samples) == len(figures["bare Megatron, a step"].samples) == 3
    assert 0 < figures["loop over bare, the same batch"].value < 20
    assert 0 <= figures["waiting for data, share of step time"].value < 1
    assert figures["tokens"].value > 0
    assert figures["model FLOPs"].value > 0
    assert said[-1] == "the loop alone"
