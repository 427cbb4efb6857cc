"""Packing sequences as they come, where nobody knows yet which will follow: best fit over a few open packs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from harness.prep.packing.plan import MIN_SEQUENCE_TOKENS
from harness.records import Pack, SequenceView

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False, slots=True)
class Member(Generic[Key]):
    """A sequence on its way into a pack.

    Attributes:
        key: where it came from.
        size: what it takes of a pack: its stored tokens, or more where it is padded for training.
    """

    key: Key
    sequence: SequenceView
    size: int


class StreamPacker(Generic[Key]):
    """Puts each sequence where it leaves the least room; at most one pack comes out for each that goes in.

    Where a sequence fits nowhere a new pack is opened, and with more than `max_open` the oldest leaves. (Letting the
    fullest leave packs lognormal lengths of median 400 into 4,096 by 0.1 percent better, but keeps single sequences
    back for ten times as long: thousands of others.)

    Args:
        pack_size: most that the sizes of a pack's members sum up to.
        max_open: packs that wait for more at one time.
    """

    def __init__(self, pack_size: int, *, max_open: int) -> None:
        self._pack_size = pack_size
        self._max_open = max_open
        self._open: list[list[Member[Key]]] = []
        self._free: list[int] = []

    @property
    def open_keys(self) -> list[list[Key]]:
        """The members of every open pack, the oldest pack first."""
        return [[member.key for member in members] for members in self._open]

    def add(self, member: Member[Key]) -> list[Member[Key]] | None:
        """Place a member of at most `pack_size`; gives the members of a pack that is full or has to leave."""
        fitting = [(free, place) for place, free in enumerate(self._free) if free >= member.size]
        place = min(fitting)[1] if fitting else self._begin()
        self._put(place, member)
        if self._free[place] < MIN_SEQUENCE_TOKENS:
            return self._take(place)
        return self._take(0) if not fitting and len(self._open) > self._max_open else None

    def flush(self) -> list[Member[Key]] | None:
        """The oldest open pack, once nothing more comes; None when all are out."""
        return self._take(0) if self._open else None

    def restore(self, packs: Iterable[Sequence[Member[Key]]]) -> None:
        """Open packs as `open_keys` told of them; one that is too large by today's sizes becomes several."""
        for members in packs:
            place = self._begin()
            for member in members:
                if self._free[place] < member.size:
                    place = self._begin()
                self._put(place, member)

    def _begin(self) -> int:
        self._open.append([])
        self._free.append(self._pack_size)
        return len(self._open) - 1

    def _put(self, place: int, member: Member[Key]) -> None:
        self._open[place].append(member)
        self._free[place] -= member.size

    def _take(self, place: int) -> list[Member[Key]]:
        self._free.pop(place)
        return self._open.pop(place)


def pack_of(members: Sequence[Member[Key]]) -> Pack:
    """The members end to end."""
    lengths = np.array([len(member.sequence) for member in members], np.int64)
    return Pack(
        np.concatenate([member.sequence.input_ids for member in members]),
        np.concatenate([member.sequence.loss_mask for member in members]),
        np.cumsum(lengths) - lengths,
    )
