"""Read the sequences of all shards by number, and divide them among splits; memory does not grow with the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.prep.shards import INPUT_IDS, LOSS_MASK, SEQUENCE, SEQUENCES
from harness.records import Int32Array, Int64Array, Pack


class _MappedShard:
    """The memory-mapped files of one shard."""

    def __init__(self, folder: Path, num_sequences: int, num_tokens: int) -> None:
        self.sequences = _map(folder / SEQUENCES, SEQUENCE, num_sequences)
        self.input_ids = _map(folder / INPUT_IDS, np.dtype("<i4"), num_tokens)
        self.loss_mask = _map(folder / LOSS_MASK, np.dtype("u1"), num_tokens)


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


class Spool:
    """Sequences of all shards, numbered in the order of the shards.

    Args:
        shards: folder, number of sequences and number of tokens of each.
    """

    def __init__(self, shards: Iterable[tuple[Path, int, int]]) -> None:
        self._shards = [_MappedShard(*shard) for shard in shards]
        counts = [len(shard.sequences) for shard in self._shards]
        self._first: Int64Array = np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    def hashes(self) -> Iterator[npt.NDArray[np.uint64]]:
        """Yield the hashes of the conversations, uint64 [sequences of the shard], shard by shard."""
        for shard in self._shards:
            yield np.asarray(shard.sequences["hash"])

    def pack(self, sequence_ids: Int64Array) -> Pack:
        """Join sequences end to end in the given order."""
        shards = np.searchsorted(self._first, sequence_ids, side="right") - 1
        ids, masks, lengths = [], [], []
        for at, number in zip(shards.tolist(), (sequence_ids - self._first[shards]).tolist(), strict=True):
            shard = self._shards[at]
            offset, _, length, _ = shard.sequences[number].item()
            ids.append(shard.input_ids[offset : offset + length])
            masks.append(shard.loss_mask[offset : offset + length])
            lengths.append(length)
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
        return Pack(input_ids=np.concatenate(ids), loss_mask=np.concatenate(masks), seq_start_id=starts)

    def column(self, name: str, ids: Int64Array) -> Int32Array:
        """Return `length` or `trained` of the sequences `ids` (int64 [n], ascending) as int32 [n]."""
        values = np.empty(len(ids), np.int32)
        for at, shard in enumerate(self._shards):
            low, high = np.searchsorted(ids, self._first[at : at + 2])
            values[low:high] = shard.sequences[name][ids[low:high] - self._first[at]]
        return values


class Split:
    """Some sequences of a spool.

    Args:
        ids: int64 [sequences], ascending.
    """

    def __init__(self, spool: Spool, ids: Int64Array) -> None:
        self._spool = spool
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @cached_property
    def lengths(self) -> Int32Array:
        """int32 [sequences], in tokens."""
        return self._spool.column("length", self._ids)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_trained_tokens(self) -> int:
        return int(self._spool.column("trained", self._ids).sum(dtype=np.int64))

    def pack(self, numbers: Int64Array) -> Pack:
        """Join sequences of the split, given by their number in it, end to end in the given order."""
        return self._spool.pack(self._ids[numbers])


def divide(
    spool: Spool, shares: Mapping[str, float], *, rest: str, drop_duplicates: bool
) -> tuple[dict[str, Split], int]:
    """Divide sequences among splits by the hashes of their conversations.

    A conversation stays in its split when others are added or removed.

    Args:
        shares: share of the conversations for each split; a split with share 0 is not made.
        rest: name of the split for the remaining conversations, which comes first in the result.
        drop_duplicates: leave out all but the first of several conversations with the same hash.

    Returns:
        the splits, and the number of sequences left out.
    """
    hashes = np.concatenate([np.zeros(0, np.uint64), *spool.hashes()])
    # The hash, scaled to 0 to 1, picks the split.
    places = np.searchsorted(np.cumsum(list(shares.values())), hashes.astype(np.float64) / 2.0**64, side="right")
    num_duplicates = 0
    if drop_duplicates:
        is_first = np.zeros(len(spool), np.bool_)
        is_first[np.unique(hashes, return_index=True)[1]] = True
        places[~is_first] = -1
        num_duplicates = len(spool) - int(is_first.sum())
    splits = {rest: Split(spool, np.flatnonzero(places == len(shares)))}
    for place, (name, share) in enumerate(shares.items()):
        if share:
            splits[name] = Split(spool, np.flatnonzero(places == place))
    return splits, num_duplicates
