"""Digests of the data in every step: each sequence's tokens, labels, mask, positions and boundaries.

They are computed from the rows that the step receives, without padding, so that runs on any layout can be compared:
equal digests prove that the data path is the same, independent of the model.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from harness.errors import FormatError, HarnessError, os_errors_as
from harness.loader import RankBatch
from harness.printing import print_line
from harness.records import Int64Array, UInt64Array
from harness.storage import write_atomically
from harness.thd import ThdBatch
from harness.train.lines import ROOM_FIX, LineFile, describe_hole, keep_lines_before
from harness.train.metrics import Log, read_lines

DIGESTS_FILE = "digests.jsonl"
BATCHES = "batches"
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
# The first pipeline stage reads tokens, the last one labels; the stages between read only positions and boundaries.
_OF_FIRST_STAGE, _OF_LAST_STAGE = ("tokens",), ("labels", "loss_mask")

_xxh3: Callable[..., int] = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, eq=False, slots=True)
class RowDigests:
    """One microbatch row of S sequences on one data-parallel rank, the first of the ranks that share it."""

    microbatch: int
    rank: int
    sequences: Int64Array  # int64 [S], ids in the dataset; -1 for tokens outside the planned sequences
    lengths: Int64Array  # int64 [S], number of real tokens between the boundaries that attention receives, or 0
    digests: UInt64Array  # uint64 [S, fields], xxh3_64 of each of FIELDS
    arrays: dict[str, npt.NDArray[Any]]  # real tokens of the whole row by field, if batches are kept
    shared_by: int = 1  # number of data-parallel ranks


@dataclass(frozen=True, eq=False, slots=True)
class RankRows:
    """The rows of one process of the job, its data-parallel rank, and the fields that it actually reads."""

    process: int
    rank: int
    fields: tuple[str, ...]
    rows: list[RowDigests]


@dataclass(frozen=True, eq=False, slots=True)
class StepDigests:
    """One optimizer step of the whole job."""

    step: int
    epoch: int
    packs: list[int]  # ids, in training order
    rows: list[RowDigests]  # by microbatch, then rank; without rows of zero loss
    disagreements: list[str]  # messages about ranks that train the same row but received different data

    @property
    def digest(self) -> str:
        """Hash of the global batch, 32 hexadecimal digits: packs in order, and sequences independent of placement."""
        columns = [
            np.column_stack([row.sequences.astype(np.uint64), row.lengths.astype(np.uint64), row.digests])
            for row in self.rows
        ]
        table = np.concatenate([np.zeros((0, 2 + len(FIELDS)), np.uint64), *columns])
        table = table[np.lexsort(table.T[::-1])]
        total = xxhash.xxh3_128()
        total.update(np.asarray([len(self.packs), *self.packs], dtype="<i8").tobytes())
        total.update(np.ascontiguousarray(table, dtype="<u8").tobytes())
        return str(total.hexdigest())


def rank_rows(
    batch: RankBatch, *, process: int, dp_rank: int, is_first_stage: bool, is_last_stage: bool, keep: bool = False
) -> RankRows:
    """Return the digests of the rows that this process trains."""
    fields = (*(_OF_FIRST_STAGE * is_first_stage), *(_OF_LAST_STAGE * is_last_stage), "position_ids")
    rows = []
    for microbatch, (row, sequences) in enumerate(zip(batch.rows, batch.sequence_ids, strict=True)):
        if not sequences.shape[0] and not row.num_trained_tokens:
            continue
        table = sequence_digests(row)
        arrays = {}
        if keep:
            spans = zip(row.cu_seqlens_padded[:-1], np.diff(row.cu_seqlens), strict=True)
            real = np.concatenate([np.arange(start, start + n) for start, n in spans])
            arrays = {name: getattr(row, name)[real] for name in FIELDS}
        count = max(table.shape[0], sequences.shape[0])
        ids = np.pad(sequences, (0, count - sequences.shape[0]), constant_values=-1)
        table = np.pad(table, ((0, count - table.shape[0]), (0, 0)))
        first, lengths = dp_rank - dp_rank % row.shared_by, table[:, 0].astype(np.int64)
        rows.append(RowDigests(microbatch, first, ids, lengths, table[:, 1:], arrays, row.shared_by))
    return RankRows(process, dp_rank, fields, rows)


def sequence_digests(row: ThdBatch) -> UInt64Array:
    """Return the real length, and the xxh3_64 of each of FIELDS, for every sequence of a row, uint64 [S, 1 + fields].

    Sequences without a real token, which are padding, are omitted. Sequences are split at the boundaries that attention
    receives, not at those of the dataset's index, so that a lost boundary changes the digests.
    """
    lengths = np.diff(row.cu_seqlens).astype(np.int64)
    starts = row.cu_seqlens_padded[:-1].astype(np.int64)
    table = np.zeros((lengths.shape[0], 1 + len(FIELDS)), dtype=np.uint64)
    table[:, 0] = lengths
    for column, name in enumerate(FIELDS, start=1):
        values = np.ascontiguousarray(getattr(row, name))
        for index, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            table[index, column] = _xxh3(values[start : start + length])
    return table[lengths > 0]


def merge_ranks(step: int, batch: RankBatch, parts: Sequence[RankRows]) -> StepDigests:
    """Return one step of the job from the rows of its processes; processes that train the same row must agree."""
    # Tokens come from the first pipeline stage, labels and masks from the last.
    merged: dict[tuple[int, int], RowDigests] = {}
    disagreements: set[str] = set()
    for rank in {part.rank for part in parts}:
        numbers = [sorted((row.microbatch, row.rank) for row in part.rows) for part in parts if part.rank == rank]
        if any(other != numbers[0] for other in numbers):
            disagreements.add(f"processes of data-parallel rank {rank} have different microbatches")
    for column, name in enumerate(FIELDS):
        for part, row in [(p, r) for p in parts if name in p.fields for r in p.rows]:
            place = (row.microbatch, row.rank)
            fresh = replace(row, digests=np.zeros_like(row.digests), arrays={})
            first = merged.setdefault(place, fresh)
            where = f"process {part.process}, microbatch {row.microbatch}, data-parallel rank {row.rank}"
            if not np.array_equal(first.sequences, row.sequences) or not np.array_equal(first.lengths, row.lengths):
                disagreements.add(f"{where}: sequences or boundaries differ from other ranks of its model copy")
            elif not first.digests[:, column].any():
                first.digests[:, column] = row.digests[:, column]
                if row.arrays:
                    first.arrays[name] = row.arrays[name]
            elif not np.array_equal(first.digests[:, column], row.digests[:, column]):
                at = int(np.argmax(first.digests[:, column] != row.digests[:, column]))
                disagreements.add(f"{where}: {name} of sequence {int(row.sequences[at])} differs from other ranks")
    rows = [merged[place] for place in sorted(merged)]
    return StepDigests(step, batch.epoch, batch.pack_ids.tolist(), rows, sorted(disagreements))


class DigestWriter(LineFile):
    """Writer that appends to `digests.jsonl` in a run's folder, one line per step, from `first_step` on."""

    def __init__(self, folder: Path, *, first_step: int = 1, log: Log = print_line) -> None:
        self._folder, path = folder, folder / DIGESTS_FILE
        kept = keep_lines_before(path, first_step)
        # The first steps may have been trained without digests.
        if hole := describe_hole(path, kept, range(kept[0] if kept else 1, first_step)):
            log(hole)
        super().__init__(path, "the digests of the run's data")

    def write(self, step: StepDigests) -> None:
        """Append a step; write its arrays, if kept, to `batches/step-NNNNNNNN.npz`; raise HarnessError on failure."""
        arrays = {
            f"{row.microbatch}.{row.rank}.{name}": values for row in step.rows for name, values in row.arrays.items()
        }
        if arrays:
            packed, path = io.BytesIO(), _batch_file(self._folder, step.step)
            np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
            with os_errors_as(HarnessError, "the batches of the run cannot be written", where=path, fix=ROOM_FIX):
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, packed.getvalue())
        self.append(json.dumps(to_json(step)) + "\n")


def to_json(step: StepDigests) -> dict[str, Any]:
    """Return the step as a line of `digests.jsonl`; a row has 16 hexadecimal digits for each sequence and field."""
    rows = [
        {
            "microbatch": row.microbatch,
            "rank": row.rank,
            "sequences": row.sequences.tolist(),
            "lengths": row.lengths.tolist(),
            "shared_by": row.shared_by,
            **{name: row.digests[:, column].astype(">u8").tobytes().hex() for column, name in enumerate(FIELDS)},
        }
        for row in step.rows
    ]
    values = {name: getattr(step, name) for name in ("step", "epoch", "digest", "packs", "disagreements")}
    return {**values, "rows": rows}


def from_json(values: dict[str, Any]) -> StepDigests:
    """Return the step of a line from `to_json`; raise ValueError if its digest does not match its rows."""
    rows = [
        RowDigests(
            int(row["microbatch"]),
            int(row["rank"]),
            np.asarray(row["sequences"], dtype=np.int64),
            np.asarray(row["lengths"], dtype=np.int64),
            np.column_stack([np.frombuffer(bytes.fromhex(row[name]), ">u8").astype(np.uint64) for name in FIELDS]),
            {},
            int(row.get("shared_by", 1)),  # not recorded by older versions
        )
        for row in values["rows"]
    ]
    number, epoch = int(values["step"]), int(values["epoch"])
    step = StepDigests(number, epoch, list(values["packs"]), rows, list(values["disagreements"]))
    if step.digest != values["digest"]:
        raise ValueError(f"the digest of step {step.step} does not match its rows")
    return step


def read_digests(folder: Path) -> list[StepDigests]:
    """Return the recorded steps of a run in order; raise FormatError if there are none or a line is damaged."""
    path = folder / DIGESTS_FILE
    if not path.exists():
        raise FormatError("the run recorded no digests", where=str(path), fix="run it with trainer.record_digests=true")
    return read_lines(path, from_json, "digests", remedy="run it again")


def kept_sequence(folder: Path, step: int, row: RowDigests, index: int) -> dict[str, npt.NDArray[Any]]:
    """Return a sequence's arrays by field, empty if batches were not kept; raise FormatError for a damaged file."""
    path = _batch_file(folder, step)
    if not path.exists():
        return {}
    start = int(row.lengths[:index].sum())
    stop = start + int(row.lengths[index])
    names = {name: f"{row.microbatch}.{row.rank}.{name}" for name in FIELDS}
    try:
        with np.load(path) as arrays:
            return {name: arrays[key][start:stop] for name, key in names.items() if key in arrays}
    except (ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        what = f"the batches of step {step} cannot be read: {error}"
        raise FormatError(what, where=str(path), fix="remove the file: digests are then compared alone") from error


def _batch_file(folder: Path, step: int) -> Path:
    return folder / BATCHES / f"step-{step:08d}.npz"
