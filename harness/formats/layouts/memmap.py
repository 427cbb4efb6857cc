"""`memmap`: a folder of plain arrays a shard, one padded row a pack.

    input_ids.npy    int32  [packs, pack_size]
    loss_mask.npy    uint8  [packs, pack_size]
    packed_len.npy   uint32 [packs]              tokens of each pack; the rest of its row is padding
    seq_offsets.npy  uint32 [packs + 1]          where each pack's starts begin in seq_starts
    seq_starts.npy   uint32 [sequences]
    manifest.json    counts, for readers of this folder alone

Arrays are mapped and rows are copied out of the maps: measured, half the time of `pread`. A mapped file that is cut
short while it is open ends the process (SIGBUS); writers of this package never change a file in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from harness.errors import FormatError
from harness.formats.base import Format, ShardReader, ShardWriter, find_folders, make_pack, start_arrays
from harness.formats.index import IndexPart, lengths_from_starts
from harness.records import Pack
from harness.storage import Folder
from harness.storage.arrays import NpyStream, map_npy, read_npy_header

_ARRAYS: dict[str, type[np.generic]] = {
    "input_ids.npy": np.int32,
    "loss_mask.npy": np.uint8,
    "packed_len.npy": np.uint32,
    "seq_offsets.npy": np.uint32,
    "seq_starts.npy": np.uint32,
}
INPUT_IDS, LOSS_MASK, PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS = _ARRAYS
SHARD_MANIFEST = "manifest.json"
_COUNTS = ("num_bins", "pack_size", "num_tokens", "num_sequences")
_MAX_COUNTS_BYTES = 1 << 16
_BLOCK_ROWS = 1 << 20

_U4, _INT32 = np.dtype(np.uint32), np.dtype(np.int32)


class MemmapShard(ShardReader):
    def __init__(self, path: Path, _pack_size: int | None = None) -> None:
        self._path = path
        if missing := [name for name in _ARRAYS if not (path / name).is_file()]:
            raise FormatError(f"has no {', '.join(missing)}", where=str(path), fix="copy the folder again")
        with (path / INPUT_IDS).open("rb") as file:
            shape = read_npy_header(path / INPUT_IDS, file)[0]
        if len(shape) != 2:
            raise FormatError(f"contains an array of shape {list(shape)[:4]}, expected two dimensions", where=str(path))
        self.num_packs, self.pack_size = shape
        # Indexing a memoryview gives a Python number in half the time of an array.
        self._lengths = map_npy(path / PACKED_LEN, _U4, (self.num_packs,)).data
        self._offsets = map_npy(path / SEQ_OFFSETS, _U4, (self.num_packs + 1,)).data
        self._starts = map_npy(path / SEQ_STARTS, _U4, (int(self._offsets[-1]),))
        self._ids = map_npy(path / INPUT_IDS, np.dtype(np.int32), (self.num_packs, self.pack_size)).reshape(-1)
        self._mask = map_npy(path / LOSS_MASK, np.dtype(np.uint8), (self.num_packs, self.pack_size)).reshape(-1)

    def read_row(self, row: int) -> Pack:
        num_tokens = self._lengths[row]
        starts = self._starts[self._offsets[row] : self._offsets[row + 1]].astype(_INT32)
        if not 0 < num_tokens <= self.pack_size or not starts.shape[0]:
            what = f"claims {num_tokens:,} of {self.pack_size:,} tokens and {starts.shape[0]:,} sequences"
            raise FormatError(what, where=self.where(row))
        begin = row * self.pack_size
        end = begin + num_tokens
        return make_pack(self._ids[begin:end].copy(), self._mask[begin:end].copy(), starts)

    def contents(self) -> IndexPart:
        lengths, offsets = np.asarray(self._lengths), np.asarray(self._offsets)
        # A block at a time, before memory is spent on as many rows as a header claims: a file can claim terabytes and
        # take no space, because what nothing was written to reads as zeros.
        for start in range(0, self.num_packs, _BLOCK_ROWS):
            tokens = lengths[start : start + _BLOCK_ROWS]
            bad = (tokens == 0) | (tokens > self.pack_size)
            if bad.any():
                at = start + int(np.argmax(bad))
                what = f"pack {at:,} claims {lengths[at]:,} of {self.pack_size:,} tokens"
                raise FormatError(what, where=self.where(at))
        offsets = offsets.astype(np.int64)
        where = str(self._path / SEQ_STARTS)
        of_sequences = lengths_from_starts(lengths.astype(np.int64), self._starts, offsets, where=where)
        return IndexPart(np.diff(offsets), of_sequences, pack_size=self.pack_size)

    def where(self, row: int) -> str:
        return f"{self._path / INPUT_IDS}, row {row:,}"


class MemmapWriter(ShardWriter[NpyStream]):
    def __init__(self, folder: Folder, name: str, pack_size: int, _rows_per_group: int) -> None:
        self._folder = folder
        self._pack_size = pack_size
        self._num_starts = self._num_packs = self._num_tokens = 0
        widths = dict.fromkeys((INPUT_IDS, LOSS_MASK), pack_size)
        streams = start_arrays(folder, name, _ARRAYS, widths, zeros=(SEQ_OFFSETS,))
        super().__init__([f"{name}/{file}" for file in (*_ARRAYS, SHARD_MANIFEST)], streams)
        self._ids_row = np.zeros(self._pack_size, np.int32)
        self._mask_row = np.zeros(self._pack_size, np.uint8)

    def append(self, pack: Pack) -> None:
        n = len(pack)
        for row, values in ((self._ids_row, pack.input_ids), (self._mask_row, pack.loss_mask)):
            row[:n] = values
            row[n:] = 0
        self._num_starts += pack.num_sequences
        if self._num_starts >= 1 << 32:
            raise FormatError(f"a shard would contain {self._num_starts:,} sequences", fix="lower data.packs_per_shard")
        ids, mask, lengths, offsets, starts = self._files
        ids.write(self._ids_row)
        mask.write(self._mask_row)
        lengths.write(np.array([n], np.uint32))
        offsets.write(np.array([self._num_starts], np.uint32))
        starts.write(pack.seq_start_id)
        self._num_packs += 1
        self._num_tokens += n

    def finish(self, metadata: Mapping[str, bytes], /) -> list[str]:
        names = super().finish(metadata)
        values = (self._num_packs, self._pack_size, self._num_tokens, self._num_starts)
        counts = dict(zip(_COUNTS, values, strict=True))
        self._folder.write(names[-1], [json.dumps(counts, indent=1).encode() + b"\n"])
        return names


def is_own(path: Path) -> bool:
    """Return whether a folder has arrays of this layout, and beside them no manifest of another tool."""
    if not any((path / name).is_file() for name in (PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS)):
        return False
    try:
        with (path / SHARD_MANIFEST).open("rb") as file:
            counts = json.loads(file.read(_MAX_COUNTS_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return True  # A damaged file is more likely ours, because of the shard's name.
    return isinstance(counts, dict) and counts.keys() == set(_COUNTS)


FORMAT = Format(
    name="memmap",
    files_per_shard=5,
    write_shard=MemmapWriter,
    open_shard=MemmapShard,
    find_bare=partial(find_folders, names=(INPUT_IDS, PACKED_LEN)),
    is_own=is_own,
)
