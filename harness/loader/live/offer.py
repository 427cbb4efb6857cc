"""What ranks tell each other before a step: the packs that they have for it, or why they have none."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.errors import HarnessError
from harness.loader.live.position import RankPosition
from harness.records import Int64Array, Pack


@dataclass(frozen=True, eq=False, slots=True)
class LivePack:
    """A pack to train on; `sequence_ids` int64 [sequences] name its sequences, whichever rank reads them."""

    pack: Pack
    sequence_ids: Int64Array


@dataclass(frozen=True, slots=True)
class Waiting:
    """A chunk that is not there: its index, since when, when its producer was last seen, and what else is known."""

    chunk: int
    waited_s: float
    producer_seen_s: float | None
    hint: str


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """What a rank tells the others before a step.

    Attributes:
        sequence_ids, lengths: one a pack that it has for the step, int64 [sequences]; lengths are stored tokens.
        position: where the rank stands once these are trained.
        waiting: why there are fewer packs than wanted; None where there are all, or no more will come.
        error: why there will be none.
        stream: names what it reads; empty where nothing was read, or chunks have no records.
        reading: the chunk that it is in, None between chunks.
        rows_expected: of the whole stream, once its end and the number are known.
        left_out: conversations that were left out, and why, since the step before.
    """

    dp_rank: int
    sequence_ids: list[Int64Array]
    lengths: list[Int64Array]
    position: RankPosition
    waiting: Waiting | None
    error: HarnessError | None
    stream: str
    reading: int | None
    rows_expected: int | None
    left_out: dict[str, int] = field(default_factory=dict)
