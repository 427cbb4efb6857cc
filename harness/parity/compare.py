"""Whether a run that ought to train the same as another did: its data, losses, norms, counts and steps, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.errors import FormatError
from harness.parity.locate import Recorded, data_difference, placement_difference
from harness.parity.result import Check, Difference
from harness.train import StepMetrics

# Columns that no layout, worker or format may change.
EXACT = ("trained_tokens", "tokens", "epoch", "packs_consumed")


@dataclass
class Tolerances:
    """Largest relative differences of a step that still count as the same.

    Attributes:
        loss: on the loss and the validation loss.
        grad_norm: on the norm of the gradient before clipping.
        reason: why these.
    """

    loss: float = 1e-5
    grad_norm: float = 1e-4
    reason: str = "sums are taken in another order, and float32 rounds them otherwise"


IDENTICAL = Tolerances(0.0, 0.0, "the same layout on one machine: the same numbers in the same order")


def compare_runs(
    expected: Recorded, found: Recorded, tolerances: Tolerances, *, same_layout: bool = False
) -> list[Check]:
    """Hold `found` against `expected`; the checks come with the one that says most first.

    Args:
        same_layout: both schedule onto the same ranks, so that rows are the same too.
    """
    checks = [_data_check("data", expected, found, data_difference)]
    if same_layout:
        checks.append(_data_check("placement", expected, found, placement_difference))
    checks += [_steps_check(expected.steps, found.steps), _exact_check(expected.steps, found.steps)]
    for column, limit in (
        ("loss", tolerances.loss),
        ("validation_loss", tolerances.loss),
        ("grad_norm", tolerances.grad_norm),
    ):
        checks.append(_column_check(column, expected.steps, found.steps, limit, tolerances.reason))
    return checks


def _data_check(
    name: str, expected: Recorded, found: Recorded, compare: Callable[[Recorded, Recorded], Difference | None]
) -> Check:
    try:
        difference = compare(expected, found)
    except FormatError as error:  # of a run that recorded nothing, or half of it: never taken for agreement
        difference = Difference(f"{error.what} ({error.where})", field="digests")
    return Check(name, difference is None, 0.0, None, "digests are equal or not", difference)


def _steps_check(expected: Sequence[StepMetrics], found: Sequence[StepMetrics]) -> Check:
    wanted, made = [one.step for one in expected], [one.step for one in found]
    difference = None
    if wanted != made or not wanted:
        missing = [step for step in wanted if step not in made]
        extra = [step for step in made if step not in wanted]
        said = f"{len(made)} of {len(wanted)} steps were made"
        if missing:
            said += f", step {missing[0]} is missing"
        elif extra:
            said += f", step {extra[0]} is one too many"
        at = next(iter(missing or extra), None)
        difference = Difference(said, step=at, field="steps", expected=len(wanted), found=len(made))
    return Check("steps", difference is None, 0.0, None, "the same steps in the same order", difference)


def _exact_check(expected: Sequence[StepMetrics], found: Sequence[StepMetrics]) -> Check:
    difference = None
    for one, other in _pairs(expected, found):
        for column in EXACT:
            wanted, got = getattr(one, column), getattr(other, column)
            if wanted != got and difference is None:
                difference = Difference(
                    f"step {one.step}: {column} is {got:,}, not {wanted:,}",
                    step=one.step,
                    field=column,
                    expected=wanted,
                    found=got,
                )
    return Check("trained_tokens", difference is None, 0.0, None, "counts are whole numbers", difference)


def _column_check(
    column: str, expected: Sequence[StepMetrics], found: Sequence[StepMetrics], limit: float, reason: str
) -> Check:
    largest, difference = 0.0, None
    pairs = _pairs(expected, found)
    for one, other in pairs:
        wanted, got = getattr(one, column), getattr(other, column)
        size = relative_difference(wanted, got)
        largest = max(largest, size)
        if size > limit and difference is None:
            allowed = f"at most {limit:g}" if limit else "expected bit-identical"
            difference = Difference(
                f"step {one.step}: {column} is {_shown(got)}, not {_shown(wanted)} "
                f"(relative difference {size:.1e}, {allowed})",
                step=one.step,
                field=column,
                expected=wanted,
                found=got,
            )
    if not pairs:
        difference = Difference(f"there is no step whose {column} could be compared", field=column)
    known = pairs and math.isfinite(largest)
    return Check(column, difference is None, limit, largest if known else None, reason, difference)


def _pairs(expected: Sequence[StepMetrics], found: Sequence[StepMetrics]) -> list[tuple[StepMetrics, StepMetrics]]:
    made = {one.step: one for one in found}
    return [(one, made[one.step]) for one in expected if one.step in made]


def relative_difference(expected: float | None, found: float | None) -> float:
    """Infinite where only one is there, or one is not finite."""
    if expected is None and found is None:
        return 0.0
    if expected is None or found is None or not math.isfinite(expected) or not math.isfinite(found):
        return math.inf
    return abs(found - expected) / max(abs(expected), 1e-30)


def _shown(value: float | None) -> str:
    return "not there" if value is None else repr(value)


def on_device(tolerances: Tolerances, device: str) -> Tolerances:
    """What `tolerances` are on a device: bit-identity is asked of CPUs alone."""
    if device == "cpu" or tolerances.loss:
        return tolerances
    return replace(Tolerances(), reason="kernels on GPUs add gradients atomically, in an order that changes")
