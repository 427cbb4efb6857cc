"""Packing algorithms: next fit and first fit in a given order, and best-fit decreasing over a histogram.

Sequences of equal length are interchangeable, so best-fit decreasing places all of one length in one step over *runs*:
bins with consecutive numbers, the same history and so the same free space. The work grows with the number of distinct
lengths; each length splits at most one run, so runs stay few for any number of sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from harness.records import Int64Array

_EXPAND_ITEMS = 1 << 20


def best_fit_decreasing(sizes: Int64Array, counts: Int64Array, pack_size: int) -> tuple[Int64Array, int]:
    """Place every item into the fullest bin that has room for it, longest items first.

    Uses exactly as many bins as best-fit decreasing item by item: after an item of length s went into the bin with the
    least sufficient room r, that bin remains the tightest while it has room, so it takes r // s of them. `sizes` are
    decreasing and at most `pack_size`, and `counts` are the items of each, int64 [distinct].

    Returns the columns of the placement, int64 [4, columns], and the number of bins. A column (first_bin, num_bins,
    per_bin, before) puts `per_bin` equal items into each of the bins `first_bin ... first_bin + num_bins - 1`, after
    the `before` items that each of them already holds.
    """
    # Room -> runs (first bin, bins, items already in each) with exactly that room.
    runs: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    rooms: list[int] = []
    rows: list[tuple[int, int, int, int]] = []
    smallest = int(sizes[-1]) if len(sizes) else 0
    total_bins = 0

    def put(room: int, run: tuple[int, int, int]) -> None:
        if room < smallest:
            return
        if room not in runs:
            insort(rooms, room)
        runs[room].append(run)

    def fill(room: int, size: int, left: int, run: tuple[int, int, int]) -> int:
        """Fill bins of one run with items of one size; returns the number of items left over."""
        first, bins, before = run
        per_bin = room // size
        full = min(bins, left // per_bin)
        if full:
            rows.append((first, full, per_bin, before))
            put(room - per_bin * size, (first, full, before + per_bin))
            left -= full * per_bin
        if full == bins:
            return left
        if left:
            rows.append((first + full, 1, left, before))
            put(room - left * size, (first + full, 1, before + left))
            full += 1
        if full < bins:
            put(room, (first + full, bins - full, before))
        return 0

    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            tightest = bisect_left(rooms, size)
            if tightest == len(rooms):
                bins = -(-left // (pack_size // size))
                total_bins += bins
                left = fill(pack_size, size, left, (total_bins - bins, bins, 0))
                continue
            room = rooms.pop(tightest)
            waiting = runs.pop(room)
            while waiting and left:
                left = fill(room, size, left, waiting.pop())
            for run in waiting:
                put(room, run)
    return np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 4).T), total_bins


def lay_out(columns: Int64Array, items: Int64Array, bin_starts: Int64Array) -> Int64Array:
    """Lay items, int64 [n] by decreasing length, out bin by bin, each bin from its `bin_starts`, int64 [bins]."""
    placed = np.empty_like(items)
    ends = np.cumsum(columns[1] * columns[2])
    column = done = 0
    while column < len(ends):
        # About a million items at a time keep temporaries in the cache and memory small.
        stop = max(int(np.searchsorted(ends, done + _EXPAND_ITEMS, side="right")), column + 1)
        first_bin, num_bins, per_bin, before = columns[:, column:stop]
        positions = bin_starts[np.repeat(first_bin, num_bins) + _ramps(num_bins)] + np.repeat(before, num_bins)
        if per_bin.max() > 1:
            repeats = np.repeat(per_bin, num_bins)
            positions = np.repeat(positions, repeats) + _ramps(repeats)
        end = int(ends[stop - 1])
        placed[positions] = items[done:end]
        column, done = stop, end
    return placed


def _ramps(counts: Int64Array) -> Int64Array:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ...: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(ends[-1]) - np.repeat(ends - counts, counts))


def next_fit(lengths: Int64Array, pack_size: int) -> Int64Array:
    """Start a new pack wherever the next sequence does not fit; return the first of each, int64 [packs + 1]."""
    ends = np.cumsum(lengths)
    # For every sequence: the first later one that does not fit into a pack starting with it.
    nexts = np.searchsorted(ends, ends - lengths + pack_size, side="right").tolist()
    offsets = [0]
    at = 0
    while at < len(nexts):
        at = nexts[at]
        offsets.append(at)
    return np.array(offsets, np.int64)


def first_fit(lengths: Int64Array, pack_size: int) -> Int64Array:
    """Place each sequence, in order, into the first opened pack with room for it.

    Takes a few microseconds per sequence: a tree over the packs holds the largest room in each subtree. Returns the
    pack of each sequence, int64 [sequences].
    """
    leaves = 1
    tree = [pack_size, pack_size]
    packs = []
    for length in lengths.tolist():
        if tree[1] < length:
            # Every pack is too full: double the tree, with the old one as the left half.
            doubled, width = [pack_size, pack_size], 1
            while width <= leaves:
                doubled += tree[width : 2 * width] + [pack_size] * width
                width *= 2
            tree, leaves = doubled, 2 * leaves
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        packs.append(node - leaves)
        tree[node] -= length
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left > right else right
    return np.array(packs, np.int64)
