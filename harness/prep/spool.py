"""Read the sequences of all shards by number, and divide them among splits; memory does not grow with the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from harness.prep.packing import join
from harness.records import MEDIA_KINDS, Int32Array, Int64Array, Medium, Pack, SequenceView

SEQUENCES, INPUT_IDS, LOSS_MASK = "sequences.bin", "input_ids.bin", "loss_mask.bin"
MEDIA, MEDIA_DATA = "media.bin", "media_data.bin"
# A sequence: offset of its tokens in the shard's files, hash of its conversation, index among the stored sequences of
# the conversation, number of tokens, number of trained tokens.
SEQUENCE = np.dtype([("offset", "<i8"), ("hash", "<u8"), ("part", "<i4"), ("length", "<i4"), ("trained", "<i4")])
# A medium: index of its sequence in the shard, start and number of its tokens, index of its kind, place in the data.
MEDIUM = np.dtype(
    [("sequence", "<i8"), ("start", "<i4"), ("tokens", "<i4"), ("kind", "u1"), ("offset", "<i8"), ("num_bytes", "<i8")]
)


class Spool:
    """Sequences of all shards in order, given each shard's folder, number of sequences and number of tokens."""

    def __init__(self, shards: Iterable[tuple[Path, int, int]]) -> None:
        self._sequences, self._input_ids, self._loss_mask = [], [], []
        self._media, self._media_data = [], []
        # Sequence of each medium, per shard: searching a field of the mapped rows would copy it each time.
        self._with_media: list[Int64Array] = []
        for folder, num_sequences, num_tokens in shards:
            self._sequences.append(_map(folder / SEQUENCES, SEQUENCE, num_sequences))
            self._input_ids.append(_map(folder / INPUT_IDS, np.dtype("<i4"), num_tokens))
            self._loss_mask.append(_map(folder / LOSS_MASK, np.dtype("u1"), num_tokens))
            self._media.append(_map(folder / MEDIA, MEDIUM, (folder / MEDIA).stat().st_size // MEDIUM.itemsize))
            self._with_media.append(self._media[-1]["sequence"].copy())
            self._media_data.append(_map(folder / MEDIA_DATA, np.dtype("u1"), (folder / MEDIA_DATA).stat().st_size))
        self._first: Int64Array = np.cumsum([0, *map(len, self._sequences)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Return the hashes of the conversations, uint64 [conversations], in the order of their first sequences."""
        firsts = (sequences["hash"][sequences["part"] == 0] for sequences in self._sequences)
        return np.concatenate([np.zeros(0, np.uint64), *firsts])

    def conversations(self) -> Int64Array:
        """Return the index of each sequence's conversation, int64 [sequences]; sequences of one are adjacent."""
        firsts = (sequences["part"] == 0 for sequences in self._sequences)
        return np.cumsum(np.concatenate([np.zeros(0, np.bool_), *firsts])) - 1

    def pack(self, sequence_ids: Int64Array) -> Pack:
        """Join sequences end to end in the given order."""
        shards = np.searchsorted(self._first, sequence_ids, side="right") - 1
        sequences = []
        for at, number in zip(shards.tolist(), (sequence_ids - self._first[shards]).tolist(), strict=True):
            offset, _, _, length, _ = self._sequences[at][number].item()
            tokens, data = slice(offset, offset + length), self._media_data[at]
            low, high = np.searchsorted(self._with_media[at], [number, number + 1])
            media = tuple(
                Medium(MEDIA_KINDS[kind], start, count, data[place : place + num_bytes].tobytes())
                for _, start, count, kind, place, num_bytes in self._media[at][low:high].tolist()
            )
            sequences.append(SequenceView(self._input_ids[at][tokens], self._loss_mask[at][tokens], media))
        return join(sequences)

    def column(self, name: str, ids: Int64Array) -> Int32Array:
        """Return `part`, `length` or `trained` of the sequences `ids` (int64 [n], ascending) as int32 [n]."""
        values = np.empty(len(ids), np.int32)
        for at, sequences in enumerate(self._sequences):
            low, high = np.searchsorted(ids, self._first[at : at + 2])
            values[low:high] = sequences[name][ids[low:high] - self._first[at]]
        return values


@dataclass(frozen=True, eq=False)
class Split:
    """Sequences of a spool by `ids` (int64 [sequences], ascending, possibly repeated)."""

    spool: Spool
    ids: Int64Array

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lengths(self) -> Int32Array:
        """Lengths of the sequences in tokens, int32 [sequences]."""
        return self.spool.column("length", self.ids)

    @property
    def num_conversations(self) -> int:
        return int(np.count_nonzero(self.spool.column("part", self.ids) == 0))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_trained_tokens(self) -> int:
        return int(self.spool.column("trained", self.ids).sum(dtype=np.int64))


def divide(
    spool: Spool, shares: Mapping[str, float], *, rest: str, drop_duplicates: bool
) -> tuple[dict[str, Split], int]:
    """Divide conversations among splits by hash; also return the number of conversations dropped as duplicates.

    A conversation stays in its split when others are added or removed, with one exception: a split that would be empty,
    because there are few conversations, takes one from the rest. A split with share 0 is not made; `rest` is the name
    of the split of the remaining conversations, which comes first in the result.
    """
    hashes = spool.hashes()
    # The hash, scaled to 0 to 1, picks the split.
    places = np.searchsorted(np.cumsum(list(shares.values())), hashes.astype(np.float64) / 2.0**64, side="right")
    num_duplicates = 0
    if drop_duplicates:
        is_first = np.zeros(len(hashes), np.bool_)
        is_first[np.unique(hashes, return_index=True)[1]] = True
        places[~is_first] = -1
        num_duplicates = len(hashes) - int(is_first.sum())
    for place, share in enumerate(shares.values()):
        left = np.flatnonzero(places == len(shares))
        if share and len(left) > 1 and not np.any(places == place):
            # Move its copies, too, so that no text is in both splits, unless all that is left are copies.
            moved_there = left[hashes[left] == hashes[left].min()]
            places[moved_there if len(moved_there) < len(left) else moved_there[:1]] = place
    if len(spool) > len(hashes):
        # All sequences of a conversation go to its split.
        places = places[spool.conversations()]
    splits = {rest: Split(spool, np.flatnonzero(places == len(shares)))}
    for place, (name, share) in enumerate(shares.items()):
        if share:
            splits[name] = Split(spool, np.flatnonzero(places == place))
    return splits, num_duplicates


def repeat(split: Split, epochs: npt.NDArray[np.float64], *, seed: int) -> Split:
    """Return a split that repeats each conversation `epochs` times, with all of its sequences.

    `epochs` is float64 [sequences of the spool]; a fractional part is the share of conversations that are repeated once
    more, chosen by their hashes and the seed.
    """
    conversations = split.spool.conversations()[split.ids]
    # The hash is mixed because the splits are chosen by the hash itself.
    mixed = split.spool.hashes() + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    times = np.floor(epochs[split.ids])
    times += mixed[conversations].astype(np.float64) / 2.0**64 < epochs[split.ids] - times
    return Split(split.spool, np.repeat(split.ids, times.astype(np.int64)))


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    # Not np.memmap, which keeps a file descriptor: a process may have 1,024, and there may be 4,096 shards.
    with pa.memory_map(str(path)) as file:
        return np.frombuffer(file.read_buffer(), dtype, count)
