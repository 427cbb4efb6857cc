"""`npy`: the legacy format, a pickled list of dicts of Python lists.

Reading does not stream: a file is unpickled whole before its first pack is available, so write shards, and packs are
kept as compact arrays. Writing streams: the pickle is written pack by pack, for any reader that calls
`np.load(path, allow_pickle=True)`.

Unpickling builds nothing but lists, dicts, numbers, strings and plain numpy arrays, and runs no code. It takes two
passes. The first walks the opcodes: it allows only a short list of them and checks every claimed size against the bytes
that are present, because the C unpickler allocates what an opcode claims. The second is the C unpickler with every name
replaced by a builder of ours; numpy's own reconstruction is never called.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError
from harness.formats.base import FIELDS, Format, ShardReader, ShardWriter, find_files
from harness.records import HUNDREDTHS, Pack
from harness.storage import Folder
from harness.storage.arrays import npy_header, read_npy_header
from harness.storage.files import OutputFile

SUFFIX = ".npy"

# A dict of three lists takes at least this many bytes of a pickle beside its tokens.
_ITEM_BYTES = 16
_NUMBERS = frozenset((int, bool, float))
_FIX = "write the dataset again; `harness convert` writes formats that can be streamed"


class NpyShard(ShardReader):
    """One unpickled file, whose packs keep the invariants."""

    def __init__(self, path: Path, _pack_size: int | None = None) -> None:
        self._path = path
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            shape, _, dtype = read_npy_header(path, file)
            if not dtype.hasobject or len(shape) != 1:
                what = f"contains {dtype} {list(shape)[:4]}, expected a pickled list of packed samples"
                raise FormatError(what, where=str(path), fix="open the folder of the dataset, not one of its arrays")
            data = file.read()
        try:
            objects = unpickle_objects(data)
        except FormatError as error:
            raise FormatError(error.what, where=str(path), fix=error.fix) from None
        if len(objects) != shape[0]:
            raise FormatError(f"claims {shape[0]:,} packs but contains {len(objects):,}", where=str(path), fix=_FIX)
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
    if not isinstance(item, dict) or not item.keys() >= set(FIELDS):
        raise FormatError(f"is not a dict of {', '.join(FIELDS)}")
    ids, mask, starts = (_numbers(item[name], name, budget) for name in FIELDS)
    pack = Pack(ids, mask, starts)
    if problem := pack.problem(max_weight=HUNDREDTHS):
        raise FormatError(problem)
    return pack


def _numbers(value: Any, name: str, budget: int) -> Any:
    value = value.value if isinstance(value, _Array) else value
    if not isinstance(value, list | tuple | np.ndarray):
        raise FormatError(f"has {name} of type {type(value).__name__}, expected numbers")
    if len(value) > budget:
        raise FormatError(f"has {len(value):,} {name} entries, more than a file of this size can contain")
    if isinstance(value, np.ndarray):
        return value
    # A list in a list can be shared: ten levels of ten are a hundred bytes here, and ten billion numbers to numpy.
    if not _NUMBERS.issuperset(map(type, value)):
        raise FormatError(f"has {name} that are not plain integers")
    array = np.array(value)
    if array.dtype.kind not in "iufb" or array.ndim != 1:
        raise FormatError(f"has {name} that are not plain integers")
    return array


class NpyWriter(ShardWriter[OutputFile]):
    """Writes one file pack by pack; only the number of packs is filled in at the end."""

    def __init__(self, folder: Folder, name: str, _pack_size: int, _rows_per_group: int) -> None:
        super().__init__([name], [folder.create_file(name)])
        self._num_packs = 0
        self._files[0].write(npy_header("|O", (0,)) + _pickle_head(0))

    def append(self, pack: Pack) -> None:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=3)
        pickler.fast = True  # no memo entries, which would clash between packs
        pickler.dump({name: getattr(pack, name).tolist() for name in FIELDS})
        self._files[0].write(buffer.getvalue()[2:-1] + b"a")  # without PROTO and STOP; APPEND
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


# ---- unpickling


_DAMAGED = "the file is damaged, or contains more than packed samples; load it only with the tool that wrote it"

# Runs of small integers appended to lists, of which nearly all of a file consists.
_INTEGERS = re.compile(rb"(?:K.|M..|J....|\x88|\x89|e|\()*+", re.DOTALL)

# The opcodes that packed samples need, as `pickletools` names them.
_ALLOWED = re.compile(
    r"PROTO|FRAME|MARK|(EMPTY_)?(LIST|DICT|TUPLE)|TUPLE[123]|APPENDS?|SETITEMS?|BININT[12]?|LONG1|BINFLOAT|NONE|NEWTRUE"
    r"|NEWFALSE|POP|DUP|MEMOIZE|(LONG_)?BIN(GET|PUT)|(STACK_)?GLOBAL|REDUCE|BUILD|(SHORT_)?BIN(UNICODE|STRING|BYTES)"
    r"|BINBYTES8|BYTEARRAY8|STOP"
)
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes if _ALLOWED.fullmatch(opcode.name)}
_MAX_LONG = 1 << 72


def check_opcodes(data: bytes) -> None:
    """Walk a pickle's opcodes; raises FormatError for one that packed samples do not need or that claims too much."""
    stream, memoized, name = io.BytesIO(data), 0, ""
    while name != "STOP":
        run = _INTEGERS.match(data, stream.tell())
        assert run is not None
        stream.seek(run.end())
        code = stream.read(1).decode("latin-1")
        if code not in _OPCODES:
            what = f"uses opcode {code!r}, which packed samples do not need" if code else "is truncated"
            raise FormatError(f"the pickle {what}", fix=_DAMAGED)
        name, kind = _OPCODES[code].name, _OPCODES[code].arg
        try:
            # Refuses a length beyond the bytes that are left.
            argument: Any = None if kind is None else kind.reader(stream)
        except ValueError as error:
            raise FormatError(f"the pickle is damaged: {error}", fix=_DAMAGED) from None
        # The C unpickler allocates zeroed memory for the number that a memo claims.
        most = {"LONG1": _MAX_LONG, "LONG_BINPUT": memoized + 1, "FRAME": len(data) - stream.tell()}
        if name in most and argument > most[name]:
            raise FormatError(f"the pickle claims {name} {argument:,}, more than {most[name]:,}", fix=_DAMAGED)
        memoized += name in ("MEMOIZE", "BINPUT", "LONG_BINPUT")


class _Dtype:
    """Replaces numpy's dtype while unpickling: plain numbers only."""

    def __init__(self, text: object, *_flags: object) -> None:
        name = text.decode("ascii", "replace") if isinstance(text, bytes) else text
        if not isinstance(name, str) or not re.fullmatch(r"[<>=|]?(?:[iu][1248]|f[248]|b1|O8?)", name):
            raise FormatError(f"the pickle contains an array of {str(name)[:40]!r}", fix=_DAMAGED)
        self.is_object = "O" in name
        self.dtype = np.dtype("O" if self.is_object else name)

    def __setstate__(self, state: Any) -> None:
        is_plain = isinstance(state, tuple) and len(state) >= 8 and state[2:5] == (None, None, None)
        if not is_plain or state[1] not in ("<", ">", "|", "=", b"<", b">", b"|", b"="):
            raise FormatError("the pickle contains a dtype that is not plain", fix=_DAMAGED)
        if not self.is_object and state[1] in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """Replaces an array while unpickling; `value` is a 1-d array of numbers or, for objects, a list."""

    def __init__(self, value: npt.NDArray[Any] | list[Any] | None = None) -> None:
        self.value = value

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise FormatError("the pickle contains an unknown array state", fix=_DAMAGED)
        _, shape, dtype, _, data = state
        self.value = _build_array(dtype, shape, data)


def _build_array(dtype: object, shape: object, data: object) -> npt.NDArray[Any] | list[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or len(shape) != 1 or type(shape[0]) is not int:
        raise FormatError("the pickle contains an array that is not one-dimensional", fix=_DAMAGED)
    count = shape[0]
    if dtype.is_object:
        if not isinstance(data, list) or len(data) != count:
            raise FormatError(f"the pickle contains an array of {count:,} objects, but not the objects", fix=_DAMAGED)
        return data
    if isinstance(data, str):  # Python 2 pickles bytes as text.
        data = _encode(data, "latin1")
    if not isinstance(data, bytes | bytearray) or len(data) != count * dtype.dtype.itemsize:
        raise FormatError(f"the pickle holds an array of {count:,} {dtype.dtype} with other bytes", fix=_DAMAGED)
    return np.frombuffer(data, dtype.dtype)


class _Name:
    """A global name in a pickle, wrapped because BUILD would set attributes on a bare function or class."""

    __slots__ = ("builder",)

    def __init__(self, builder: Callable[..., Any] | None) -> None:
        self.builder = builder

    def __call__(self, *arguments: object) -> Any:
        if self.builder is None:
            raise FormatError("the pickle calls numpy.ndarray", fix=_DAMAGED)
        return self.builder(*arguments)

    def __setstate__(self, state: object) -> None:
        raise FormatError("the pickle sets the state of a function", fix=_DAMAGED)


def _reconstruct(subtype: object, *_placeholder: object) -> _Array:
    if not isinstance(subtype, _Name) or subtype.builder is not None:
        raise FormatError("the pickle reconstructs something other than an array", fix=_DAMAGED)
    return _Array()


def _frombuffer(data: object, dtype: object, shape: object, *_order: object) -> _Array:
    return _Array(_build_array(dtype, shape, data))


def _scalar(dtype: object, data: object) -> Any:
    return _build_array(dtype, (1,), data)[0].item()


def _encode(text: object, encoding: object) -> bytes:
    # Python 3 writes bytes like this at protocol 2.
    if isinstance(text, str) and encoding == "latin1":
        with suppress(UnicodeEncodeError):
            return text.encode("latin1")
    raise FormatError("the pickle encodes something other than bytes", fix=_DAMAGED)


# None is the array type itself, which is passed on but never called.
_NAMES: dict[tuple[str, str], Callable[..., Any] | None] = {
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}
for _module in ("numpy.core", "numpy._core"):
    _NAMES[(f"{_module}.multiarray", "_reconstruct")] = _reconstruct
    _NAMES[(f"{_module}.multiarray", "scalar")] = _scalar
    _NAMES[(f"{_module}.numeric", "_frombuffer")] = _frombuffer
    _NAMES[(f"{_module}.multiarray", "_frombuffer")] = _frombuffer


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Name:
        if (module, name) not in _NAMES:
            raise FormatError(f"the pickle refers to {f'{module}.{name}'[:80]!r}, which is not allowed", fix=_DAMAGED)
        return _Name(_NAMES[(module, name)])


def unpickle_objects(data: bytes) -> list[Any]:
    """Unpickle the objects of a one-dimensional object array; arrays in them are of `_Array`."""
    check_opcodes(data)
    try:
        # latin1, as numpy loads pickles of Python 2.
        array = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except FormatError:
        raise
    except Exception as error:  # a damaged pickle can raise anything; it must not look like our own mistake
        raise FormatError(f"the pickle is damaged: {type(error).__name__}: {str(error)[:200]}", fix=_DAMAGED) from None
    if isinstance(array, _Array) and isinstance(array.value, list):
        return array.value
    raise FormatError("the pickle is not an array of packed samples", fix=_DAMAGED)


FORMAT = Format(
    name="npy",
    shard_template=f"shard_{{:06d}}{SUFFIX}",
    suffixes=(SUFFIX,),
    packs_per_shard=2048,
    write_shard=NpyWriter,
    open_shard=NpyShard,
    find_bare=find_bare,
    is_own=is_own,
    single_file_suffix=SUFFIX,
)
