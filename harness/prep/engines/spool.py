"""The sequences of all shards, read by number where they lie: memory does not grow with the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.prep.engines.shard import INPUT_IDS, LOSS_MASK, SEQUENCE, SEQUENCES
from harness.records import Int32Array, Int64Array, Pack


class _Shard:
    def __init__(self, folder: Path, num_sequences: int, num_tokens: int) -> None:
        # An empty file cannot be mapped.
        self.sequences = _mapped(folder / SEQUENCES, SEQUENCE, num_sequences)
        self.input_ids = _mapped(folder / INPUT_IDS, np.dtype("<i4"), num_tokens)
        self.loss_mask = _mapped(folder / LOSS_MASK, np.dtype("u1"), num_tokens)


class Spool:
    """Sequences of shards, numbered through in the order of the shards.

    Args:
        shards: folder, sequences and tokens of each.
    """

    def __init__(self, shards: Iterable[tuple[Path, int, int]]) -> None:
        self._shards = [_Shard(*shard) for shard in shards]
        counts = [len(one.sequences) for one in self._shards]
        self._first: Int64Array = np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    def hashes(self) -> Iterator[npt.NDArray[np.uint64]]:
        """uint64 [sequences of the shard], of the conversations, shard by shard."""
        for shard in self._shards:
            yield np.asarray(shard.sequences["hash"])

    def pack(self, sequence_ids: Int64Array) -> Pack:
        """The sequences end to end in the order given."""
        places = np.searchsorted(self._first, sequence_ids, side="right") - 1
        ids, masks, lengths = [], [], []
        for place, number in zip(places.tolist(), (sequence_ids - self._first[places]).tolist(), strict=True):
            shard = self._shards[place]
            offset, _, length, _ = shard.sequences[number].item()
            ids.append(shard.input_ids[offset : offset + length])
            masks.append(shard.loss_mask[offset : offset + length])
            lengths.append(length)
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
        return Pack(input_ids=np.concatenate(ids), loss_mask=np.concatenate(masks), seq_start_id=starts)

    def column(self, name: str, ids: Int64Array) -> Int32Array:
        """`length` or `trained` of the sequences `ids` (int64 [n], ascending): int32 [n]."""
        found = np.empty(len(ids), np.int32)
        for place, shard in enumerate(self._shards):
            low, high = np.searchsorted(ids, self._first[place : place + 2])
            found[low:high] = shard.sequences[name][ids[low:high] - self._first[place]]
        return found


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
        """Sequences of the split, by number in it, end to end in the order given."""
        return self._spool.pack(self._ids[numbers])


def divide(
    spool: Spool, shares: Mapping[str, float], *, rest: str, drop_duplicates: bool
) -> tuple[dict[str, Split], int]:
    """Divide sequences among splits by the hashes of their conversations.

    Args:
        shares: of the conversations for each split; one whose share is 0 is not made.
        rest: the split of what is left, which comes first.
        drop_duplicates: of conversations with the same hash, leave out all but the first.

    Returns:
        the splits, and how many sequences were left out.
    """
    # The hash as a number from 0 to 1: a conversation stays in its split when others come or go.
    bounds = np.cumsum(list(shares.values()))
    places = np.zeros(len(spool), np.int8)
    begin = 0
    for hashes in spool.hashes():
        found = np.searchsorted(bounds, hashes.astype(np.float64) / 2.0**64, side="right")
        places[begin : begin + len(hashes)] = found
        begin += len(hashes)
    again = np.zeros(len(spool), np.bool_)
    if drop_duplicates:
        again[:] = True
        again[np.unique(np.concatenate([np.zeros(0, np.uint64), *spool.hashes()]), return_index=True)[1]] = False
        places[again] = -1
    splits = {rest: Split(spool, np.flatnonzero(places == len(shares)))}
    for place, (name, share) in enumerate(shares.items()):
        if share:
            splits[name] = Split(spool, np.flatnonzero(places == place))
    return splits, int(again.sum())


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
