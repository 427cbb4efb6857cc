"""The step bench measures the same batches on both sides, and counts FLOPs by their formula."""

from __future__ import annotations

import statistics

import pytest

from harness.bench import BENCHES
from harness.bench.step import bench_step
from harness.bench.workspace import Workspace
from harness.loader import RankBatch
from harness.megatron.step import MegatronStep


def test_the_bench_gives_its_figures_on_a_small_model(tmp_path, monkeypatch) -> None:
    progress: list[str] = []
    trained: list[RankBatch] = []
    whole = MegatronStep.train
    monkeypatch.setattr(MegatronStep, "train", lambda self, batch: trained.append(batch) or whole(self, batch))
    sizes = BENCHES["step"].sizes(quick=True, packs=8, global_batch=4, steps=3, workers=(0,))
    with Workspace(tmp_path) as workspace:
        report = bench_step(sizes, workspace, progress.append)
    figures = {figure.name: figure for figure in report.figures}
    loop, bare = figures["our loop, a step"].samples, figures["a bare Megatron loop, a step"].samples
    assert len(loop) == len(bare) == 3
    pairs = list(zip(loop, bare, strict=True))
    ratios = [ours / theirs for ours, theirs in pairs]
    assert figures["our loop over a bare one, the same batch"].value == pytest.approx(statistics.median(ratios))
    feed = figures["processor time of the feed, a microbatch"]
    alone = figures["processor time of our loop, a step"]
    assert [(one.unit, one.at_most, len(one.samples)) for one in (feed, alone)] == [("ms", 0.3, 3), ("ms", 1.0, 3)]
    assert len(trained) == 2 * 4, "in turns, and for the figures of a model; the loop alone trains none"
    assert {"waiting for data, of a step", "tokens", "model FLOPs of a rank"} <= figures.keys()
    assert progress[-1] == "the loop and the bare step, in turns; then each part alone"
