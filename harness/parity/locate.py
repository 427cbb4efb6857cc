"""Find where the data of two runs first differs: step, microbatch, rank, sequence, field, position and both values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.formats.verify import first_difference
from harness.parity.result import Difference
from harness.train import METRICS_FILE, StepMetrics, read_metrics
from harness.train.digests import FIELDS, RowDigests, StepDigests, kept_sequence, read_digests

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Recorded:
    """The records of a run.

    Attributes:
        digests: returns the digests of its data; raises FormatError where none were recorded.
        arrays: returns a trained sequence (step, its row, its place in the row) by field; empty where it is not known.
    """

    steps: list[StepMetrics]
    digests: Callable[[], list[StepDigests]]
    arrays: Callable[[int, RowDigests, int], Arrays]


def recorded_run(folder: Path) -> Recorded:
    """Return the records of the run of `recipes.sft` in `folder`; no steps where it wrote none."""
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.exists() else []
    return Recorded(steps, lambda: read_digests(folder), partial(kept_sequence, folder))


def data_difference(reference: Recorded, run: Recorded) -> Difference | None:
    """Return the first difference of the trained data, on whatever ranks it was; None where all is equal.

    Steps that only one of the runs made are ignored here.
    """
    for name, records in (("the reference", reference), ("the run", run)):
        recorded = {step.step for step in records.digests()}
        lost = next((step.step for step in records.steps if step.step not in recorded), None)
        if lost is not None:
            return Difference(f"step {lost}: {name} recorded no digests of it", step=lost, field="digests")
    for expected, actual in _common_steps(reference, run):
        disagreements = [f"the reference's {text}" for text in expected.disagreements] + actual.disagreements
        if disagreements:
            return Difference(f"step {expected.step}: {disagreements[0]}", step=expected.step, field="ranks")
        if expected.digest == actual.digest and expected.epoch == actual.epoch:
            continue
        return (
            _compare_packs(expected, actual)
            or _compare_sequences(expected, actual)
            or _compare_values(expected, actual, reference, run)
            # The digest covers nothing else, so one of these found the difference.
            or Difference(f"step {expected.step}: the digests differ", step=expected.step, field="digest")
        )
    return None


def placement_difference(reference: Recorded, run: Recorded) -> Difference | None:
    """Return the first row that holds other sequences, or the same ones in another order."""
    for expected, actual in _common_steps(reference, run):
        rows = {(row.microbatch, row.rank): row for row in actual.rows}
        for row in expected.rows:
            other = rows.pop((row.microbatch, row.rank), None)
            ids = np.zeros(0, np.int64) if other is None else other.sequences
            if not np.array_equal(row.sequences, ids):
                at = first_difference(row.sequences, ids)
                wanted, got = _number(row.sequences, at), _number(ids, at)
                holds = "no sequence" if got is None else f"sequence {got}"
                lacks = "none" if wanted is None else f"sequence {wanted}"
                details: dict[str, Any] = {"sequence": wanted, "position": at, "expected": wanted, "found": got}
                message = f"place {at} of the row contains {holds}, not {lacks}"
                return _difference_in(row, expected.step, "placement", message, **details)
        if rows:
            return _difference_in(rows[min(rows)], expected.step, "placement", "the reference has no such row")
    return None


def _difference_in(row: RowDigests, step: int, field: str, message: str, place: str = "", **details: Any) -> Difference:
    text = f"step {step}, microbatch {row.microbatch}, rank {row.rank}{place}: {message}"
    return Difference(text, step=step, microbatch=row.microbatch, rank=row.rank, field=field, **details)


def _common_steps(reference: Recorded, run: Recorded) -> Iterator[tuple[StepDigests, StepDigests]]:
    made = {step.step: step for step in run.digests()}
    return ((step, made[step.step]) for step in reference.digests() if step.step in made)


def _compare_packs(expected: StepDigests, actual: StepDigests) -> Difference | None:
    if expected.packs == actual.packs and expected.epoch == actual.epoch:
        return None
    details: dict[str, Any] = {"field": "epoch", "position": 0, "expected": expected.epoch, "found": actual.epoch}
    message = f"epoch {actual.epoch} is trained, not {expected.epoch}"
    if expected.packs != actual.packs:
        packs, other = np.asarray(expected.packs), np.asarray(actual.packs)
        at = first_difference(packs, other)
        wanted, got = _number(packs, at), _number(other, at)
        details = {"field": "packs", "position": at, "expected": wanted, "found": got}
        if expected.epoch == actual.epoch:
            message = f"pack {at} of the global batch is {'missing' if got is None else got}, not {wanted}"
            if wanted is None:
                message = f"the global batch has an extra pack {got} after the {packs.shape[0]} of the reference"
    lost = _place_of_first(expected, set(_ids(expected)) - set(_ids(actual)))
    if lost is not None:
        row, index = lost
        details |= {"microbatch": row.microbatch, "rank": row.rank, "sequence": int(row.sequences[index])}
        message += f"; sequence {row.sequences[index]} (microbatch {row.microbatch}, rank {row.rank}) is not trained"
    return Difference(f"step {expected.step}: {message}", step=expected.step, **details)


def _compare_sequences(expected: StepDigests, actual: StepDigests) -> Difference | None:
    wanted, got = Counter(_ids(expected)), Counter(_ids(actual))
    if wanted == got:
        return None
    changed = {sequence for sequence in wanted | got if wanted[sequence] != got[sequence]}
    # A sequence that should not be there has no place in the reference, only in the run.
    place = _place_of_first(expected, changed) or _place_of_first(actual, changed)
    assert place is not None
    row, index = place
    sequence = int(row.sequences[index])
    name = f"sequence {sequence}" if sequence >= 0 else "tokens that are not a sequence of the dataset"
    message = f"{name} is trained {got[sequence]} times, not {wanted[sequence]}"
    details: dict[str, Any] = {"sequence": sequence, "expected": wanted[sequence], "found": got[sequence]}
    return _difference_in(row, expected.step, "sequences", message, **details)


def _compare_values(
    expected: StepDigests, actual: StepDigests, reference: Recorded, run: Recorded
) -> Difference | None:
    places: dict[int, list[tuple[RowDigests, int]]] = {}
    for row, index in _places(actual):
        places.setdefault(int(row.sequences[index]), []).append((row, index))
    for row, index in _places(expected):
        other, place = places[int(row.sequences[index])].pop(0)
        differs = row.digests[index] != other.digests[place]
        if row.lengths[index] == other.lengths[place] and not differs.any():
            continue
        field = FIELDS[int(np.argmax(differs))] if row.lengths[index] == other.lengths[place] else "boundaries"
        at: int | None = None
        wanted: Any
        got: Any
        values = reference.arrays(expected.step, row, index).get(field)
        others = run.arrays(expected.step, other, place).get(field)
        if field == "boundaries":
            wanted, got = int(row.lengths[index]), int(other.lengths[place])
            at = min(wanted, got)
            message = f"the boundaries contain {got} tokens, not {wanted}"
        elif values is not None and others is not None:
            at = first_difference(values, others)
            wanted, got = _number(values, at), _number(others, at)
            message = f"{field} at position {at} is {got}, not {wanted}"
        else:
            column = FIELDS.index(field)
            wanted, got = f"{row.digests[index, column]:016x}", f"{other.digests[place, column]:016x}"
            message = f"{field} has the digest {got}, not {wanted} (recorded batches would have its position)"
        sequence = int(row.sequences[index])
        details: dict[str, Any] = {"sequence": sequence, "position": at, "expected": wanted, "found": got}
        return _difference_in(row, expected.step, field, message, place=f", sequence {sequence}", **details)
    return None


def _places(step: StepDigests) -> Iterator[tuple[RowDigests, int]]:
    for row in step.rows:
        for index in range(row.sequences.shape[0]):
            yield row, index


def _place_of_first(step: StepDigests, sequences: set[int]) -> tuple[RowDigests, int] | None:
    return next(((row, index) for row, index in _places(step) if int(row.sequences[index]) in sequences), None)


def _ids(step: StepDigests) -> list[int]:
    return [int(row.sequences[index]) for row, index in _places(step)]


def _number(values: npt.NDArray[Any], index: int) -> float | int | None:
    if index >= values.shape[0]:
        return None
    value = values[index].item()
    return int(value) if float(value).is_integer() else float(value)
