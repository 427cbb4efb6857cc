"""Find where the data of two runs first differs: step, microbatch, rank, sequence, field, position and both values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import yaml

from harness.errors import HarnessError
from harness.loader import BlendSource, DataConfig, open_datasets
from harness.parity.result import Difference
from harness.thd import build_thd_batch
from harness.train import (
    FIELDS,
    METRICS_FILE,
    RowDigests,
    StepDigests,
    StepMetrics,
    kept_sequence,
    read_digests,
    read_metrics,
)

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Recorded:
    """The records of a run.

    Attributes:
        steps: its metrics.
        digests: returns the digests of its data; raises FormatError where none were recorded.
        arrays: returns a trained sequence (step, its row, its place in the row) by field; empty where it is not known.
    """

    steps: list[StepMetrics]
    digests: Callable[[], list[StepDigests]]
    arrays: Callable[[int, RowDigests, int], Arrays]


def recorded_run(folder: Path) -> Recorded:
    """Return the records of the run of `recipes.sft` in `folder`; no steps where it wrote none."""

    def arrays(step: int, row: RowDigests, index: int) -> Arrays:
        return kept_sequence(folder, step, row, index) or _stored_sequence(folder, row, index)

    path = folder / METRICS_FILE
    return Recorded(read_metrics(path) if path.exists() else [], lambda: read_digests(folder), arrays)


def _stored_sequence(folder: Path, row: RowDigests, index: int) -> Arrays:
    """Read a sequence from the run's dataset; a field whose digest is not the recorded one is left out."""
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text())["data"]
        blend = [BlendSource(**source) for source in settings.get("blend") or ()]
        reader = open_datasets(DataConfig(settings["path"], settings["validation_path"], blend=blend)).train
        sequence = int(row.sequences[index])
        pack = int(np.searchsorted(reader.pack_offsets, sequence, side="right")) - 1
        built = build_thd_batch([reader.read([pack])[0].sequence(sequence - int(reader.pack_offsets[pack]))])
    except (OSError, KeyError, TypeError, IndexError, yaml.YAMLError, HarnessError):
        return {}  # the dataset is gone or another one; the digests still show where the runs differ
    fields = {name: getattr(built, name) for name in FIELDS}
    return {
        name: values
        for column, (name, values) in enumerate(fields.items())
        if xxhash.xxh3_64_intdigest(values.tobytes()) == int(row.digests[index, column])
    }


def data_difference(reference: Recorded, run: Recorded) -> Difference | None:
    """Return the first difference of the trained data, on whatever ranks it was; None where all is equal.

    Steps that only one of the runs made are ignored here.
    """
    for name, records in (("the reference", reference), ("the run", run)):
        recorded = {step.step for step in records.digests()}
        lost = next((step.step for step in records.steps if step.step not in recorded), None)
        if lost is not None:
            return Difference(f"step {lost}: {name} recorded no digests of it", step=lost, field="digests")
    for one, other in _common_steps(reference, run):
        disagreements = [f"the reference's {text}" for text in one.disagreements] + other.disagreements
        if disagreements:
            return Difference(f"step {one.step}: {disagreements[0]}", step=one.step, field="ranks")
        if one.digest == other.digest and one.epoch == other.epoch:
            continue
        difference = (
            _compare_packs(one, other) or _compare_sequences(one, other) or _compare_values(one, other, reference, run)
        )
        # The digest covers nothing else, so one of these found the difference.
        return difference or Difference(f"step {one.step}: the digests differ", step=one.step, field="digest")
    return None


def placement_difference(reference: Recorded, run: Recorded) -> Difference | None:
    """Return the first row that holds other sequences, or the same ones in another order."""
    for one, other in _common_steps(reference, run):
        rows = {(row.microbatch, row.rank): row for row in other.rows}
        for row in one.rows:
            there = rows.pop((row.microbatch, row.rank), None)
            ids = np.zeros(0, np.int64) if there is None else there.sequences
            if not np.array_equal(row.sequences, ids):
                at = _first_difference(row.sequences, ids)
                wanted, got = _at(row.sequences, at), _at(ids, at)
                return Difference(
                    f"step {one.step}, microbatch {row.microbatch}, rank {row.rank}: place {at} of the row holds "
                    f"{'no sequence' if got is None else f'sequence {got}'}, not "
                    f"{'none' if wanted is None else f'sequence {wanted}'}",
                    step=one.step,
                    microbatch=row.microbatch,
                    rank=row.rank,
                    sequence=wanted,
                    field="placement",
                    position=at,
                    expected=wanted,
                    found=got,
                )
        if rows:
            microbatch, rank = min(rows)
            return Difference(
                f"step {one.step}: there is a row in microbatch {microbatch} of rank {rank}, where the reference has "
                "none",
                step=one.step,
                microbatch=microbatch,
                rank=rank,
                field="placement",
            )
    return None


def _common_steps(reference: Recorded, run: Recorded) -> Iterator[tuple[StepDigests, StepDigests]]:
    made = {step.step: step for step in run.digests()}
    for step in reference.digests():
        if step.step in made:
            yield step, made[step.step]


def _compare_packs(one: StepDigests, other: StepDigests) -> Difference | None:
    if one.packs == other.packs and one.epoch == other.epoch:
        return None
    wanted, got = np.asarray(one.packs), np.asarray(other.packs)
    at = _first_difference(wanted, got) if one.packs != other.packs else 0
    expected, found = _at(wanted, at), _at(got, at)
    message = f"pack {at} of the global batch is {'missing' if found is None else found}, not {expected}"
    if expected is None:
        message = f"the global batch has pack {found} more than the {wanted.shape[0]} of the reference"
    if one.epoch != other.epoch:
        message = f"epoch {other.epoch} is trained, not {one.epoch}"
    lost = _place_of_first(one, set(_ids(one)) - set(_ids(other)))
    if lost is not None:
        row, index = lost
        message += f"; sequence {row.sequences[index]} (microbatch {row.microbatch}, rank {row.rank}) is not trained"
    return Difference(
        f"step {one.step}: {message}",
        step=one.step,
        microbatch=lost[0].microbatch if lost else None,
        rank=lost[0].rank if lost else None,
        sequence=int(lost[0].sequences[lost[1]]) if lost else None,
        field="packs" if one.packs != other.packs else "epoch",
        position=at,
        expected=expected if one.packs != other.packs else one.epoch,
        found=found if one.packs != other.packs else other.epoch,
    )


def _compare_sequences(one: StepDigests, other: StepDigests) -> Difference | None:
    wanted, got = Counter(_ids(one)), Counter(_ids(other))
    if wanted == got:
        return None
    changed = {sequence for sequence in wanted | got if wanted[sequence] != got[sequence]}
    # A sequence that should not be there has no place in the reference, only in the run.
    placed = _place_of_first(one, changed) or _place_of_first(other, changed)
    assert placed is not None
    row, index = placed
    sequence = int(row.sequences[index])
    what = f"sequence {sequence}" if sequence >= 0 else "a run of tokens that is no sequence of the dataset"
    return Difference(
        f"step {one.step}, microbatch {row.microbatch}, rank {row.rank}: {what} is trained {got[sequence]} times, not "
        f"{wanted[sequence]}",
        step=one.step,
        microbatch=row.microbatch,
        rank=row.rank,
        sequence=sequence,
        field="sequences",
        expected=wanted[sequence],
        found=got[sequence],
    )


def _compare_values(one: StepDigests, other: StepDigests, reference: Recorded, run: Recorded) -> Difference | None:
    places: dict[int, list[tuple[RowDigests, int]]] = {}
    for row, index in _places(other):
        places.setdefault(int(row.sequences[index]), []).append((row, index))
    for row, index in _places(one):
        there, place = places[int(row.sequences[index])].pop(0)
        name = _differing_field(row, index, there, place)
        if name is None:
            continue
        where = f"step {one.step}, microbatch {row.microbatch}, rank {row.rank}, sequence {row.sequences[index]}"
        at: int | None = None
        wanted: float | int | str | None
        got: float | int | str | None
        if name == "boundaries":
            wanted, got = int(row.lengths[index]), int(there.lengths[place])
            at = min(wanted, got)
            message = f"the boundaries hold {got} tokens, not {wanted}"
        else:
            a = reference.arrays(one.step, row, index).get(name)
            b = run.arrays(one.step, there, place).get(name)
            column = FIELDS.index(name)
            if a is not None and b is not None:
                at = _first_difference(a, b)
                wanted, got = _number(a, at), _number(b, at)
                message = f"{name} at position {at} is {got}, not {wanted}"
            else:
                wanted, got = f"{row.digests[index, column]:016x}", f"{there.digests[place, column]:016x}"
                message = (
                    f"{name} has the digest {got}, not {wanted} (its position is known where batches were recorded)"
                )
        return Difference(
            f"{where}: {message}",
            step=one.step,
            microbatch=row.microbatch,
            rank=row.rank,
            sequence=int(row.sequences[index]),
            field=name,
            position=at,
            expected=wanted,
            found=got,
        )
    return None


def _differing_field(one: RowDigests, index: int, other: RowDigests, place: int) -> str | None:
    if one.lengths[index] != other.lengths[place]:
        return "boundaries"
    differs = one.digests[index] != other.digests[place]
    return FIELDS[int(np.argmax(differs))] if differs.any() else None


def _places(step: StepDigests) -> Iterator[tuple[RowDigests, int]]:
    for row in step.rows:
        for index in range(row.sequences.shape[0]):
            yield row, index


def _place_of_first(step: StepDigests, sequences: set[int]) -> tuple[RowDigests, int] | None:
    return next(((row, index) for row, index in _places(step) if int(row.sequences[index]) in sequences), None)


def _ids(step: StepDigests) -> list[int]:
    return [sequence for row in step.rows for sequence in row.sequences.tolist()]


def _first_difference(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Return the index of the first difference; the end of the shorter array where all before it is equal."""
    count = min(one.shape[0], other.shape[0])
    differs = one[:count] != other[:count]
    return int(np.argmax(differs)) if differs.any() else count


def _at(values: npt.NDArray[Any], index: int) -> int | None:
    return int(values[index]) if index < values.shape[0] else None


def _number(values: npt.NDArray[Any], index: int) -> float | int | None:
    if index >= values.shape[0]:
        return None
    value = values[index].item()
    return int(value) if float(value).is_integer() else float(value)
