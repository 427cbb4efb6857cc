"""Bounds on the values in a checkpoint's pickles, computed from their opcodes before loading.

The C unpickler allocates as much as an opcode claims. A tuple of two references to a tuple of two references, forty
levels deep, takes 200 bytes, and a year to hash, compare or print. Here the size of a value counts every reference in
full. A benign pickle fills a value before it refers to it, so one pass is enough.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
import zlib
from typing import IO, Any

import torch

# Limits on the number of values, counting every reference in full at each level: always accepted, and in addition per
# byte of the pickle. Metadata of Megatron's checkpoints has 2 to 3 values per byte.
_FREE_VALUES, _VALUES_PER_BYTE = 1 << 20, 64
_MAX_DEPTH = 64
# Size of one file that is unpickled whole; metadata of 405 B parameters on 1,024 ranks takes 0.2 GB.
MAX_PICKLE_BYTES = 1 << 30
# Functions and classes that pickles of `torch.save` call to build tensors and plain values. Torch's own list has more,
# such as `bytearray`, whose argument can be a number of bytes to allocate.
_BUILDERS = re.compile(
    r"collections OrderedDict|torch (Size|device)|torch\._utils _rebuild_(tensor_v[23]|parameter)"
    r"|torch\.serialization _get_layout"
)
# MS-DOS attribute of a folder in the directory of a zip archive.
_IS_FOLDER = 0x10
# Benign pickles use these only for values that contain themselves, or in protocol 0.
_REFUSED = ("POP", "POP_MARK", "DUP", "INST", "OBJ")
_PUT, _GET, _MARK, _LEAF, _NEW, _FILL, _BUILD = range(7)
_KINDS = dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _PUT)
_KINDS |= dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _GET)
_KINDS |= dict.fromkeys(("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"), _FILL)
_KINDS |= dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _NEW)
_KINDS |= {"MARK": _MARK}
# Opcode -> (kind, True if it takes all values after the last mark, number of values that it takes below them).
_EFFECTS: dict[str, tuple[int, bool, int]] = {}
for _opcode in (opcode for opcode in pickletools.opcodes if opcode.name not in _REFUSED):
    _taken = [item for item in _opcode.stack_before if item is not pickletools.markobject]
    _to_mark = pickletools.stackslice in _taken
    _kind = _KINDS.get(_opcode.name, _BUILD if _taken else _LEAF)
    _EFFECTS[_opcode.code] = _kind, _to_mark, len(_taken) - _to_mark - (_kind == _FILL)


class _Value:
    """A value as described by the opcodes so far: its size, depth and name, and whether another value refers to it."""

    __slots__ = ("can_have_state", "depth", "is_used", "name", "size")

    def __init__(self, size: int, depth: int, name: str = "", *, is_used: bool = False) -> None:
        self.size, self.depth, self.name, self.is_used = size, depth, name, is_used
        self.can_have_state = False


def check_archive(file: IO[bytes], *, compare: bool = False) -> None:
    """Check a file of `torch.save`, so that `torch.load` needs memory and time proportional to its size.

    Raises:
        pickle.UnpicklingError: its records claim more bytes than the file has; `check_pickle` refuses its pickle; or,
            with `compare`, a record differs from its checksum, which torch does not check.
    """
    num_bytes = file.seek(0, 2)
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise pickle.UnpicklingError("it was not written by torch.save")
    file.seek(0)
    try:
        reader = torch._C.PyTorchFileReader(file)
        if hasattr(reader, "get_record_size"):
            sizes = [reader.get_record_size(name) for name in reader.get_all_records()]
        else:  # torch before 2.8
            sizes = [record.file_size for record in zipfile.ZipFile(file).infolist()]
        if sum(sizes) > num_bytes:
            raise pickle.UnpicklingError(f"its {len(sizes)} records claim {sum(sizes):,} bytes of {num_bytes:,}")
        if compare:
            file.seek(0)
            archive = zipfile.ZipFile(io.BytesIO(file.read()))
            # Torch reads no data for records marked as folders: their values would be uninitialized memory.
            folders = (one.filename for one in archive.infolist() if one.external_attr & _IS_FOLDER)
            if (name := archive.testzip() or next(folders, None)) is not None:
                raise pickle.UnpicklingError(f"the bytes of {name} differ from their checksum, or it is a folder")
        data = reader.get_record("data.pkl")
    except (RuntimeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise pickle.UnpicklingError(str(error).partition("\n")[0]) from None
    check_pickle(data, _BUILDERS)
    file.seek(0)


def check_pickle(data: bytes, builders: re.Pattern[str] | None = None) -> None:
    """Check that a pickle's values need memory and time proportional to its size, and that it calls only `builders`.

    Raises:
        pickle.UnpicklingError: an opcode claims more than the pickle contains, repeated references make the size of
            values explode, a value is nested too deep, or the pickle changes a value that it did not create.
        ValueError, IndexError, KeyError: it is damaged.
    """
    most = _FREE_VALUES + _VALUES_PER_BYTE * len(data)
    leaf, total = _Value(1, 1, is_used=True), 0
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[Any, _Value] = {}
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.code not in _EFFECTS:
            raise pickle.UnpicklingError(f"it uses the opcode {opcode.name}")
        kind, to_mark, num_below = _EFFECTS[opcode.code]
        if kind == _LEAF:
            if opcode.stack_after:
                stack.append(_checked_leaf(argument) if opcode.code in "cLI\x8a\x8b" else leaf)
        elif kind == _PUT:
            index = len(memo) if argument is None else argument
            if index > len(memo):
                raise pickle.UnpicklingError(f"it memoizes value {index:,} after {len(memo):,}")
            memo[index] = stack[-1]
        elif kind == _GET:
            stack.append(memo[argument])
        elif kind == _MARK:
            marks.append(len(stack))
        elif kind == _NEW:
            stack.append(_Value(1, 1))
        else:
            start = (marks.pop() if to_mark else len(stack)) - num_below
            taken = stack[start:]
            del stack[start:]
            size, depth = 1, 1
            for value in taken:
                value.is_used = True
                size += value.size
                if value.depth >= depth:
                    depth = value.depth + 1
            total += size
            if total > most:
                raise pickle.UnpicklingError(f"its {len(data):,} bytes refer to more than {most:,} values")
            if depth > _MAX_DEPTH:
                raise pickle.UnpicklingError(f"it nests values more than {_MAX_DEPTH} deep")
            if kind == _FILL:
                _fill(stack[-1], size, depth, opcode.name)
            else:
                stack.append(_build(taken, size, depth, opcode.name, builders))


def _checked_leaf(argument: Any) -> _Value:
    """Return a name or a number; refuse long numbers, because each use as a key takes time proportional to length."""
    if isinstance(argument, int) and argument.bit_length() > 64:
        raise pickle.UnpicklingError(f"it contains a number of {argument.bit_length():,} bits")
    return _Value(1, 1, str(argument), is_used=True)


def _fill(target: _Value, size: int, depth: int, opcode: str) -> None:
    """Add items or a state to the value on top, if the pickle created it and nothing refers to it."""
    if target.is_used or (opcode == "BUILD" and not target.can_have_state):
        raise pickle.UnpicklingError(f"it changes {target.name or 'a value that it did not create'} ({opcode})")
    target.size += size
    target.depth = max(target.depth, depth)


def _build(taken: list[_Value], size: int, depth: int, opcode: str, builders: re.Pattern[str] | None) -> _Value:
    made = _Value(size, depth)
    if opcode in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
        name = taken[0].name if opcode == "REDUCE" else ""
        if builders is not None and not builders.fullmatch(name):
            raise pickle.UnpicklingError(f"it calls {name[:80] or 'something'!r}")
        # With arguments, a class may return an existing object, such as a member of an enumeration.
        made.can_have_state = taken[1].size == 1 and (opcode == "NEWOBJ" or name == "collections OrderedDict")
    return made
