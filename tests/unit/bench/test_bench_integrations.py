"""The bench of integrations measures both sides on the same rows, and names what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from tests.benchmarks import integrations
from tests.benchmarks.integrations import (
    bench_integrations,
)

TINY = Sizes(packs=24, pack_size=64, workers=(0,), global_batch=4, steps=8)


def silent(text: str) -> None:
    pass


def test_every_installed_trainer_is_measured_beside_its_own_data_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {"torchtitan": ["torchtitan"]}
    monkeypatch.setattr(integrations, "missing_packages", lambda name, *, beside=(): without.get(name, []))
    with Workspace(tmp_path) as workspace:
        report = bench_integrations(TINY, workspace, silent)

    assert [figure.name for figure in report.figures if figure.unit == "x"] == [
        "TRL, ours to theirs, 0 workers",
        "Megatron-Bridge, ours to theirs, 0 workers",
    ]
    assert report.figure("TRL, ours to theirs, 0 workers").of == (
        "TRL, rows of a step, 0 workers",
        "TRL, its packed dataset, 0 workers",
    )
    assert all(figure.value > 0 for figure in report.figures)
    (left_out,) = [note for note in report.notes if "left out" in note]
    assert left_out == "torchtitan is left out: torchtitan not installed; `pip install torchtitan` adds it"
