"""`npy`: the legacy format, a pickled list of dicts of Python lists.

Reading does not stream: a file is unpickled whole before its first pack is available, so write shards. The unpickler
runs no code (`unpickle`), and packs are kept as compact arrays. Writing streams: the pickle is written pack by pack,
for any reader that calls `np.load(path, allow_pickle=True)`.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import FormatError
from harness.formats.base import FIELDS, Format, ShardOptions, ShardReader, ShardWriter, find_files
from harness.formats.npy.unpickle import array_of, unpickle_objects
from harness.records import Pack
from harness.storage import Folder
from harness.storage.arrays import npy_header, read_npy_header
from harness.storage.files import OutputFile

__all__ = ["FORMAT"]

SUFFIX = ".npy"

# A dict of three lists takes at least this many bytes of a pickle beside its tokens.
_ITEM_BYTES = 16
_NUMBERS = frozenset((int, bool, float))
_FIX = "write the dataset again; `harness convert` makes a format that streams"


class NpyShard(ShardReader):
    """One unpickled file, whose packs keep the invariants."""

    def __init__(self, path: Path, _pack_size: int | None = None) -> None:
        self._path = path
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            shape, _, dtype = read_npy_header(path, file)
            if not dtype.hasobject or len(shape) != 1:
                what = f"holds {dtype} {list(shape)[:4]}, expected a pickled list of packed samples"
                raise FormatError(what, where=str(path), fix="name the folder of a dataset, not one of its arrays")
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
        # A pickle can name one list many times; the size that it expands to is bounded by the file's.
        budget = num_bytes
        self._packs: list[Pack] = []
        for row, item in enumerate(objects):
            try:
                pack = _pack_of(item, budget)
            except FormatError as error:
                raise FormatError(f"pack {row:,} {error.what}", where=str(path), fix=_FIX) from None
            budget -= len(pack) + _ITEM_BYTES
            self._packs.append(pack)
            objects[row] = None  # Python lists take ten times the memory of the arrays they become.
        self.num_packs = len(self._packs)

    def read_row(self, row: int) -> Pack:
        pack = self._packs[row]
        # Copies: callers may write into their packs, and the next reader must not see that.
        return Pack(pack.input_ids.copy(), pack.loss_mask.copy(), pack.seq_start_id.copy())

    def where(self, row: int) -> str:
        return f"{self._path}, item {row:,}"


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
    # A list in a list can be shared: ten levels of ten are a hundred bytes here, and ten billion numbers to numpy.
    if not _NUMBERS.issuperset(map(type, value)):
        raise FormatError(f"has {name} that are not plain whole numbers")
    try:
        array = np.array(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise FormatError(f"has {name} that are not plain numbers: {str(error)[:100]}") from None
    if array.dtype.kind not in "iufb" or array.ndim != 1:
        raise FormatError(f"has {name} that are not plain whole numbers")
    return array


class NpyWriter(ShardWriter[OutputFile]):
    """Writes one file pack by pack; only the number of packs is filled in at the end."""

    def __init__(self, folder: Folder, name: str, _options: ShardOptions) -> None:
        super().__init__([name], [folder.create_file(name)])
        self._num_packs = 0
        self._files[0].write(npy_header("|O", (0,)) + _pickle_head(0))

    def append(self, pack: Pack) -> None:
        item = {name: getattr(pack, name).tolist() for name in FIELDS}
        self._files[0].write(_pickled_item(item) + b"a")  # APPEND
        self._num_packs += 1

    def finish(self, metadata: Mapping[str, bytes], /) -> list[str]:
        self._files[0].write(b"tb.")  # TUPLE, BUILD, STOP
        self._files[0].seek(0)
        self._files[0].write(npy_header("|O", (self._num_packs,)) + _pickle_head(self._num_packs))
        return super().finish(metadata)


def _pickle_head(num_packs: int) -> bytes:
    """Start a pickled object array, up to the open list of its objects; the size is the same for any number."""
    # The module's name before numpy 2, which every numpy still knows.
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n"
    arguments = b"cnumpy\nndarray\nK\x00\x85C\x01b\x87"
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
    dtype_state = b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb"
    count = b"J" + struct.pack("<i", num_packs)
    return b"\x80\x03" + reconstruct + arguments + b"R" + b"(K\x01" + count + b"\x85" + dtype + dtype_state + b"\x89]"


def _pickled_item(item: dict[str, list[int]]) -> bytes:
    """Pickle one dict to bare opcodes, without memo entries, which would clash between items."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)
    pickler.fast = True
    pickler.dump(item)
    return buffer.getvalue()[2:-1]  # without PROTO and STOP


def find_bare(path: Path) -> list[Path]:
    found = find_files(path, (SUFFIX,))
    return [file for file in found if _is_pickled(file)] if path.is_dir() else found


def _is_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return read_npy_header(path, file)[2].hasobject
        except FormatError:
            return True  # Damaged: opening it reports that.


def is_own(path: Path) -> bool:
    """Return whether a pickle begins as `NpyWriter` begins it; numpy's own keeps names in a memo."""
    head = _pickle_head(0)
    count = head.index(b"J\0\0\0\0\x85") + 1
    with path.open("rb") as file:
        read_npy_header(path, file)
        found = file.read(len(head))
    return found[:count] + head[count : count + 4] + found[count + 4 :] == head


FORMAT = Format(
    name="npy",
    shard_template=f"shard_{{:06d}}{SUFFIX}",
    suffixes=(SUFFIX,),
    shard_pattern=r".*\.npy",
    packs_per_shard=2048,
    files_per_shard=1,
    write_shard=NpyWriter,
    open_shard=NpyShard,
    find_bare=find_bare,
    is_own=is_own,
    single_file_suffix=SUFFIX,
)
