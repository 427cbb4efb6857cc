"""Rows of equal cost within each microbatch, and equal cost for every rank, as far as rows have room."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule.batch import GlobalBatch, Imbalance, measure_imbalance
from harness.schedule.dp_balanced import place_dp_balanced

# Exchanges stop when the busiest rank costs this many times the mean.
EVEN = 1.003
# Ratios of cost, and of waiting in every microbatch, up to which neither one more microbatch nor divided packs pay.
_GOOD_STEP, _GOOD_SYNC = 1.01, 1.06
# Sequences are placed in at most this many portions: more take longer and balance hardly better.
_PORTIONS = 400
# A portion is at most this part of the rows, so that no row gets two long sequences in a row.
_PORTION_OF_ROWS = 16
# Exchanges that every pair of rows, and of ranks, makes at most.
_ROUNDS_OF_ROWS, _ROUNDS_OF_RANKS = 6, 48
# Least busy ranks that a busy one tries to exchange with; the next is tried where less than one pair in this many had
# an exchange.
_PARTNERS, _FEW = 3, 50
# Takers of about the wanted cost that a sequence is tried with.
_NEAR = 4
_NONE = np.array([-1, -1])
# Weight of the wait that an exchange adds to a microbatch, over the cost that it takes off the busier rank. It falls
# to 0 with the number of exchanges, because the last improvements often cost a wait.
_WAIT_WEIGHT = 2.0


def place_cost_balanced(batch: GlobalBatch) -> Schedule:
    """Place sequences so that ranks cost the same in the step, and rows the same within their microbatch.

    Every microbatch has a target cost: the first that of the longest sequences, for which all ranks wait anyway, the
    others an equal share of the rest. Sequences go, costliest first, to the row that lacks most of its target and has
    room. Finally the busiest and the least busy ranks exchange sequences.

    The number of microbatches is the least possible where that balances well enough, and otherwise at most one group
    more than best-fit packing needs. Stored packs stay whole where that balances well enough, apart from what the
    exchanges move: a rank decodes a pack for every part of it. A placement of `dp_balanced` that is as balanced and as
    short is preferred.
    """
    costs = batch.costs()
    in_order = place_dp_balanced(batch)
    theirs = _measure(in_order, batch)
    goal, good = min(EVEN, theirs.cost_ratio), min(_GOOD_STEP, theirs.cost_ratio)
    fewest = _microbatches(rows_needed(batch), batch)
    chosen, ours = None, theirs
    for whole in (True, False)[batch.pack_offsets is None :]:
        for num_microbatches in (fewest, fewest + batch.group_size):
            placed = _place(batch, costs, num_microbatches, goal, whole)
            if placed is not None:
                measured = _measure(placed, batch)
                if chosen is None or _excess(measured, theirs) < _excess(ours, theirs):
                    chosen, ours = placed, measured
                if ours.cost_ratio <= good:
                    break
        if chosen is not None and not _excess(ours, theirs):
            break
    if chosen is None:
        rows = _best_fit(batch)
        needed = _microbatches(int(rows.max()) + 1, batch)
        tries = (_place(batch, costs, each, goal) for each in (needed, needed + batch.group_size))
        chosen = next((placed for placed in tries if placed is not None), None)
        if chosen is None:
            chosen = exchange_sequences(_by_cost(batch, costs, rows, needed), costs, batch, needed, goal)
        ours = _measure(chosen, batch)
    if theirs.num_microbatches <= ours.num_microbatches and (
        theirs.cost_ratio <= ours.cost_ratio and theirs.sync_ratio <= ours.sync_ratio
    ):
        return in_order
    return chosen


def _microbatches(rows: int, batch: GlobalBatch) -> int:
    return -(-rows // batch.rows_per_group) * batch.group_size


def _measure(schedule: Schedule, batch: GlobalBatch) -> Imbalance:
    sizes: dict[str, Any] = {"max_tokens_per_row": batch.max_tokens_per_row, "media_cost": batch.media_cost}
    return measure_imbalance(schedule, batch.lengths, cost=batch.cost, **sizes)


def _excess(measured: Imbalance, in_order: Imbalance) -> float:
    """Return what is above good ratios, and above those of the sequences in order; 0 for a good placement."""
    step = max(0.0, measured.cost_ratio - min(_GOOD_STEP, in_order.cost_ratio))
    # Every layout waits for the whole step and only pipelines for each microbatch, so the step weighs ten times.
    return 10 * step + max(0.0, measured.sync_ratio - min(_GOOD_SYNC, in_order.sync_ratio))


def rows_needed(batch: GlobalBatch) -> int:
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


def _place(
    batch: GlobalBatch, costs: Float64Array, num_microbatches: int, goal: float, whole: bool = False
) -> Schedule | None:
    """Return the placement in this many microbatches, of `whole` packs first.

    None where something finds no room, or whole packs would make ranks wait: exchanges hardly change that.
    """
    num_rows = num_microbatches * batch.dp_size
    item_of = _whole_packs(batch, num_rows) if whole else np.arange(batch.lengths.shape[0])
    lengths = np.bincount(item_of, weights=batch.lengths).astype(np.int64)
    of_items = np.bincount(item_of, weights=costs).astype(np.float64)
    targets = np.repeat(_targets(of_items, batch.dp_size, num_microbatches), batch.dp_size)
    # Packs are about equally long: of those, the costliest go first.
    order = np.argsort(-(of_items if whole else lengths), kind="stable")
    rows = fill_rows(replace(batch, lengths=lengths), of_items, targets, order)
    if rows is None:
        return None
    position = _by_cost(batch, costs, rows[item_of], num_microbatches)
    busiest = np.bincount(position, weights=costs, minlength=num_rows).reshape(-1, batch.dp_size).max(axis=1)
    if whole and busiest.sum() > _GOOD_SYNC * _targets(costs, batch.dp_size, num_microbatches).sum():
        return None
    return exchange_sequences(position, costs, batch, num_microbatches, goal)


def _whole_packs(batch: GlobalBatch, num_rows: int) -> Int64Array:
    """Return a number for each sequence, int64 [sequences]: its pack's, or its own.

    Padding can make packs so long that their rows do not hold them: then the shortest sequences have numbers of their
    own.
    """
    assert batch.pack_offsets is not None
    num_packs = batch.pack_offsets.shape[0] - 1
    room = batch.max_tokens_per_row // -(-num_packs // num_rows)
    pack_of = np.repeat(np.arange(num_packs), np.diff(batch.pack_offsets))
    order = np.lexsort((-batch.lengths, pack_of))
    sums = np.cumsum(batch.lengths[order])
    before = np.concatenate([[0], sums])[batch.pack_offsets[:-1]]
    alone = order[sums - before[pack_of] > room]
    pack_of[alone] = num_packs + np.arange(alone.shape[0])
    return np.unique(pack_of, return_inverse=True)[1].astype(np.int64)


def fill_rows(batch: GlobalBatch, costs: Float64Array, targets: Float64Array, order: Int64Array) -> Int64Array | None:
    """Return the row of each sequence, int64 [sequences]: in order, to the row that lacks most and has room.

    Args:
        batch: lengths, and the tokens that a row holds.
        costs: float64 [sequences].
        targets: float64 [rows], the target cost of each row.
        order: int64 [sequences], the sequences as they are placed, such as longest first.
    """
    num_rows = targets.shape[0]
    num = batch.lengths.shape[0]
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
        lacks = -missing[rows]
        few = np.flatnonzero(lacks <= np.partition(lacks, size - 1)[size - 1])
        rows = rows[few[np.argsort(lacks[few], kind="stable")[:size]]]
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
    renumbered[rows.ravel()] = np.arange(num_rows)
    return renumbered[row_of]


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


def exchange_sequences(
    position: Int64Array,
    costs: Float64Array,
    batch: GlobalBatch,
    num_microbatches: int,
    goal: float,
    taken: Float64Array | None = None,
) -> Schedule:
    """Even out the rows of each microbatch, deal them to the ranks, and even out the ranks.

    Args:
        position: int64 [sequences], the row of each; row m * dp_size + d is rank d's in microbatch m.
        costs: float64 [sequences].
        batch: lengths, and the tokens that a row holds.
        num_microbatches: rows of each rank.
        goal: stop when the busiest rank costs this many times the mean.
        taken: float64 [rows], the cost of rows that have other sequences and take none, 0 for all others; rows then
            stay with their ranks. None for no such rows.
    """
    state = _Placement(position, costs, batch, num_microbatches, taken)
    state.even_rows()
    if taken is None:
        state.deal_rows()
    state.even_ranks(goal)
    row_of = np.empty_like(state.row_of)
    row_of[state.by_cost] = state.row_of
    sizes = np.bincount(row_of, minlength=num_microbatches * batch.dp_size)
    return Schedule(batch.dp_size, np.argsort(row_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]))


class _Placement:
    """Costs and free tokens of rows while sequences, numbered from 0 by rising cost, change places.

    Busy rows or ranks are paired with idle ones, and every pair makes one move or swap at a time, all at once.
    """

    def __init__(
        self,
        position: Int64Array,
        costs: Float64Array,
        batch: GlobalBatch,
        num_microbatches: int,
        taken: Float64Array | None = None,
    ) -> None:
        self.shape = num_microbatches, batch.dp_size
        num_rows = num_microbatches * batch.dp_size
        self.by_cost = np.argsort(costs, kind="stable")
        self.costs, self.lengths = costs[self.by_cost], batch.lengths[self.by_cost]
        self.row_of = position[self.by_cost]
        self.row_costs = np.bincount(self.row_of, weights=self.costs, minlength=num_rows).astype(np.float64)
        tokens = np.bincount(self.row_of, weights=self.lengths, minlength=num_rows)
        self.free = batch.max_tokens_per_row - np.rint(tokens).astype(np.int64)
        if taken is not None:
            self.row_costs += taken
            self.free[taken > 0] = 0
        self.mean = float(self.row_costs.sum()) / batch.dp_size

    def even_rows(self) -> None:
        """Exchange sequences between the rows of each microbatch."""
        rows = np.arange(self.row_costs.shape[0])
        half = self.shape[1] // 2
        for _ in range(_ROUNDS_OF_ROWS):
            costs = self.row_costs.reshape(self.shape)
            order = np.argsort(costs, axis=1, kind="stable") + np.arange(0, costs.size, self.shape[1])[:, None]
            idle, busy = order[:, :half].ravel(), order[:, ::-1][:, :half].ravel()
            gaps = self.row_costs[busy] - self.row_costs[idle]
            pays = gaps > (EVEN - 1) * self.mean
            if not self._exchange(rows, (busy[pays], idle[pays]), (gaps[pays] / 2, gaps[pays]), idle[pays], 0.0):
                return

    def deal_rows(self) -> None:
        """Give the costliest rows of each microbatch to the least busy ranks, most unequal microbatches first."""
        costs = self.row_costs.reshape(self.shape)
        totals = np.zeros(self.shape[1])
        row_at = np.empty(self.shape, np.int64)
        for number in np.argsort(costs.min(axis=1) - costs.max(axis=1), kind="stable").tolist():
            ranks, rows = np.argsort(totals, kind="stable"), np.argsort(-costs[number], kind="stable")
            row_at[number, ranks] = number * self.shape[1] + rows
            totals[ranks] += costs[number, rows]
        moved = np.empty(costs.size, np.int64)
        moved[row_at.ravel()] = np.arange(costs.size)
        self.row_of = moved[self.row_of]
        self.row_costs, self.free = self.row_costs[row_at].ravel(), self.free[row_at].ravel()

    def even_ranks(self, goal: float) -> None:
        """Exchange sequences between ranks; each exchange is charged with the wait that it adds to a microbatch."""
        ranks = np.tile(np.arange(self.shape[1]), self.shape[0])
        misses = 0
        for number in range(_ROUNDS_OF_RANKS):
            totals = self.row_costs.reshape(self.shape).sum(axis=0)
            order = np.argsort(totals, kind="stable")
            # Where hardly any pair had an exchange, the next ranks are tried.
            pairs = min(int(np.count_nonzero(totals > goal * self.mean)), (self.shape[1] - misses) // 2)
            idle, busy = order[misses : misses + pairs], order[::-1][:pairs]
            # The change that brings one of the two to the mean.
            wanted = np.minimum(totals[busy] - self.mean, self.mean - totals[idle])
            changes = wanted, totals[busy] - totals[idle]
            freest = np.argmax(self.free.reshape(self.shape), axis=0)[idle] * self.shape[1] + idle
            weight = _WAIT_WEIGHT * (1 - number / _ROUNDS_OF_RANKS)
            made = self._exchange(ranks, (busy, idle), changes, freest, weight)
            misses = 0 if made * _FEW > pairs else misses + 1
            if misses == _PARTNERS:
                break

    def _exchange(
        self,
        owner_of: Int64Array,
        pairs: tuple[Int64Array, Int64Array],
        changes: tuple[Float64Array, Float64Array],
        freest: Int64Array,
        weight: float,
    ) -> int:
        """Make the best exchange of every pair that has one; return how many.

        Args:
            owner_of: int64 [rows], the row's owner: the row itself, or its rank.
            pairs: int64 [pairs] each, the busy and the idle owners, all different.
            changes: float64 [pairs] each, the cost that should change owner, and a cost that is too much.
            freest: int64 [pairs], the row of the idle owner that takes a sequence for nothing.
            weight: of the wait that an exchange adds to a microbatch, over the cost that should change owner.
        """
        wanted, most = changes
        givers, pair, takers, of_taker = self._sequences_of(owner_of, *pairs)
        if not givers.shape[0]:
            return 0

        # For every giver, the takers of its pair whose cost differs from its own by about what is wanted, and none.
        apart = 2 * self.costs[-1] + 1
        costs, lengths, sought, limit = self.costs[givers], self.lengths[givers], wanted[pair], most[pair]
        place = np.searchsorted(of_taker * apart + self.costs[takers], pair * apart + np.maximum(0.0, costs - sought))
        # Beyond the ends is a taker of no pair.
        of_taker, takers = (np.concatenate([_NONE, values, _NONE]) for values in (of_taker, takers))
        slack = self._slack() if weight else None
        least, best = np.full(givers.shape[0], np.inf), np.zeros(givers.shape[0], np.int64)
        for number in range(_NEAR + 1):
            if number < _NEAR:
                at = np.flatnonzero(of_taker[place + number] == pair)
                taken = takers[place[at] + number]
                rows, change = self.row_of[taken], costs[at] - self.costs[taken]
                added = lengths[at] - self.lengths[taken]
            else:
                at, rows, change, added = np.arange(givers.shape[0]), freest[pair], costs, lengths
            allowed = (change > 0) & (change < limit[at]) & (added <= self.free[rows])
            at, rows, change = at[allowed], rows[allowed], change[allowed]
            score = np.abs(change - sought[at])
            if slack is not None:
                score += weight * np.maximum(0.0, change - slack[rows])
            better = score < least[at]
            least[at[better]], best[at[better]] = score[better], number

        of_pair = np.full(wanted.shape[0], np.inf)
        np.minimum.at(of_pair, pair, least)
        made = np.flatnonzero((least == of_pair[pair]) & (least < np.inf))
        made = made[np.unique(pair[made], return_index=True)[1]]
        is_swap = best[made] < _NEAR
        back = takers[(place + best)[made[is_swap]]]
        rows, change, added = freest[pair[made]], costs[made], lengths[made]
        rows[is_swap] = self.row_of[back]
        change[is_swap] -= self.costs[back]
        added[is_swap] -= self.lengths[back]
        self._apply(givers[made], is_swap, back, rows, change, added)
        return made.shape[0]

    def _sequences_of(
        self, owner_of: Int64Array, busy: Int64Array, idle: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return the busy owners' sequences and the pair of each, and the idle owners', which are in order of pairs."""
        numbers = np.arange(busy.shape[0])
        pair_of = np.full(self.row_costs.shape[0], -1)
        pair_of[busy], pair_of[idle] = numbers, -2 - numbers
        pair_of = pair_of[owner_of][self.row_of]
        givers, takers = np.flatnonzero(pair_of >= 0), np.flatnonzero(pair_of < -1)
        of_taker = -2 - pair_of[takers]
        # Numbers of 16 bits are sorted in a tenth of the time.
        order = np.argsort(of_taker.astype(np.min_scalar_type(busy.shape[0])), kind="stable")
        return givers, pair_of[givers], takers[order], of_taker[order]

    def _slack(self) -> Float64Array:
        """Return the cost that each row can gain before its microbatch takes longer, float64 [rows]."""
        costs = self.row_costs.reshape(self.shape)
        slack: Float64Array = costs.max(axis=1, keepdims=True) - costs
        return slack.ravel()

    def _apply(
        self,
        given: Int64Array,
        is_swap: npt.NDArray[np.bool_],
        back: Int64Array,
        rows: Int64Array,
        change: Float64Array,
        added: Int64Array,
    ) -> None:
        """Move the given sequences to rows, and those of the swaps back, with what changes in cost and tokens."""
        was = self.row_of[given]
        self.row_of[given] = rows
        self.row_of[back] = was[is_swap]
        for row, sign in ((was, -1), (rows, 1)):
            np.add.at(self.row_costs, row, sign * change)
            np.add.at(self.free, row, -sign * added)
