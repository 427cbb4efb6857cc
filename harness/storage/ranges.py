"""Bytes of a file by range: on a disk, or in object storage with few requests."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from harness.errors import FormatError
from harness.storage.bucket import ObjectStore
from harness.storage.uris import ObjectPath

# The first request reads this much of the end of a remote file: most footers fit.
_TAIL_BYTES = 1 << 16


class LocalSource:
    """A file on a disk, of `num_bytes`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self._descriptor).st_size

    def read_at(self, start: int, num_bytes: int) -> bytes:
        """Read these bytes; fewer if the file ends before."""
        return os.pread(self._descriptor, num_bytes, start)

    def fetch(self, start: int, end: int) -> None:
        """Announce that this range is about to be read in pieces. A disk needs no such hint."""

    def release(self) -> None:
        """Drop the bytes of `fetch`."""

    def for_arrow(self) -> Any:
        """Return the argument for `pyarrow.parquet.ParquetFile`."""
        return self._path

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class RemoteSource(io.RawIOBase):
    """An object with the methods of `LocalSource`, which pyarrow reads as a Python file.

    Bytes that `fetch` got are read from memory.
    """

    def __init__(self, place: ObjectPath) -> None:
        self._place = place
        self._store = ObjectStore(place)
        self.num_bytes = self._store.find_stamp(place).num_bytes
        self._position = 0
        self._window_start, self._window = 0, b""
        self.fetch(max(0, self.num_bytes - _TAIL_BYTES), self.num_bytes)

    def read_at(self, start: int, num_bytes: int) -> bytes:
        num_bytes = max(0, min(num_bytes, self.num_bytes - start))
        offset = start - self._window_start
        if offset >= 0 and offset + num_bytes <= len(self._window):
            return self._window[offset : offset + num_bytes]
        return self._store.read(self._place, start, num_bytes) if num_bytes else b""

    def fetch(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.num_bytes:
            raise FormatError(f"bytes {start:,} to {end:,} lie outside the file of {self.num_bytes:,}")
        if start < self._window_start or end > self._window_start + len(self._window):
            self._window = b""
            self._window = self._store.read(self._place, start, end - start)
            self._window_start = start

    def release(self) -> None:
        self._window = b""

    def for_arrow(self) -> Any:
        return self

    def read(self, size: int = -1) -> bytes:
        data = self.read_at(self._position, self.num_bytes if size is None or size < 0 else size)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self.num_bytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


ByteSource = LocalSource | RemoteSource


def open_source(place: Path | ObjectPath) -> ByteSource:
    """Open a file for ranged reads; raises OSError or FormatError."""
    return RemoteSource(place) if isinstance(place, ObjectPath) else LocalSource(place)
