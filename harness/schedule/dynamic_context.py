"""Each sequence on as few ranks as hold it: long ones shared, short ones whole, and the same cost for every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule.batch import GlobalBatch, largest_share, row_costs
from harness.schedule.cost_balanced import EVEN, exchange_sequences, fill_rows, place_cost_balanced, rows_needed

# Parts of a step that a sequence may take, in the order in which they are tried, until the busiest rank costs no more
# than _GOOD times an even share.
_SHARES, _GOOD = (1.0, np.inf, 0.5, 0.25, 0.125), 1.01
# Sequences of one rank get this many times the rows that they need at least.
_ROOM = 1.03


def place_dynamic_context(batch: GlobalBatch) -> Schedule:
    """Choose for each sequence the data-parallel ranks that share it, and give every rank the same cost.

    Sequences longer than a rank holds are shared by the fewest ranks that hold them, or by more, where these would
    take longer than the whole step should. Where ranks are not even then, shares of other sizes are tried. Each
    microbatch has those of about the same cost, the costliest first. The others then fill the rows that are left, as
    far as their ranks lack cost, and are exchanged between rows and ranks as in `cost_balanced`, which places batches
    of which no sequence is shared.
    """
    fewest = fewest_ranks(batch)
    ideal = float((batch.costs(fewest) * fewest).sum()) / batch.dp_size
    chosen, least, tried = None, np.inf, set[bytes]()
    for share in _SHARES:
        sizes = divide_further(batch, fewest, share * ideal)
        if sizes.tobytes() in tried:
            continue
        tried.add(sizes.tobytes())
        placed = _place(batch, sizes) if (sizes > 1).any() else place_cost_balanced(batch)
        busiest = float(row_costs(placed, batch.lengths, cost=batch.cost, media_cost=batch.media_cost).sum(0).max())
        if busiest < least:
            chosen, least = placed, busiest
        if least <= _GOOD * ideal:
            break
    assert chosen is not None
    return chosen


def _place(batch: GlobalBatch, sizes: Int64Array) -> Schedule:
    is_shared = sizes > 1
    at, loads, counts = _place_shared(batch, sizes)
    short = np.flatnonzero(~is_shared)
    costs = batch.costs()[short]
    missing = np.maximum(0.0, (loads.sum() + costs.sum()) / batch.dp_size - loads)
    rest = replace(batch, lengths=batch.lengths[short], pack_offsets=None, media_cost=None)
    rows = (rows_needed(rest) * _ROOM + 1) * (missing / (missing.sum() or 1.0))
    groups, more = -(-int((counts + np.ceil(rows)).max()) // batch.group_size), 1
    of_shared = np.repeat(batch.costs(sizes)[is_shared], sizes[is_shared])
    while True:
        num_microbatches = groups * batch.group_size
        # The cost of each rank's row of a shared sequence, 0 for other rows.
        taken = np.zeros((num_microbatches, batch.dp_size))
        taken.ravel()[_rows_of(at[is_shared], sizes[is_shared])] = of_shared
        row_of = _fill_free(rest, costs, missing, taken)
        if row_of is not None:
            break
        groups, more = groups + more, 2 * more
    placed = exchange_sequences(row_of, costs, rest, num_microbatches, EVEN, taken.ravel())
    return _joined(batch, placed, short, sizes, at)


def fewest_ranks(batch: GlobalBatch) -> Int64Array:
    """Return the fewest ranks that hold each sequence, int64 [sequences], powers of two."""
    sizes = np.ones_like(batch.lengths)
    # Of a shared sequence each rank has two chunks of the same length.
    held, is_long = batch.max_tokens_per_row // 2 * 2, batch.lengths > batch.max_tokens_per_row
    while is_long.any():
        sizes[is_long] *= 2
        is_long &= batch.lengths > held * sizes
    return sizes


def divide_further(batch: GlobalBatch, sizes: Int64Array, cost: float) -> Int64Array:
    """Return more ranks for sequences that cost more than `cost` on each of theirs, int64 [sequences].

    They are doubled as long as that makes them cheaper, down to an eighth of a row: what ranks have of shorter ones is
    launched and padded for longer than it is computed.
    """
    most, sizes = largest_share(batch.dp_size, batch.cost.most_ranks), sizes.copy()
    costs = batch.costs(sizes)
    while True:
        halves = batch.costs(2 * sizes)
        pays = (costs > cost) & (2 * sizes <= most) & (halves < costs)
        pays &= 8 * batch.lengths > batch.max_tokens_per_row * sizes
        if not pays.any():
            return sizes
        sizes[pays] *= 2
        costs[pays] = halves[pays]


def _place_shared(batch: GlobalBatch, sizes: Int64Array) -> tuple[Int64Array, Float64Array, Float64Array]:
    """Return the places of shared sequences, and the cost and number of the rows that each rank has then.

    Each microbatch gets the costliest of those that are left and fit beside each other, so its rows cost about the
    same. There the costliest of a size go to the ranks that are least busy.

    Returns:
        int64 [sequences], microbatch * dp_size + first rank, -1 for the others; float64 [dp_size] each.
    """
    at = np.full_like(sizes, -1)
    loads, counts = np.zeros((2, batch.dp_size))
    costs = batch.costs(sizes)
    order = np.argsort(-costs, kind="stable")
    left = {size: order[sizes[order] == size].tolist()[::-1] for size in np.unique(sizes[sizes > 1])[::-1].tolist()}
    number = 0
    while any(left.values()):
        chosen: dict[int, list[int]] = {size: [] for size in left}
        room = batch.dp_size
        while fitting := [size for size, those in left.items() if those and size <= room]:
            size = max(fitting, key=lambda one: costs[left[one][-1]])
            chosen[size].append(left[size].pop())
            room -= size
        is_free = np.full(batch.dp_size, True)
        for size, those in chosen.items():  # larger ones first, so that all that fit find neighbors
            blocks = np.flatnonzero(is_free.reshape(-1, size).all(axis=1))
            busy = loads.reshape(-1, size).max(axis=1)[blocks]
            first = blocks[np.argsort(busy, kind="stable")[: len(those)]] * size
            at[those] = number * batch.dp_size + first
            ranks = (first[:, None] + np.arange(size)).ravel()
            is_free[ranks] = False
            loads[ranks] += np.repeat(costs[those], size)
            counts[ranks] += 1
        number += 1
    return at, loads, counts


def _rows_of(first: Int64Array, sizes: Int64Array) -> Int64Array:
    """Return the rows of all ranks that share the rows whose first is given, int64 [sum of sizes]."""
    starts = np.cumsum(sizes) - sizes
    rows: Int64Array = np.repeat(first - starts, sizes) + np.arange(int(sizes.sum()))
    return rows


def _fill_free(
    batch: GlobalBatch, costs: Float64Array, missing: Float64Array, taken: Float64Array
) -> Int64Array | None:
    """Return the row of each sequence among those that are free, int64 [sequences]; None where one finds no room."""
    is_free = taken == 0
    if not batch.lengths.size:
        return np.zeros_like(batch.lengths)
    # Rows of a rank are full one after the other, so that no rank gets a long sequence in each of its rows.
    full = costs.sum() / batch.lengths.sum() * batch.max_tokens_per_row / _ROOM
    targets = np.clip(missing - (np.cumsum(is_free, axis=0) - 1) * full, 0.0, full)
    rows = np.flatnonzero(is_free)
    filled = fill_rows(batch, costs, targets.ravel()[rows], np.argsort(-batch.lengths, kind="stable"))
    return None if filled is None else rows[filled]


def _joined(
    batch: GlobalBatch, placed: Schedule, short: npt.NDArray[np.int64], sizes: Int64Array, at: Int64Array
) -> Schedule:
    """Return the schedule of the short sequences with the shared ones in their places."""
    row_of = at.copy()
    row_of[short[placed.order]] = np.repeat(np.arange(placed.row_offsets.shape[0] - 1), np.diff(placed.row_offsets))
    shared = np.flatnonzero(at >= 0)
    shared_by = np.ones(placed.row_offsets.shape[0] - 1, dtype=np.int64)
    shared_by[_rows_of(at[shared], sizes[shared])] = np.repeat(sizes[shared], sizes[shared])
    # Microbatches without a sequence on any rank are left out, up to a whole group of them.
    is_used = np.bincount(row_of // batch.dp_size, minlength=len(shared_by) // batch.dp_size) > 0
    order = np.argsort(~is_used, kind="stable")
    kept = -(-np.count_nonzero(is_used) // batch.group_size) * batch.group_size * batch.dp_size
    rows = (order[:, None] * batch.dp_size + np.arange(batch.dp_size)).ravel()
    row_of = np.argsort(rows)[row_of]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=kept))]).astype(np.int64)
    return Schedule(batch.dp_size, np.argsort(row_of, kind="stable"), offsets, shared_by[rows[:kept]])
