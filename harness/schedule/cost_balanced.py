"""Rows of equal cost within each microbatch, and equal cost for every rank, as far as rows have room."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule.batch import GlobalBatch, Imbalance, measure_imbalance
from harness.schedule.dp_balanced import place_dp_balanced

# Exchanges stop when the busiest rank costs this many times the mean.
_EVEN = 1.003
# Ratios of cost, and of waiting in every microbatch, up to which one more microbatch does not pay.
_GOOD_STEP, _GOOD_SYNC = 1.01, 1.10
# Sequences are placed in at most this many portions: more take longer and balance hardly better.
_PORTIONS = 400
# A portion is at most this part of the rows, so that no row gets two long sequences in a row.
_PORTION_OF_ROWS = 16
# Where the goal can be reached at all, a few exchanges a rank are enough.
_EXCHANGES_A_RANK, _EXCHANGES = 3, 40
# Weight of the wait that an exchange adds to a microbatch, over the cost that it takes off the busier rank. It falls
# to 0 with the number of exchanges, because the last improvements often cost a wait.
_WAIT_WEIGHT = 2.0
# Number of least busy ranks that the busiest one tries to exchange with.
_PARTNERS = 3


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
    return measure_imbalance(schedule, batch.lengths, max_tokens_per_row=batch.max_tokens_per_row, cost=batch.cost)


def _excess(measured: Imbalance, good_step: float) -> float:
    # Every layout waits for the whole step and only pipelines for each microbatch, so the step weighs ten times.
    return 10 * max(0.0, measured.cost_ratio - good_step) + max(0.0, measured.sync_ratio - _GOOD_SYNC)


def _rows_needed(batch: GlobalBatch) -> int:
    """Return a number of rows below which no placement exists.

    Sequences above half a row never share one. For any t up to half a row, those of at least t never share a row with
    one longer than max_tokens_per_row - t, so they fill the room that the others above half leave, and then rows of
    their own.

    Source: the lower bound L2 of Martello and Toth, "Lower bounds and reduction procedures for the bin packing
    problem" (1990).
    """
    lengths = np.sort(batch.lengths)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    num = lengths.shape[0]
    halves = int(np.searchsorted(lengths, batch.max_tokens_per_row // 2, side="right"))
    thresholds = np.unique(lengths[:halves])
    first = np.searchsorted(lengths, thresholds, side="left")
    alone = np.searchsorted(lengths, batch.max_tokens_per_row - thresholds, side="right")
    room = (alone - halves) * batch.max_tokens_per_row - (sums[alone] - sums[halves])
    overflow = np.maximum(0, sums[halves] - sums[first] - room)
    shared = num - halves - (-overflow // batch.max_tokens_per_row)
    return int(np.max(shared, initial=max(num - halves, 1)))


def _place(batch: GlobalBatch, costs: Float64Array, num_microbatches: int, goal: float) -> Schedule | None:
    """Return the placement in this many microbatches; None where a sequence found no room."""
    targets = np.repeat(_targets(costs, batch.dp_size, num_microbatches), batch.dp_size)
    row_of = _fill(batch, costs, targets)
    if row_of is None:
        return None
    return _exchange_sequences(_by_cost(batch, costs, row_of, num_microbatches), costs, batch, num_microbatches, goal)


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
    row_of = np.empty(num, dtype=np.int64)
    free = np.full(num_rows, batch.max_tokens_per_row, dtype=np.int64)
    missing = targets.copy()
    portion = min(max(-(-num // _PORTIONS), -(-num_rows // _PORTION_OF_ROWS)), num_rows)
    start = 0
    while start < num:
        rows = np.flatnonzero(free >= batch.lengths[order[start]])
        if rows.shape[0] == 0:
            return None
        size = min(portion, num - start, rows.shape[0])
        # Of a partition, or an unstable sort, the order of equal rows depends on the processor: ranks would disagree.
        rows = rows[np.argsort(-missing[rows], kind="stable")[:size]]
        placed = order[start : start + size]
        row_of[placed] = rows
        missing[rows] -= costs[placed]
        free[rows] -= batch.lengths[placed]
        start += size
    return row_of


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
    return _exchange_sequences(_by_cost(batch, costs, rows, needed), costs, batch, needed, goal)


def _best_fit(batch: GlobalBatch) -> Int64Array:
    """Return the row of each sequence, int64 [sequences]: longest first, into the fullest row that has room."""
    row_of = np.empty(batch.lengths.shape[0], dtype=np.int64)
    # (free tokens, row), ascending.
    rows: list[tuple[int, int]] = []
    lengths = batch.lengths.tolist()
    for sequence in np.argsort(-batch.lengths, kind="stable").tolist():
        at = bisect_left(rows, (lengths[sequence], -1))
        free, row = rows.pop(at) if at < len(rows) else (batch.max_tokens_per_row, len(rows))
        insort(rows, (free - lengths[sequence], row))
        row_of[sequence] = row
    return row_of


def _exchange_sequences(
    position: Int64Array, costs: Float64Array, batch: GlobalBatch, num_microbatches: int, goal: float
) -> Schedule:
    """Move or swap single sequences from the busiest rank to the least busy ones, as far as rows have room.

    An exchange is scored by the cost that it takes off the busier of the two ranks, less the wait that it adds for the
    slowest row of a microbatch.

    Args:
        position: int64 [sequences], the row of each; row m * dp_size + d is rank d's in microbatch m.
        costs: float64 [sequences].
        batch: lengths, and the tokens that a row holds.
        num_microbatches: rows of each rank.
        goal: stop when the busiest rank costs this many times the mean.
    """
    state = _Placement(position, costs, batch, num_microbatches)
    most = _EXCHANGES_A_RANK * batch.dp_size + _EXCHANGES
    for number in range(most):
        busiest = int(np.argmax(state.rank_costs))
        if state.rank_costs[busiest] <= goal * state.mean:
            break
        weight = _WAIT_WEIGHT * (1 - number / most)
        for partner in np.argsort(state.rank_costs, kind="stable")[:_PARTNERS]:
            if state.exchange(busiest, int(partner), weight):
                break
        else:
            break
    row_of = np.empty_like(state.row_of[1:])
    row_of[state.by_cost] = state.row_of[1:]
    sizes = np.bincount(row_of, minlength=num_microbatches * batch.dp_size)
    return Schedule(batch.dp_size, np.argsort(row_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]))


class _Placement:
    """Costs and free tokens of rows while sequences change places.

    Sequences are numbered from 1 by rising cost. Number 0 costs nothing and means no sequence: a swap with it is a
    move.
    """

    def __init__(self, position: Int64Array, costs: Float64Array, batch: GlobalBatch, num_microbatches: int) -> None:
        self.dp_size = batch.dp_size
        self.by_cost = np.argsort(costs, kind="stable")
        self.costs = np.concatenate([np.zeros(1), costs[self.by_cost]])
        self.lengths = np.concatenate([[0], batch.lengths[self.by_cost]])
        self.row_of = np.concatenate([[0], position[self.by_cost]])
        self.rank_of = (self.row_of % batch.dp_size).astype(np.int32)
        num_rows = num_microbatches * batch.dp_size
        self.row_costs = np.bincount(self.row_of, weights=self.costs, minlength=num_rows)
        tokens = np.bincount(self.row_of, weights=self.lengths, minlength=num_rows)
        self.free = batch.max_tokens_per_row - np.rint(tokens).astype(np.int64)
        by_microbatch = self.row_costs.reshape(num_microbatches, batch.dp_size)
        # Cost that a row can gain before its microbatch takes longer.
        self.slack = (by_microbatch.max(axis=1, keepdims=True) - by_microbatch).reshape(-1)
        self.rank_costs = by_microbatch.sum(axis=0)
        self.mean = float(self.rank_costs.mean())

    def exchange(self, busy: int, idle: int, wait_weight: float) -> bool:
        """Make the best exchange between two ranks; return False where none is possible."""
        gap = float(self.rank_costs[busy] - self.rank_costs[idle])
        # The change that brings one of the two to the mean.
        wanted = min(float(self.rank_costs[busy]) - self.mean, self.mean - float(self.rank_costs[idle]))
        if wanted <= 0:
            return False
        self.rank_of[0] = -1
        givers = (self.rank_of == busy).nonzero()[0]
        self.rank_of[0] = idle
        self.row_of[0] = idle + self.dp_size * int(np.argmax(self.free[idle :: self.dp_size]))
        takers = (self.rank_of == idle).nonzero()[0]

        # For every giver, the takers whose cost differs from its own by about that.
        near = np.searchsorted(self.costs[takers], self.costs[givers] - wanted)
        near = np.clip(near[:, None] + np.arange(-2, 2), 0, takers.shape[0] - 1).reshape(-1)
        given, taken = np.repeat(givers, 4), takers[near]
        change = self.costs[given] - self.costs[taken]
        rows = self.row_of[taken]
        allowed = (self.free[rows] + self.lengths[taken] >= self.lengths[given]) & (change > 0) & (change < gap)
        score = np.abs(change - wanted) + wait_weight * np.maximum(0.0, change - self.slack[rows])
        score[~allowed] = np.inf
        best = int(np.argmin(score))
        if score[best] == np.inf:
            return False
        self._swap(int(given[best]), int(taken[best]))
        self.rank_costs[busy] -= change[best]
        self.rank_costs[idle] += change[best]
        return True

    def _swap(self, given: int, taken: int) -> None:
        rows = int(self.row_of[given]), int(self.row_of[taken])
        cost = self.costs[given] - self.costs[taken]
        length = self.lengths[given] - self.lengths[taken]
        for row, sign in zip(rows, (-1, 1), strict=True):
            self.row_costs[row] += sign * cost
            self.free[row] -= sign * length
            first = row - row % self.dp_size
            costs = self.row_costs[first : first + self.dp_size]
            self.slack[first : first + self.dp_size] = costs.max() - costs
        self.row_of[given], self.row_of[taken] = rows[1], rows[0]
        self.rank_of[given], self.rank_of[taken] = rows[1] % self.dp_size, rows[0] % self.dp_size
