"""Frozen numpy records that all packages share: sequences, packs and schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError, ScheduleError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]

MAX_TOKEN_ID = 2**31 - 1
_WHOLE = "pass int32 tokens and starts, and a mask of whole numbers"
# Weights of tokens are stored in hundredths, in datasets whose manifest says so.
HUNDREDTHS = 100
MEDIA_KINDS = ("audio", "image")


def _as_dtype(values: Any, dtype: type[np.generic], *, field: str) -> npt.NDArray[Any]:
    """Return a 1-d array of `dtype`; raise FormatError where a value would change."""
    array = np.asarray(values)
    if array.dtype == dtype and array.ndim == 1:
        return array
    if array.ndim != 1:
        raise FormatError(f"{field} has {array.ndim} dimensions, expected 1", fix="write one pack at a time")
    if array.size == 0:
        return array.astype(dtype)
    is_whole = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
    # A float mask of exact zeros and ones, as older tools store, loses nothing; other floats would.
    if not is_whole and not (np.issubdtype(array.dtype, np.floating) and np.array_equal(array, np.trunc(array))):
        raise FormatError(f"{field} holds {array.dtype} values, expected whole numbers", fix=_WHOLE)
    info = np.iinfo(dtype)  # type: ignore[type-var]
    low, high = array.min(), array.max()
    if low < info.min or high > info.max:
        raise FormatError(f"{field} holds values from {low} to {high}, which do not fit {np.dtype(dtype)}", fix=_WHOLE)
    return array.astype(dtype)


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a sound, represented by placeholder tokens in a sequence.

    Attributes:
        kind: one of `MEDIA_KINDS`.
        start: position of the first placeholder token in the sequence or pack.
        tokens: number of consecutive placeholder tokens.
        data: contents of the file, such as PNG, JPEG, WAV or FLAC.
    """

    kind: str
    start: int
    tokens: int
    data: bytes


def moved(media: Iterable[Medium], by: int) -> tuple[Medium, ...]:
    """Return media with `by` added to each start."""
    return tuple(replace(one, start=one.start + by) for one in media)


@dataclass(frozen=True, eq=False, slots=True)
class SequenceView:
    """One tokenized conversation as stored.

    Attributes:
        input_ids: int32 [L].
        loss_mask: uint8 [L], label-aligned: loss_mask[j] = 1 trains the token after j; the last entry is 0. In a
            dataset with weights, the weight of the token after j in hundredths, 0 to 100.
        media: images and sounds in order of position.
    """

    input_ids: Int32Array
    loss_mask: UInt8Array
    media: tuple[Medium, ...] = ()

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, eq=False, slots=True)
class Pack:
    """Sequences stored together, end to end, without padding.

    Lists and arrays of other integer types are converted; values that would change raise FormatError.

    Attributes:
        input_ids: int32 [n].
        loss_mask: uint8 [n], label-aligned inside each sequence, as in `SequenceView`.
        seq_start_id: int32 [k], the first position of each sequence.
        media: images and sounds of all sequences in order of position, each inside one sequence.
    """

    input_ids: Int32Array
    loss_mask: UInt8Array
    seq_start_id: Int32Array
    media: tuple[Medium, ...] = ()

    def __post_init__(self) -> None:
        # Frozen, so that a pack can be shared; set once here to normalize the arguments.
        for name, dtype in (("input_ids", np.int32), ("loss_mask", np.uint8), ("seq_start_id", np.int32)):
            object.__setattr__(self, name, _as_dtype(getattr(self, name), dtype, field=name))

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pack):
            return NotImplemented
        names = ("input_ids", "loss_mask", "seq_start_id")
        is_same = all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)
        return is_same and self.media == other.media

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_sequences(self) -> int:
        return int(self.seq_start_id.shape[0])

    @property
    def sequence_lengths(self) -> Int32Array:
        """int32 [k]: stored tokens of each sequence."""
        return np.diff(self.seq_start_id, append=np.int32(len(self)))

    def sequence(self, index: int) -> SequenceView:
        """Return the sequence at `index`, as views into the arrays of this pack."""
        start = int(self.seq_start_id[index])
        end = int(self.seq_start_id[index + 1]) if index + 1 < self.num_sequences else len(self)
        media = moved((one for one in self.media if start <= one.start < end), -start)
        return SequenceView(self.input_ids[start:end], self.loss_mask[start:end], media)

    def sequences(self) -> list[SequenceView]:
        """Return all sequences in order, as views into the arrays of this pack."""
        return [self.sequence(index) for index in range(self.num_sequences)]

    def problem(self, pack_size: int | None = None, *, max_weight: int = 1) -> str | None:
        """Return a description of the first broken invariant of a pack, or None.

        The invariants: 0 < n <= pack_size; one loss_mask entry per token, each from 0 to max_weight; no negative
        token ids; seq_start_id starts at 0, rises strictly and ends before n.
        """
        n = len(self)
        if n == 0:
            return "has no tokens"
        if pack_size is not None and n > pack_size:
            return f"has {n:,} tokens, more than pack_size {pack_size:,}"
        if self.loss_mask.shape[0] != n:
            return f"has {n:,} tokens but {self.loss_mask.shape[0]:,} loss_mask entries"
        if self.loss_mask.max() > max_weight:
            at, to = int(np.argmax(self.loss_mask > max_weight)), "or" if max_weight == 1 else "to"
            return f"has loss_mask {int(self.loss_mask[at])} at position {at:,}, expected 0 {to} {max_weight}"
        if self.input_ids.min() < 0:
            at = int(np.argmax(self.input_ids < 0))
            return f"has the negative token id {int(self.input_ids[at])} at position {at:,}"
        starts = self.seq_start_id
        if starts.shape[0] == 0:
            return "has no seq_start_id entries"
        if starts[0] != 0:
            return f"has seq_start_id[0] == {int(starts[0])}, expected 0"
        # Compared, not subtracted: a difference of int32 values of a damaged file can wrap around.
        rising = starts[1:] > starts[:-1]
        if not rising.all():
            at = int(np.argmin(rising)) + 1
            low, high = int(starts[at - 1]), int(starts[at])
            return f"has seq_start_id[{at}] == {high}, not above seq_start_id[{at - 1}] == {low}"
        if starts[-1] >= n:
            return f"has its last sequence start at {int(starts[-1]):,}, at or after its {n:,} tokens"
        return self._problem_of_media() if self.media else None

    def _problem_of_media(self) -> str | None:
        """Return a description of the first medium outside the placeholder tokens of one sequence, or None."""
        ends = np.append(self.seq_start_id[1:], len(self))
        last = 0
        for number, one in enumerate(self.media):
            if one.kind not in MEDIA_KINDS or one.tokens < 1:
                return f"has medium {number} of kind {one.kind!r} and {one.tokens:,} tokens"
            end = one.start + one.tokens
            owner = int(np.searchsorted(self.seq_start_id, one.start, side="right")) - 1
            place = f"medium {number} in tokens {one.start:,} to {end:,}"
            # The last token of a sequence is only a label; the model does not read it.
            if one.start < last or end >= ends[owner]:
                return f"has {place}, not after the one before, inside one sequence and before its last token"
            # Entry j trains token j + 1; the entry before a sequence belongs to the previous one.
            first = max(one.start - 1, int(self.seq_start_id[owner]))
            if self.loss_mask[first : end - 1].any():
                return f"trains placeholder tokens of {place}"
            last = end
        return None


@dataclass(frozen=True, eq=False, slots=True)
class Schedule:
    """The placement of the sequences of one global batch on ranks and microbatches; equal on every rank.

    In each microbatch, a rank trains row `microbatch * dp_size + dp_rank` of `order`, split at `row_offsets`. A row
    that several ranks share is stored as the first rank's; the rows of the others are empty.

    Attributes:
        dp_size: data-parallel ranks.
        order: int64 [sequences], indices into the lengths that were scheduled, row by row.
        row_offsets: int64 [rows + 1]; rows is a multiple of dp_size; an empty row is trained with zero loss.
        shared_by: int64 [rows], number of consecutive data-parallel ranks that train each row together, a power of two;
            the first is a multiple of it. None if no row is shared.
    """

    dp_size: int
    order: Int64Array
    row_offsets: Int64Array
    shared_by: Int64Array | None = None

    def __post_init__(self) -> None:
        rows = self.row_offsets.shape[0] - 1
        if rows % self.dp_size:
            what = f"{rows} rows cannot be divided evenly among {self.dp_size} data-parallel ranks"
            fix = "give every rank a row in every microbatch, even an empty one"
            raise ScheduleError(what, where="Schedule", fix=fix)

    @property
    def num_microbatches(self) -> int:
        return (int(self.row_offsets.shape[0]) - 1) // self.dp_size

    def row(self, microbatch: int, dp_rank: int) -> Int64Array:
        """Return the indices into the scheduled lengths of one row, int64 [sequences of the row]."""
        if not 0 <= microbatch < self.num_microbatches or not 0 <= dp_rank < self.dp_size:
            what = f"row ({microbatch}, {dp_rank}) of {self.num_microbatches} microbatches x {self.dp_size} ranks"
            raise IndexError(what)
        index = microbatch * self.dp_size + dp_rank // (size := self.ranks_of_row(microbatch, dp_rank)) * size
        return self.order[self.row_offsets[index] : self.row_offsets[index + 1]]

    def ranks_of_row(self, microbatch: int, dp_rank: int) -> int:
        """Return the number of data-parallel ranks that train this row together."""
        return 1 if self.shared_by is None else int(self.shared_by[microbatch * self.dp_size + dp_rank])
