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
        digests: returns the digests of its data; raises FormatError if none were recorded.
        arrays: returns the fields of a trained sequence, given step, row and place in the row; empty if unknown.
    """

    steps: list[StepMetrics]
    digests: Callable[[], list[StepDigests]]
    arrays: Callable[[int, RowDigests, int], Arrays]


def recorded_run(folder: Path) -> Recorded:
    """Return the records of the run of `recipes.sft` in `folder`, without steps if it wrote none."""
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.exists() else []
    return Recorded(steps, lambda: read_digests(folder), partial(kept_sequence, folder))


def data_difference(reference: Recorded, run: Recorded) -> Difference | None:
    """Return the first difference of the trained data, regardless of its ranks; None if all data is equal.

    Steps that only one of the runs completed are ignored here.
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
            # The digest covers nothing else, so one of these comparisons finds the difference.
            or Difference(f"step {expected.step}: the digests differ", step=expected.step, field="digest")
        )
    return None


def placement_difference(reference: Recorded, run: Recorded) -> Difference | None:
    """Return the first row that contains other sequences, or the same sequences in another order."""
    for expected, actual in _common_steps(reference, run):
        rows = {(row.microbatch, row.rank): row for row in actual.rows}
        for row in expected.rows:
            other = rows.pop((row.microbatch, row.rank), None)
            ids = np.zeros(0, np.int64) if other is None else other.sequences
            if not np.array_equal(row.sequences, ids):
                at, wanted, got = _first(row.sequences, ids)
                holds = "no sequence" if got is None else f"sequence {got}"
                lacks = "none" if wanted is None else f"sequence {wanted}"
                message = f"place {at} of the row contains {holds}, not {lacks}"
                details: dict[str, Any] = {"sequence": wanted, "position": at, "expected": wanted, "found": got}
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
    field, at = "epoch", 0
    wanted: float | None = expected.epoch
    got: float | None = actual.epoch
    message = f"epoch {actual.epoch} is trained, not {expected.epoch}"
    if expected.packs != actual.packs:
        field, (at, wanted, got) = "packs", _first(np.asarray(expected.packs), np.asarray(actual.packs))
        if expected.epoch == actual.epoch and wanted is None:
            message = f"the global batch has an extra pack {got} after the {len(expected.packs)} of the reference"
        elif expected.epoch == actual.epoch:
            message = f"pack {at} of the global batch is {'missing' if got is None else got}, not {wanted}"
    details: dict[str, Any] = {"field": field, "position": at, "expected": wanted, "found": got}
    trained = {sequence for sequence, *_ in _places(actual)}
    if lost := next((place for place in _places(expected) if place[0] not in trained), None):
        sequence, row, _ = lost
        details |= {"microbatch": row.microbatch, "rank": row.rank, "sequence": sequence}
        message += f"; sequence {sequence} (microbatch {row.microbatch}, rank {row.rank}) is not trained"
    return Difference(f"step {expected.step}: {message}", step=expected.step, **details)


def _compare_sequences(expected: StepDigests, actual: StepDigests) -> Difference | None:
    wanted, got = (Counter(sequence for sequence, *_ in _places(step)) for step in (expected, actual))
    # An extra sequence has no place in the reference, only in the run.
    for sequence, row, _ in (*_places(expected), *_places(actual)):
        if wanted[sequence] != got[sequence]:
            name = f"sequence {sequence}" if sequence >= 0 else "tokens that are not a sequence of the dataset"
            message = f"{name} is trained {got[sequence]} times, not {wanted[sequence]}"
            details: dict[str, Any] = {"sequence": sequence, "expected": wanted[sequence], "found": got[sequence]}
            return _difference_in(row, expected.step, "sequences", message, **details)
    return None


def _compare_values(
    expected: StepDigests, actual: StepDigests, reference: Recorded, run: Recorded
) -> Difference | None:
    places: dict[int, list[tuple[RowDigests, int]]] = {}
    for sequence, row, index in _places(actual):
        places.setdefault(sequence, []).append((row, index))
    for sequence, row, index in _places(expected):
        other, place = places[sequence].pop(0)
        differs = row.digests[index] != other.digests[place]
        lengths = int(row.lengths[index]), int(other.lengths[place])
        if lengths[0] == lengths[1] and not differs.any():
            continue
        column = int(np.argmax(differs))
        field, at = FIELDS[column] if lengths[0] == lengths[1] else "boundaries", None
        wanted: Any
        got: Any
        values = reference.arrays(expected.step, row, index).get(field)
        others = run.arrays(expected.step, other, place).get(field)
        if field == "boundaries":
            at, (wanted, got) = min(lengths), lengths
            message = f"the boundaries contain {got} tokens, not {wanted}"
        elif values is not None and others is not None:
            at, wanted, got = _first(values, others)
            message = f"{field} at position {at} is {got}, not {wanted}"
        else:
            wanted, got = f"{row.digests[index, column]:016x}", f"{other.digests[place, column]:016x}"
            message = f"{field} has the digest {got}, not {wanted} (recorded batches would have its position)"
        details: dict[str, Any] = {"sequence": sequence, "position": at, "expected": wanted, "found": got}
        return _difference_in(row, expected.step, field, message, place=f", sequence {sequence}", **details)
    return None


def _places(step: StepDigests) -> Iterator[tuple[int, RowDigests, int]]:
    """Yield the id of every sequence of a step, its row, and its place in the row."""
    return ((sequence, row, index) for row in step.rows for index, sequence in enumerate(row.sequences.tolist()))


def _first(values: npt.NDArray[Any], others: npt.NDArray[Any]) -> tuple[int, float | int | None, float | int | None]:
    """Return the place of the first difference and both values there; None for an array that has ended."""
    at = first_difference(values, others)
    found = (each[at].item() if at < each.shape[0] else None for each in (values, others))
    wanted, got = (int(value) if value is not None and float(value).is_integer() else value for value in found)
    return at, wanted, got
