"""Sequences of one microbatch row, laid end to end in Megatron's `thd` layout, and their context-parallel slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import ScheduleError
from harness.records import Int32Array, Int64Array, SequenceView, UInt8Array, UInt64Array

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]

# Units over which the loss is averaged.
LOSS_AVERAGES = ("token", "conversation")


@dataclass(frozen=True, eq=False, slots=True)
class RowMedia:
    """The images or sounds of a row, in order of position.

    Attributes:
        sequences: int64 [media], the index in the row of the sequence that contains each.
        starts, tokens: int64 [media], position in the sequence and number of the placeholder tokens of each.
        digests: uint64 [media], digests of the files.
        arrays: inputs of the model's encoder by name: [media, ...], or [parts, ...] end to end, with the same number of
            parts for every placeholder token. Pipeline stages after the first have only `image_grid_thw`.
        num_bytes: total size of the distinct files.
    """

    sequences: Int64Array
    starts: Int64Array
    tokens: Int64Array
    digests: UInt64Array
    arrays: dict[str, npt.NDArray[Any]]
    num_bytes: int = 0

    def places(self, cu_seqlens_padded: Int32Array) -> Int64Array:
        """Return the positions of all placeholder tokens in a row with these bounds, int64 [sum of tokens]."""
        firsts = cu_seqlens_padded[self.sequences] + self.starts
        return np.repeat(firsts - (np.cumsum(self.tokens) - self.tokens), self.tokens) + np.arange(self.tokens.sum())

    def arrays_of(self, media: Int64Array) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a subset of the media, given by index in ascending order."""
        kept, found = np.isin(np.arange(len(self.tokens)), media), {}
        for name, array in self.arrays.items():
            parts = 1 if len(array) == len(kept) else self.tokens * (len(array) // self.tokens.sum())
            found[name] = np.ascontiguousarray(array[np.repeat(kept, parts)])
        return found

    def positions(self, position_ids: Int64Array, cu_seqlens_padded: Int32Array) -> Int64Array | None:
        """Return time, height and width positions, int64 [3, T], of a row with these bounds and text positions.

        Tokens of an image start at the position after the preceding text, plus their row or column in height and width.
        The following text continues after the longer side (transformers' `get_rope_index`). None without a grid.
        """
        if (grids := self.arrays.get("image_grid_thw")) is None:
            return None
        places = np.tile(position_ids, (3, 1))
        firsts = cu_seqlens_padded[self.sequences] + self.starts
        ends = cu_seqlens_padded[self.sequences + 1]
        for first, end, tokens, sides in zip(firsts, ends, self.tokens, grids[:, 1:], strict=True):
            merged, after = sides // math.isqrt(math.prod(sides) // tokens), first + tokens
            places[:, first:after] = places[0, first]
            places[1:, first:after] += np.indices(merged).reshape(2, -1)
            places[:, after:end] += max(merged) - tokens
        return places


@dataclass(frozen=True, eq=False, slots=True)
class ThdBatch:
    """One row of a microbatch: S sequences in T tokens, padding included.

    Trailing sequences may be empty; see `visible_bounds`.

    Attributes:
        tokens: int64 [T]; 0 at padding.
        labels: int64 [T], the token after each of `tokens` in its sequence; 0 at padding.
        position_ids: int64 [T], counted from 0 in every sequence, through its padding.
        loss_mask: float32 [T], 1 where the label is trained; 0 at padding.
        cu_seqlens: int32 [S + 1], running sum of real tokens.
        cu_seqlens_padded: int32 [S + 1], running sum of padded tokens: sequence s is tokens[c[s]:c[s + 1]].
        max_seqlen: padded tokens of the longest sequence.
        padding_mask: bool [T], True at padding.
        sources: int64 [S or fewer], index of the dataset that each of the first sequences comes from, 0 for the others;
            None if no layer uses it.
        shared_by: data-parallel ranks that train the row together, each on a context-parallel slice.
        media: None if the row has no media or this rank has no encoder.
    """

    tokens: Int64Array
    labels: Int64Array
    position_ids: Int64Array
    loss_mask: Float32Array
    cu_seqlens: Int32Array
    cu_seqlens_padded: Int32Array
    max_seqlen: int
    padding_mask: BoolArray
    sources: Int64Array | None = None
    shared_by: int = 1
    media: RowMedia | None = None

    def __len__(self) -> int:
        """T, padding included."""
        return int(self.tokens.shape[0])

    @property
    def num_sequences(self) -> int:
        """Sequences with a real token."""
        return int(np.count_nonzero(np.diff(self.cu_seqlens)))

    @property
    def num_tokens(self) -> int:
        """Real tokens: T without padding."""
        return int(self.cu_seqlens[-1])

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


def padding_multiple(*, cp_size: int = 1, tp_size: int = 1, sequence_parallel: bool = False) -> int:
    """Return the multiple that a layout pads every sequence to.

    Context parallelism splits a sequence into 2 * cp_size equal chunks. Sequence parallelism splits the part of one
    context-parallel rank, 1 / cp_size of the row, into tp_size equal parts. The result is the least number that
    satisfies both.
    """
    chunks = 2 * cp_size if cp_size > 1 else 1
    parts = cp_size * tp_size if sequence_parallel else 1
    return math.lcm(chunks, parts)


def shared_multiple(pad_to_multiple: int, ranks: int) -> int:
    """Return the padding multiple of a row shared by `ranks` data-parallel ranks, given that of unshared rows."""
    return pad_to_multiple if ranks == 1 else ranks * math.lcm(2, pad_to_multiple)


def needed_spans(
    stored: Int64Array, multiples: Int64Array, *, cp_size: Int64Array, cp_rank: Int64Array, ahead: int
) -> Int64Array:
    """Return the spans of stored tokens that context-parallel ranks need: the two chunks of each sequence.

    Args:
        stored: int64 [S], stored tokens of each sequence.
        multiples: int64 [S], the multiple that the model tokens of each are padded to.
        cp_size, cp_rank: int64 [S], number of ranks that share the row, and the rank.
        ahead: number of tokens after a chunk that its labels require.

    Returns:
        int64 [S, 2, 2], start and end of each chunk; end is not above start for a chunk of padding only.
    """
    chunk = -(-(stored - 1) // multiples) * multiples // (2 * cp_size)
    firsts = np.stack([cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk], axis=1)
    # With one rank, half of the tokens would be rounded down.
    ends = np.where(cp_size == 1, stored, chunk + ahead)[:, None] + firsts
    return np.stack([firsts, np.minimum(ends, stored[:, None])], axis=2)


def padded_lengths(stored_lengths: npt.NDArray[Any], pad_to_multiple: int = 1) -> Int64Array:
    """Return padded model tokens of sequences with these numbers of stored tokens, int64 in the input's shape."""
    # L stored tokens are L - 1 model tokens: each is paired with its successor.
    model_lengths = np.asarray(stored_lengths, dtype=np.int64) - 1
    if pad_to_multiple == 1:
        return model_lengths
    return -(-model_lengths // pad_to_multiple) * pad_to_multiple


def build_thd_batch(sequences: Sequence[SequenceView], *, pad_to_multiple: int = 1) -> ThdBatch:
    """Lay sequences end to end in Megatron's `thd` layout.

    Args:
        sequences: input_ids int32 [L] and loss_mask uint8 [L] of each, which become L - 1 model tokens.
        pad_to_multiple: every sequence is padded at its end to a multiple of this many tokens.

    Returns:
        the row; an empty sequence follows if only the last one has padding, see `visible_bounds`.

    Raises:
        ScheduleError: there are no sequences, or one has a single token.

    Source: the THD layout of Transformer Engine's `DotProductAttention`.
    """
    if not sequences:
        what = "a row cannot be built from no sequences"
        raise ScheduleError(what, where="the row", fix="use zero_loss_row for a row without sequences")
    return rows_from_arrays(
        np.concatenate([sequence.input_ids for sequence in sequences]),
        np.concatenate([sequence.loss_mask for sequence in sequences]),
        [np.fromiter((len(sequence) for sequence in sequences), dtype=np.int64, count=len(sequences))],
        pad_to_multiple=pad_to_multiple,
    )[0]


def rows_from_arrays(
    input_ids: Int32Array, loss_mask: UInt8Array, row_lengths: Sequence[Int64Array], *, pad_to_multiple: int = 1
) -> list[ThdBatch]:
    """Lay out several rows whose sequences are already end to end; an empty row becomes a `zero_loss_row`.

    Args:
        input_ids: int32 [n].
        loss_mask: uint8 [n], label-aligned inside each sequence.
        row_lengths: int64 [S] per row, stored tokens of each sequence, at least 2; they sum to n.
        pad_to_multiple: every sequence is padded at its end to a multiple of this many tokens.

    Raises:
        ScheduleError: a sequence has a single token, or the lengths do not match the arrays.
    """
    short = next((stored for stored in row_lengths if stored.min(initial=2) < 2), None)
    if short is not None:
        at = int(np.argmin(short))
        what = f"sequence {at} of the row has {short[at]} stored token(s); training needs a token and the one after it"
        fix = "prepare the dataset again; sequences of one token are refused there"
        raise ScheduleError(what, where="the row", fix=fix)
    ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *row_lengths]))
    if not input_ids.shape[0] == loss_mask.shape[0] == ends[-1]:
        counts = f"{input_ids.shape[0]:,} tokens, {loss_mask.shape[0]:,} loss_mask entries"
        what = f"a row has {counts} and sequences of {ends[-1]:,} tokens together"
        raise ScheduleError(what, where="the row", fix="give the tokens and the mask of exactly these sequences")
    # The label of a token is the next stored token; the last stored token of a sequence is only a label.
    wide: npt.NDArray[Any] = input_ids.astype(np.int64)
    values = {"tokens": wide, "labels": wide[1:], "loss_mask": loss_mask}
    return _lay_out(values, [stored - 1 for stored in row_lengths], ends[:-1], pad_to_multiple)


def rows_from_model_tokens(
    row_lengths: Sequence[Int64Array], *, pad_to_multiple: int = 1, **values: npt.NDArray[Any]
) -> list[ThdBatch]:
    """Lay out several rows like `rows_from_arrays`, given tokens that already have labels.

    `row_lengths` is int64 [S] per row, model tokens of each sequence, at least 1; they sum to n. `values` are tokens,
    labels and loss_mask, [n] integers (loss_mask may be floats), and optionally position_ids; by default, and at
    padding, positions count from 0 in every sequence.
    """
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *row_lengths]))[:-1]
    return _lay_out(values, row_lengths, starts, pad_to_multiple)


def _lay_out(
    values: dict[str, npt.NDArray[Any]], row_lengths: Sequence[Int64Array], starts: Int64Array, pad_to_multiple: int
) -> list[ThdBatch]:
    """Lay out all rows at once, which is faster; their sequences begin at `starts` in the arrays."""
    lengths = np.concatenate([np.zeros(0, np.int64), *row_lengths])
    padded = padded_lengths(lengths + 1, pad_to_multiple)
    real_ends, ends = np.append(0, np.cumsum(lengths)), np.append(0, np.cumsum(padded))
    counted = np.arange(ends[-1], dtype=np.int64)
    counted -= np.repeat(ends[:-1], padded)
    is_padded = ends[-1] > real_ends[-1]
    padding = counted >= np.repeat(lengths, padded) if is_padded else np.zeros(ends[-1], dtype=np.bool_)
    # Gathering by index is faster than selecting by a mask. Indices at padding point past the sequence or the array.
    places = counted + np.repeat(starts, padded)

    def laid_out(name: str, dtype: type[np.generic], at_padding: Any = 0) -> Any:
        row = values[name].astype(dtype, copy=False).take(places, mode="clip")
        if is_padded:
            np.copyto(row, at_padding, where=padding)
        return row

    fields = {
        "tokens": laid_out("tokens", np.int64),
        "labels": laid_out("labels", np.int64),
        "position_ids": laid_out("position_ids", np.int64, counted) if "position_ids" in values else counted,
        "loss_mask": laid_out("loss_mask", np.float32),
        "padding_mask": padding,
    }
    rows, last = [], 0
    for one in row_lengths:
        first, last = last, last + one.shape[0]
        if first == last:
            rows.append(zero_loss_row(pad_to_multiple))
            continue
        begin, end = int(ends[first]), int(ends[last])
        real, bounds = visible_bounds(real_ends[first : last + 1] - real_ends[first], ends[first : last + 1] - begin)
        parts = {name: field[begin:end] for name, field in fields.items()}
        longest = int(padded[first:last].max())
        rows.append(ThdBatch(**parts, cu_seqlens=real, cu_seqlens_padded=bounds, max_seqlen=longest))
    return rows


def loss_weights(row: ThdBatch, average: str = "token") -> tuple[Float32Array, int]:
    """Return the weights of a row's losses, float32 [T], and the row's contribution to the divisor of the loss.

    The loss of a global batch is the weighted sum over all its rows, divided by the sum of these contributions. With
    `token`, every trained token is weighted by its mask. With `conversation`, every sequence with a trained token has
    weight 1, divided among its tokens in proportion to their masks.
    """
    if average == "token":
        return row.loss_mask, int(row.loss_mask.sum(dtype=np.float64))
    sizes = np.diff(row.cu_seqlens_padded)
    owners = np.repeat(np.arange(sizes.shape[0]), sizes)
    sums = np.bincount(owners, weights=row.loss_mask, minlength=sizes.shape[0])
    weights = row.loss_mask / np.where(sums > 0, sums, 1.0)[owners]
    return weights.astype(np.float32), int(np.count_nonzero(sums))


def visible_bounds(cu_seqlens: npt.ArrayLike, cu_seqlens_padded: npt.ArrayLike) -> tuple[Int32Array, Int32Array]:
    """Return the bounds of a row, with an empty sequence at its end if only the last sequence has padding.

    Transformer Engine up to 2.17.1 detects padding by comparing the bounds without their last entries. It therefore
    misses padding that is only at the end of a row, and context parallelism then drops real keys (TransformerEngine
    issue 3331). The empty sequence adds no token, and turns the padding into padding between sequences.

    Args:
        cu_seqlens, cu_seqlens_padded: [S + 1] integers, running sums of real and of padded tokens.

    Returns:
        both as int32, [S + 1] or [S + 2].
    """
    real, padded = np.asarray(cu_seqlens, dtype=np.int32), np.asarray(cu_seqlens_padded, dtype=np.int32)
    if real[-1] != padded[-1] and np.array_equal(real[:-1], padded[:-1]):
        real, padded = np.append(real, real[-1]), np.append(padded, padded[-1])
    return real, padded


def zero_loss_row(pad_to_multiple: int = 1) -> ThdBatch:
    """Return the shortest legal row that trains nothing: one untrained token, padded to `pad_to_multiple`.

    A rank without sequences in a microbatch runs this row, because other ranks wait for it in collectives.
    `padding_mask` marks the whole row, so that routers of experts do not count its token.
    """
    two = SequenceView(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.uint8))
    row = build_thd_batch([two], pad_to_multiple=pad_to_multiple)
    return replace(row, padding_mask=np.ones_like(row.padding_mask))


def pad_row(row: ThdBatch, total: int) -> ThdBatch:
    """Pad a row at its end to `total` tokens, as one more sequence without a real token.

    All rows then have one shape, as compiled graphs need. `max_seqlen` rises where the padding is longer than every
    sequence. Raises ScheduleError for a longer row.
    """
    missing = total - len(row)
    if missing < 0:
        what = f"a row has {len(row):,} tokens and cannot be padded to {total:,}"
        raise ScheduleError(what, where="the row", fix="raise schedule.max_tokens_per_rank")
    if missing == 0:
        return row
    # Without an empty sequence at the end so far: kernels of scans number sequences by what they contain.
    count = int(np.searchsorted(row.cu_seqlens_padded, len(row))) + 1
    cu_seqlens, cu_seqlens_padded = visible_bounds(
        np.append(row.cu_seqlens[:count], row.cu_seqlens[-1]), np.append(row.cu_seqlens_padded[:count], total)
    )

    def extended(values: npt.NDArray[Any], by: Any) -> Any:
        longer = np.empty(total, values.dtype)
        longer[: len(row)], longer[len(row) :] = values, by
        return longer

    return replace(
        row,
        tokens=extended(row.tokens, 0),
        labels=extended(row.labels, 0),
        position_ids=extended(row.position_ids, np.arange(missing)),
        loss_mask=extended(row.loss_mask, 0),
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
        max_seqlen=max(row.max_seqlen, missing),
        padding_mask=extended(row.padding_mask, True),
    )


def static_row(row: ThdBatch, *, total: int, num_sequences: int) -> ThdBatch:
    """Pad a row at its end to `total` tokens, and its bounds with empty sequences, so that rows differ in values alone.

    The bounds are then [num_sequences + 3]: of two sequences more, one may be the padding of `pad_row`, and one that of
    `visible_bounds`. `max_seqlen` is `total`. Raise ScheduleError for a row of more tokens or sequences.
    """
    if row.num_sequences > num_sequences:
        what = f"a row has {row.num_sequences:,} sequences, and its CUDA graph is for {num_sequences:,} at most"
        raise ScheduleError(what, where="the row", fix="parallel.cuda_graphs=false")
    row = pad_row(row, total)
    empty = num_sequences + 3 - len(row.cu_seqlens)
    return replace(
        row,
        cu_seqlens=np.pad(row.cu_seqlens, (0, empty), mode="edge"),
        cu_seqlens_padded=np.pad(row.cu_seqlens_padded, (0, empty), mode="edge"),
        max_seqlen=total,
    )


def tokens_ahead(row: ThdBatch, distance: int) -> ThdBatch:
    """Return a row shifted by `distance`: each token is replaced by the one that far ahead in its sequence.

    Past the end of a sequence, tokens, labels and loss_mask are 0 and padding_mask is True.
    """
    padded = np.diff(row.cu_seqlens_padded)
    ends = row.cu_seqlens_padded[:-1] + np.diff(row.cu_seqlens)
    places = np.arange(len(row)) + distance
    is_there = places < np.repeat(ends, padded)
    places[~is_there] = 0

    def moved(values: npt.NDArray[Any]) -> Any:
        return np.where(is_there, values[places], values.dtype.type(0))

    return replace(
        row,
        tokens=moved(row.tokens),
        labels=moved(row.labels),
        loss_mask=moved(row.loss_mask),
        padding_mask=row.padding_mask | ~is_there,
    )


def context_parallel_indices(cu_seqlens_padded: npt.NDArray[Any], *, cp_size: int, cp_rank: int) -> Int64Array:
    """Return the positions of a row that one context-parallel rank holds, in order.

    Every padded sequence is split into 2 * cp_size equal chunks. Rank r holds chunks r and 2 * cp_size - 1 - r, so that
    causal attention costs every rank the same.

    Args:
        cu_seqlens_padded: [S + 1] integers, running sum of padded sequence lengths; the last entry is T.
        cp_size: number of context-parallel ranks.
        cp_rank: rank among them.

    Returns:
        int64 [T / cp_size], indices into the row's tokens.

    Raises:
        ScheduleError: a sequence is not divisible by 2 * cp_size.

    Source: equal to Transformer Engine's `thd_get_partitioned_indices`.
    """
    bounds = np.asarray(cu_seqlens_padded, dtype=np.int64)
    if not 0 <= cp_rank < cp_size:
        what = f"context-parallel rank {cp_rank} does not exist among {cp_size}"
        raise ScheduleError(what, where="the row", fix=f"cp_rank is 0 to {cp_size - 1}")
    if cp_size == 1:
        return np.arange(bounds[-1], dtype=np.int64)
    lengths = np.diff(bounds)
    ragged = lengths % (2 * cp_size) != 0
    if ragged.any():
        at = int(np.argmax(ragged))
        what = f"sequence {at} has {lengths[at]:,} padded tokens, not a multiple of 2 * cp_size = {2 * cp_size}"
        fix = "build the row with pad_to_multiple=padding_multiple(cp_size=...)"
        raise ScheduleError(what, where="the row", fix=fix)
    chunk = lengths // (2 * cp_size)
    starts = np.stack([bounds[:-1] + cp_rank * chunk, bounds[:-1] + (2 * cp_size - 1 - cp_rank) * chunk], axis=1)
    sizes = np.repeat(chunk, 2)
    held = np.cumsum(sizes)
    indices: Int64Array = np.arange(held[-1], dtype=np.int64)
    indices += np.repeat(starts.reshape(-1) - (held - sizes), sizes)
    return indices
