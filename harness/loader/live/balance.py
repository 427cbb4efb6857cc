"""Balanced steps of live data: place the sequences that all ranks have read, and send their tokens where they train.

The lengths are in the offers, which every rank has: all compute the same placement (phase 1), and with it how many
bytes each rank sends to each other (phase 2), so that nothing but the tokens themselves is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.loader.live.rank import BatchPlan, LivePack, Offer
from harness.records import Int64Array, Pack, Schedule, UInt8Array
from harness.schedule import schedule
from harness.schedule.batch import row_offsets
from harness.thd import padded_lengths

# A token and its mask.
_TOKEN_BYTES = 5

# Takes uint8 bytes for each reading rank, and the number of bytes that each of them sends; returns what they sent.
Swap = Callable[[list[UInt8Array], list[int]], list[UInt8Array]]


@dataclass(frozen=True, eq=False)
class Placement:
    """The sequences of one step, in the order of their packs, and where they are read and trained.

    Attributes:
        placed: their rows.
        ids: int64 [sequences], ids of the sequences.
        lengths: int64 [sequences], stored tokens.
        readers: int64 [sequences], data-parallel rank that read each.
        trainers: int64 [sequences], data-parallel rank that trains each.
    """

    placed: Schedule
    ids: Int64Array
    lengths: Int64Array
    readers: Int64Array
    trainers: Int64Array


class ReadPack(NamedTuple):
    """A pack that a rank has read for a step: its number there, of all folders, and its arrays as in `Offer`."""

    number: int
    dp_rank: int
    sequence_ids: Int64Array
    lengths: Int64Array


def packs_in_order(offers: Sequence[Offer]) -> list[ReadPack]:
    """Return the packs of a global batch in its order: the first of each rank, then the second ones, and so on."""
    by_rank: dict[int, list[ReadPack]] = {}
    for offer in offers:
        packs = by_rank.setdefault(offer.dp_rank, [])
        for ids, lengths in zip(offer.sequence_ids, offer.lengths, strict=True):
            packs.append(ReadPack(len(packs), offer.dp_rank, ids, lengths))
    return sorted(pack for packs in by_rank.values() for pack in packs)


def place(packs: Sequence[ReadPack], plan: BatchPlan) -> Placement:
    """Place the sequences that all ranks have read, the same on every rank.

    With `as_packed` a pack is trained where it was read, and the packs that a rank lacks are empty rows; the other
    schedules place all sequences anywhere.

    Raises:
        ScheduleError: a sequence is longer than a row.
    """
    layout = plan.layout
    lengths = np.concatenate([pack.lengths for pack in packs])
    counts = np.array([pack.lengths.shape[0] for pack in packs], np.int64)
    if plan.is_balanced:
        placed = schedule(
            plan.schedule,
            padded_lengths(lengths, layout.pad_to_multiple),
            dp_size=layout.dp_size,
            cp_size=layout.cp_size,
            max_tokens_per_rank=plan.max_tokens_per_row // layout.cp_size,
            group_size=layout.group_size,
            pack_offsets=np.cumsum([0, *counts], dtype=np.int64),
            cost=plan.cost,
        )
    else:
        sizes = np.zeros((packs[-1].number + 1, layout.dp_size), np.int64)
        for pack, count in zip(packs, counts.tolist(), strict=True):
            sizes[pack.number, pack.dp_rank] = count
        offsets = row_offsets(sizes.reshape(-1).tolist(), layout.dp_size * layout.group_size)
        placed = Schedule(layout.dp_size, np.arange(lengths.shape[0], dtype=np.int64), offsets)
    trainers = np.empty(lengths.shape[0], np.int64)
    trainers[placed.order] = np.repeat(
        np.arange(placed.row_offsets.shape[0] - 1) % layout.dp_size, np.diff(placed.row_offsets)
    )
    return Placement(
        placed,
        np.concatenate([pack.sequence_ids for pack in packs]),
        lengths,
        np.repeat(np.array([pack.dp_rank for pack in packs], np.int64), counts),
        trainers,
    )


def send_to_trainers(mine: list[LivePack], placement: Placement, dp_rank: int, swap: Swap) -> list[LivePack | None]:
    """Give the packs that this rank has read, and return the rows that it trains; None for a row of zero loss."""
    stored = [view for live in mine for view in live.pack.sequences()]
    held = dict(zip(np.flatnonzero(placement.readers == dp_rank).tolist(), stored, strict=True))
    ranks = range(placement.placed.dp_size)
    outgoing, expected = [], []
    for rank in ranks:
        going = np.flatnonzero((placement.readers == dp_rank) & (placement.trainers == rank))
        parts = [np.concatenate([held[i].input_ids.view(np.uint8), held[i].loss_mask]) for i in going.tolist()]
        outgoing.append(np.concatenate([np.zeros(0, np.uint8), *parts]))
        coming = (placement.readers == rank) & (placement.trainers == dp_rank)
        expected.append(int(placement.lengths[coming].sum()) * _TOKEN_BYTES)
    arrived: dict[int, tuple[UInt8Array, UInt8Array]] = {}
    for rank, data in enumerate(swap(outgoing, expected)):
        at = 0
        for i in np.flatnonzero((placement.readers == rank) & (placement.trainers == dp_rank)).tolist():
            middle = at + 4 * int(placement.lengths[i])
            end = at + _TOKEN_BYTES * int(placement.lengths[i])
            # A copy: the next sequence may begin anywhere, and int32 needs its place in memory.
            arrived[i] = (data[at:middle].copy(), data[middle:end].copy())
            at = end
    rows: list[LivePack | None] = [None] * placement.placed.num_microbatches
    for number in range(len(rows)):
        row = placement.placed.row(number, dp_rank)
        if row.shape[0]:
            ids, masks = (np.concatenate(parts) for parts in zip(*(arrived[i] for i in row.tolist()), strict=True))
            starts = np.cumsum(placement.lengths[row]) - placement.lengths[row]
            rows[number] = LivePack(Pack(ids.view(np.int32), masks, starts), placement.ids[row])
    return rows
