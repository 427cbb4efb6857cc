"""Formats, workers and schedulers train the same, and defects planted in real runs are named."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.recipes.parity import make_dataset
from small_packs import TINY

from harness.formats import FORMATS, Provenance, open_dataset, open_writer
from harness.parity.result import REPORT_FILE
from harness.records import Pack

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


def rewritten(source: Path, target: Path, format: str, change: Callable[[int, Pack], Pack]) -> Path:
    """Write `train` of a dataset again with `change`, and `validation` unchanged."""
    for split in ("train", "validation"):
        reader = open_dataset(source / split)
        provenance = Provenance(tokenizer="none", tokenizer_hash="0" * 16, counts={"vocab_size": 300})
        with open_writer(
            target / split, format=format, pack_size=256, provenance=provenance, packs_per_shard=40
        ) as writer:
            for number in range(len(reader)):
                writer.append(change(number, reader[number]) if split == "train" else reader[number])
    return target


def test_defects_planted_in_datasets_and_settings_are_named_by_real_runs(parity: Parity, tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "made")

    def one_token(number: int, pack: Pack) -> Pack:
        return (
            replace(pack, input_ids=np.append(pack.input_ids[:-2], [299, pack.input_ids[-1]])) if number == 77 else pack
        )

    def stale(number: int, pack: Pack) -> Pack:
        return replace(pack, input_ids=pack.input_ids + 1) if 40 <= number < 80 else pack

    datasets = {
        "token": str(rewritten(made, tmp_path / "token", "binidx", one_token)),
        "stale": str(rewritten(made, tmp_path / "stale", "memmap", stale)),
        "mixed": str(rewritten(made, tmp_path / "mixed", "jsonl", lambda number, pack: pack)),
    }
    # One shard comes from another dataset, as after an interrupted copy.
    other = rewritten(made, tmp_path / "other", "jsonl", stale)
    shard = sorted((other / "train").rglob("chunk_*.jsonl"))[1]
    shutil.copy(shard, tmp_path / "mixed" / shard.relative_to(other))
    cases = ["npy", "parquet", "token", "stale", "mixed"]
    found = parity(
        f"dataset={made}",
        f"datasets={json.dumps([f'{name}={path}' for name, path in datasets.items()])}",
        f"formats={json.dumps([*(f'1 format={name}' for name in cases), '1 format=npy loader.seed=1'])}",
        sft=TINY,
        keep=False,
    )
    assert found.code == 1
    assert found.cell("formats: parquet").status == "same"

    offsets = open_dataset(made / "train").pack_offsets
    difference = found.cell("formats: token").first_difference
    assert (difference.field, difference.found) == ("tokens", 299)
    assert difference.sequence == offsets[78] - 1
    length = int(open_dataset(made / "train").sequence_lengths[difference.sequence])
    assert difference.position == length - 2
    assert f"tokens at position {length - 2} is 299, not {difference.expected}" in found.output

    difference = found.cell("formats: stale").first_difference
    assert offsets[40] <= difference.sequence < offsets[80]
    assert (difference.field, difference.position, difference.found) == ("tokens", 0, difference.expected + 1)

    mixed = found.cell("formats: mixed")
    assert mixed.status == "failed"
    assert "chunk_00001" in mixed.reason

    difference = found.cell("formats: npy seed=1").first_difference
    assert (difference.step, difference.field) == (1, "packs")


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
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "parity" / REPORT_FILE).exists()
    before = {path.parent.name: path.stat().st_mtime_ns for path in cells.glob("*/cell.json")}
    assert set(before) >= {"formats__npy", "formats__parquet"}
    assert "formats__memmap" not in before
    # Its run ended with it, so that nothing writes there anymore.
    deadline = time.monotonic() + 120
    while _writers(running):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    found = parity("steps=8", "slots=1", sft=TINY, keep=False)
    assert found.code == 0, found.output
    after = {path.parent.name: path.stat().st_mtime_ns for path in cells.glob("*/cell.json")}
    assert set(after) == {f"formats__{name}" for name in FORMATS}
    assert {name: after[name] for name in before} == before
    assert found.output.count("reused") == len(before)


def _writers(path: Path) -> list[int]:
    """Return the processes that have `path` open."""
    writers = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(fd.readlink() == path for fd in (process / "fd").iterdir()):
                writers.append(int(process.name))
        except OSError:
            continue
    return writers
