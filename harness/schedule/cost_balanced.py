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
# Ratios of step cost, and of cost with a wait in every microbatch, at which neither another microbatch nor dividing
# packs is worth trying.
_GOOD_STEP, _GOOD_SYNC = 1.01, 1.06
# Sequences are placed in at most this many portions; more take longer and hardly improve the balance.
_PORTIONS = 400
# A portion covers at most one in this many rows, so that no row gets two long sequences in succession.
_PORTION_OF_ROWS = 16
# The most exchanges between a pair of rows, and between a pair of ranks.
_ROUNDS_OF_ROWS, _ROUNDS_OF_RANKS = 6, 48
# Least busy ranks that a busy one tries in turn; the next one is tried if at most one pair in `_FEW` had an exchange.
_PARTNERS, _FEW = 3, 50
# Sequences of about the wanted cost that are tried as the other half of a swap.
_NEAR = 4
_NONE = np.array([-1, -1])
# Pairs processed at once, so that their arrays stay in the processor's caches.
_PAIRS_AT_ONCE = 256
# Size of the sample of rows from which a threshold is estimated.
_SAMPLE = 1024
# Weight of the wait that an exchange adds to a microbatch, relative to the cost that it takes off the busier rank. It
# falls to 0 over the rounds, because the last improvements often require a wait.
_WAIT_WEIGHT = 2.0


def place_cost_balanced(batch: GlobalBatch) -> Schedule:
    """Place sequences so that ranks cost the same in the step, and rows the same within their microbatch.

    Every microbatch has a target cost: the first ones the cost of their longest sequence, which all ranks wait for
    anyway, the others an equal share of the rest. Sequences, costliest first, go to the row with room that is furthest
    below its target. Finally the busiest and the least busy ranks exchange sequences.

    The number of microbatches is the smallest possible if that balances well enough, and otherwise at most one group
    more than best-fit packing needs. Stored packs stay whole, apart from exchanged sequences, if that balances well
    enough, because every rank that has a part of a pack decodes all of it. A placement of `dp_balanced` that is as
    balanced and as short is preferred.
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
    """Return how far the ratios exceed good ones, or those of `in_order` if lower; 0 for a good placement."""
    step = max(0.0, measured.cost_ratio - min(_GOOD_STEP, in_order.cost_ratio))
    # Every layout waits for the whole step and only pipelines for each microbatch, so the step weighs ten times.
    return 10 * step + max(0.0, measured.sync_ratio - min(_GOOD_SYNC, in_order.sync_ratio))


def rows_needed(batch: GlobalBatch) -> int:
    """Return a lower bound on the number of rows of any placement.

    Two sequences longer than half a row never share one. For any t up to half a row, sequences of t tokens or more
    never share a row with one longer than max_tokens_per_row - t; they fit only into the room left by the other long
    sequences and into further rows.

    Source: the lower bound L2 of Martello and Toth, "Lower bounds and reduction procedures for the bin packing
    problem" (1990).
    """
    lengths = batch.lengths[_sorted(batch.lengths)]
    sums = np.concatenate([[0], np.cumsum(lengths)])
    num = lengths.shape[0]
    halves = int(np.searchsorted(lengths, batch.max_tokens_per_row // 2, side="right"))
    first = np.flatnonzero(np.diff(lengths[:halves], prepend=0))
    thresholds = lengths[first]
    alone = np.searchsorted(lengths, batch.max_tokens_per_row - thresholds, side="right")
    room = (alone - halves) * batch.max_tokens_per_row - (sums[alone] - sums[halves])
    overflow = np.maximum(0, sums[halves] - sums[first] - room)
    shared = num - halves - (-overflow // batch.max_tokens_per_row)
    return int(np.max(shared, initial=max(num - halves, 1)))


def _sorted(numbers: npt.NDArray[Any]) -> Int64Array:
    """Return the indices that sort integers in ascending order, stably."""
    low, high = numbers.min(initial=0), numbers.max(initial=0)
    # 16-bit integers sort in a tenth of the time.
    return np.argsort((numbers - low).astype(np.min_scalar_type(high - low)), kind="stable")


def _place(
    batch: GlobalBatch, costs: Float64Array, num_microbatches: int, goal: float, whole: bool = False
) -> Schedule | None:
    """Return the placement in this many microbatches; `whole` places packs as units.

    None if a sequence finds no row, or if whole packs would make ranks wait, which exchanges hardly change.
    """
    num_rows = num_microbatches * batch.dp_size
    item_of = _whole_packs(batch, num_rows) if whole else np.arange(batch.lengths.shape[0])
    lengths = np.bincount(item_of, weights=batch.lengths).astype(np.int64)
    of_items = np.bincount(item_of, weights=costs).astype(np.float64)
    targets = np.repeat(_targets(of_items, batch.dp_size, num_microbatches), batch.dp_size)
    # Packs are about equally long, so sort them by cost.
    order = np.argsort(-of_items, kind="stable") if whole else _sorted(-lengths)
    rows = fill_rows(replace(batch, lengths=lengths), of_items, targets, order)
    if rows is None:
        return None
    position = _by_cost(batch, costs, rows[item_of], num_microbatches)
    busiest = np.bincount(position, weights=costs, minlength=num_rows).reshape(-1, batch.dp_size).max(axis=1)
    if whole and busiest.sum() > _GOOD_SYNC * _targets(costs, batch.dp_size, num_microbatches).sum():
        return None
    return exchange_sequences(position, costs, batch, num_microbatches, goal)


def _whole_packs(batch: GlobalBatch, num_rows: int) -> Int64Array:
    """Return a number for each sequence, int64 [sequences]: its pack's, or its own."""
    assert batch.pack_offsets is not None
    num_packs = batch.pack_offsets.shape[0] - 1
    room = batch.max_tokens_per_row // -(-num_packs // num_rows)
    item_of = np.repeat(np.arange(num_packs), np.diff(batch.pack_offsets))
    # Padding can make packs too long for their rows: number their shortest sequences separately.
    longer = np.flatnonzero((np.bincount(item_of, weights=batch.lengths) > room)[item_of])
    order = longer[np.lexsort((-batch.lengths[longer], item_of[longer]))]
    sums = np.cumsum(batch.lengths[order])
    firsts = np.flatnonzero(np.diff(item_of[order], prepend=-1))
    before = np.repeat(sums[firsts] - batch.lengths[order[firsts]], np.diff(firsts, append=order.shape[0]))
    alone = order[sums - before > room]
    item_of[alone] = num_packs + np.arange(alone.shape[0])
    return np.unique(item_of, return_inverse=True)[1].astype(np.int64) if alone.shape[0] else item_of


def fill_rows(
    batch: GlobalBatch,
    costs: Float64Array,
    targets: Float64Array,
    order: Int64Array,
    free: Int64Array | None = None,
    multiples: Int64Array | int = 1,
) -> Int64Array | None:
    """Return the row of each sequence, int64 [sequences]: in order, the row with room furthest below its target.

    Args:
        batch: lengths, and the capacity of a row.
        costs: float64 [sequences].
        targets: float64 [rows], the target cost of each row.
        order: int64 [sequences], the order in which sequences are placed, such as longest first.
        free: int64 [rows], the capacity of each row in tokens, if they differ.
        multiples: int64 [rows] or one number, the multiple that sequences of a row are padded to.
    """
    num_rows = targets.shape[0]
    num = batch.lengths.shape[0]
    row_of = np.empty(num, dtype=np.int64)
    free = np.full(num_rows, batch.max_tokens_per_row) if free is None else free.copy()
    multiples = np.broadcast_to(multiples, free.shape)
    missing = targets.copy()
    portion = min(max(-(-num // _PORTIONS), -(-num_rows // _PORTION_OF_ROWS)), num_rows)
    start = 0
    while start < num:
        # Free tokens are multiples of the row's padding multiple, so the unpadded length can be compared.
        rows = np.flatnonzero(free >= batch.lengths[order[start : start + portion]].max())
        if rows.shape[0] == 0:
            return None
        size = min(portion, num - start, rows.shape[0])
        # Partitions and unstable sorts order equal rows by processor, so ranks would disagree: sort stably.
        lacks = -missing[rows]
        # A threshold from a sample, a quarter above the needed size, preselects rows in a fifth of the time.
        every = max(1, lacks.shape[0] // _SAMPLE)
        at = min(lacks.shape[0] - 1, size + size // 4) // every
        few = np.flatnonzero(lacks <= np.partition(lacks[::every], at)[at])
        if few.shape[0] < size:
            few = np.flatnonzero(lacks <= np.partition(lacks, size - 1)[size - 1])
        rows = rows[few[np.argsort(lacks[few], kind="stable")[:size]]]
        placed = order[start : start + size]
        row_of[placed] = rows
        missing[rows] -= costs[placed]
        free[rows] -= -(-batch.lengths[placed] // multiples[rows]) * multiples[rows]
        start += size
    return row_of


def _targets(costs: Float64Array, dp_size: int, num_microbatches: int) -> Float64Array:
    """Return the target cost of the rows of each microbatch, float64 [microbatches]."""
    longest = np.zeros(num_microbatches, dtype=np.float64)
    places = np.arange(costs.shape[0] - 1, -1, -dp_size)[:num_microbatches]
    seeds = np.partition(costs, places)[places]
    longest[: seeds.shape[0]] = seeds
    return even_levels(longest, costs.sum() / dp_size)


def even_levels(longest: Float64Array, share: float) -> Float64Array:
    """Return the target cost of each microbatch, float64 [microbatches], for ranks that each have `share` in total.

    It is the cost of the microbatch's longest sequence (`longest`, float64 [microbatches], falling), because the
    microbatch takes at least that long, or the level that spreads the rest evenly over the other microbatches.
    """
    before = np.cumsum(longest) - longest
    levels = (share - before) / np.arange(longest.shape[0], 0, -1)
    targets: Float64Array = np.maximum(longest, levels[int(np.argmax(levels >= longest))])
    return targets


def _by_cost(batch: GlobalBatch, costs: Float64Array, row_of: Int64Array, num_microbatches: int) -> Int64Array:
    """Renumber rows by falling cost; return the row of each sequence, int64 [sequences]."""
    num_rows = num_microbatches * batch.dp_size
    row_costs = np.bincount(row_of, weights=costs, minlength=num_rows)
    # Rows of a microbatch then cost about the same. Every other microbatch is dealt to the ranks in reverse.
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
    """Balance the rows of each microbatch, assign them to ranks, and balance the ranks.

    Args:
        position: int64 [sequences], the row of each; row m * dp_size + d is rank d's in microbatch m.
        costs: float64 [sequences].
        batch: lengths, and the capacity of a row.
        num_microbatches: rows of each rank.
        goal: ratio of the busiest rank's cost to the mean at which to stop.
        taken: float64 [rows], the cost of rows that hold other sequences and accept none, 0 for all others; rows then
            stay with their ranks. None if there are no such rows.
    """
    state = _Placement(position, costs, batch, num_microbatches, taken)
    state.even_rows()
    if taken is None:
        state.deal_rows()
    state.even_ranks(goal)
    row_of = np.empty_like(state.row_of)
    row_of[state.by_cost] = state.row_of
    sizes = np.bincount(row_of, minlength=num_microbatches * batch.dp_size)
    return Schedule(batch.dp_size, _sorted(row_of), np.concatenate([[0], np.cumsum(sizes)]))


class _Placement:
    """Costs and free tokens of rows while sequences, numbered from 0 by rising cost, are exchanged.

    Busy rows or ranks are paired with idle ones. In each round, all pairs make at most one move or swap at once.
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
        # Sorting by length is faster and usually gives the same order.
        self.by_cost = _sorted(batch.lengths)
        rises = np.diff(costs[self.by_cost])
        if (rises < 0).any() or (np.diff(self.by_cost)[rises == 0] < 0).any():
            self.by_cost = np.argsort(costs, kind="stable")
        self.costs, self.lengths = costs[self.by_cost], batch.lengths[self.by_cost]
        self.row_of = position[self.by_cost].astype(np.min_scalar_type(num_rows))
        self.row_costs = np.bincount(self.row_of, weights=self.costs, minlength=num_rows).astype(np.float64)
        tokens = np.bincount(self.row_of, weights=self.lengths, minlength=num_rows)
        self.free = batch.max_tokens_per_row - np.rint(tokens).astype(np.int64)
        if taken is not None:
            self.row_costs += taken
            self.free[taken > 0] = 0
        self.mean = float(self.row_costs.sum()) / batch.dp_size

    def even_rows(self) -> None:
        """Exchange sequences between the rows of each microbatch."""
        half = self.shape[1] // 2
        for _ in range(_ROUNDS_OF_ROWS):
            costs = self.row_costs.reshape(self.shape)
            order = np.argsort(costs, axis=1, kind="stable") + np.arange(0, costs.size, self.shape[1])[:, None]
            idle, busy = order[:, :half].ravel(), order[:, ::-1][:, :half].ravel()
            gaps = self.row_costs[busy] - self.row_costs[idle]
            pays = gaps > (EVEN - 1) * self.mean
            changes = gaps[pays] / 2, gaps[pays]
            if not self._exchange(costs.size, (busy[pays], idle[pays]), changes, idle[pays], 0.0):
                return

    def deal_rows(self) -> None:
        """Assign the costliest rows of each microbatch to the least busy ranks, the most unequal microbatches first."""
        costs = self.row_costs.reshape(self.shape)
        totals = np.zeros(self.shape[1])
        row_at = np.empty(self.shape, np.int64)
        for number in np.argsort(costs.min(axis=1) - costs.max(axis=1), kind="stable").tolist():
            ranks, rows = np.argsort(totals, kind="stable"), np.argsort(-costs[number], kind="stable")
            row_at[number, ranks] = number * self.shape[1] + rows
            totals[ranks] += costs[number, rows]
        moved = np.empty(costs.size, np.int64)
        moved[row_at.ravel()] = np.arange(costs.size)
        self.row_of = moved[self.row_of].astype(self.row_of.dtype)
        self.row_costs, self.free = self.row_costs[row_at].ravel(), self.free[row_at].ravel()

    def even_ranks(self, goal: float) -> None:
        """Exchange sequences between ranks, weighing the wait that each exchange adds to a microbatch."""
        misses = 0
        for number in range(_ROUNDS_OF_RANKS):
            totals = self.row_costs.reshape(self.shape).sum(axis=0)
            order = np.argsort(totals, kind="stable")
            # If hardly any pair had an exchange, try the next ranks.
            pairs = min(int(np.count_nonzero(totals > goal * self.mean)), (self.shape[1] - misses) // 2)
            if not pairs:
                break
            idle, busy = order[misses : misses + pairs], order[::-1][:pairs]
            # The change in cost that brings one of the two to the mean.
            wanted = np.minimum(totals[busy] - self.mean, self.mean - totals[idle])
            changes = wanted, totals[busy] - totals[idle]
            freest = np.argmax(self.free.reshape(self.shape), axis=0)[idle] * self.shape[1] + idle
            weight = _WAIT_WEIGHT * (1 - number / _ROUNDS_OF_RANKS)
            made = self._exchange(self.shape[1], (busy, idle), changes, freest, weight)
            misses = 0 if made * _FEW > pairs else misses + 1
            if misses == _PARTNERS:
                break

    def _exchange(
        self,
        num_owners: int,
        pairs: tuple[Int64Array, Int64Array],
        changes: tuple[Float64Array, Float64Array],
        freest: Int64Array,
        weight: float,
    ) -> int:
        """Make the best exchange of every pair that has one; return how many.

        Args:
            num_owners: the number of rows, if each is its own owner, or the number of ranks.
            pairs: int64 [pairs] each, the busy and the idle owners, all different.
            changes: float64 [pairs] each, the wanted transfer of cost, and a transfer that is too large.
            freest: int64 [pairs], the idle owner's row that takes a sequence in a move without a swap.
            weight: weight of the wait that an exchange adds to a microbatch, relative to the wanted transfer.
        """
        (wanted, most), num, made, apart = changes, freest.shape[0], 0, 2 * self.costs.max(initial=0) + 1
        order, pair_of = self._sequences_of(num_owners, np.concatenate(pairs))
        # The cost that each row can gain before its microbatch takes longer.
        slack = self.row_costs.reshape(self.shape).max(axis=1).repeat(self.shape[1]) - self.row_costs
        for first in range(0, num, _PAIRS_AT_ONCE):
            last = min(first + _PAIRS_AT_ONCE, num)
            bounds = np.array([first, last, num + first, num + last], pair_of.dtype)
            start, end, begin, stop = pair_of.searchsorted(bounds)
            if start == end:
                continue
            givers, pair = order[start:end], pair_of[start:end].astype(np.int64)
            # Pad both ends with takers of no pair, then append one taker of zero cost per pair, which makes a move.
            takers, of_taker = order[begin:stop], pair_of[begin:stop].astype(np.int64) - num
            takers = np.concatenate([_NONE, takers, _NONE])
            of_taker = np.concatenate([_NONE, of_taker, _NONE, np.arange(first, last)])
            rows = np.concatenate([self.row_of[takers], freest[first:last]])
            back, added = (np.append(of[takers], np.zeros(last - first, of.dtype)) for of in (self.costs, self.lengths))
            room, waits = self.free[rows] + added, slack[rows]
            # For every giver: the takers of its pair whose cost differs by about the wanted transfer, and no taker.
            costs, lengths, sought, limit = self.costs[givers], self.lengths[givers], wanted[pair], most[pair]
            spare = self.free[self.row_of[givers]] + lengths  # with media, a cheaper sequence can be longer
            keys = (of_taker * apart + back)[2 : 2 + stop - begin]
            place = np.searchsorted(keys, pair * apart + np.maximum(0.0, costs - sought))
            places = [*(place + number for number in range(_NEAR)), takers.shape[0] + pair - first]
            scores = []
            for at in places:
                change, fits = costs - back[at], (lengths <= room[at]) & (added[at] <= spare)
                allowed = (of_taker[at] == pair) & (change > 0) & (change < limit) & fits
                score = np.abs(change - sought) + weight * np.maximum(0.0, change - waits[at])
                scores.append(np.where(allowed, score, np.inf))
            least, of_pair = np.min(scores, axis=0), np.full(num, np.inf)
            np.minimum.at(of_pair, pair, least)
            best = np.flatnonzero((least == of_pair[pair]) & (least < np.inf))
            best = best[np.unique(pair[best], return_index=True)[1]]
            number = np.argmin([score[best] for score in scores], axis=0)
            at, was = np.choose(number, [place[best] for place in places]), self.row_of[givers[best]]
            self.row_of[givers[best]] = rows[at]
            self.row_of[takers[at[number < _NEAR]]] = was[number < _NEAR]
            for row, sign in ((was, -1), (rows[at], 1)):
                self.row_costs[row] += sign * (costs[best] - back[at])
                self.free[row] -= sign * (lengths[best] - added[at])
            made += best.shape[0]
        return made

    def _sequences_of(self, num_owners: int, owners: Int64Array) -> tuple[Int64Array, npt.NDArray[Any]]:
        """Return the sequences of `owners`, grouped in that order, and the index in `owners` of each."""
        place_of = np.full(num_owners, len(owners), np.min_scalar_type(len(owners)))
        place_of[owners] = np.arange(len(owners))
        places = np.tile(place_of, len(self.row_costs) // num_owners)[self.row_of]
        found = np.flatnonzero(places < len(owners))
        order = np.argsort(places[found], kind="stable")
        return found[order], places[found][order]
