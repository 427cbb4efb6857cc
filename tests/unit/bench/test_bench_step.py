"""The step bench measures the same batches on both sides, and counts FLOPs by their formula."""

from __future__ import annotations

import statistics
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
    progress: list[str] = []
    settings = replace(QUICK, packs=8, global_batch=4, steps=3, workers=0)
    with Workspace(tmp_path) as workspace:
        report = bench_step(settings, workspace, progress.append)
    figures = {figure.name: figure for figure in report.figures}
    loop, bare = figures["loop, a step"].samples, figures["bare Megatron, a step"].samples
    assert len(loop) == len(bare) == 3
    ratios = [ours / theirs for ours, theirs in zip(loop, bare, strict=True)]
    assert figures["loop over bare, the same batch"].value == pytest.approx(statistics.median(ratios))
    assert {"waiting for data, share of step time", "tokens", "model FLOPs"} <= figures.keys()
    assert progress[-1] == "the loop alone"
