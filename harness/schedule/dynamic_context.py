"""A context-parallel size for each row: long sequences are shared, short ones stay whole, and ranks cost the same."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule.batch import GlobalBatch, largest_share, row_costs
from harness.schedule.cost_balanced import (
    EVEN,
    even_levels,
    exchange_sequences,
    fill_rows,
    place_cost_balanced,
    rows_needed,
)

# Fractions of a step that one sequence may take, in the order that they are tried. Then lengths of a step, relative to
# an even share, of schedules with few microbatches whose shared rows are filled with short sequences.
_SHARES, _STEPS = (1.0, np.inf, 0.5, 0.25, 0.125), (1.0, 1.15, 1.4, 1.75, 2.2, 2.8)
# Ratios to an even share at which the search ends: cost of the busiest rank, and of the busiest in every microbatch;
# the busiest rank's ratio at which fixed sizes are not tried; and the most sequences that all tries place together.
_GOOD_STEP, _GOOD_SYNC, _NEAR, _MOST_PLACED = 1.01, 1.10, 1.005, 1 << 18
# A rank's part of a sequence has more tokens than this where short sequences are shared too.
_LEAST_TOKENS = 32
# Unshared sequences get this many times the least number of rows that they need.
_ROOM = 1.03


def place_dynamic_context(batch: GlobalBatch) -> Schedule:
    """Choose for each sequence the data-parallel ranks that share it, and give every rank the same cost.

    A sequence that is too long for one rank is shared by the fewest ranks that can hold it, or by more if it would
    take longer than an even step. If ranks then differ in cost, other numbers of ranks are tried. Each microbatch gets
    shared sequences of about the same cost, the costliest first. Unshared sequences fill the remaining rows up to an
    even cost per rank, and are exchanged between rows and ranks as in `cost_balanced`, which places batches without
    shared sequences. A step takes no longer than with any one context-parallel size for all sequences, unless it is
    within 0.5% of an even share of the work.
    """
    fewest = fewest_ranks(batch)
    ideal = float((batch.costs(fewest) * fewest).sum()) / batch.dp_size
    rows = math.ceil(batch.lengths.sum() / (batch.max_tokens_per_row * batch.dp_size))
    tries, part = [(share, 8.0, 0) for share in _SHARES], batch.max_tokens_per_row / _LEAST_TOKENS
    if batch.pads_further:
        tries += [(step / waves, part, waves) for step in _STEPS for waves in (rows, rows + 1)]
    chosen, least, lowest, tried = None, np.inf, np.inf, set[tuple[bytes, int]]()
    for share, part, waves in tries:
        sizes = divide_further(batch, fewest, share * ideal, part)
        key = sizes.tobytes(), waves if (sizes > 1).any() else 0
        if len(tried) * sizes.shape[0] > _MOST_PLACED:
            break
        if key in tried:
            continue
        tried.add(key)
        placed = _place(batch, sizes, waves) if (sizes > 1).any() else place_cost_balanced(batch)
        excess, step = _excess(placed, batch, ideal)
        if excess < least:
            chosen, least, lowest = placed, excess, step
        if excess == 0:
            break
    assert chosen is not None
    size, near = int(fewest.max()), _NEAR * ideal
    while (
        batch.pads_further
        and (least > 0 or lowest > near)
        and size <= largest_share(batch.dp_size, batch.cost.most_ranks)
    ):
        costs = batch.costs(size)
        if max(costs.max(), costs.sum() * size / batch.dp_size) <= max(lowest, near):
            placed = place_alike(batch, size)
            excess, step = _excess(placed, batch, ideal)
            if step <= max(lowest, near) and (excess < least or near < lowest > step):
                chosen, least, lowest = placed, excess, step
        size *= 2
    return chosen


def _excess(placed: Schedule, batch: GlobalBatch, ideal: float) -> tuple[float, float]:
    """Return the cost in excess of a good placement, 0 for a good one, and the cost of the busiest rank."""
    work = row_costs(placed, batch.lengths, cost=batch.cost, media_cost=batch.media_cost)
    step, sync = float(work.sum(axis=0).max()), float(work.max(axis=1).sum())
    # Every layout waits for the whole step; pipelines and ranks that share rows wait for each microbatch as well.
    waits = max(0.0, sync - _GOOD_SYNC * ideal) if batch.pads_further else 0.0
    return 4 * max(0.0, step - _GOOD_STEP * ideal) + waits, step


def place_alike(batch: GlobalBatch, size: int) -> Schedule:
    """Place every sequence on `size` ranks, as `cost_balanced` does in a layout with that context-parallel size."""
    if size == 1:
        return place_cost_balanced(batch)
    multiple = size * math.lcm(2, batch.pad_to_multiple)
    lengths, held = -(-batch.lengths // multiple) * multiple, batch.max_tokens_per_row * size // multiple * multiple
    padding = batch.costs() - batch.cost.of(lengths)  # costs nothing
    groups = replace(batch, lengths=lengths, dp_size=batch.dp_size // size, max_tokens_per_row=held, media_cost=padding)
    placed = place_cost_balanced(groups)
    row_of, rows = np.empty_like(lengths), np.arange(placed.row_offsets.shape[0] - 1)
    row_of[placed.order] = np.repeat(rows * size, np.diff(placed.row_offsets))
    return _without_empty(batch, row_of, np.full(rows.size * size, size))


def _place(batch: GlobalBatch, sizes: Int64Array, waves: int) -> Schedule:
    """Place sequences on `sizes` ranks; if `waves` microbatches are requested, short sequences fill shared rows too."""
    at = _place_shared(batch, sizes)
    short, shared = np.flatnonzero(at < 0), np.flatnonzero(at >= 0)
    taken, ranks = _shared_rows(batch, sizes, at, -(-int(at.max() // batch.dp_size + 1) // batch.group_size))
    if not short.size:
        return _without_empty(batch, at, ranks)
    loads, counts, costs = taken.sum(axis=0), (taken > 0).sum(axis=0), batch.costs()[short]
    rest = replace(batch, lengths=batch.lengths[short], pack_offsets=None, media_cost=None)
    missing = np.maximum(0.0, (loads.sum() + costs.sum()) / batch.dp_size - loads)
    rows = (rows_needed(rest) * _ROOM + 1) * (missing / (missing.sum() or 1.0))
    needed = np.maximum(counts, waves) if waves else counts + np.ceil(rows)
    groups, more, row_of = -(-int(needed.max()) // batch.group_size), 1, None
    # Fill a rank's rows one after another, so that no rank gets a long sequence in each of its rows.
    full = costs.sum() / rest.lengths.sum() * batch.max_tokens_per_row / _ROOM
    filled = shared if waves else shared[:0]
    while row_of is None:
        taken, ranks = _shared_rows(batch, sizes, at, groups)
        is_free = taken == 0
        room, before = np.full(taken.shape, full), (np.cumsum(is_free, axis=0) - 1) * full
        if waves:
            # Every microbatch costs the same, or as much as its costliest sequence.
            levels = even_levels(taken.max(axis=1), float(missing.mean() + taken.sum() / batch.dp_size))[:, None]
            room = np.where(is_free, np.minimum(levels, full), levels - taken)
            before = np.cumsum(room, axis=0) - room
        rows = np.append(np.flatnonzero(is_free), at[filled])
        known, number = np.unique(ranks[rows], return_inverse=True)
        # The same sequences cost more in total on more ranks.
        cheaper = costs.sum() / [batch.costs(size)[short].sum() * size for size in known.tolist()]
        targets = np.clip(missing - before, 0.0, room).ravel()[rows] * (ranks[rows] * cheaper[number])
        multiples = np.where(ranks[rows] > 1, ranks[rows] * math.lcm(2, batch.pad_to_multiple), 1)
        free = batch.max_tokens_per_row * ranks[rows] // multiples * multiples
        held = np.append(np.zeros(len(rows) - len(filled), np.int64), batch.lengths[filled])
        free += -held // multiples * multiples
        row_of = fill_rows(rest, costs, targets, np.argsort(-rest.lengths, kind="stable"), free, multiples)
        groups, more = groups + more, 2 * more
    row_of, sizes = rows[row_of], sizes.copy()
    sizes[short] = ranks[row_of]
    at[short] = row_of
    alone = np.flatnonzero(sizes[short] == 1)
    taken, _ = _shared_rows(batch, sizes, np.where(sizes > 1, at, -1), len(taken) // batch.group_size)
    rest = replace(rest, lengths=rest.lengths[alone])
    placed = exchange_sequences(row_of[alone], costs[alone], rest, len(taken), EVEN, taken.ravel())
    at[short[alone[placed.order]]] = np.repeat(np.arange(taken.size), np.diff(placed.row_offsets))
    return _without_empty(batch, at, ranks)


def _shared_rows(batch: GlobalBatch, sizes: Int64Array, at: Int64Array, groups: int) -> tuple[Float64Array, Int64Array]:
    """Return the costs of shared rows, float64 [microbatches, dp_size], and the ranks that share each, int64 [rows].

    For other rows these are 0 and 1. `at` is the result of `_place_shared`.
    """
    shared = np.flatnonzero(at >= 0)
    each, num_rows = sizes[shared], groups * batch.rows_per_group
    rows = np.repeat(at[shared] - (np.cumsum(each) - each), each) + np.arange(int(each.sum()))
    taken = np.bincount(rows, np.repeat(batch.costs(sizes)[shared], each), num_rows).astype(np.float64)
    ranks = np.ones(num_rows, np.int64)
    ranks[rows] = np.repeat(each, each)
    return taken.reshape(-1, batch.dp_size), ranks


def fewest_ranks(batch: GlobalBatch) -> Int64Array:
    """Return the fewest ranks that can hold each sequence, int64 [sequences], powers of two."""
    sizes = np.ones_like(batch.lengths)
    unit, is_long = math.lcm(2, batch.pad_to_multiple), batch.lengths > batch.max_tokens_per_row
    held = batch.max_tokens_per_row // unit * unit
    while is_long.any():
        sizes[is_long] *= 2
        is_long &= batch.lengths > held * sizes
    return sizes


def divide_further(batch: GlobalBatch, sizes: Int64Array, cost: float, part: float) -> Int64Array:
    """Return the ranks of each sequence, int64 [sequences], with more for those whose cost per rank exceeds `cost`.

    A number of ranks is doubled while that lowers the cost and leaves each rank more than 1 / `part` of a row: kernel
    launches and padding of shorter parts would take longer than their computation.
    """
    most, sizes = largest_share(batch.dp_size, batch.cost.most_ranks), sizes.copy()
    costs = batch.costs(sizes)
    while True:
        halves = batch.costs(2 * sizes)
        pays = (costs > cost) & (2 * sizes <= most) & (halves < costs)
        pays &= part * batch.lengths > batch.max_tokens_per_row * sizes
        if not pays.any():
            return sizes
        sizes[pays] *= 2
        costs[pays] = halves[pays]


def _place_shared(batch: GlobalBatch, sizes: Int64Array) -> Int64Array:
    """Return the places of shared sequences.

    Each microbatch gets the costliest remaining sequences that fit next to each other, so its rows cost about the
    same. Within a microbatch, the costliest sequences of a size go to the least busy ranks.

    Returns:
        int64 [sequences], microbatch * dp_size + first rank; -1 for unshared sequences.
    """
    at = np.full_like(sizes, -1)
    loads = np.zeros(batch.dp_size)
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
        for size, those in chosen.items():  # larger ones first, so that aligned ranks are left for the others
            blocks = np.flatnonzero(is_free.reshape(-1, size).all(axis=1))
            busy = loads.reshape(-1, size).max(axis=1)[blocks]
            first = blocks[np.argsort(busy, kind="stable")[: len(those)]] * size
            at[those] = number * batch.dp_size + first
            ranks = (first[:, None] + np.arange(size)).ravel()
            is_free[ranks] = False
            loads[ranks] += np.repeat(costs[those], size)
        number += 1
    return at


def _without_empty(batch: GlobalBatch, row_of: Int64Array, shared_by: Int64Array) -> Schedule:
    """Return the schedule without empty microbatches, except those that complete the last group."""
    is_used = np.bincount(row_of // batch.dp_size, minlength=len(shared_by) // batch.dp_size) > 0
    order = np.argsort(~is_used, kind="stable")
    kept = -(-np.count_nonzero(is_used) // batch.group_size) * batch.group_size * batch.dp_size
    rows = (order[:, None] * batch.dp_size + np.arange(batch.dp_size)).ravel()
    row_of = np.argsort(rows)[row_of]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=kept))]).astype(np.int64)
    return Schedule(batch.dp_size, np.argsort(row_of, kind="stable"), offsets, shared_by[rows[:kept]])
