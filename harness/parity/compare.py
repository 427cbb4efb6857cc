"""Compare a run with a reference: its data, steps, counts, losses and norms as checks; or its curves and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from harness.checks import CheckedSettings, bounded
from harness.errors import ConfigError, FormatError
from harness.parity.locate import Recorded, data_difference, placement_difference
from harness.parity.result import Check, Difference
from harness.paths import explain_path, is_run
from harness.settings import flatten
from harness.train import METRICS_FILE, StepMetrics, read_metrics
from harness.train.folder import SETTINGS_FILE, read_settings
from harness.train.metrics import validation_losses

# Columns that are equal on every layout, with any number of workers and in every format.
EXACT = ("trained_tokens", "tokens", "epoch", "packs_consumed")
# Router statistics of a mixture of experts: counts, and computed values.
EXACT_EXPERTS = ("routed_tokens", "shared_tokens", "bias_tokens")
EXPERTS = ("load", "worst_load", "entropy", "aux_loss", "bias")
# Returns values of a step by name, the most informative ones first.
Read = Callable[[StepMetrics], Mapping[str, float | None]]
# Settings of a run's name and place, which differ between any two runs.
PLACES = ("name", "run_dir", "runs", "resume")


@dataclass
class Tolerances(CheckedSettings, section="tolerances"):
    """Maximum relative differences in a step that still count as the same.

    The defaults are several times the noise measured on a CPU in float32, over 22 steps of 19 layouts on 1 to 4 ranks,
    6 steps of 17 layouts with experts on 1 and 2 ranks, and with plain transformers for each model family: at most 9e-8
    of a loss and 4e-7 of a gradient norm. The noise did not grow over the steps.

    Attributes:
        loss: maximum relative difference of the loss and the validation loss.
        grad_norm: maximum relative difference of the gradient norm before clipping.
        reason: explanation of these values, shown in the report.
    """

    loss: float = bounded(5e-7, lowest=0, highest=1)
    grad_norm: float = bounded(2e-6, lowest=0, highest=1)
    reason: str = "sums are computed in another order, and float32 rounds them differently"


# For GPUs and other versions of the libraries, whose noise has not been measured.
OTHER_KERNELS = Tolerances(1e-5, 1e-4, "other kernels, those of GPUs atomically, add in an order that changes")
IDENTICAL = Tolerances(0.0, 0.0, "the same layout on one machine: the same numbers in the same order")


def compare_runs(
    reference: Recorded, run: Recorded, tolerances: Tolerances, *, same_layout: bool = False
) -> list[Check]:
    """Compare `run` with `reference`; the checks whose differences explain the most come first.

    With `same_layout`, rows must be equal too.
    """
    checks = [_check_data("data", reference, run, data_difference)]
    if same_layout:
        checks.append(_check_data("placement", reference, run, placement_difference))
    made, both = {step.step: step for step in run.steps}, (*reference.steps, *run.steps)
    pairs = [(step, made[step.step]) for step in reference.steps if step.step in made]

    def compare(name: str, read: Read, limit: float, reason: str, exact: Sequence[str] = (), of: str = "") -> Check:
        """Compare values of all steps, and name the first that differs; columns in `exact` must be equal."""
        difference, largest = None, 0.0
        for expected, actual in pairs:
            before, after = read(expected), read(actual)
            for column in dict.fromkeys((*before, *after)):
                wanted, got = before.get(column), after.get(column)
                size, is_exact = relative_difference(wanted, got), column in exact
                largest = max(largest, 0.0 if is_exact else size)
                if size > (0.0 if is_exact else limit) and difference is None:
                    message = f"step {expected.step}: {column}{of} is {_format(got)}, not {_format(wanted)}"
                    allowed = f"at most {limit:g}" if limit else "expected bit-identical"
                    message += "" if is_exact else f" (relative difference {size:.1e}, {allowed})"
                    difference = Difference(message, step=expected.step, field=column, expected=wanted, found=got)
        known = largest if math.isfinite(largest) else None
        return Check(name, difference is None, limit, known, reason, difference)

    checks.append(_check_steps(reference.steps, run.steps))
    counts = compare("trained_tokens", _read(*EXACT), 0.0, "counts are whole numbers", EXACT)
    checks.append(replace(counts, largest=None))
    most, reason = tolerances.loss, tolerances.reason
    if any(step.experts for step in both):
        checks.append(compare("experts", _statistics, most, reason, EXACT_EXPERTS, " of the experts"))
    if any(step.source_losses for step in both):
        checks.append(compare("sources", lambda step: step.source_losses, most, reason, of=" loss"))
    if any(step.mtp_losses for step in both):
        checks.append(compare("mtp", _further, most, reason, ("mtp_tokens",)))
    for column, limit in {"loss": most, "validation_loss": most, "grad_norm": tolerances.grad_norm}.items():
        check = compare(column, _validations if column == "validation_loss" else _read(column), limit, reason)
        if not pairs:
            nothing = Difference(f"no step has a {column} to compare", field=column)
            check = replace(check, passed=False, largest=None, difference=nothing)
        checks.append(check)
    return checks


def _check_data(
    name: str, reference: Recorded, run: Recorded, compare: Callable[[Recorded, Recorded], Difference | None]
) -> Check:
    try:
        difference = compare(reference, run)
    except FormatError as error:  # a run with missing or incomplete records never counts as equal
        difference = Difference(f"{error.what} ({error.where})", field="digests")
    return Check(name, difference is None, 0.0, None, "digests are equal or not", difference)


def _check_steps(reference: Sequence[StepMetrics], run: Sequence[StepMetrics]) -> Check:
    wanted, made = [step.step for step in reference], [step.step for step in run]
    difference = None
    if wanted != made or not wanted:
        message, first = f"{len(made)} of {len(wanted)} steps were completed", None
        if missing := sorted(set(wanted).difference(made)):
            message, first = f"{message}, step {missing[0]} is missing", missing[0]
        elif extra := sorted(set(made).difference(wanted)):
            message, first = f"{message}, step {extra[0]} is extra", extra[0]
        difference = Difference(message, step=first, field="steps", expected=len(wanted), found=len(made))
    return Check("steps", difference is None, 0.0, None, "the same steps in the same order", difference)


def _read(*columns: str) -> Read:
    return lambda step: {column: getattr(step, column) for column in columns}


def _statistics(step: StepMetrics) -> dict[str, float | None]:
    """Return the router statistics of a step, counts first, and the expert loads by source and validation set."""
    return {
        **{name: step.experts[name] for name in (*EXACT_EXPERTS, *EXPERTS) if name in step.experts},
        **step.experts,
        **{f"load of {name}": load for name, load in step.source_expert_loads.items()},
        **{f"load in {name}": load for name, load in step.evaluation_expert_loads.items()},
    }


def _validations(step: StepMetrics) -> dict[str, float | None]:
    return {"validation_loss": step.validation_loss, **step.evaluation_losses}


def _further(step: StepMetrics) -> dict[str, float | None]:
    losses = {f"mtp_losses[{number}]": loss for number, loss in enumerate(step.mtp_losses)}
    return {"mtp_tokens": step.mtp_tokens, **losses}


def relative_difference(expected: float | None, actual: float | None) -> float:
    """Return |actual - expected| / |expected|; infinite if one is missing or not finite, 0 if both are missing."""
    if expected is None and actual is None:
        return 0.0
    if expected is None or actual is None or not math.isfinite(expected) or not math.isfinite(actual):
        return math.inf
    return abs(actual - expected) / max(abs(expected), 1e-30)


def _format(value: float | None) -> str:
    return "missing" if value is None else f"{value:,}" if isinstance(value, int) else repr(value)


def on_device(tolerances: Tolerances, device: str, *, num_ranks: int = 1) -> Tolerances:
    """Return the tolerances for a device: only one rank on a CPU must be bit-identical, and GPUs have other defaults.

    Tolerances that are set explicitly apply on every device.
    """
    if device != "cpu" and tolerances in (IDENTICAL, Tolerances()):
        return OTHER_KERNELS
    if tolerances == IDENTICAL and num_ranks > 1:
        return Tolerances(reason="sums over several ranks are taken in the order in which their parts arrive")
    return tolerances


@dataclass(frozen=True)
class RunCurves:
    """The completed steps of a run, at least one, and its settings by dotted name."""

    name: str
    steps: list[StepMetrics]
    settings: dict[str, Any]


@dataclass(frozen=True)
class CurveDifference:
    """One curve of two runs over the steps that have a value in both.

    Attributes:
        last: values of both runs at the last of these steps.
        largest, largest_step: largest relative difference, and its step.
        first: first step whose difference is above the tolerance, with both values; None if there is none, or if the
            curve has no tolerance.
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
    """Comparison of a run with a reference run.

    Attributes:
        curves: loss first, then validation sets, then grad_norm, which has no tolerance.
        other_data: first common step that trained on different data, by its counts; None if there is none.
    """

    reference: str
    run: str
    curves: list[CurveDifference]
    settings: dict[str, tuple[Any, Any]]
    other_data: int | None

    @property
    def first(self) -> CurveDifference | None:
        """The curve that exceeds the tolerance at the earliest step; None if none does."""
        return min((each for each in self.curves if each.first), key=lambda each: each.first or (), default=None)


def read_curves(folder: Path) -> RunCurves:
    """Read the curves of a run's folder; a step that is still being written is omitted.

    Raises:
        ConfigError: the folder does not contain a run, or the run has not completed a step.
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
    """Compare two runs over their common steps; raise ConfigError if there are none."""
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
