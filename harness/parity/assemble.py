"""From finished cells to the report: each is read, held against its reference, and described."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import harness
from harness.errors import FormatError
from harness.parity.cells import Cell
from harness.parity.compare import compare_runs, on_device
from harness.parity.locate import Recorded, recorded_run
from harness.parity.processes import command, log_file, run_folder
from harness.parity.result import CellResult, Check, Series
from harness.parity.running import Finished
from harness.train import StepMetrics

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "pyarrow")


def cell_result(
    cell: Cell, finished: Finished, *, folder: Path, known: Mapping[str, Cell], reference: Finished | None, device: str
) -> CellResult:
    """What became of a cell that ran, or failed to.

    Args:
        folder: of the matrix.
        known: all cells by name.
        reference: of the cell that this one is held against, None for a reference.
        device: cpu or cuda: bit-identity is asked of CPUs alone.
    """
    recorded = recorded_run(run_folder(folder, cell))
    try:
        steps = recorded.steps
        checks: list[Check] = []
        reason = finished.reason
        if not reason and cell.reference is not None and reference is not None:
            if reference.reason:
                reason = f"its reference, {cell.reference}, failed"
            else:
                checks = check_cell(cell, recorded, recorded_run(run_folder(folder, known[cell.reference])), device)
    except FormatError as error:
        steps, checks, reason = [], [], f"{error.what} ({error.where})"
    status = "failed" if reason else "same" if all(check.passed for check in checks) else "different"
    return CellResult(
        name=cell.name,
        check=cell.check,
        axes=cell.case.axes,
        reference=cell.reference,
        status=status,
        command=command(folder, cell, known[cell.start] if cell.start else None),
        checks=checks,
        series=series_of(steps),
        reason=reason or (f"log: {log_file(folder, cell)}" if status == "different" else ""),
        seconds=finished.seconds,
        tokens_per_s=tokens_per_second(steps),
        peak_memory_bytes=finished.peak_memory_bytes,
    )


def check_cell(cell: Cell, found: Recorded, expected: Recorded, device: str) -> list[Check]:
    return compare_runs(expected, found, on_device(cell.plan.tolerances, device), same_layout=cell.plan.same_layout)


def skipped(name: str, check: str, reason: str) -> CellResult:
    """A part of the matrix that could not run here."""
    return CellResult(name, check, {}, None, "skipped", "", reason=reason)


def series_of(steps: Sequence[StepMetrics]) -> Series:
    names = Series.__dataclass_fields__
    return Series(**{name: [getattr(one, name) for one in steps] for name in names})


def tokens_per_second(steps: Sequence[StepMetrics]) -> float | None:
    """The middle one of the steps after the first, which pays for the start; None where there are no others."""
    return float(np.median([one.tokens_per_s for one in steps[1:]])) if len(steps) > 1 else None


def environment(device: str) -> dict[str, str]:
    """Where and on what a report was made: machine, versions, commit."""
    found = {
        "device": _device_name(device),
        "machine": f"{platform.node()}, {platform.platform()}, {platform.machine()}",
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "commit": _commit()}


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"cpu ({platform.processor() or platform.machine()})"
    import torch

    if not torch.cuda.is_available():
        return "cuda (looked at on a machine without one)"
    return f"cuda ({torch.cuda.get_device_name()} x {torch.cuda.device_count()})"


def _commit() -> str:
    root = Path(harness.__file__).parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}{' with changes' if git('status', '--porcelain') else ''}" if commit else "not a git checkout"
    except OSError:
        return "git is not installed"


def command_line() -> str:
    """What was typed to start this process, as far as it shows."""
    import shlex

    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    program = ["python", "-m", spec.name] if spec is not None else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])
