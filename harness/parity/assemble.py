"""Turn finished cells into a report: read each run, compare it with its reference, and describe the results."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import harness
from harness.errors import FormatError, installed_versions
from harness.parity.cells import ISOLATION, REFERENCE, Cell
from harness.parity.compare import compare_runs, on_device
from harness.parity.locate import Recorded, recorded_run
from harness.parity.result import CellResult, Check, Difference, Series
from harness.parity.running import PACKAGES, Finished
from harness.plan import ModelConfig, ParallelConfig, sequence_cost
from harness.settings import load
from harness.train import StepMetrics
from harness.train.folder import SETTINGS_FILE, read_settings


def cell_result(
    cell: Cell, finished: Mapping[str, Finished], *, folder: Path, known: Mapping[str, Cell], device: str
) -> CellResult:
    """Return the result of a cell that completed or failed."""
    outcome, placement = finished[cell.name], None
    reason, steps, checks = outcome.reason, list[StepMetrics](), list[Check]()
    try:
        recorded = recorded_run(cell.run_folder(folder))
        steps, placement = recorded.steps, placement_of(recorded, cell.run_folder(folder), cell.case.ranks)
        if not reason and cell.plan.program == ISOLATION:
            record = cell.record(folder)
            lines = [load(dict[str, Any], line, where=record) for line in record.read_bytes().splitlines()]
            findings = [finding for line in lines for finding in line["findings"]]
            more = f" (and {len(findings) - 1} more findings)" if len(findings) > 1 else ""
            difference = Difference(findings[0] + more, field="isolation") if findings else None
            why = "changing a document leaves everything of the others the same bit for bit"
            checks = [Check("isolation", not findings, 0.0, None, why, difference)]
        elif not reason and cell.reference is not None:
            if finished[cell.reference].reason:
                reason = f"its reference, {cell.reference}, failed"
            else:
                reference = known[cell.reference]
                expected, found = recorded_run(reference.run_folder(folder)), recorded
                if reference.plan.program == REFERENCE:  # has no router statistics and one validation set
                    plain = [replace(step, experts={}, evaluation_losses={}) for step in steps]
                    found = replace(found, steps=plain)
                num_ranks = max(cell.case.ranks, reference.case.ranks)
                tolerances = on_device(cell.plan.tolerances, device, num_ranks=num_ranks)
                checks = compare_runs(expected, found, tolerances, same_layout=cell.layout == reference.layout)
    except FormatError as error:
        steps, checks, reason = [], [], reason or f"{error.what} ({error.where})"
    of_cell = {"name": cell.name, "check": cell.check, "axes": cell.case.axes, "reference": cell.reference}
    measured = {"seconds": outcome.seconds, "peak_memory_bytes": outcome.peak_memory_bytes, "placement": placement}
    result = result_of(steps, checks, reason, command=cell.command(folder), **of_cell, **measured)
    return replace(result, reason=f"log: {cell.log_file(folder)}") if result.status == "different" else result


def result_of(steps: Sequence[StepMetrics], checks: list[Check], reason: str, **known: Any) -> CellResult:
    """Return a result with the status, series and speed derived from its steps, checks and reason of failure.

    The speed is the median over the steps after the first, which includes the startup; None if there are no others.
    """
    status = "failed" if reason else "same" if all(check.passed for check in checks) else "different"
    series = Series(**{name: [getattr(step, name) for step in steps] for name in Series.__dataclass_fields__})
    speed = float(np.median([step.tokens_per_s for step in steps[1:]])) if len(steps) > 1 else None
    return CellResult(status=status, checks=checks, series=series, reason=reason, tokens_per_s=speed, **known)


def placement_of(recorded: Recorded, folder: Path, ranks: int) -> dict[str, Any] | None:
    """Return the rows of the first recorded step in which ranks shared a row; None if there is none."""
    with suppress(FormatError):  # the comparison reports missing records
        for step in (one for one in recorded.digests() if any(row.shared_by > 1 for row in one.rows)):
            settings = read_settings(folder / SETTINGS_FILE)
            parallel, model = ParallelConfig(**settings["parallel"]), ModelConfig(**settings["model"])
            dp_size, cost = parallel.dp_size(ranks), sequence_cost(model, parallel)
            counts, shared_by = np.zeros((2, step.rows[-1].microbatch + 1, dp_size), np.int64)
            for row in step.rows:
                counts[row.microbatch, row.rank] = len(row.lengths)
                shared_by[row.microbatch, row.rank : row.rank + row.shared_by] = row.shared_by
            return {
                **{"step": step.step, "dp_size": dp_size, "row_offsets": [0, *np.cumsum(counts).tolist()]},
                "shared_by": np.maximum(shared_by, 1).ravel().tolist(),
                "lengths": [length for row in step.rows for length in row.lengths.tolist()],
                "cost": {name: getattr(cost, name) for name in ("linear", "quadratic", "exchange", "swap")},
            }
    return None


def environment(device: str) -> dict[str, str]:
    """Return the device, machine, versions and commit for a report."""
    name = f"cpu ({platform.processor() or platform.machine()})"
    if device != "cpu":
        import torch

        gpus = f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}" if torch.cuda.is_available() else ""
        name = f"cuda ({gpus or 'on a machine without one'})"
    facts = {
        "device": name,
        "machine": f"{platform.node()}, {platform.platform()}, {platform.machine()}",
        "python": platform.python_version(),
    }
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= with changes"]
    command = ["git", "-C", str(Path(harness.__file__).parent.parent), *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or "not a git checkout"
    except OSError:
        commit = "git is not installed"
    return {**facts, **installed_versions(PACKAGES), "commit": commit}


def command_line() -> str:
    """Return the command line that started this process, as far as it is known."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec is not None else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])
