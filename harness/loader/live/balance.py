"""Balanced steps of live data: place the sequences that all ranks have read, and send them where they train.

The lengths are in the offers, which every rank has: all compute the same placement (phase 1), and with it how many
bytes each rank sends to each other (phase 2), so that nothing but tokens and the files of media is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.loader.live.rank import MEDIUM, BatchPlan, LivePack, Offer
from harness.loader.plan import Features, row_media
from harness.records import MEDIA_KINDS, Float64Array, Int64Array, Medium, Pack, Schedule, UInt8Array
from harness.schedule import schedule
from harness.schedule.batch import row_offsets
from harness.thd import RowMedia, padded_lengths

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
        media_bytes, media_cost: as in `Offer.media`; the cost is None if there are no media.
        readers: int64 [sequences], data-parallel rank that read each.
        trainers: int64 [sequences], data-parallel rank that trains each.
    """

    placed: Schedule
    ids: Int64Array
    lengths: Int64Array
    media_bytes: Int64Array
    media_cost: Float64Array | None
    readers: Int64Array
    trainers: Int64Array


class ReadPack(NamedTuple):
    """A pack that a rank has read for a step: its number there, of all folders, and its arrays as in `Offer`."""

    number: int
    dp_rank: int
    sequence_ids: Int64Array
    lengths: Int64Array
    media_bytes: Int64Array
    media_cost: Float64Array


def packs_in_order(offers: Sequence[Offer]) -> list[ReadPack]:
    """Return the packs of a global batch in its order: the first of each rank, then the second ones, and so on."""
    by_rank: dict[int, list[ReadPack]] = {}
    for offer in offers:
        packs = by_rank.setdefault(offer.dp_rank, [])
        for ids, lengths, media in zip(offer.sequence_ids, offer.lengths, offer.media, strict=True):
            packs.append(ReadPack(len(packs), offer.dp_rank, ids, lengths, *media))
    return sorted(pack for packs in by_rank.values() for pack in packs)


def place(packs: Sequence[ReadPack], plan: BatchPlan) -> Placement:
    """Place the sequences that all ranks have read, the same on every rank.

    With `as_packed` a pack is trained where it was read, and the packs that a rank lacks are empty rows; the other
    schedules place all sequences anywhere.

    Raises:
        ScheduleError: a sequence is longer than a row.
    """
    layout = plan.layout
    lengths, media_bytes, encoding = (
        np.concatenate([getattr(pack, name) for pack in packs]) for name in ("lengths", "media_bytes", "media_cost")
    )
    media_cost = encoding if encoding.any() else None
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
            media_cost=media_cost,
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
        media_bytes,
        media_cost,
        np.repeat(np.array([pack.dp_rank for pack in packs], np.int64), counts),
        trainers,
    )


def send_to_trainers(
    mine: list[LivePack], placement: Placement, dp_rank: int, swap: Swap, features: Features | None = None
) -> list[LivePack | None]:
    """Give the packs that this rank has read, and return the rows that it trains; None for a row of zero loss.

    Args:
        features: decode the media of rows, several at once.
    """
    stored = [view for live in mine for view in live.pack.sequences()]
    held = dict(zip(np.flatnonzero(placement.readers == dp_rank).tolist(), stored, strict=True))
    num_bytes = placement.lengths * _TOKEN_BYTES + placement.media_bytes
    ranks = range(placement.placed.dp_size)
    outgoing, expected = [], []
    for rank in ranks:
        going = np.flatnonzero((placement.readers == dp_rank) & (placement.trainers == rank))
        views = [held[i] for i in going.tolist()]
        parts = [part for view in views for part in (view.input_ids.view(np.uint8), view.loss_mask, *_sent(view.media))]
        outgoing.append(np.concatenate([np.zeros(0, np.uint8), *parts]))
        coming = (placement.readers == rank) & (placement.trainers == dp_rank)
        expected.append(int(num_bytes[coming].sum()))
    arrived: dict[int, tuple[UInt8Array, UInt8Array, tuple[Medium, ...]]] = {}
    for rank, data in enumerate(swap(outgoing, expected)):
        at = 0
        for i in np.flatnonzero((placement.readers == rank) & (placement.trainers == dp_rank)).tolist():
            middle = at + 4 * int(placement.lengths[i])
            end = at + _TOKEN_BYTES * int(placement.lengths[i])
            after = at + int(num_bytes[i])
            # A copy: the next sequence may begin anywhere, and int32 needs its place in memory.
            arrived[i] = (data[at:middle].copy(), data[middle:end].copy(), _received(data[end:after]))
            at = after
    rows = [placement.placed.row(number, dp_rank).tolist() for number in range(placement.placed.num_microbatches)]
    decoded: list[RowMedia | None] = [None] * len(rows)
    if features is not None:
        with ThreadPoolExecutor() as pool:
            decoded = [*pool.map(lambda row: row_media([arrived[i][2] for i in row], features), rows)]
    trained: list[LivePack | None] = [None] * len(rows)
    for number, (row, media) in enumerate(zip(rows, decoded, strict=True)):
        if row:
            ids, masks, _ = zip(*(arrived[i] for i in row), strict=True)
            starts = np.cumsum(placement.lengths[row]) - placement.lengths[row]
            pack = Pack(np.concatenate(ids).view(np.int32), np.concatenate(masks), starts)
            trained[number] = LivePack(pack, placement.ids[row], media)
    return trained


def _sent(media: Iterable[Medium]) -> list[UInt8Array]:
    """Return the bytes of a sequence's media on their way to another rank."""
    return [
        np.frombuffer(part, np.uint8)
        for one in media
        for part in (MEDIUM.pack(MEDIA_KINDS.index(one.kind), one.start, one.tokens, len(one.data)), one.data)
    ]


def _received(data: UInt8Array) -> tuple[Medium, ...]:
    """Return the media that `_sent` gave."""
    media, at, content = [], 0, data.tobytes()
    while at < len(content):
        kind, start, tokens, size = MEDIUM.unpack_from(content, at)
        at += MEDIUM.size + size
        media.append(Medium(MEDIA_KINDS[kind], start, tokens, content[at - size : at]))
    return tuple(media)
