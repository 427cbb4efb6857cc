"""A sequence store: a dataset of shards that hold the sequences of their packs, one after another.

input_ids.npy           int32  [tokens]          all sequences, end to end
loss_mask.npy           uint8  [tokens]
sequence_offsets.npy    int64  [sequences + 1]   where each begins in both
sequence_checksums.npy  uint64 [sequences]       `sequence_digest` of each
pack_offsets.npy        int64  [packs + 1]       pack p holds sequences pack_offsets[p] to pack_offsets[p + 1]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import FormatError
from harness.formats.base import ShardContents, ShardOptions, ShardReader, ShardWriter, make_pack
from harness.formats.digest import sequence_digest
from harness.records import Int32Array, Int64Array, Pack, UInt8Array
from harness.storage import Folder
from harness.storage.arrays import NpyStream, map_npy

NAME = "virtual"
SHARD_TEMPLATE = "shard_{:06d}"
INPUT_IDS, LOSS_MASK = "input_ids.npy", "loss_mask.npy"
SEQUENCE_OFFSETS, SEQUENCE_CHECKSUMS = "sequence_offsets.npy", "sequence_checksums.npy"
PACK_OFFSETS = "pack_offsets.npy"
_ARRAYS: dict[str, np.dtype[Any]] = {
    INPUT_IDS: np.dtype(np.int32),
    LOSS_MASK: np.dtype(np.uint8),
    SEQUENCE_OFFSETS: np.dtype(np.int64),
    SEQUENCE_CHECKSUMS: np.dtype(np.uint64),
    PACK_OFFSETS: np.dtype(np.int64),
}
FILES_PER_SHARD = len(_ARRAYS)


def check_offsets(offsets: Int64Array, end: int, *, where: Path) -> None:
    """Raise FormatError unless offsets rise strictly from 0 to `end`."""
    if offsets.shape[0] < 2 or offsets[0] != 0 or offsets[-1] != end or (offsets[1:] <= offsets[:-1]).any():
        raise FormatError(f"the offsets do not rise from 0 to {end:,}", where=str(where), fix="copy the dataset again")


class SequenceShard(ShardReader):
    """The open files of a shard that holds its sequences; mapped, so that processes share the pages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids, self._mask, offsets, checksums, packs = (
            map_npy(path / name, dtype) for name, dtype in _ARRAYS.items()
        )
        self.num_sequences, self.num_packs = checksums.shape[0], packs.shape[0] - 1
        if not self._ids.shape == self._mask.shape or offsets.shape[0] != self.num_sequences + 1:
            raise FormatError("the arrays do not fit together", where=str(path), fix="copy the dataset again")
        check_offsets(offsets, self._ids.shape[0], where=path / SEQUENCE_OFFSETS)
        check_offsets(packs, self.num_sequences, where=path / PACK_OFFSETS)
        self._starts = offsets
        # Indexing a memoryview gives a Python number in half the time of an array.
        self._offsets, self._checksums, self._packs = offsets.data, checksums.data, packs.data

    def read_row(self, row: int) -> Pack:
        first, last = self._packs[row], self._packs[row + 1]
        begin, end = self._offsets[first], self._offsets[last]
        starts = (self._starts[first:last] - begin).astype(np.int32)
        return make_pack(self._ids[begin:end].copy(), self._mask[begin:end].copy(), starts)

    def read_sequence(self, number: int) -> tuple[Int32Array, UInt8Array]:
        """Return input_ids and loss_mask of a sequence as views; raises FormatError if they were changed."""
        begin, end = self._offsets[number], self._offsets[number + 1]
        ids, mask = self._ids[begin:end], self._mask[begin:end]
        if sequence_digest(ids, mask) != self._checksums[number]:
            raise FormatError(
                f"sequence {number:,} does not match its checksum",
                where=str(self._path / INPUT_IDS),
                fix="copy the store again; `harness verify` lists all damage",
            )
        return ids, mask

    def contents(self) -> ShardContents:
        lengths = np.diff(self._starts)
        if lengths.max() > np.iinfo(np.int32).max:
            raise FormatError(f"a sequence has {int(lengths.max()):,} tokens", where=str(self._path))
        return ShardContents(np.diff(np.asarray(self._packs)), lengths.astype(np.int32))

    def where(self, row: int) -> str:
        return f"{self._path / INPUT_IDS}, pack {row:,}"


class SequenceShardWriter(ShardWriter[NpyStream]):
    """Writes a shard that holds its sequences."""

    def __init__(self, folder: Folder, name: str, _options: ShardOptions) -> None:
        self._num_tokens = self._num_sequences = 0
        super().__init__([f"{name}/{array}" for array in _ARRAYS], self._start(folder, name))

    def _start(self, folder: Folder, name: str) -> Iterator[NpyStream]:
        for array, dtype in _ARRAYS.items():
            stream = NpyStream(folder.create_file(f"{name}/{array}"), dtype)
            if array in (SEQUENCE_OFFSETS, PACK_OFFSETS):
                stream.write(np.zeros(1, dtype))
            yield stream

    def append(self, pack: Pack) -> None:
        ids, mask, offsets, checksums, packs = self._files
        ids.write(pack.input_ids)
        mask.write(pack.loss_mask)
        ends = np.append(pack.seq_start_id[1:], len(pack)).astype(np.int64)
        offsets.write(ends + self._num_tokens)
        digests = [sequence_digest(sequence.input_ids, sequence.loss_mask) for sequence in pack.sequences()]
        checksums.write(np.array(digests, np.uint64))
        self._num_tokens += len(pack)
        self._num_sequences += pack.num_sequences
        packs.write(np.array([self._num_sequences], np.int64))
