"""Baselines: the data digests and losses of a run, kept in the repository to compare later runs with."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ConfigError, FormatError
from harness.parity.assemble import environment, series_of, tokens_per_second
from harness.parity.compare import Tolerances, compare_runs
from harness.parity.locate import Recorded, recorded_run
from harness.parity.result import CellResult, Check, ParityReport
from harness.train import StepDigests, StepMetrics, from_json, read_digests, to_json

SCHEMA = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Settings of a run that do not change what it trains.
_OWN_SETTINGS = ("run_dir", "runs", "name", "resume")


@dataclass(frozen=True)
class Baseline:
    """One file of the baselines' folder.

    Attributes:
        name: of the file, without `.json`.
        created: ISO 8601, UTC.
        environment: of the machine that made it: device, versions, commit.
        tolerances: for later runs; data is always compared exactly.
        settings: of the run, without its folder.
        steps: its metrics; the times in them are 0.
        digests: of its data.
    """

    name: str
    created: str
    environment: dict[str, str]
    tolerances: Tolerances
    settings: dict[str, Any]
    steps: list[StepMetrics]
    digests: list[StepDigests]

    def recorded(self) -> Recorded:
        """Return the records to compare with; without the data, the expected value at a position is unknown."""
        return Recorded(self.steps, lambda: self.digests, lambda step, row, index: {})


def baseline_path(name: str, folder: Path) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a baseline", where="NAME", fix="letters, digits, dots and dashes")
    return folder / f"{name}.json"


def baseline_of(name: str, run: Path, tolerances: Tolerances) -> Baseline:
    """Make a baseline from the run of `recipes.sft` in `run`.

    Raises:
        FormatError: it made no step, or did not record the data of each.
    """
    recorded = recorded_run(run)
    digests = read_digests(run)
    if not recorded.steps or [step.step for step in recorded.steps] != [step.step for step in digests]:
        raise FormatError(
            f"the run has {len(recorded.steps)} steps and digests of {len(digests)} steps",
            where=str(run),
            fix="record a finished run that had trainer.record_digests=true",
        )
    broken = next((step for step in digests if step.disagreements), None)
    if broken is not None:
        raise FormatError(
            f"step {broken.step}: {broken.disagreements[0]}",
            where=str(run),
            fix="fix this first: it is no reference",
        )
    settings = _settings(run)
    return Baseline(
        name,
        datetime.now(UTC).isoformat(timespec="seconds"),
        # A baseline is shared: the kind of machine matters, its name does not.
        environment(_device_of(run)) | {"machine": f"{platform.system()} {platform.machine()}"},
        tolerances,
        {key: value for key, value in settings.items() if key not in _OWN_SETTINGS},
        [replace(step, step_s=0.0, data_wait_s=0.0, tokens_per_s=0.0) for step in recorded.steps],
        digests,
    )


def _device_of(run: Path) -> str:
    """Return cpu or cuda; cpu for a run without settings."""
    try:
        return "cuda" if _settings(run).get("trainer", {}).get("device") == "cuda" else "cpu"
    except FormatError:
        return "cpu"


def _settings(run: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text())
        return settings if isinstance(settings, dict) else {}
    except (OSError, yaml.YAMLError) as error:
        raise FormatError(
            f"the run's settings cannot be read: {error}", where=str(run), fix="name the folder of a run"
        ) from error


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write a line a step, so that a change of a few steps is a small diff."""
    head = {
        "schema": SCHEMA,
        "name": baseline.name,
        "created": baseline.created,
        "environment": baseline.environment,
        "tolerances": asdict(baseline.tolerances),
        "settings": baseline.settings,
    }
    steps = [
        json.dumps({"metrics": asdict(metrics), "data": to_json(data)})
        for metrics, data in zip(baseline.steps, baseline.digests, strict=True)
    ]
    text = json.dumps(head, indent=1)[:-2] + ',\n "steps": [\n  ' + ",\n  ".join(steps) + "\n ]\n}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the baseline cannot be written: {error.strerror}",
            where=str(path),
            fix="choose another: baselines=DIR",
        ) from error


def read_baseline(path: Path) -> Baseline:
    """Read the baseline at `path`; raises FormatError where it is missing, damaged or of a newer schema."""
    try:
        values = json.loads(path.read_text())
        if values["schema"] > SCHEMA:
            raise FormatError(
                f"the baseline has schema {values['schema']}, and this version reads up to {SCHEMA}",
                where=str(path),
                fix="update this package",
            )
        return Baseline(
            values["name"],
            values["created"],
            values["environment"],
            Tolerances(**values["tolerances"]),
            values["settings"],
            [StepMetrics(**step["metrics"]) for step in values["steps"]],
            [from_json(step["data"]) for step in values["steps"]],
        )
    except FileNotFoundError:
        raise FormatError(
            f"there is no baseline {path.stem}",
            where=str(path),
            fix=f"`harness parity record {path.stem} RUN` makes one from a run that is known to be right",
        ) from None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise FormatError(
            f"this is not a baseline: {error}", where=str(path), fix="restore it from the repository's history"
        ) from None


def record(name: str, run: Path, folder: Path, tolerances: Tolerances) -> Path:
    """Write a new baseline; raises ConfigError where there is one of that name."""
    path = baseline_path(name, folder)
    if path.exists():
        raise ConfigError(
            f"there is a baseline {name} already",
            where=str(path),
            fix=f"`harness parity update {name} RUN` replaces it and reports what moved",
        )
    write_baseline(baseline_of(name, run, tolerances), path)
    return path


def against(name: str, run: Path, folder: Path, *, command: str) -> ParityReport:
    """Compare the run in `run` with the baseline; one that is missing or damaged is a failed cell of the report."""
    path = baseline_path(name, folder)

    def compared(baseline: Baseline) -> list[Check]:
        return compare_runs(baseline.recorded(), recorded_run(run), baseline.tolerances)

    return _report(name, run, path, f"Against baseline {name}", compared, command)


def update(name: str, run: Path, folder: Path, *, command: str) -> ParityReport:
    """Replace a baseline by the run in `run`; the report has everything that moved, within tolerance or not.

    Raises:
        FormatError: there is no such baseline, or the run cannot be one.
    """
    path = baseline_path(name, folder)
    old = read_baseline(path)
    new = baseline_of(name, run, old.tolerances)

    def compared(baseline: Baseline) -> list[Check]:
        # No tolerance, so that everything that moved is in the report.
        return compare_runs(
            baseline.recorded(), recorded_run(run), Tolerances(0.0, 0.0, "an update reports everything that moved")
        )

    report = _report(name, run, path, f"Update of baseline {name}", compared, command)
    write_baseline(new, path)
    return report


def _report(
    name: str, run: Path, path: Path, title: str, compared: Callable[[Baseline], list[Check]], command: str
) -> ParityReport:
    checks: list[Check] = []
    cells: list[CellResult] = []
    reason, steps, env = "", [], environment(_device_of(run))
    try:
        baseline = read_baseline(path)
        cells.append(
            CellResult(
                name=f"baseline {name}",
                check="baseline",
                axes={"made": baseline.created},
                reference=None,
                status="same",
                command=f"see {path}",
                series=series_of(baseline.steps),
            )
        )
        env |= {f"baseline {key}": value for key, value in baseline.environment.items() if env.get(key) != value}
        steps = recorded_run(run).steps
        if not steps:
            reason = f"the run made no step ({run})"
        else:
            checks = compared(baseline)
    except FormatError as error:
        reason = f"{error.what} ({error.where}); {error.fix}"
    cells.append(
        CellResult(
            name=f"run {run.name}",
            check="baseline",
            axes={"run": str(run)},
            reference=f"baseline {name}",
            status="failed" if reason else "same" if all(check.passed for check in checks) else "different",
            command=command,
            checks=checks,
            series=series_of(steps),
            reason=reason,
            tokens_per_s=tokens_per_second(steps),
        )
    )
    return ParityReport(title, datetime.now(UTC).isoformat(timespec="seconds"), command, env, cells)
