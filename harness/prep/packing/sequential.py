"""Packers that take sequences in a given order, one after another."""

from __future__ import annotations

import numpy as np

from harness.records import Int64Array


def next_fit(lengths: Int64Array, pack_size: int) -> Int64Array:
    """Cut the sequences, kept in order, into packs wherever the next one does not fit.

    Args:
        lengths: int64 [sequences], each at most `pack_size`.
        pack_size: room of an empty pack.

    Returns:
        int64 [packs + 1], where each pack begins; the last entry is the number of sequences.
    """
    ends = np.cumsum(lengths)
    # For every sequence: the first one that does not fit into a pack that it begins.
    nexts = np.searchsorted(ends, ends - lengths + pack_size, side="right").tolist()
    offsets = [0]
    at = 0
    while at < len(nexts):
        at = nexts[at]
        offsets.append(at)
    return np.array(offsets, np.int64)


def first_fit(lengths: Int64Array, pack_size: int) -> Int64Array:
    """Place each sequence, in order, into the first opened pack with room for it.

    Takes a few microseconds a sequence: a tree over the packs holds the most room in each subtree.

    Args:
        lengths: int64 [sequences], each at most `pack_size`.
        pack_size: room of an empty pack.

    Returns:
        int64 [sequences], the pack of each sequence.
    """
    leaves = 1
    tree = [pack_size, pack_size]
    packs = []
    for length in lengths.tolist():
        if tree[1] < length:
            # Every pack is too full: twice as many, the old tree as the left half.
            tree = _doubled(tree, leaves, pack_size)
            leaves *= 2
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


def _doubled(tree: list[int], leaves: int, pack_size: int) -> list[int]:
    doubled = [pack_size, pack_size]
    width = 1
    while width <= leaves:
        doubled += tree[width : 2 * width] + [pack_size] * width
        width *= 2
    return doubled
