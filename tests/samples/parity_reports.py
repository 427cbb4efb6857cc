"""Handwritten reports of parity runs, for tests of the pages that are rendered from them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from harness.parity.result import CellResult, Check, Difference, ParityReport, Series
from harness.settings import load

ENVIRONMENT = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "device": "CPU, 2 cores",
    "commit": "b9bd50c1",
    "settings": "configs/parity/formats.yaml model=tiny trainer.steps=40",
}
REASON = "the same layout on one machine adds in the same order"


def series(steps: int, *, drift: float = 0.0, drift_from: int = 1, speed: float = 0.4) -> Series:
    """Return a falling loss that is larger by the share `drift` from step `drift_from` on."""
    numbers = list(range(1, steps + 1))
    loss = [9.2 * math.exp(-step / 35) + 4 + 0.05 * math.sin(step) for step in numbers]
    moved = [value * (1 + drift) if step >= drift_from else value for step, value in zip(numbers, loss, strict=True)]
    return Series(
        step=numbers,
        loss=moved,
        validation_loss=[value + 0.1 if step % 10 == 0 else None for step, value in zip(numbers, moved, strict=True)],
        grad_norm=[2 + math.cos(step / 5) for step in numbers],
        fill=[0.97 - 0.02 * (step % 3) for step in numbers],
        imbalance_tokens=[1.01 + 0.01 * (step % 4) for step in numbers],
        imbalance_cost=[1.02 + 0.02 * (step % 5) for step in numbers],
        step_s=[speed + 0.05 * (step % 2) for step in numbers],
        data_wait_s=[0.001] * steps,
    )


def checks(*, failed: str = "", difference: Difference | None = None, largest: float = 1.2e-3) -> list[Check]:
    """Return all six comparisons; the one named `failed` has failed."""
    names = ("data", "loss", "validation_loss", "grad_norm", "trained_tokens", "steps")
    sized = ("loss", "validation_loss", "grad_norm")
    return [
        Check(
            name,
            passed=name != failed,
            tolerance=0.0,
            largest=None if name not in sized else largest if name == failed else 0.0,
            reason=REASON if name in sized else "",
            difference=difference if name == failed else None,
        )
        for name in names
    ]


DATA_DIFFERENCE = Difference(
    "step 7, microbatch 1, rank 0: token 211 of sequence 4,182 is 5,120, and 5,121 in the reference",
    step=7,
    microbatch=1,
    rank=0,
    sequence=4182,
    field="tokens",
    position=211,
    expected=5121,
    found=5120,
)


def cell(name: str, format_name: str, workers: int, **changed: object) -> CellResult:
    """Return a cell that equals the reference."""
    plain = CellResult(
        name=name,
        check="formats",
        axes={"format": format_name, "num_workers": str(workers), "layout": "dp2"},
        reference="npy, 0 workers",
        status="same",
        command=f"python -m recipes.parity check=formats cells='{name}'",
        checks=checks(),
        series=series(40),
        seconds=41.5,
        tokens_per_s=7000.0 + 400 * workers,
        peak_memory_bytes=1_250_000_000,
    )
    return replace(plain, **changed)


def report(cells: list[CellResult], **changed: object) -> ParityReport:
    """Return a report of these cells."""
    plain = ParityReport(
        title="Every format trains as the legacy npy does",
        created="2026-11-21T02:14:07+00:00",
        command="python -m recipes.parity check=formats",
        environment=ENVIRONMENT,
        cells=cells,
    )
    return replace(plain, **changed)


def reference(**changed: object) -> CellResult:
    """Return the cell that the others are compared against."""
    return cell("npy, 0 workers", "legacy_npy_pickle", 0, reference=None, checks=[], **changed)


def all_same() -> ParityReport:
    """Return a report of five formats with and without workers, all the same."""
    formats = ("legacy_npy_pickle", "parquet", "memmap", "binidx", "jsonl")
    cells = [cell(f"{name}, {workers} workers", name, workers) for name in formats for workers in (0, 4)]
    return report([reference(), *cells[1:]])


def one_of_each() -> ParityReport:
    """Return a report with a cell of every status, and one whose loss drifts from step 12 on."""
    token = cell(
        "memmap, 4 workers", "memmap", 4, status="different", checks=checks(failed="data", difference=DATA_DIFFERENCE)
    )
    drift = cell(
        "binidx, 0 workers",
        "binidx",
        0,
        status="different",
        series=series(40, drift=1.2e-3, drift_from=12),
        checks=checks(
            failed="loss",
            difference=Difference(
                "loss differs by 1.2e-03 at step 12", step=12, field="loss", expected=10.5, found=10.5126
            ),
        ),
    )
    broken = cell(
        "jsonl, 0 workers",
        "jsonl",
        0,
        status="failed",
        checks=[],
        series=Series(),
        reason="rank 1 ended with exit code 2; its log is cells/jsonl-0/log.txt",
        tokens_per_s=None,
        peak_memory_bytes=None,
    )
    missing = cell(
        "npy, megatron-core 0.19",
        "legacy_npy_pickle",
        2,
        check="versions",
        status="skipped",
        checks=[],
        series=Series(),
        reason="no second interpreter was given: set versions.python",
    )
    good = [cell("parquet, 0 workers", "parquet", 0), cell("parquet, 4 workers", "parquet", 4)]
    return report([reference(), *good, token, drift, broken, missing])


def read_report(path: Path) -> ParityReport:
    """Read the report that a run of parity wrote."""
    return load(ParityReport, path.read_bytes(), where=path, fix="", what="this is not a parity report")
