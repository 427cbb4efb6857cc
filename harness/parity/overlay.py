"""Compare the curves of runs, finished or not: losses step by step, settings that differ, and one plot of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import ConfigError
from harness.parity.compare import EXACT, relative_difference
from harness.paths import explain_path, is_run
from harness.settings import flatten
from harness.train import METRICS_FILE, StepMetrics, read_metrics
from harness.train.folder import SETTINGS_FILE, read_settings
from harness.train.metrics import validation_losses

# Settings of where a run is, which differ between any two.
PLACES = ("name", "run_dir", "runs", "resume")


@dataclass(frozen=True)
class RunCurves:
    """The steps of a run so far, at least one, and its settings by their dotted names."""

    name: str
    steps: list[StepMetrics]
    settings: dict[str, Any]


@dataclass(frozen=True)
class CurveDifference:
    """One curve of two runs over the steps that have a value in both.

    Attributes:
        last: values of both at the last of these steps.
        largest, largest_step: largest relative difference, and the step that has it.
        first: first step whose difference is above the tolerance, with both values; None if there is none, or the
            curve is not judged.
    """

    curve: str
    steps: list[int]
    last: tuple[float, float]
    largest: float
    largest_step: int
    mean: float
    first: tuple[int, float, float] | None


@dataclass(frozen=True)
class RunComparison:
    """A run and the one that it is compared with.

    Attributes:
        curves: loss first, then validation sets, then grad_norm, which is not judged.
        other_data: first common step that trained on other data, by its counts; None if there is none.
    """

    reference: str
    run: str
    curves: list[CurveDifference]
    settings: dict[str, tuple[Any, Any]]
    other_data: int | None

    @property
    def first(self) -> CurveDifference | None:
        """The curve that is above the tolerance at the earliest step; None where the runs are the same."""
        return min((each for each in self.curves if each.first), key=lambda each: each.first or (), default=None)


def read_curves(folder: Path) -> RunCurves:
    """Read the curves of a run's folder; a step that is being written is left out.

    Raises:
        ConfigError: the folder is not that of a run, or the run has no step yet.
        FormatError: its files are damaged.
    """
    if not is_run(folder):
        usual = ("there is no run in this folder", "use the folder of a run, such as runs/sft-001")
        what, fix = explain_path(folder, expected="a run") or usual
        raise ConfigError(what, where=str(folder), fix=fix)
    settings = flatten(read_settings(folder / SETTINGS_FILE))
    steps = read_metrics(folder / METRICS_FILE) if (folder / METRICS_FILE).is_file() else []
    if not steps:
        raise ConfigError("the run has not completed a step yet", where=str(folder), fix="wait for its first step")
    return RunCurves(str(folder), steps, settings)


def compare_curves(reference: RunCurves, run: RunCurves, *, tolerance: float) -> RunComparison:
    """Compare a run with another over the steps that both have; raise ConfigError if there is none."""
    before, after = ({step.step: step for step in one.steps} for one in (reference, run))
    common = sorted(before.keys() & after.keys())
    if not common:
        ranges = " and ".join(f"{min(steps)} to {max(steps)}" for steps in (before, after))
        fix = "compare runs from their first step; a run that was resumed in another folder has only its own steps"
        raise ConfigError(f"no common steps: {ranges}", where=f"{reference.name} and {run.name}", fix=fix)

    def values_of(column: str) -> list[dict[int, float]]:
        return [{step: getattr(metrics, column) for step, metrics in steps.items()} for steps in (before, after)]

    curves = [_compare_curve("loss", values_of("loss"), tolerance)]
    sets = validation_losses(reference.steps), validation_losses(run.steps)
    curves += [
        _compare_curve(name, [losses, sets[1][name]], tolerance)
        for name, losses in sets[0].items()
        if losses.keys() & sets[1].get(name, {}).keys()
    ]
    curves.append(_compare_curve("grad_norm", values_of("grad_norm"), None))
    counts = attrgetter(*EXACT)
    other = (step for step in common if counts(before[step]) != counts(after[step]))
    names = [name for name in {**reference.settings, **run.settings} if name not in PLACES]
    pairs = {name: (reference.settings.get(name), run.settings.get(name)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return RunComparison(reference.name, run.name, curves, differing, next(other, None))


def _compare_curve(curve: str, both: Sequence[Mapping[int, float]], tolerance: float | None) -> CurveDifference:
    before, after = both
    steps = sorted(before.keys() & after.keys())
    pairs = [(before[step], after[step]) for step in steps]
    sizes = [relative_difference(*pair) for pair in pairs]
    largest = int(np.argmax(sizes))
    above = (number for number, size in enumerate(sizes) if tolerance is not None and size > tolerance)
    first = next(((steps[number], *pairs[number]) for number in above), None)
    return CurveDifference(curve, steps, pairs[-1], sizes[largest], steps[largest], float(np.mean(sizes)), first)
