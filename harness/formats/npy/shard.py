"""`npy`: the legacy format, a pickled list of dicts of Python lists.

It streams nothing when it is read: a file is unpickled whole before its first pack is there, so write shards. Files
are read with an unpickler that runs no code (`unpickle`). Packs are kept as compact arrays after that. Writing does
stream: the pickle is written pack by pack, for any reader that does `np.load(path, allow_pickle=True)`.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import FormatError
from harness.formats.base import BareShard, Format, ShardInfo, ShardOptions, ShardReader, ShardWriter
from harness.formats.npy.unpickle import array_of, unpickle_objects
from harness.records import Pack
from harness.storage import AtomicFile, natural_key, npy_header, read_npy_header

SUFFIX = ".npy"
FIELDS = ("input_ids", "loss_mask", "seq_start_id")

_FIX = "write the dataset again; `harness convert` makes a format that streams"


class NpyShard:
    """One unpickled file."""

    def __init__(self, path: Path, packs: list[Pack]) -> None:
        self._path = path
        self._packs = packs

    @classmethod
    def load(cls, path: Path) -> NpyShard:
        """Unpickle a file and make packs of it, whose invariants are checked."""
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            shape, _, dtype = read_npy_header(path, file)
            if not dtype.hasobject or len(shape) != 1:
                raise FormatError(
                    f"holds {dtype} {list(shape)[:4]}, expected a pickled list of packed samples", where=str(path)
                )
            # Each object takes at least a byte; a claim beyond that is damage.
            if not 0 <= shape[0] <= num_bytes:
                raise FormatError(f"claims {shape[0]:,} packs in {num_bytes:,} bytes", where=str(path))
            data = file.read()
        try:
            objects = unpickle_objects(data)
        except FormatError as error:
            raise FormatError(error.what, where=str(path), fix=error.fix) from None
        if len(objects) != shape[0]:
            raise FormatError(f"claims {shape[0]:,} packs but holds {len(objects):,}", where=str(path), fix=_FIX)
        # A pickle can name one list many times; what it unfolds to is held against the file's size.
        budget = num_bytes
        packs: list[Pack] = []
        for row, item in enumerate(objects):
            try:
                pack = _pack_of(item, budget)
            except FormatError as error:
                raise FormatError(f"pack {row:,} {error.what}", where=str(path), fix=_FIX) from None
            budget -= len(pack)
            packs.append(pack)
            objects[row] = None  # Python lists take ten times the memory of the arrays they become.
        return cls(path, packs)

    def read(self, rows: Sequence[int]) -> list[Pack]:
        # Copies: callers may write into their packs, and the next reader must not see that.
        return [
            Pack(pack.input_ids.copy(), pack.loss_mask.copy(), pack.seq_start_id.copy())
            for pack in (self._packs[row] for row in rows)
        ]

    def all(self) -> list[Pack]:
        return self._packs

    def read_row(self, row: int) -> Pack:
        return self.read((row,))[0]

    def where(self, row: int) -> str:
        return f"{self._path}, item {row:,}"

    def close(self) -> None:
        self._packs = []


def _pack_of(item: Any, budget: int) -> Pack:
    if not isinstance(item, dict):
        raise FormatError(f"is a {type(item).__name__}, expected a dict of {', '.join(FIELDS)}")
    missing = [name for name in FIELDS if name not in item]
    if missing:
        raise FormatError(f"lacks {', '.join(missing)}")
    ids, mask, starts = (_numbers(item[name], name, budget) for name in FIELDS)
    pack = Pack(ids, mask, starts)
    problem = pack.problem()
    if problem is not None:
        raise FormatError(problem)
    return pack


def _numbers(value: Any, name: str, budget: int) -> Any:
    value = array_of(value)
    if not isinstance(value, list | tuple | np.ndarray):
        raise FormatError(f"has {name} of type {type(value).__name__}, expected numbers")
    if len(value) > budget:
        raise FormatError(f"has {len(value):,} {name} entries, more than a file of this size can hold")
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.array(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise FormatError(f"has {name} that are not plain numbers: {str(error)[:100]}") from None
    if array.dtype.kind not in "iufb" or array.ndim != 1:
        raise FormatError(f"has {name} that are not plain whole numbers")
    return array


class NpyWriter:
    """Writes one file pack by pack; only the number of packs is filled in at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_packs = 0
        self._file = AtomicFile(path)
        self._file.write(npy_header("|O", (0,)))
        self._file.write(_pickle_head(0))

    def append(self, pack: Pack) -> None:
        item = {
            "input_ids": pack.input_ids.tolist(),
            "loss_mask": pack.loss_mask.tolist(),
            "seq_start_id": pack.seq_start_id.tolist(),
        }
        self._file.write(_pickled_item(item) + b"a")  # APPEND
        self._num_packs += 1

    def finish(self, _metadata: Mapping[str, bytes]) -> list[Path]:
        self._file.write(b"tb.")  # TUPLE, BUILD, STOP
        self._file.seek(0)
        self._file.write(npy_header("|O", (self._num_packs,)))
        self._file.write(_pickle_head(self._num_packs))
        self._file.finish()
        return [self._path]

    def abort(self) -> None:
        self._file.abort()


def _pickle_head(num_packs: int) -> bytes:
    """The start of a pickled object array, up to the open list of its objects, of the same size for any number."""
    # The module's name before numpy 2, which every numpy still knows.
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n"
    arguments = b"cnumpy\nndarray\nK\x00\x85C\x01b\x87"
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
    dtype_state = b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb"
    count = b"J" + struct.pack("<i", num_packs)
    return b"\x80\x03" + reconstruct + arguments + b"R" + b"(K\x01" + count + b"\x85" + dtype + dtype_state + b"\x89]"


def _pickled_item(item: dict[str, list[int]]) -> bytes:
    """The opcodes that build one dict, without memo entries, which would clash between items."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)
    pickler.fast = True
    pickler.dump(item)
    return buffer.getvalue()[2:-1]  # without PROTO and STOP


def shard_name(number: int) -> str:
    return f"shard_{number:06d}{SUFFIX}"


def open_shard(info: ShardInfo) -> ShardReader:
    shard = NpyShard.load(info.path)
    if len(shard.all()) != info.num_packs:
        raise FormatError(f"holds {len(shard.all()):,} packs, expected {info.num_packs:,}", where=str(info.path))
    return shard


def write_shard(path: Path, _options: ShardOptions) -> ShardWriter:
    return NpyWriter(path)


def find_bare(path: Path) -> list[Path]:
    if path.is_dir():
        found = [entry for entry in path.iterdir() if entry.name.endswith(SUFFIX) and entry.is_file()]
        return sorted((one for one in found if _is_pickled(one)), key=lambda one: natural_key(one.name))
    return [path] if path.name.endswith(SUFFIX) and path.is_file() else []


def _is_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return read_npy_header(path, file)[2].hasobject
        except FormatError:
            return True  # Damaged: opening it says so.


def inspect_bare(path: Path) -> BareShard:
    shard = NpyShard.load(path)
    counts = np.array([pack.num_sequences for pack in shard.all()], np.int64)
    lengths = [pack.sequence_lengths for pack in shard.all()]
    joined = np.concatenate(lengths) if lengths else np.zeros(0, np.int32)
    return BareShard(path=path, sequence_counts=counts, sequence_lengths=joined, reader=shard)


FORMAT = Format(
    name="npy",
    shard_name=shard_name,
    suffixes=(SUFFIX,),
    shard_pattern=r".*\.npy",
    packs_per_shard=2048,
    files_per_shard=1,
    write_shard=write_shard,
    open_shard=open_shard,
    find_bare=find_bare,
    inspect_bare=inspect_bare,
    single_file_suffix=SUFFIX,
)
