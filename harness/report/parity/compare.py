"""Whether runs that ought to train the same did: their metrics held against those of a reference run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import ConfigError
from harness.report.metrics import StepMetrics


@dataclass(frozen=True)
class Case:
    """One run to compare: so many ranks with these settings."""

    ranks: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        said = [part.split("=", 1)[-1] if part.startswith("parallel=") else part for part in self.overrides]
        return " ".join([f"{self.ranks}x", *said])


def parse_case(text: str) -> Case:
    """`"4 parallel=tp2 loader.num_workers=2"` as a Case; raises ConfigError for another form."""
    ranks, *overrides = text.split() or [""]
    if not ranks.isdigit() or int(ranks) < 1 or any("=" not in part for part in overrides):
        raise ConfigError(
            f"{text!r} is not a case",
            where="layouts",
            fix="ranks, then settings: '4 parallel=tp2 loader.num_workers=2'",
        )
    return Case(int(ranks), tuple(overrides))


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences of a step that still count as the same; other columns must be equal."""

    loss: float = 1e-5
    grad_norm: float = 1e-4


@dataclass(frozen=True)
class Agreement:
    """How near a run came to its reference.

    Attributes:
        steps: compared.
        largest: the largest relative difference over the steps, by column; infinite where a value is missing.
        problems: what is beyond tolerance, in words with numbers; empty where all is well.
    """

    steps: int
    largest: Mapping[str, float]
    problems: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.problems


EXACT = ("epoch", "tokens", "trained_tokens", "packs_consumed")


def compare(expected: Sequence[StepMetrics], found: Sequence[StepMetrics], tolerances: Tolerances) -> Agreement:
    """Hold `found` against `expected`, step by step."""
    limits = {"loss": tolerances.loss, "validation_loss": tolerances.loss, "grad_norm": tolerances.grad_norm}
    problems: list[str] = []
    if [one.step for one in expected] != [one.step for one in found]:
        problems.append(f"{len(found)} of {len(expected)} steps were made")
    pairs = list(zip(expected, found, strict=False))
    for column in EXACT:
        for one, other in pairs:
            if getattr(one, column) != getattr(other, column):
                problems.append(f"step {one.step}: {column} is {getattr(other, column)}, not {getattr(one, column)}")
                break
    largest = {}
    for column, limit in limits.items():
        by_step = {one.step: _relative(getattr(one, column), getattr(other, column)) for one, other in pairs}
        largest[column] = max(by_step.values(), default=math.inf)
        beyond = [step for step, difference in by_step.items() if difference > limit]
        if beyond:
            problems.append(f"{column} differs by {by_step[beyond[0]]:.1e} at step {beyond[0]} (at most {limit:g})")
    return Agreement(len(pairs), largest, tuple(problems))


def _relative(expected: float | None, found: float | None) -> float:
    if expected is None and found is None:
        return 0.0
    if expected is None or found is None or not math.isfinite(expected) or not math.isfinite(found):
        return math.inf
    return abs(found - expected) / max(abs(expected), 1e-30)


def render(agreements: Mapping[str, Agreement]) -> str:
    """A table of cases with their largest differences, problems below it."""
    width = max(len("case"), *map(len, agreements))
    lines = [f"{'case':<{width}}  steps     loss  validation  grad norm"]
    for name, one in agreements.items():
        values = [one.largest[column] for column in ("loss", "validation_loss", "grad_norm")]
        shown = "{:8.1e}    {:8.1e}   {:8.1e}".format(*values)
        lines.append(f"{name:<{width}}  {one.steps:5d} {shown}  {'same' if one.agrees else 'DIFFERENT'}")
    lines += [f"{name}: {problem}" for name, one in agreements.items() for problem in one.problems]
    same = sum(one.agrees for one in agreements.values())
    lines.append(f"{same} of {len(agreements)} cases train as the reference does (largest relative differences shown)")
    return "\n".join(lines)
