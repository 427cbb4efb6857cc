"""Rows of equal cost within each microbatch, and equal cost for every rank, as far as rows have room."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule.batch import GlobalBatch
from harness.schedule.dp_balanced import place_dp_balanced
from harness.schedule.even_out import exchange_sequences
from harness.schedule.imbalance import Imbalance, measure_imbalance

# Exchanges stop when the busiest rank costs this many times the mean.
_EVEN = 1.003
# Ratios of cost, and of waiting in every microbatch, up to which one more microbatch does not pay.
_GOOD_STEP, _GOOD_SYNC = 1.01, 1.10
# Sequences are placed in at most this many portions: more take longer and balance hardly better.
_PORTIONS = 400
# A portion is at most this part of the rows, so that no row gets two long sequences in a row.
_PORTION_OF_ROWS = 16


def place_cost_balanced(batch: GlobalBatch) -> Schedule:
    """Place sequences so that ranks cost the same in the step, and rows the same within their microbatch.

    Every microbatch has a target cost: the first that of the longest sequences, for which all ranks wait anyway, the
    others an equal share of the rest. Sequences go, longest first, to the row that lacks most of its target and has
    room. Finally the busiest and the least busy ranks exchange sequences.

    The number of microbatches is the least possible where that balances well enough, and otherwise at most one group
    more than best-fit packing needs. A placement of `dp_balanced` that is as balanced and as short is preferred.
    """
    costs = batch.cost.of(batch.lengths)
    in_order = place_dp_balanced(batch)
    theirs = _measure(in_order, batch)
    goal, good = min(_EVEN, theirs.cost_ratio), min(_GOOD_STEP, theirs.cost_ratio)
    fewest = _microbatches(_rows_needed(batch), batch)
    chosen, ours = None, theirs
    for num_microbatches in (fewest, fewest + batch.group_size):
        placed = _place(batch, costs, num_microbatches, goal)
        if placed is not None:
            measured = _measure(placed, batch)
            if chosen is None or _excess(measured, good) < _excess(ours, good):
                chosen, ours = placed, measured
            if ours.cost_ratio <= good:
                break
    if chosen is None:
        chosen = _with_best_fit(batch, costs, goal)
        ours = _measure(chosen, batch)
    if theirs.num_microbatches <= ours.num_microbatches and (
        theirs.cost_ratio <= ours.cost_ratio and theirs.sync_ratio <= ours.sync_ratio
    ):
        return in_order
    return chosen


def _microbatches(rows: int, batch: GlobalBatch) -> int:
    return -(-rows // batch.rows_per_group) * batch.group_size


def _measure(schedule: Schedule, batch: GlobalBatch) -> Imbalance:
    return measure_imbalance(schedule, batch.lengths, row_tokens=batch.row_tokens, cost=batch.cost)


def _excess(measured: Imbalance, good_step: float) -> float:
    # Every layout waits for the whole step and only pipelines for each microbatch, so the step weighs ten times.
    return 10 * max(0.0, measured.cost_ratio - good_step) + max(0.0, measured.sync_ratio - _GOOD_SYNC)


def _rows_needed(batch: GlobalBatch) -> int:
    """Return a number of rows below which no placement exists.

    Sequences above half a row never share one. For any t up to half a row, those of at least t never share a row with
    one longer than row_tokens - t, so they fill the room that the others above half leave, and then rows of their own.

    Source: the lower bound L2 of Martello and Toth, "Lower bounds and reduction procedures for the bin packing
    problem" (1990).
    """
    lengths = np.sort(batch.lengths)
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    num = lengths.shape[0]
    halves = int(np.searchsorted(lengths, batch.row_tokens // 2, side="right"))
    thresholds = np.unique(lengths[:halves])
    first = np.searchsorted(lengths, thresholds, side="left")
    alone = np.searchsorted(lengths, batch.row_tokens - thresholds, side="right")
    room = (alone - halves) * batch.row_tokens - (sums[alone] - sums[halves])
    overflow = np.maximum(0, sums[halves] - sums[first] - room)
    shared = num - halves - (-overflow // batch.row_tokens)
    return int(np.max(shared, initial=max(num - halves, 1)))


def _place(batch: GlobalBatch, costs: Float64Array, num_microbatches: int, goal: float) -> Schedule | None:
    """Return the placement in this many microbatches; None where a sequence found no room."""
    targets = np.repeat(_targets(costs, batch.dp_size, num_microbatches), batch.dp_size)
    row_of = _fill(batch, costs, targets)
    if row_of is None:
        return None
    return exchange_sequences(_by_cost(batch, costs, row_of, num_microbatches), costs, batch, num_microbatches, goal)


def _fill(batch: GlobalBatch, costs: Float64Array, targets: Float64Array) -> Int64Array | None:
    """Return the row of each sequence, int64 [sequences]: longest first, to the row that lacks most and has room.

    Args:
        batch: lengths, and the tokens that a row holds.
        costs: float64 [sequences].
        targets: float64 [rows], the target cost of each row.
    """
    num_rows = targets.shape[0]
    num = batch.lengths.shape[0]
    order = np.argsort(-batch.lengths, kind="stable")
    lengths, costs = batch.lengths[order], costs[order]
    row_of = np.empty(num, dtype=np.int64)
    free = np.full(num_rows, batch.row_tokens, dtype=np.int64)
    missing = targets.copy()
    portion = min(max(-(-num // _PORTIONS), -(-num_rows // _PORTION_OF_ROWS)), num_rows)
    start = 0
    while start < num:
        rows = np.flatnonzero(free >= lengths[start])
        if rows.shape[0] == 0:
            return None
        size = min(portion, num - start, rows.shape[0])
        if size < rows.shape[0]:
            rows = rows[np.argpartition(-missing[rows], size - 1)[:size]]
        rows = rows[np.argsort(-missing[rows], kind="stable")]
        stop = start + size
        row_of[start:stop] = rows
        missing[rows] -= costs[start:stop]
        free[rows] -= lengths[start:stop]
        start = stop
    placed = np.empty(num, dtype=np.int64)
    placed[order] = row_of
    return placed


def _targets(costs: Float64Array, dp_size: int, num_microbatches: int) -> Float64Array:
    """Return the target cost of the rows of each microbatch, float64 [microbatches].

    A microbatch takes at least as long as its longest sequence. Where that is above the level that spreads the rest
    evenly, it is the target, so that the rows beside it are filled too and the other microbatches get less.
    """
    longest = np.zeros(num_microbatches, dtype=np.float64)
    seeds = np.sort(costs)[::-1][: num_microbatches * dp_size : dp_size]
    longest[: seeds.shape[0]] = seeds
    before = np.cumsum(longest) - longest
    levels = (costs.sum() / dp_size - before) / np.arange(num_microbatches, 0, -1)
    targets: Float64Array = np.maximum(longest, levels[int(np.argmax(levels >= longest))])
    return targets


def _by_cost(batch: GlobalBatch, costs: Float64Array, row_of: Int64Array, num_microbatches: int) -> Int64Array:
    """Return the row of each sequence, int64 [sequences], after numbering rows by falling cost.

    The rows of one microbatch then cost about the same. Every other microbatch goes to the ranks in reverse, and the
    exchange of sequences that follows evens them out.
    """
    num_rows = num_microbatches * batch.dp_size
    row_costs = np.bincount(row_of, weights=costs, minlength=num_rows)
    rows = np.argsort(-row_costs, kind="stable").reshape(num_microbatches, batch.dp_size)
    rows[1::2] = rows[1::2, ::-1]
    renumbered = np.empty(num_rows, dtype=np.int64)
    renumbered[rows.reshape(-1)] = np.arange(num_rows)
    return renumbered[row_of]


def _with_best_fit(batch: GlobalBatch, costs: Float64Array, goal: float) -> Schedule:
    """Return a schedule of as many microbatches as best-fit-decreasing packing needs, or one group more."""
    rows = _best_fit(batch)
    needed = _microbatches(int(rows.max()) + 1, batch)
    for num_microbatches in (needed, needed + batch.group_size):
        placed = _place(batch, costs, num_microbatches, goal)
        if placed is not None:
            return placed
    return exchange_sequences(_by_cost(batch, costs, rows, needed), costs, batch, needed, goal)


def _best_fit(batch: GlobalBatch) -> Int64Array:
    """Return the row of each sequence, int64 [sequences]: longest first, into the fullest row that has room."""
    row_of = np.empty(batch.lengths.shape[0], dtype=np.int64)
    # (free tokens, row), ascending.
    rows: list[tuple[int, int]] = []
    lengths = batch.lengths.tolist()
    for sequence in np.argsort(-batch.lengths, kind="stable").tolist():
        at = bisect_left(rows, (lengths[sequence], -1))
        free, row = rows.pop(at) if at < len(rows) else (batch.row_tokens, len(rows))
        insort(rows, (free - lengths[sequence], row))
        row_of[sequence] = row
    return row_of
