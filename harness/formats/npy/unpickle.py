"""Unpickling that builds nothing but lists, dicts, numbers, strings and plain numpy arrays, and runs no code.

Two passes. The first walks the opcodes: it allows only a short list of them and checks every claimed size against the
bytes that are present, because the C unpickler allocates what an opcode claims. The second is the C unpickler with
every name replaced by a builder of ours; numpy's own reconstruction is never called.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError

_FIX = "the file is damaged, or holds more than packed samples: load it only with the tool that wrote it"

# Runs of small integers appended to lists, of which nearly all of a file consists.
_INTEGERS = re.compile(rb"(?:K.|M..|J....|\x88|\x89|e|\()*+", re.DOTALL)

# The opcodes that packed samples need, besides GLOBAL and STOP, as `pickletools` names them.
_ALLOWED = re.compile(
    r"PROTO|FRAME|MARK|(EMPTY_)?(LIST|DICT|TUPLE)|TUPLE[123]|APPENDS?|SETITEMS?|BININT[12]?|LONG1|BINFLOAT|NONE|NEWTRUE"
    r"|NEWFALSE|POP|DUP|MEMOIZE|(LONG_)?BIN(GET|PUT)|STACK_GLOBAL|REDUCE|BUILD|(SHORT_)?BIN(UNICODE|STRING|BYTES)"
    r"|BINBYTES8|BYTEARRAY8"
)
# Bytes of the length that an argument of variable size starts with.
_LENGTH_BYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_LENGTH_BYTES |= {pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}
# Opcode -> bytes of its fixed argument, and opcode -> bytes of the length field of a variable one.
_FIXED: dict[bytes, int] = {}
_COUNTED: dict[bytes, int] = {}
for _opcode in (opcode for opcode in pickletools.opcodes if _ALLOWED.fullmatch(opcode.name)):
    _num_bytes = 0 if _opcode.arg is None else _opcode.arg.n
    if _num_bytes >= 0:
        _FIXED[_opcode.code.encode("latin1")] = _num_bytes
    else:
        _COUNTED[_opcode.code.encode("latin1")] = _LENGTH_BYTES[_num_bytes]
_MAX_NAME_BYTES = 256
_MAX_LONG_BYTES = 9


def check_opcodes(data: bytes) -> None:
    """Walk a pickle's opcodes; raises FormatError for one that packed samples do not need or that claims too much."""
    view = memoryview(data)
    position, end, memoized = 0, len(view), 0
    while True:
        run = _INTEGERS.match(view, position)
        assert run is not None
        position = run.end()
        if position >= end:
            raise FormatError("the pickle is cut short", fix=_FIX)
        opcode = bytes(view[position : position + 1])
        position += 1
        if opcode == b".":
            return
        if opcode == b"c":
            position = _skip_names(view, position)
        elif opcode in _COUNTED:
            width = _COUNTED[opcode]
            length = int.from_bytes(view[position : position + width], "little")
            position += width
            if length > end - position:
                raise FormatError(f"the pickle claims {length:,} bytes where {end - position:,} are left", fix=_FIX)
            if opcode == b"\x8a" and length > _MAX_LONG_BYTES:
                raise FormatError(f"the pickle holds a number of {length} bytes", fix=_FIX)
            position += length
        elif opcode in _FIXED:
            width = _FIXED[opcode]
            if width > end - position:
                raise FormatError("the pickle is cut short", fix=_FIX)
            argument = int.from_bytes(view[position : position + width], "little")
            if opcode == b"r" and argument > memoized + 1:
                # The C unpickler allocates zeroed memory for the claimed number.
                raise FormatError(f"the pickle memoizes object {argument:,} after {memoized:,}", fix=_FIX)
            if opcode == b"\x95" and argument > end - position:
                raise FormatError(f"the pickle claims a frame of {argument:,} bytes", fix=_FIX)
            memoized += opcode in (b"\x94", b"q", b"r")
            position += width
        else:
            raise FormatError(f"the pickle uses opcode {opcode!r}, which packed samples do not need", fix=_FIX)


def _skip_names(view: memoryview, position: int) -> int:
    for _ in range(2):
        line = bytes(view[position : position + _MAX_NAME_BYTES])
        length = line.find(b"\n")
        if length < 0:
            raise FormatError("the pickle names something without an end", fix=_FIX)
        position += length + 1
    return position


class _Dtype:
    """Replaces numpy's dtype while unpickling: plain numbers only."""

    def __init__(self, text: object, *_flags: object) -> None:
        name = text.decode("ascii", "replace") if isinstance(text, bytes) else text
        if not isinstance(name, str) or not re.fullmatch(r"[<>=|]?(?:[iu][1248]|f[248]|b1|O8?)", name):
            raise FormatError(f"the pickle holds an array of {str(name)[:40]!r}", fix=_FIX)
        self.is_object = "O" in name
        self.dtype = np.dtype("O" if self.is_object else name)

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 8 or state[2:5] != (None, None, None):
            raise FormatError("the pickle holds a dtype that is not plain", fix=_FIX)
        order = state[1].decode("ascii", "replace") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise FormatError(f"the pickle holds the byte order {str(order)[:10]!r}", fix=_FIX)
        if not self.is_object and order == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """Replaces an array while unpickling; `value` is a 1-d array of numbers or, for objects, a list."""

    def __init__(self) -> None:
        self.value: npt.NDArray[Any] | list[Any] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise FormatError("the pickle holds an array state of another form", fix=_FIX)
        _, shape, dtype, _, data = state
        self.value = _build_array(dtype, shape, data)


def _build_array(dtype: object, shape: object, data: object) -> npt.NDArray[Any] | list[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or len(shape) != 1 or type(shape[0]) is not int:
        raise FormatError("the pickle holds an array that is not one-dimensional", fix=_FIX)
    count = shape[0]
    if dtype.is_object:
        if not isinstance(data, list) or len(data) != count:
            raise FormatError(f"the pickle holds an object array of {count:,} without its {count:,} objects", fix=_FIX)
        return data
    if isinstance(data, str):  # Python 2 pickles bytes as text.
        try:
            data = data.encode("latin1")
        except UnicodeEncodeError:
            data = None
    if not isinstance(data, bytes | bytearray) or len(data) != count * dtype.dtype.itemsize:
        raise FormatError(f"the pickle holds an array of {count:,} {dtype.dtype} with other bytes", fix=_FIX)
    return np.frombuffer(data, dtype.dtype)


class _Name:
    """A global name in a pickle, wrapped because BUILD would set attributes on a bare function or class."""

    __slots__ = ("builder",)

    def __init__(self, builder: Callable[..., Any] | None) -> None:
        self.builder = builder

    def __call__(self, *arguments: object) -> Any:
        if self.builder is None:
            raise FormatError("the pickle calls numpy.ndarray", fix=_FIX)
        return self.builder(*arguments)

    def __setstate__(self, state: object) -> None:
        raise FormatError("the pickle sets the state of a function", fix=_FIX)


def _reconstruct(subtype: object, *_placeholder: object) -> _Array:
    if not isinstance(subtype, _Name) or subtype.builder is not None:
        raise FormatError("the pickle reconstructs something other than an array", fix=_FIX)
    return _Array()


def _frombuffer(data: object, dtype: object, shape: object, *_order: object) -> _Array:
    array = _Array()
    array.value = _build_array(dtype, shape, data)
    return array


def _scalar(dtype: object, data: object) -> Any:
    values = _build_array(dtype, (1,), data)
    if isinstance(values, list):
        raise FormatError("the pickle holds an object scalar", fix=_FIX)
    return values[0].item()


def _encode(text: object, encoding: object) -> bytes:
    # Python 3 writes bytes like this at protocol 2.
    if not isinstance(text, str) or encoding != "latin1":
        raise FormatError("the pickle encodes something other than bytes", fix=_FIX)
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise FormatError("the pickle encodes something other than bytes", fix=_FIX) from None


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
            raise FormatError(f"the pickle asks for {f'{module}.{name}'[:80]!r}, which is refused", fix=_FIX)
        return _Name(_NAMES[(module, name)])

    def persistent_load(self, _identity: object) -> object:
        raise FormatError("the pickle refers to something outside it", fix=_FIX)


def unpickle_objects(data: bytes) -> list[Any]:
    """Unpickle the objects of a one-dimensional object array; arrays of numbers in them are for `array_of`.

    Raises:
        FormatError: the pickle is damaged, refers to anything else, or is something else.
    """
    check_opcodes(data)
    try:
        # latin1, as numpy loads pickles of Python 2.
        array = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except FormatError:
        raise
    except Exception as error:  # a damaged pickle can raise anything; it must not look like our own mistake
        raise FormatError(f"the pickle is damaged: {type(error).__name__}: {str(error)[:200]}", fix=_FIX) from None
    if isinstance(array, _Array) and isinstance(array.value, list):
        return array.value
    raise FormatError("the pickle is not an array of packed samples", fix=_FIX)


def array_of(value: object) -> object:
    """Return the numpy array of an unpickled value that replaces one, or the value itself."""
    return value.value if isinstance(value, _Array) else value
