"""`binidx`: Megatron's own indexed dataset, with masks and sequence starts beside it. X is the shard's prefix.

    X.bin       int32 tokens of all packs, end to end
    X.idx       Megatron's index: one sequence and one document a pack
    X.loss.bin  uint8, one a token
    X.seq.idx   int64 [packs + 1], where each pack's starts begin in X.seq.bin
    X.seq.bin   int32 [sequences]

`X.bin` and `X.idx` alone are a valid `megatron.core.datasets.indexed_dataset.IndexedDataset`; `harness.indexed` has
the layout of the index.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError
from harness.formats.base import Format, ShardReader, ShardWriter, make_pack
from harness.formats.index import IndexPart, lengths_from_starts
from harness.indexed.index import BIN, IDX, INT32, LOSS_BIN, IndexHeader, read_lengths, with_suffix
from harness.records import Int64Array, Pack
from harness.storage import Folder, natural_key
from harness.storage.files import OutputFile

SEQ_IDX, SEQ_BIN = ".seq.idx", ".seq.bin"
SUFFIXES = (BIN, IDX, LOSS_BIN, SEQ_IDX, SEQ_BIN)


class BinIdxShard(ShardReader):
    def __init__(self, prefix: Path, _pack_size: int | None = None) -> None:
        self._prefix = prefix
        if missing := [suffix for suffix in SUFFIXES if not with_suffix(prefix, suffix).is_file()]:
            what = f"is incomplete: {', '.join(prefix.name + suffix for suffix in missing)} missing"
            fix = "an indexed dataset of packs requires the loss mask and sequence starts; write it again"
            raise FormatError(what, where=str(prefix), fix=fix)
        # Read, not mapped: 28 bytes a pack.
        self._lengths = read_lengths(with_suffix(prefix, IDX))
        self.num_packs = self._lengths.shape[0]
        self._offsets: Int64Array = self._map(SEQ_IDX, np.dtype("<i8"), self.num_packs + 1).copy()
        counts = np.diff(self._offsets)
        if self._offsets[0] != 0 or (counts <= 0).any() or (counts > self._lengths).any():
            raise FormatError("the offsets of sequence starts do not increase from 0", where=f"{prefix}{SEQ_IDX}")
        ends = np.zeros(self.num_packs + 1, np.int64)
        np.cumsum(self._lengths, out=ends[1:])
        num_tokens = int(ends[-1])
        # Indexing a memoryview gives a Python number in half the time of an array.
        self._token_offsets = ends.data
        self._start_offsets = self._offsets.data
        self._tokens = self._map(BIN, np.dtype("<i4"), num_tokens)
        self._mask = self._map(LOSS_BIN, np.dtype(np.uint8), num_tokens)
        self._starts = self._map(SEQ_BIN, np.dtype("<i4"), int(self._offsets[-1]))

    def read_row(self, row: int) -> Pack:
        begin, end = self._token_offsets[row], self._token_offsets[row + 1]
        first, last = self._start_offsets[row], self._start_offsets[row + 1]
        return make_pack(self._tokens[begin:end].copy(), self._mask[begin:end].copy(), self._starts[first:last].copy())

    def contents(self) -> IndexPart:
        where = str(with_suffix(self._prefix, SEQ_BIN))
        lengths = lengths_from_starts(self._lengths.astype(np.int64), self._starts, self._offsets, where=where)
        return IndexPart(np.diff(self._offsets), lengths)

    def where(self, row: int) -> str:
        return f"{self._prefix}.bin, pack {row:,}"

    def _map(self, suffix: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """Map a file of exactly `count` numbers, read-only."""
        with with_suffix(self._prefix, suffix).open("rb") as file:
            num_bytes, expected = os.fstat(file.fileno()).st_size, count * dtype.itemsize
            if num_bytes != expected:
                what = f"has {num_bytes:,} bytes, the index lists {expected:,}"
                raise FormatError(what, where=f"{self._prefix}{suffix}")
            if not count:  # an empty file cannot be mapped
                return np.zeros(0, dtype)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(data, dtype)


class BinIdxWriter(ShardWriter[OutputFile]):
    """Appends to the data files; the indices, 20 bytes a pack, are written at the end."""

    def __init__(self, folder: Folder, name: str, _pack_size: int, _rows_per_group: int) -> None:
        self._folder = folder
        self._name = name
        self._lengths = array("i")
        self._counts = array("i")
        names = [name + suffix for suffix in (BIN, LOSS_BIN, SEQ_BIN)]
        super().__init__(names, map(folder.create_file, names))

    def append(self, pack: Pack) -> None:
        tokens, mask, starts = self._files
        tokens.write(np.ascontiguousarray(pack.input_ids, "<i4").data)
        mask.write(np.ascontiguousarray(pack.loss_mask).data)
        starts.write(np.ascontiguousarray(pack.seq_start_id, "<i4").data)
        self._lengths.append(len(pack))
        self._counts.append(pack.num_sequences)

    def finish(self, metadata: Mapping[str, bytes], /) -> list[str]:
        lengths = np.array(self._lengths, np.int64)
        count = lengths.shape[0]
        ends = np.cumsum(lengths)
        index = self._add(IDX)
        index.write(IndexHeader(INT32, count, count + 1).to_bytes())
        for values, dtype in ((lengths, "<i4"), (4 * (ends - lengths), "<i8"), (np.arange(count + 1), "<i8")):
            index.write(values.astype(dtype).data)
        starts = np.concatenate([[0], np.cumsum(np.array(self._counts, np.int64))])
        self._add(SEQ_IDX).write(starts.astype("<i8").data)
        return super().finish(metadata)

    def _add(self, suffix: str) -> OutputFile:
        self._names.append(self._name + suffix)
        self._files.append(self._folder.create_file(self._names[-1]))
        return self._files[-1]


def find_bare(path: Path) -> list[Path]:
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        prefixes = {name.removesuffix(IDX) for name in names if name.endswith(IDX) and not name.endswith(SEQ_IDX)}
        return [path / name for name in sorted(prefixes, key=natural_key) if name + BIN in names]
    if with_suffix(path, IDX).is_file() and with_suffix(path, BIN).is_file():
        return [path]
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.endswith(suffix) and path.name != suffix and path.is_file():
            return find_bare(path.with_name(path.name.removesuffix(suffix)))
    return []


def is_own(prefix: Path) -> bool:
    """Return whether a prefix has a file that Megatron's own datasets do not have."""
    return any(with_suffix(prefix, suffix).is_file() for suffix in (LOSS_BIN, SEQ_IDX, SEQ_BIN))


FORMAT = Format(
    name="binidx",
    suffixes=(BIN, IDX),
    files_per_shard=3,
    write_shard=BinIdxWriter,
    open_shard=BinIdxShard,
    find_bare=find_bare,
    is_own=is_own,
    shard_files=SUFFIXES,
)
