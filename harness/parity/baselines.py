"""Baselines: the data digests and losses of a run, kept in the repository to compare later runs with."""

from __future__ import annotations

import json
import platform
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, FormatError, os_errors_as
from harness.parity.assemble import environment, result_of
from harness.parity.compare import PLACES, Tolerances, compare_runs
from harness.parity.locate import Recorded, recorded_run
from harness.parity.result import CellResult, Check, ParityReport
from harness.settings import from_plain
from harness.storage import write_atomically
from harness.train import StepMetrics
from harness.train.digests import StepDigests, from_json, read_digests, to_json
from harness.train.folder import SETTINGS_FILE, read_settings
from harness.train.lines import MISREAD

SCHEMA = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Baseline:
    """One file of the baselines' folder.

    Attributes:
        created: time in ISO 8601, UTC.
        tolerances: tolerances for later runs; data is always compared exactly.
    """

    name: str
    created: str
    environment: dict[str, str]
    tolerances: Tolerances
    settings: dict[str, Any]
    steps: list[StepMetrics]
    digests: list[StepDigests]


def baseline_path(name: str, folder: Path) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid name", where="NAME", fix="use letters, digits, dots and dashes")
    return folder / f"{name}.json"


def baseline_of(name: str, run: Path, tolerances: Tolerances) -> Baseline:
    recorded = recorded_run(run)
    digests = read_digests(run)
    if not recorded.steps or [step.step for step in recorded.steps] != [step.step for step in digests]:
        what = f"the run has {len(recorded.steps)} steps, but digests of {len(digests)} steps"
        raise FormatError(what, where=str(run), fix="record a finished run that had trainer.record_digests=true")
    broken = next((step for step in digests if step.disagreements), None)
    if broken is not None:
        what = f"step {broken.step}: {broken.disagreements[0]}"
        raise FormatError(what, where=str(run), fix="fix this first; the run cannot be a reference")
    settings = read_settings(run / SETTINGS_FILE)
    return Baseline(
        name,
        datetime.now(UTC).isoformat(timespec="seconds"),
        # A baseline is shared, so it contains the kind of machine but not its name.
        environment(_device_of(run)) | {"machine": f"{platform.system()} {platform.machine()}"},
        tolerances,
        {key: value for key, value in settings.items() if key not in PLACES},
        [replace(step, step_s=0.0, data_wait_s=0.0, tokens_per_s=0.0) for step in recorded.steps],
        digests,
    )


def _device_of(run: Path) -> str:
    with suppress(FormatError):
        return "cuda" if read_settings(run / SETTINGS_FILE)["trainer"]["device"] == "cuda" else "cpu"
    return "cpu"


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write one line per step, so that a change in a few steps is a small diff."""
    head = {"schema": SCHEMA} | {key: value for key, value in vars(baseline).items() if key not in ("steps", "digests")}
    steps = [
        json.dumps({"metrics": asdict(metrics), "data": to_json(data)})
        for metrics, data in zip(baseline.steps, baseline.digests, strict=True)
    ]
    text = json.dumps(head | {"tolerances": asdict(baseline.tolerances)}, indent=1)[:-2]
    with os_errors_as(ConfigError, "the baseline cannot be written", where=path, fix="set baselines=FOLDER"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (text + ',\n "steps": [\n  ' + ",\n  ".join(steps) + "\n ]\n}\n").encode())


def read_baseline(path: Path) -> Baseline:
    """Read the baseline at `path`; raise FormatError if it is missing, damaged or has a newer schema."""
    make = f"`harness parity record {path.stem} RUN` records one from a run that is known to be correct"
    with os_errors_as(FormatError, f"there is no baseline {path.stem} to read", where=path, fix=make):
        text = path.read_bytes()
    try:
        values = json.loads(text)
        if values["schema"] > SCHEMA:
            raise ValueError(f"schema {values['schema']} is above {SCHEMA}, the newest of this version")
        metrics = [line["metrics"] for line in values["steps"]]
        baseline = from_plain(Baseline, {**values, "steps": metrics, "digests": []}, lenient=True)
        return replace(baseline, digests=[from_json(line["data"]) for line in values["steps"]])
    except (*MISREAD, ConfigError) as error:
        fix = "restore it from the repository's history"
        what = f"this is not a baseline: {getattr(error, 'what', error)}"
        raise FormatError(what, where=str(path), fix=fix) from None


def record(name: str, run: Path, folder: Path, tolerances: Tolerances) -> Path:
    """Write a new baseline; raise ConfigError if one with this name exists."""
    path = baseline_path(name, folder)
    if path.exists():
        fix = f"`harness parity update {name} RUN` replaces it and reports what changed"
        raise ConfigError(f"the baseline {name} already exists", where=str(path), fix=fix)
    write_baseline(baseline_of(name, run, tolerances), path)
    return path


def against(name: str, run: Path, folder: Path, *, command: str) -> ParityReport:
    """Compare the run in `run` with a baseline; a missing or damaged baseline is a failed cell of the report."""
    return _report(name, run, baseline_path(name, folder), f"Against baseline {name}", command)


def update(name: str, run: Path, folder: Path, *, command: str) -> ParityReport:
    """Replace a baseline with the run in `run`, and report everything that changed, even within tolerance.

    Raises FormatError if the baseline does not exist, or if the run cannot be a baseline.
    """
    path = baseline_path(name, folder)
    new = baseline_of(name, run, read_baseline(path).tolerances)
    # Without a tolerance, everything that changed is in the report.
    exact = Tolerances(0.0, 0.0, "an update reports everything that moved")
    report = _report(name, run, path, f"Update of baseline {name}", command, exact)
    write_baseline(new, path)
    return report


def _report(
    name: str, run: Path, path: Path, title: str, command: str, tolerances: Tolerances | None = None
) -> ParityReport:
    """Compare the run in `run` with the baseline at `path`; `tolerances` default to the baseline's own."""
    checks: list[Check] = []
    cells: list[CellResult] = []
    reason, steps, env = "", list[StepMetrics](), environment(_device_of(run))
    baseline_name = f"baseline {name}"
    try:
        baseline = read_baseline(path)
        of = {"check": "baseline", "axes": {"made": baseline.created}, "reference": None, "command": f"see {path}"}
        # The steps of a baseline have no times.
        cells.append(replace(result_of(baseline.steps, [], "", name=baseline_name, **of), tokens_per_s=None))
        env |= {f"baseline {key}": value for key, value in baseline.environment.items() if env.get(key) != value}
        recorded = recorded_run(run)
        steps = recorded.steps
        if steps:
            # A baseline has no data, so the expected value at a position is unknown.
            reference = Recorded(baseline.steps, lambda: baseline.digests, lambda step, row, index: {})
            checks = compare_runs(reference, recorded, tolerances or baseline.tolerances)
        else:
            reason = f"the run completed no step ({run})"
    except FormatError as error:
        reason = f"{error.what} ({error.where}); {error.fix}"
    of = {"check": "baseline", "axes": {"run": str(run)}, "reference": baseline_name, "command": command}
    cells.append(result_of(steps, checks, reason, name=f"run {run.name}", **of))
    return ParityReport(title, datetime.now(UTC).isoformat(timespec="seconds"), command, env, cells)
