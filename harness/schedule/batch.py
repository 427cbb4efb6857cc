"""The input of a scheduler, the cost of training a sequence, and the imbalance of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, ScheduleError
from harness.records import Float64Array, Int64Array, Schedule

DYNAMIC = "dynamic_context"


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Work of training one sequence of L model tokens: L * linear + L^2 * quadratic, in any unit.

    The linear term is for matrix multiplications with weights, the quadratic term for attention scores. Only their
    ratio affects a placement. By default they are equal at 8,192 tokens.

    Attributes:
        exchange: work that a rank could do while it sends the keys and values of one token to another rank. Ranks
            that share a sequence send them while they compute attention scores, and wait for the slower of the two.
        swap: work that a rank could do while the features of one token travel to the ranks that scan them, and back.
        most_ranks: the most ranks that the model's layers can divide a sequence over; None for no limit.
        encode: returns the work of encoding media with these numbers of placeholder tokens, float64 [media]; None for
            a text model.
    """

    linear: float = 1.0
    quadratic: float = 1.0 / 8192
    exchange: float = 0.0
    swap: float = 0.0
    most_ranks: int | None = None
    encode: Callable[[Float64Array], Float64Array] | None = None

    def __post_init__(self) -> None:
        rates = self.linear, self.quadratic, self.exchange, self.swap
        if not (all(0 <= rate < math.inf for rate in rates) and self.linear + self.quadratic > 0):
            what = f"a sequence cannot cost {self.linear} per token and {self.quadratic} per squared token"
            what += f", and {self.exchange} per exchanged token and {self.swap} per swapped one"
            fix = "set all to 0 or more, finite, and linear or quadratic above 0"
            raise ConfigError(what, where="SequenceCost", fix=fix)

    def of(self, lengths: npt.NDArray[np.integer]) -> Float64Array:
        """Return the cost of sequences of these numbers of model tokens, float64 in the shape of `lengths`."""
        return self.of_rank(lengths, 1)

    def of_rank(self, lengths: npt.NDArray[np.integer], ranks: npt.NDArray[np.integer] | int) -> Float64Array:
        """Return the cost on each of the ranks that share a sequence, float64 in the shape of `lengths`."""
        behind = np.maximum(self.quadratic * lengths, self.exchange * (ranks - 1))
        cost: Float64Array = lengths * (self.linear + behind + self.swap * (ranks - 1) / ranks) / ranks
        return cost


@dataclass(frozen=True, eq=False, slots=True)
class GlobalBatch:
    """The sequences of one global batch and the ranks that they are placed on.

    Attributes:
        lengths: int64 [sequences], model tokens after padding; each above 0 and at most `max_tokens_per_row`.
        dp_size: data-parallel ranks.
        max_tokens_per_row: tokens that one row holds: max_tokens_per_rank * cp_size.
        group_size: the number of microbatches is a multiple of this (virtual pipeline stages run them in groups).
        pack_offsets: int64 [packs + 1], the bounds of stored packs in `lengths`; None where they are unknown.
        cost: cost of training a sequence.
        media_cost: float64 [sequences], cost of encoding the media of each; None without media.
        pad_to_multiple: every sequence was padded to a multiple of this many tokens; shared rows are padded further.
        pads_further: False if shared rows cannot be padded further; then only costly sequences are shared.
    """

    lengths: Int64Array
    dp_size: int
    max_tokens_per_row: int
    group_size: int
    pack_offsets: Int64Array | None
    cost: SequenceCost
    media_cost: Float64Array | None = None
    pad_to_multiple: int = 1
    pads_further: bool = True

    @property
    def rows_per_group(self) -> int:
        """The number of rows of a schedule is a multiple of this."""
        return self.dp_size * self.group_size

    def costs(self, ranks: npt.NDArray[np.integer] | int = 1) -> Float64Array:
        """Return the cost of each sequence on each of the `ranks` that share it, float64 [sequences]."""
        costs = self.cost.of_rank(self.lengths, ranks)
        return costs if self.media_cost is None else costs + self.media_cost


def largest_share(dp_size: int, most_ranks: int | None = None) -> int:
    """Return the most data-parallel ranks that may share a row: the largest power of two that divides their number."""
    return min(dp_size & -dp_size, most_ranks or dp_size)  # `most_ranks` is a power of two as well


def check_lengths(
    lengths: Int64Array,
    pack_offsets: Int64Array | None,
    name: str,
    max_tokens_per_rank: int,
    *,
    dp_size: int,
    cp_size: int,
    most_ranks: int | None = None,
    pad_to_multiple: int = 1,
    of: str = "",
) -> None:
    """Raise ScheduleError for a sequence or a pack that can never be placed, by its number.

    Arguments are those of `schedule`; `of` names the owner of the sequences in messages.
    """
    ranks, words, chunks, unit = cp_size, "cp_size", 1, pad_to_multiple // math.gcd(pad_to_multiple, cp_size)
    if name == DYNAMIC:
        ranks = largest_share(dp_size, most_ranks)
        words = f"{ranks}, the largest power of two that divides {dp_size} data-parallel ranks"
        if ranks < largest_share(dp_size):
            words = f"{ranks}, the most ranks that can divide the heads of a scan"
        # Each rank that shares a sequence has two chunks of equal length.
        unit = math.lcm(2, pad_to_multiple)
        chunks = 1 if ranks == 1 else unit
    max_tokens_per_row = max_tokens_per_rank // chunks * chunks * ranks

    def where(sequence: int) -> str:
        if pack_offsets is None:
            return "schedule.max_tokens_per_rank"
        pack = int(np.searchsorted(pack_offsets, sequence, side="right")) - 1
        return f"pack {pack}, its sequence {sequence - int(pack_offsets[pack])}"

    def check_longest(kind: str, tokens: Int64Array, where: Callable[[int], str], shorter: str) -> None:
        is_long = tokens > max_tokens_per_row
        if not is_long.any():
            return
        at, least = int(np.argmax(is_long)), -(-int(tokens.max()) // (ranks * unit)) * unit
        raise ScheduleError(
            f"{kind} {at}{of} has {tokens[at]:,} model tokens after padding, more than the {max_tokens_per_row:,} of a "
            f"row (max_tokens_per_rank * {words}); {np.count_nonzero(is_long):,} of {tokens.shape[0]:,} {kind}s are "
            "that long",
            where=where(at),
            fix=f"raise schedule.max_tokens_per_rank to {least:,} or more, or {shorter}",
        )

    check_longest("sequence", lengths, where, "prepare the data with a smaller limit")
    if lengths.min() < 1:
        at = int(np.argmin(lengths))
        fix = "prepare the dataset again; sequences of one token are refused there"
        raise ScheduleError(f"sequence {at}{of} has {lengths[at]} model tokens", where=where(at), fix=fix)
    if name == "as_packed" and pack_offsets is not None:
        packs = np.add.reduceat(lengths, pack_offsets[:-1])
        shorter = "prepare smaller packs, or choose the dp_balanced schedule"
        check_longest("pack", packs, lambda pack: f"pack {pack}", shorter)


def row_offsets(counts: Iterable[int], multiple: int) -> Int64Array:
    """Return the offsets of rows with `counts` sequences and empty rows up to a multiple, int64 [rows + 1]."""
    sizes = [*counts]
    return np.cumsum([0, *sizes, *[0] * (-len(sizes) % multiple)], dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Imbalance:
    """Imbalance of one global batch; a ratio of 1 is perfect.

    Attributes:
        rank_tokens: int64 [dp_size], padded tokens of each rank in the step.
        rank_cost: float64 [dp_size], cost of each rank in the step, in the unit of SequenceCost.
        token_ratio: busiest rank's tokens over the mean.
        cost_ratio: busiest rank's cost over the mean: the time of a step whose ranks synchronize once.
        sync_ratio: sum over microbatches of the busiest rank's cost, over the mean: the time of a step whose ranks
            synchronize in every microbatch, as in pipelines.
        fill: padded tokens over the capacity of the rows.
        num_microbatches: rows of each rank.
    """

    rank_tokens: Int64Array
    rank_cost: Float64Array
    token_ratio: float
    cost_ratio: float
    sync_ratio: float
    fill: float
    num_microbatches: int


def measure_imbalance(
    schedule: Schedule,
    lengths: npt.NDArray[np.integer],
    *,
    max_tokens_per_row: int,
    cost: SequenceCost | None = None,
    media_cost: Float64Array | None = None,
) -> Imbalance:
    """Measure the imbalance of a schedule of sequences with these padded lengths.

    `media_cost` is as in GlobalBatch. If data-parallel ranks share rows, `max_tokens_per_row` is the limit of a rank.
    """
    tokens = _row_sums(schedule, lengths / _ranks_of(schedule))
    work = row_costs(schedule, lengths, cost=cost, media_cost=media_cost)
    rank_tokens = tokens.sum(axis=0)
    rank_cost = work.sum(axis=0)
    return Imbalance(
        rank_tokens=np.rint(rank_tokens).astype(np.int64),
        rank_cost=rank_cost,
        token_ratio=float(rank_tokens.max() / rank_tokens.mean()),
        cost_ratio=float(rank_cost.max() / rank_cost.mean()),
        sync_ratio=float(work.max(axis=1).sum() / rank_cost.mean()),
        fill=float(tokens.sum() / (tokens.size * max_tokens_per_row)),
        num_microbatches=schedule.num_microbatches,
    )


def row_costs(
    schedule: Schedule,
    lengths: npt.NDArray[np.integer],
    *,
    cost: SequenceCost | None = None,
    media_cost: Float64Array | None = None,
) -> Float64Array:
    """Return the cost of each rank's row, float64 [microbatches, dp_size]; see `measure_imbalance`."""
    costs = (cost or SequenceCost()).of_rank(lengths, _ranks_of(schedule))
    return _row_sums(schedule, costs if media_cost is None else costs + media_cost)


def _ranks_of(schedule: Schedule) -> Int64Array:
    """Return the ranks that share each sequence, int64 [sequences], or [1] where none is shared."""
    if schedule.shared_by is None:
        return np.ones(1, np.int64)
    ranks = np.empty_like(schedule.order)
    ranks[schedule.order] = np.repeat(schedule.shared_by, np.diff(schedule.row_offsets))
    return ranks


def _row_sums(schedule: Schedule, values: Float64Array) -> Float64Array:
    """Return sums of `values` over the sequences of each rank's row, float64 [microbatches, dp_size]."""
    rows = schedule.row_offsets.shape[0] - 1
    row_of = np.repeat(np.arange(rows), np.diff(schedule.row_offsets))
    sums = np.bincount(row_of, weights=values[schedule.order], minlength=rows).astype(np.float64)
    if schedule.shared_by is not None:
        numbers = np.arange(rows)
        sums = sums[numbers - numbers % schedule.dp_size % schedule.shared_by]
    return sums.reshape(-1, schedule.dp_size)


def most_sequences(
    name: str,
    lengths: npt.NDArray[Any],
    pack_offsets: npt.NDArray[Any],
    *,
    max_tokens_per_row: int,
    global_batch_size: int,
    repeats: bool = False,
) -> int:
    """Return an upper bound on the sequences of a row under a schedule, from the index alone.

    `as_packed` trains packs as they are. Other schedules may combine any sequences of a global batch: as many of the
    shortest as fit into a row, and no more than the packs of a batch contain.

    Args:
        name: a key of `SCHEDULERS`.
        lengths: [sequences] integers above 0, model tokens of each sequence of the dataset after padding.
        pack_offsets: [packs + 1] integers, the bounds of its packs in `lengths`.
        global_batch_size: packs of a batch.
        repeats: a batch may have a pack more than once, as blends may.
    """
    by_pack = np.diff(pack_offsets)
    if name == "as_packed":
        return int(by_pack.max())
    counts = np.bincount(lengths)
    rest, fit = max_tokens_per_row, 0
    for length in np.flatnonzero(counts).tolist():
        taken = rest // length if repeats else min(int(counts[length]), rest // length)
        rest, fit = rest - taken * length, fit + taken
    largest = np.sort(by_pack)[-global_batch_size:]
    return min(fit, int(largest[-1]) * global_batch_size if repeats else int(largest.sum()))
