"""Formats, workers and schedulers train the same, and a killed matrix continues."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from small_packs import TINY

from harness.formats import FORMATS
from harness.parity.result import REPORT_FILE

from ..distributed.conftest import ROOT, environment
from .conftest import Matrix

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
Parity = Callable[..., Matrix]


def test_every_format_trains_as_the_legacy_npy_does(parity: Parity, device: str) -> None:
    found = parity("check=formats")
    assert found.code == 0, found.output
    assert {cell.axes["format"] for cell in found.report.cells} == set(FORMATS)
    assert {cell.series.step[-1] for cell in found.report.cells} == {20}
    for cell in found.report.cells[1:]:
        checks = {check.name: check for check in cell.checks}
        assert checks["data"].passed
        assert checks["placement"].passed
        assert (checks["loss"].tolerance == 0) == (device == "cpu")
        assert cell.peak_memory_bytes > 100 * 2**20
        assert cell.tokens_per_s > 0


def test_every_format_trains_the_same_with_four_persistent_workers_over_two_epochs(parity: Parity) -> None:
    found = parity("check=workers")
    assert found.code == 0, found.output
    persistent = [
        cell
        for cell in found.report.cells
        if (cell.axes["num_workers"], cell.axes.get("persistent_workers")) == ("4", "true")
    ]
    assert {cell.axes["format"] for cell in persistent} == set(FORMATS)
    assert all(cell.reference == "workers: npy num_workers=0" for cell in persistent)


def test_every_schedule_trains_the_same_on_one_rank_and_on_two(parity: Parity, device: str) -> None:
    found = parity("check=schedules", *(["max_ranks=1"] if device == "cuda" else []))
    assert found.code == 0, found.output
    assert len(found.report.cells) == (3 if device == "cuda" else 6)


def test_a_killed_matrix_started_again_keeps_its_finished_cells(parity: Parity, tmp_path: Path, device: str) -> None:
    arguments = [f"folder={tmp_path / 'parity'}", "steps=8", "slots=1"]
    more = f"sft_more={json.dumps([f'trainer.device={device}', *TINY])}"
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.recipes.parity", *arguments, more],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    cells = tmp_path / "parity" / "cells"
    deadline = time.monotonic() + 1200
    running = cells / "formats__memmap" / "run" / "metrics.jsonl"
    while not running.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    runs = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not (tmp_path / "parity" / REPORT_FILE).exists()
    before = {path.parent.name: path.stat().st_mtime_ns for path in cells.glob("*/cell.json")}
    assert set(before) >= {"formats__npy", "formats__parquet"}
    assert "formats__memmap" not in before
    # Its run ended with it, so that nothing writes there anymore.
    assert psutil.wait_procs(runs, timeout=120)[1] == []

    found = parity("steps=8", "slots=1", sft=TINY, keep=False)
    assert found.code == 0, found.output
    after = {path.parent.name: path.stat().st_mtime_ns for path in cells.glob("*/cell.json")}
    assert set(after) == {f"formats__{name}" for name in FORMATS}
    assert {name: after[name] for name in before} == before
    assert found.output.count("reused") == len(before)
