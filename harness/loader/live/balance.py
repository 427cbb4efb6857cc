"""Balanced steps of live data: place the sequences read by all ranks, and send them to the ranks that train them.

Every rank has all offers, which contain the lengths, so all ranks compute the same placement (phase 1) and know how
many bytes each rank sends to each other (phase 2). Only tokens and media files are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.loader.live.rank import MEDIUM, BatchPlan, LivePack, Offer, ReadPack
from harness.loader.plan import Features, row_media
from harness.records import MEDIA_KINDS, Int64Array, Medium, Pack, Schedule, UInt8Array
from harness.schedule import Imbalance, measure_imbalance, schedule
from harness.schedule.batch import row_offsets
from harness.thd import padded_lengths

# Bytes of a token and its mask.
_TOKEN_BYTES = 5
# Rows whose media are decoded concurrently; each takes several times the size of its features in memory.
_DECODERS = 8

# Takes the bytes to send to each rank (a list that it may empty) and the number of bytes that each rank sends here;
# returns the received bytes.
Swap = Callable[[list[UInt8Array], list[int]], list[UInt8Array]]


@dataclass(frozen=True, eq=False)
class Placement:
    """The sequences of one step, in pack order, and the ranks that read and train them.

    Arrays are int64 [sequences]: lengths in stored tokens, bytes of media as in `ReadPack`, and data-parallel ranks
    that read and train each sequence.
    """

    placed: Schedule
    ids: Int64Array
    lengths: Int64Array
    media_bytes: Int64Array
    readers: Int64Array
    trainers: Int64Array
    imbalance: Imbalance


def packs_in_order(offers: Sequence[Offer]) -> list[ReadPack]:
    """Return the packs of a global batch in order: the first of each rank, then the second of each, and so on."""
    by_rank: dict[int, list[ReadPack]] = {}
    for offer in offers:
        packs = by_rank.setdefault(offer.dp_rank, [])
        packs += [ReadPack(number, *pack[1:]) for number, pack in enumerate(offer.packs, start=len(packs))]
    return sorted(pack for packs in by_rank.values() for pack in packs)


def place(packs: Sequence[ReadPack], plan: BatchPlan) -> Placement:
    """Place the sequences read by all ranks, equally on every rank; raise ScheduleError if one is too long.

    With `as_packed`, a pack is trained by the rank that read it, and missing packs become empty rows. Other schedules
    place sequences on any rank.
    """
    layout = plan.layout
    names = "lengths", "media_bytes", "media_cost"
    lengths, media_bytes, encoding = (np.concatenate([getattr(pack, name) for pack in packs]) for name in names)
    padded = padded_lengths(lengths, layout.pad_to_multiple)
    costs: dict[str, Any] = {"cost": plan.cost, "media_cost": encoding if encoding.any() else None}
    counts = np.array([pack.lengths.shape[0] for pack in packs], np.int64)
    if plan.is_balanced:
        placed = schedule(
            plan.schedule,
            padded,
            dp_size=layout.dp_size,
            cp_size=layout.cp_size,
            max_tokens_per_rank=plan.max_tokens_per_row // layout.cp_size,
            group_size=layout.group_size,
            pack_offsets=np.cumsum([0, *counts], dtype=np.int64),
            **costs,
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
        np.repeat(np.array([pack.dp_rank for pack in packs], np.int64), counts),
        trainers,
        measure_imbalance(placed, padded, max_tokens_per_row=plan.max_tokens_per_row, **costs),
    )


def send_to_trainers(
    mine: list[LivePack], placement: Placement, dp_rank: int, swap: Swap, features: Features | None = None
) -> list[LivePack | None]:
    """Send the packs read by this rank, and return the rows that it trains, None for a zero-loss row.

    `mine` is emptied. `features` decodes the media of several rows concurrently.
    """
    layout, lengths = placement.placed, placement.lengths
    num_bytes = lengths * _TOKEN_BYTES + placement.media_bytes
    coming = [(placement.readers == rank) & (placement.trainers == dp_rank) for rank in range(layout.dp_size)]
    outgoing = _outgoing(mine, placement, dp_rank)
    mine.clear()  # keeps media in memory at most twice: read and sent, or sent and received
    arrived: dict[int, UInt8Array] = {}
    for is_from, data in zip(coming, swap(outgoing, [int(num_bytes[one].sum()) for one in coming]), strict=True):
        those = np.flatnonzero(is_from)
        arrived |= zip(those.tolist(), np.split(data, np.cumsum(num_bytes[those])), strict=False)

    def build(number: int) -> LivePack | None:
        if not (row := layout.row(number, dp_rank).tolist()):
            return None
        starts = np.cumsum(lengths[row]) - lengths[row]
        found = [(arrived[i], 4 * int(lengths[i]), _TOKEN_BYTES * int(lengths[i])) for i in row]
        ids = np.concatenate([data[:middle] for data, middle, _ in found]).view(np.int32)
        pack = Pack(ids, np.concatenate([data[middle:end] for data, middle, end in found]), starts)
        media = None if features is None else row_media([_received(data[end:]) for data, _, end in found], features)
        return LivePack(pack, placement.ids[row], media)

    numbers = range(layout.num_microbatches)
    if features is None:
        return [*map(build, numbers)]
    with ThreadPoolExecutor(_DECODERS) as pool:
        return [*pool.map(build, numbers)]


def _outgoing(mine: list[LivePack], placement: Placement, dp_rank: int) -> list[UInt8Array]:
    """Return the bytes that this rank sends to each rank."""
    stored = [view for live in mine for view in live.pack.sequences()]
    held = dict(zip(np.flatnonzero(placement.readers == dp_rank).tolist(), stored, strict=True))
    made = []
    for rank in range(placement.placed.dp_size):
        going = np.flatnonzero((placement.readers == dp_rank) & (placement.trainers == rank))
        views = [held[i] for i in going.tolist()]
        parts = [part for view in views for part in (view.input_ids.view(np.uint8), view.loss_mask, *_sent(view.media))]
        made.append(np.concatenate([np.zeros(0, np.uint8), *parts]))
    return made


def _sent(media: Iterable[Medium]) -> list[UInt8Array]:
    """Serialize the media of a sequence for another rank."""
    return [
        np.frombuffer(part, np.uint8)
        for one in media
        for part in (MEDIUM.pack(MEDIA_KINDS.index(one.kind), one.start, one.tokens, len(one.data)), one.data)
    ]


def _received(data: UInt8Array) -> tuple[Medium, ...]:
    """Deserialize the media serialized by `_sent`."""
    media, at, content = [], 0, data.tobytes()
    while at < len(content):
        kind, start, tokens, size = MEDIUM.unpack_from(content, at)
        at += MEDIUM.size + size
        media.append(Medium(MEDIA_KINDS[kind], start, tokens, content[at - size : at]))
    return tuple(media)
