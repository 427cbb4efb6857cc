"""Compare a run with a reference: data, steps, counts, losses and gradient norms, each as one check."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.checks import bounded, check_numbers
from harness.errors import FormatError
from harness.parity.locate import Recorded, data_difference, placement_difference
from harness.parity.result import Check, Difference
from harness.train import StepMetrics

# Columns that are equal on every layout, with any workers and in every format.
EXACT = ("trained_tokens", "tokens", "epoch", "packs_consumed")
# Of the routers of a mixture of experts: counts, and numbers that are computed.
EXACT_EXPERTS = ("routed_tokens", "shared_tokens", "bias_tokens")
EXPERTS = ("load", "worst_load", "entropy", "aux_loss", "bias")


@dataclass
class Tolerances:
    """Largest relative differences of a step that still count as the same.

    The defaults are several times the noise that was measured on a CPU in float32 over 22 steps of 19 layouts on 1 to 4
    ranks, 6 steps of 17 layouts of experts on 1 and 2, and of plain transformers for each model family: at most 9e-8 of
    a loss and 4e-7 of a gradient norm. It did not grow with the steps.

    Attributes:
        loss: on the loss and the validation loss.
        grad_norm: on the norm of the gradient before clipping.
        reason: why these values, for the report.
    """

    loss: float = bounded(5e-7, lowest=0, highest=1)
    grad_norm: float = bounded(2e-6, lowest=0, highest=1)
    reason: str = "sums are taken in another order, and float32 rounds them otherwise"

    def __post_init__(self) -> None:
        check_numbers(self, "tolerances")


# Of GPUs, and of other versions of the libraries, where no noise has been measured.
OTHER_KERNELS = Tolerances(1e-5, 1e-4, "other kernels, those of GPUs atomically, add in an order that changes")
IDENTICAL = Tolerances(0.0, 0.0, "the same layout on one machine: the same numbers in the same order")


def compare_runs(
    reference: Recorded, run: Recorded, tolerances: Tolerances, *, same_layout: bool = False
) -> list[Check]:
    """Compare `run` with `reference`; the checks are in the order of how much their difference explains.

    Args:
        same_layout: both schedule onto the same ranks, so that rows are equal too.
    """
    checks = [_check_data("data", reference, run, data_difference)]
    if same_layout:
        checks.append(_check_data("placement", reference, run, placement_difference))
    checks += [_check_steps(reference.steps, run.steps), _check_counts(reference.steps, run.steps)]
    if any(step.experts for step in (*reference.steps, *run.steps)):
        checks.append(_check_routers(reference.steps, run.steps, tolerances))
    if any(step.mtp_losses for step in (*reference.steps, *run.steps)):
        checks.append(_check_further(reference.steps, run.steps, tolerances))
    limits = {"loss": tolerances.loss, "validation_loss": tolerances.loss, "grad_norm": tolerances.grad_norm}
    for column, limit in limits.items():
        checks.append(_check_column(column, reference.steps, run.steps, limit, tolerances.reason))
    return checks


def _check_data(
    name: str, reference: Recorded, run: Recorded, compare: Callable[[Recorded, Recorded], Difference | None]
) -> Check:
    try:
        difference = compare(reference, run)
    except FormatError as error:  # a run that recorded nothing, or half of it, never counts as equal
        difference = Difference(f"{error.what} ({error.where})", field="digests")
    return Check(name, difference is None, 0.0, None, "digests are equal or not", difference)


def _check_steps(reference: Sequence[StepMetrics], run: Sequence[StepMetrics]) -> Check:
    wanted, made = [step.step for step in reference], [step.step for step in run]
    difference = None
    if wanted != made or not wanted:
        message, first = f"{len(made)} of {len(wanted)} steps were made", None
        if missing := [step for step in wanted if step not in made]:
            message, first = f"{message}, step {missing[0]} is missing", missing[0]
        elif extra := [step for step in made if step not in wanted]:
            message, first = f"{message}, step {extra[0]} is one too many", extra[0]
        difference = Difference(message, step=first, field="steps", expected=len(wanted), found=len(made))
    return Check("steps", difference is None, 0.0, None, "the same steps in the same order", difference)


def _check_counts(reference: Sequence[StepMetrics], run: Sequence[StepMetrics]) -> Check:
    difference = None
    for expected, actual in _pair_steps(reference, run):
        for column in EXACT:
            wanted, got = getattr(expected, column), getattr(actual, column)
            if wanted != got and difference is None:
                message = f"step {expected.step}: {column} is {got:,}, not {wanted:,}"
                difference = Difference(message, step=expected.step, field=column, expected=wanted, found=got)
    return Check("trained_tokens", difference is None, 0.0, None, "counts are whole numbers", difference)


def _check_routers(reference: Sequence[StepMetrics], run: Sequence[StepMetrics], tolerances: Tolerances) -> Check:
    """Compare the statistics of the routers, counts first, and name the first of a step that differs."""
    difference, largest = None, 0.0
    for expected, actual in _pair_steps(reference, run):
        before, after = _statistics(expected), _statistics(actual)
        for name in dict.fromkeys((*EXACT_EXPERTS, *EXPERTS, *before, *after)):
            wanted, got = before.get(name), after.get(name)
            size = 0.0 if wanted == got else relative_difference(wanted, got)
            is_count = name in EXACT_EXPERTS
            largest = max(largest, 0.0 if is_count else size)
            if size > (0.0 if is_count else tolerances.loss) and difference is None:
                message = f"step {expected.step}: {name} of the experts is {_format(got)}, not {_format(wanted)}"
                if not is_count:
                    message += f" (relative difference {size:.1e}, at most {tolerances.loss:g})"
                difference = Difference(message, step=expected.step, field=name, expected=wanted, found=got)
    known = largest if math.isfinite(largest) else None
    return Check("experts", difference is None, tolerances.loss, known, tolerances.reason, difference)


def _check_further(reference: Sequence[StepMetrics], run: Sequence[StepMetrics], tolerances: Tolerances) -> Check:
    """Compare what was trained on further tokens: how many, and their losses."""
    difference, largest = None, 0.0
    for expected, actual in _pair_steps(reference, run):
        count = max(len(expected.mtp_losses), len(actual.mtp_losses))
        wanted, got = (dict(enumerate(step.mtp_losses, start=1)) for step in (expected, actual))
        sizes = {number: relative_difference(wanted.get(number), got.get(number)) for number in range(1, count + 1)}
        largest = max(largest, *sizes.values(), 0.0)
        if difference is not None:
            continue
        if expected.mtp_tokens != actual.mtp_tokens:
            message = f"step {expected.step}: mtp_tokens is {actual.mtp_tokens:,}, not {expected.mtp_tokens:,}"
            difference = Difference(
                message, step=expected.step, field="mtp_tokens", expected=expected.mtp_tokens, found=actual.mtp_tokens
            )
        elif number := next((number for number, size in sizes.items() if size > tolerances.loss), 0):
            before, after = wanted.get(number), got.get(number)
            message = f"step {expected.step}: the loss {number} tokens further is {_format(after)}, not "
            message += f"{_format(before)} (relative difference {sizes[number]:.1e}, at most {tolerances.loss:g})"
            field = f"mtp_losses[{number - 1}]"
            difference = Difference(message, step=expected.step, field=field, expected=before, found=after)
    known = largest if math.isfinite(largest) else None
    return Check("mtp", difference is None, tolerances.loss, known, tolerances.reason, difference)


def _statistics(step: StepMetrics) -> dict[str, float]:
    """Return the statistics of routers over a step, and their loads in the validations after it, by name."""
    of_sources = {f"load of {name}": load for name, load in step.source_expert_loads.items()}
    return {
        **step.experts,
        **of_sources,
        **{f"load in {name}": load for name, load in step.evaluation_expert_loads.items()},
    }


def _check_column(
    column: str, reference: Sequence[StepMetrics], run: Sequence[StepMetrics], limit: float, reason: str
) -> Check:
    largest, difference = 0.0, None
    pairs = _pair_steps(reference, run)
    for expected, actual in pairs:
        wanted, got = getattr(expected, column), getattr(actual, column)
        size = relative_difference(wanted, got)
        largest = max(largest, size)
        if size > limit and difference is None:
            allowed = f"at most {limit:g}" if limit else "expected bit-identical"
            message = f"step {expected.step}: {column} is {_format(got)}, not {_format(wanted)}"
            message += f" (relative difference {size:.1e}, {allowed})"
            difference = Difference(message, step=expected.step, field=column, expected=wanted, found=got)
    if not pairs:
        difference = Difference(f"there is no step whose {column} could be compared", field=column)
    is_known = pairs and math.isfinite(largest)
    return Check(column, difference is None, limit, largest if is_known else None, reason, difference)


def _pair_steps(reference: Sequence[StepMetrics], run: Sequence[StepMetrics]) -> list[tuple[StepMetrics, StepMetrics]]:
    made = {step.step: step for step in run}
    return [(step, made[step.step]) for step in reference if step.step in made]


def relative_difference(expected: float | None, actual: float | None) -> float:
    """Return |actual - expected| / |expected|; infinite where one is missing or not finite."""
    if expected is None and actual is None:
        return 0.0
    if expected is None or actual is None or not math.isfinite(expected) or not math.isfinite(actual):
        return math.inf
    return abs(actual - expected) / max(abs(expected), 1e-30)


def _format(value: float | None) -> str:
    return "missing" if value is None else repr(value)


def on_device(tolerances: Tolerances, device: str, *, num_ranks: int = 1) -> Tolerances:
    """Return the tolerances for a device: bit-identity is required of one rank on a CPU alone, and GPUs have theirs.

    Tolerances that settings name are the same on every device.
    """
    if device != "cpu" and tolerances in (IDENTICAL, Tolerances()):
        return OTHER_KERNELS
    if tolerances.loss or num_ranks == 1:
        return tolerances
    return replace(Tolerances(), reason="sums over several ranks are taken in the order in which their parts arrive")
