"""Rows of equal cost side by side, and equal cost for every rank, as far as capacity lets them."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from harness.records import Int64Array, Schedule
from harness.schedule.batch import Float64Array, GlobalBatch
from harness.schedule.dp_balanced import place_dp_balanced
from harness.schedule.even_out import exchange_sequences
from harness.schedule.imbalance import Imbalance, measure_imbalance

# Ranks are evened out until the busiest costs this many times the mean.
_EVEN = 1.003
# Ratios of a busiest rank, and of waiting for it in every microbatch, that are not worth one more microbatch.
_GOOD_STEP, _GOOD_SYNC = 1.01, 1.10
# Sequences are placed in at most this many portions: more take longer and are hardly more even.
_PORTIONS = 400
# A portion is at most this part of the rows, so that a row that got a long sequence is not given another at once.
_PORTION_OF_ROWS = 16


def place_cost_balanced(batch: GlobalBatch) -> Schedule:
    """Place sequences so that ranks cost the same in the step, and rows the same within their microbatch.

    Every microbatch aims at a cost: the first at that of the longest sequences, which keep everybody waiting anyway,
    the others at what then is left for each rank. Sequences go, longest first, to the row that lacks most of its aim
    and has room. At last the busiest and the least busy ranks exchange sequences.

    The number of microbatches is the least that capacity allows where that is even enough, and otherwise at most one
    group more than best-fit packing needs. A placement of `dp_balanced` that is as even and as short is kept.
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
            found = _measure(placed, batch)
            if chosen is None or _excess(found, good) < _excess(ours, good):
                chosen, ours = placed, found
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
    # The step is what every layout waits for, so it weighs ten times what only pipelines wait for.
    return 10 * max(0.0, measured.cost_ratio - good_step) + max(0.0, measured.sync_ratio - _GOOD_SYNC)


def _rows_needed(batch: GlobalBatch) -> int:
    """A number of rows below which no placement exists.

    Sequences above half a row never share one. For any t up to half a row, those of at least t fit beside none
    longer than capacity - t, so they fill what the others above half leave, and then rows of their own.

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
    """The placement in this many microbatches; None where capacity was in the way."""
    targets = np.repeat(_targets(costs, batch.dp_size, num_microbatches), batch.dp_size)
    row_of = _fill(batch, costs, targets)
    if row_of is None:
        return None
    return exchange_sequences(_dealt(batch, costs, row_of, num_microbatches), costs, batch, num_microbatches, goal)


def _fill(batch: GlobalBatch, costs: Float64Array, targets: Float64Array) -> Int64Array | None:
    """int64 [sequences], the row of each: longest first, to the row that lacks most of its target and has room.

    Args:
        batch: lengths and capacity.
        costs: float64 [sequences].
        targets: float64 [rows], the cost that each row aims at.
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
    """float64 [microbatches], the cost that each row of a microbatch aims at.

    A microbatch takes at least as long as its longest sequence. Those whose longest is above the level that spreads
    the rest evenly aim at it, so that their rows take up what the others then need not.
    """
    longest = np.zeros(num_microbatches, dtype=np.float64)
    seeds = np.sort(costs)[::-1][: num_microbatches * dp_size : dp_size]
    longest[: seeds.shape[0]] = seeds
    before = np.cumsum(longest) - longest
    levels = (costs.sum() / dp_size - before) / np.arange(num_microbatches, 0, -1)
    targets: Float64Array = np.maximum(longest, levels[int(np.argmax(levels >= longest))])
    return targets


def _dealt(batch: GlobalBatch, costs: Float64Array, row_of: Int64Array, num_microbatches: int) -> Int64Array:
    """int64 [sequences], the row of each, with rows renumbered: alike ones side by side, evenly over ranks."""
    num_rows = num_microbatches * batch.dp_size
    row_costs = np.bincount(row_of, weights=costs, minlength=num_rows)
    by_cost = np.argsort(-row_costs, kind="stable").reshape(num_microbatches, batch.dp_size)
    sorted_costs = row_costs[by_cost]
    renumbered = np.empty(num_rows, dtype=np.int64)
    load = np.zeros(batch.dp_size, dtype=np.float64)
    # The microbatches that differ most inside come first: the others can still make up for it.
    for microbatch in np.argsort(sorted_costs[:, -1] - sorted_costs[:, 0], kind="stable"):
        ranks = np.argsort(load, kind="stable")
        renumbered[by_cost[microbatch]] = microbatch * batch.dp_size + ranks
        load[ranks] += sorted_costs[microbatch]
    return renumbered[row_of]


def _with_best_fit(batch: GlobalBatch, costs: Float64Array, goal: float) -> Schedule:
    """A schedule of as many microbatches as best-fit-decreasing packing needs, or a group more."""
    rows = _best_fit(batch)
    needed = _microbatches(int(rows.max()) + 1, batch)
    for num_microbatches in (needed, needed + batch.group_size):
        placed = _place(batch, costs, num_microbatches, goal)
        if placed is not None:
            return placed
    return exchange_sequences(_dealt(batch, costs, rows, needed), costs, batch, needed, goal)


def _best_fit(batch: GlobalBatch) -> Int64Array:
    """int64 [sequences], the row of each: longest first, into the fullest row that still has room."""
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
