"""Plain numeric `.npy` files: validated headers, memory maps, and files that grow while they are written."""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError, os_errors_as
from harness.storage.files import OutputFile

_MAX_HEADER_BYTES = 4096
_HEADER = re.compile(
    rb"\{'descr': '([<>|](?:[iu][1248]|f[248]|b1|O8?))', 'fortran_order': (True|False), "
    rb"'shape': \(((?: *\d{1,19}L?,?)*)\), *\} *\n?"
)
# Written headers have this size for any shape, so that the shape can be filled in at the end.
_HEADER_BYTES = 128


def read_npy_header(path: Path, file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, Fortran order and dtype of an open `.npy` file; leave the file at its first data byte."""
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(file.read(8))
    if width is None:
        raise FormatError("not a .npy file of version 1 or 2", where=str(path))
    num_bytes = int.from_bytes(file.read(width), "little")
    text = file.read(num_bytes) if num_bytes <= _MAX_HEADER_BYTES else b""
    # numpy's own parser evaluates the header as Python and raises many kinds of errors for a damaged one.
    header = _HEADER.fullmatch(text)
    if header is None or len(text) != num_bytes:
        raise FormatError("the .npy header is damaged, or does not describe a plain array", where=str(path))
    descr, order, shape = (group.decode("ascii") for group in header.groups())
    sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
    if max(sizes, default=0) >= 1 << 62:
        raise FormatError(f"the .npy header claims the shape {shape[:60]}", where=str(path))
    return sizes, order == "True", np.dtype(descr)


def map_npy(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """Memory-map a `.npy` file of this dtype and shape (None for one dimension), read-only; FormatError otherwise."""
    with os_errors_as(FormatError, "cannot be read", where=path), path.open("rb") as file:
        if dtype.names and shape is not None:
            header = npy_header(dtype.descr, shape)
            if file.read(len(header)) != header:
                raise FormatError(f"is not an array of {list(shape)} {', '.join(dtype.names)}", where=str(path))
            stored_shape, fortran, stored = shape, False, dtype
        else:
            stored_shape, fortran, stored = read_npy_header(path, file)
        shape = (math.prod(stored_shape),) if shape is None else shape
        if stored != dtype or stored_shape != shape or (fortran and len(shape) > 1):
            what = f"holds {stored} {list(stored_shape)[:4]}, expected {dtype} {list(shape)}"
            raise FormatError(what, where=str(path))
        offset = int(file.tell())
        expected = offset + math.prod(shape) * dtype.itemsize
        num_bytes = int(file.seek(0, 2))
        if num_bytes != expected:
            raise FormatError(f"has {num_bytes:,} bytes, expected {expected:,}", where=str(path))
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # np.memmap is avoided: its subclass costs a microsecond per access, and it pickles by value.
    return np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=offset).reshape(shape)


def npy_header(descr: str | list[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a `.npy` file: 128 bytes for a plain dtype, a multiple of 128 for one with fields."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    num_bytes = -(-(len(text) + 11) // _HEADER_BYTES) * _HEADER_BYTES
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", num_bytes - 10) + text.ljust(num_bytes - 11).encode() + b"\n"


class NpyStream:
    """A `.npy` file that grows row by row: one-dimensional, or two-dimensional with rows of `width` numbers."""

    def __init__(self, file: OutputFile, dtype: np.dtype[Any], *, width: int | None = None) -> None:
        self._num_rows = 0
        self._dtype = dtype.newbyteorder("<")
        self._width = width
        self._file = file
        self._file.write(self._header())

    def write(self, values: npt.NDArray[Any]) -> None:
        """Append complete rows, given as a flat array."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._num_rows += values.shape[0] // (self._width or 1)

    def finish(self) -> None:
        self._file.seek(0)
        self._file.write(self._header())
        self._file.finish()

    def abort(self) -> None:
        self._file.abort()

    def _header(self) -> bytes:
        return npy_header(self._dtype.str, (self._num_rows, *([] if self._width is None else [self._width])))
