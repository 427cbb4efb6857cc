"""The step bench measures the same batches on both sides, and counts FLOPs by their formula."""

from __future__ import annotations

import statistics

import pytest

from harness.bench import BENCHES
from harness.bench.step import bench_step
from harness.bench.workspace import Workspace


def test_the_bench_gives_its_figures_on_a_small_model(tmp_path) -> None:
    progress: list[str] = []
    sizes = BENCHES["step"].sizes(quick=True, packs=8, global_batch=4, steps=3, workers=(0,))
    with Workspace(tmp_path) as workspace:
        report = bench_step(sizes, workspace, progress.append)
    figures = {figure.name: figure for figure in report.figures}
    loop, bare = figures["our loop, a step"].samples, figures["a bare Megatron loop, a step"].samples
    assert len(loop) == len(bare) == 3
    pairs = list(zip(loop, bare, strict=True))
    ratios = [ours / theirs for ours, theirs in pairs]
    assert figures["our loop over a bare one, the same batch"].value == pytest.approx(statistics.median(ratios))
    added = figures["processor time that our loop adds to a step"]
    assert added.value == pytest.approx(statistics.median(ours - theirs for ours, theirs in pairs))
    assert (added.unit, added.at_most) == ("ms", 10)
    assert {"waiting for data, of a step", "tokens", "model FLOPs of a rank"} <= figures.keys()
    assert progress[-1] == "the loop and the bare step, in turns; then the loop alone"
