"""`virtual`: sequences stored once, and packs that are plans over them. A shard is a folder, of one of two kinds.

One holds the sequences of its packs, which follow one another; a dataset of such shards is a sequence store:

    input_ids.npy           int32  [tokens]          all sequences, end to end
    loss_mask.npy           uint8  [tokens]
    sequence_offsets.npy    int64  [sequences + 1]   where each begins in both
    sequence_checksums.npy  uint64 [sequences]       `sequence_digest` of each
    pack_offsets.npy        int64  [packs + 1]       pack p holds sequences pack_offsets[p] to pack_offsets[p + 1]

The other holds a plan, and no token: its packs are made of the sequences of a store when they are read. It is written
by `virtual_plan`:

    plan.json               the store: its path from the dataset's folder, its hash, its shards
    sequence_ids.npy        int64  [sequences]       numbers of sequences in the store, pack after pack
    pack_offsets.npy        int64  [packs + 1]       where each pack begins in them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError
from harness.formats.base import BareShard, Format, ShardInfo, ShardOptions, ShardReader, ShardWriter, make_pack
from harness.formats.digest import sequence_digest
from harness.records import Int32Array, Int64Array, Pack, UInt8Array
from harness.storage import NpyStream, map_npy, natural_key, read_npy_header, sync_folder

INPUT_IDS, LOSS_MASK = "input_ids.npy", "loss_mask.npy"
SEQUENCE_OFFSETS, SEQUENCE_CHECKSUMS = "sequence_offsets.npy", "sequence_checksums.npy"
PACK_OFFSETS, SEQUENCE_IDS, PLAN = "pack_offsets.npy", "sequence_ids.npy", "plan.json"
NAME = "virtual"
_ARRAYS: dict[str, np.dtype[Any]] = {
    INPUT_IDS: np.dtype(np.int32),
    LOSS_MASK: np.dtype(np.uint8),
    SEQUENCE_OFFSETS: np.dtype(np.int64),
    SEQUENCE_CHECKSUMS: np.dtype(np.uint64),
    PACK_OFFSETS: np.dtype(np.int64),
}


def map_array(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A read-only map of a one-dimensional `.npy` file; FormatError for anything else."""
    try:
        with path.open("rb") as file:
            shape = read_npy_header(path, file)[0]
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path), fix="copy the dataset again") from None
    if len(shape) != 1:
        raise FormatError(f"holds an array of {len(shape)} dimensions, expected 1", where=str(path))
    return map_npy(path, dtype, shape)


def check_offsets(offsets: Int64Array, end: int, *, where: Path) -> None:
    """Raise FormatError unless offsets rise strictly from 0 to `end`."""
    if offsets.shape[0] < 2 or offsets[0] != 0 or offsets[-1] != end or (offsets[1:] <= offsets[:-1]).any():
        raise FormatError(f"the offsets do not rise from 0 to {end:,}", where=str(where), fix="copy the dataset again")


class SequenceShard:
    """The open files of a shard that holds its sequences; mapped, so that processes share the pages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = map_array(path / INPUT_IDS, _ARRAYS[INPUT_IDS])
        self._mask = map_array(path / LOSS_MASK, _ARRAYS[LOSS_MASK])
        offsets = map_array(path / SEQUENCE_OFFSETS, _ARRAYS[SEQUENCE_OFFSETS])
        checksums = map_array(path / SEQUENCE_CHECKSUMS, _ARRAYS[SEQUENCE_CHECKSUMS])
        packs = map_array(path / PACK_OFFSETS, _ARRAYS[PACK_OFFSETS])
        self.num_sequences, self.num_packs = checksums.shape[0], packs.shape[0] - 1
        if not self._ids.shape == self._mask.shape or offsets.shape[0] != self.num_sequences + 1:
            raise FormatError("the arrays do not fit together", where=str(path), fix="copy the dataset again")
        check_offsets(offsets, self._ids.shape[0], where=path / SEQUENCE_OFFSETS)
        check_offsets(packs, self.num_sequences, where=path / PACK_OFFSETS)
        self._starts = offsets
        # Indexing a memoryview gives a Python number in half the time of an array.
        self._offsets, self._checksums, self._packs = offsets.data, checksums.data, packs.data

    def read(self, rows: Sequence[int]) -> list[Pack]:
        return [self.read_row(row) for row in rows]

    def read_row(self, row: int) -> Pack:
        first, last = self._packs[row], self._packs[row + 1]
        begin, end = self._offsets[first], self._offsets[last]
        starts = (self._starts[first:last] - begin).astype(np.int32)
        return make_pack(self._ids[begin:end].copy(), self._mask[begin:end].copy(), starts)

    def read_sequence(self, number: int) -> tuple[Int32Array, UInt8Array]:
        """input_ids and loss_mask of a sequence, as views; FormatError where it is not what was written."""
        begin, end = self._offsets[number], self._offsets[number + 1]
        ids, mask = self._ids[begin:end], self._mask[begin:end]
        if sequence_digest(ids, mask) != self._checksums[number]:
            raise FormatError(
                f"sequence {number:,} does not match its checksum",
                where=str(self._path / INPUT_IDS),
                fix="copy the store again; `harness verify` lists all that is damaged",
            )
        return ids, mask

    def lengths(self) -> tuple[Int64Array, Int32Array]:
        """Sequences of each pack int64 [packs], and lengths of all sequences int32 [sequences]."""
        lengths = np.diff(self._starts)
        if lengths.max() > np.iinfo(np.int32).max:
            raise FormatError(f"a sequence has {int(lengths.max()):,} tokens", where=str(self._path))
        return np.diff(np.asarray(self._packs)), lengths.astype(np.int32)

    def where(self, row: int) -> str:
        return f"{self._path / INPUT_IDS}, pack {row:,}"

    def close(self) -> None:
        """The maps end with their last array."""
        del self._ids, self._mask, self._starts, self._offsets, self._checksums, self._packs


class SequenceShardWriter:
    """Writes a shard that holds its sequences."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_tokens = self._num_sequences = 0
        path.mkdir(exist_ok=True)
        self._streams: list[NpyStream] = []
        try:
            for name, dtype in _ARRAYS.items():
                self._streams.append(NpyStream(path / name, dtype))
            for stream in self._streams[2], self._streams[4]:
                stream.write(np.zeros(1, np.int64))
        except BaseException:
            self.abort()
            raise

    def append(self, pack: Pack) -> None:
        ids, mask, offsets, checksums, packs = self._streams
        ids.write(pack.input_ids)
        mask.write(pack.loss_mask)
        ends = np.append(pack.seq_start_id[1:], len(pack)).astype(np.int64)
        offsets.write(ends + self._num_tokens)
        digests = [sequence_digest(one.input_ids, one.loss_mask) for one in pack.sequences()]
        checksums.write(np.array(digests, np.uint64))
        self._num_tokens += len(pack)
        self._num_sequences += pack.num_sequences
        packs.write(np.array([self._num_sequences], np.int64))

    def finish(self, _metadata: Mapping[str, bytes]) -> list[Path]:
        for stream in self._streams:
            stream.finish()
        sync_folder(self._path)
        return [stream.path for stream in self._streams]

    def abort(self) -> None:
        for stream in self._streams:
            stream.abort()


def shard_name(number: int) -> str:
    return f"shard_{number:06d}"


def open_shard(info: ShardInfo) -> ShardReader:
    from harness.formats.virtual.plan import PlanShard

    is_plan = (info.path / PLAN).is_file()
    shard = PlanShard(info.path) if is_plan else SequenceShard(info.path)
    if shard.num_packs != info.num_packs:
        raise FormatError(f"holds {shard.num_packs:,} packs, expected {info.num_packs:,}", where=str(info.path))
    return shard


def write_shard(path: Path, _options: ShardOptions) -> ShardWriter:
    return SequenceShardWriter(path)


def find_bare(path: Path) -> list[Path]:
    if _is_shard(path):
        return [path]
    if not path.is_dir():
        return []
    return sorted((one for one in path.iterdir() if _is_shard(one)), key=lambda one: natural_key(one.name))


def _is_shard(path: Path) -> bool:
    return (path / INPUT_IDS).is_file() and (path / SEQUENCE_OFFSETS).is_file()


def inspect_bare(path: Path) -> BareShard:
    shard = SequenceShard(path)
    counts, lengths = shard.lengths()
    return BareShard(path=path, sequence_counts=counts, sequence_lengths=lengths, reader=shard)


FORMAT = Format(
    name=NAME,
    shard_name=shard_name,
    suffixes=(),
    shard_pattern=r"shard_\d+",
    # Stores hold millions of sequences, and few of their shards can be open at a time.
    packs_per_shard=1 << 18,
    files_per_shard=len(_ARRAYS),
    write_shard=write_shard,
    open_shard=open_shard,
    find_bare=find_bare,
    inspect_bare=inspect_bare,
)
