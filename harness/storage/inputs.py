"""Single files, on a disk or in object storage: find and identify them, and read them by ranges or front to back."""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from harness.errors import FormatError
from harness.storage.bucket import check_bucket, find_stamp, list_below, read_object
from harness.storage.connections import ObjectPath, Place, is_uri
from harness.storage.files import Stamp

# Of an object, read ahead: each request costs tens of milliseconds.
_REQUEST_BYTES = 4 << 20
# Ranges this near to each other are read at once, up to a size that memory is no question of.
_GAP_BYTES, _SPAN_BYTES = 256, 8 << 20
_REQUESTS = 16
NO_MODEL = "the hub has no model of this name"
_HUB_S = 5.0


def parse_place(path: str) -> Place:
    """Return the place that a path or URI names; raises ConfigError for a malformed URI."""
    return ObjectPath.parse(path) if is_uri(path) else Path(path)


def stamp_of(place: Place) -> Stamp:
    """Return the stamp of a file; raises OSError or FormatError if it is missing."""
    if isinstance(place, ObjectPath):
        return find_stamp(place)
    stat = place.stat()
    return Stamp(stat.st_size, str(stat.st_mtime_ns))


def open_stream(place: Place) -> BinaryIO:
    """Open a file for reading from any position; raises OSError or FormatError."""
    if isinstance(place, ObjectPath):
        return io.BufferedReader(RemoteSource(place), _REQUEST_BYTES)
    return place.open("rb")


def list_objects(folder: ObjectPath) -> dict[str, Stamp]:
    """Return the stamps of all objects below a prefix, by their keys below it, with times as versions."""
    stamps = {name: stamp for name, (stamp, _) in list_below(folder).items()}
    if not stamps:
        check_bucket(folder)
    return stamps


def match_objects(pattern: ObjectPath) -> dict[ObjectPath, Stamp]:
    """Return the stamps of the objects whose keys match a glob, as `list_objects` does."""
    parts = pattern.key.split("/")
    plain = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = replace(pattern, key="/".join(parts[:plain]))
    matching = glob_pattern("/".join(parts[plain:]))
    return {root / name: stamp for name, stamp in list_objects(root).items() if matching.fullmatch(name)}


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression that matches whole `/`-separated paths as a glob does: `*`, `**`, `?` and `[...]`."""
    text, known = "", {"**/": r"(?:[^/]+/)*", "*": r"[^/]*", "**": r".*", "?": r"[^/]"}
    for part in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]/]+\]|[^*?\[]+|\[", pattern):
        if part in known:
            text += known[part]
        elif part.startswith("[") and len(part) > 1:
            inner = part[1:-1].replace("\\", r"\\")
            text += f"[^{inner[1:]}]" if inner[0] == "!" else f"[{inner}]"
        else:
            text += re.escape(part)
    try:
        return re.compile(text, re.DOTALL)
    except re.error:
        return re.compile(re.escape(pattern))


class LocalSource:
    """A file on a disk, of `num_bytes`; reading around less than `least_skipped_bytes` takes longer."""

    least_skipped_bytes = _GAP_BYTES

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

    def read_many(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        return [self.read_at(start, end - start) for start, end in ranges]

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
    """An object with the methods of `LocalSource`, a file to pyarrow; bytes that `fetch` got are in memory."""

    least_skipped_bytes = _REQUEST_BYTES

    def __init__(self, place: ObjectPath) -> None:
        self._place = place
        self.num_bytes = find_stamp(place).num_bytes
        self._position = 0
        self._window_start, self._window = 0, b""

    def read_at(self, start: int, num_bytes: int) -> bytes:
        num_bytes = max(0, min(num_bytes, self.num_bytes - start))
        offset = start - self._window_start
        if offset >= 0 and offset + num_bytes <= len(self._window):
            return self._window[offset : offset + num_bytes]
        return read_object(self._place, start, num_bytes) if num_bytes else b""

    def fetch(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.num_bytes:
            raise FormatError(f"bytes {start:,} to {end:,} lie outside the file of {self.num_bytes:,}")
        if start < self._window_start or end > self._window_start + len(self._window):
            self._window = b""
            self._window = read_object(self._place, start, end - start)
            self._window_start = start

    def release(self) -> None:
        self._window = b""

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with ThreadPoolExecutor(min(_REQUESTS, len(ranges)) or 1) as pool:
            return list(pool.map(lambda one: self.read_at(one[0], one[1] - one[0]), ranges))

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

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


ByteSource = LocalSource | RemoteSource


def open_source(place: Path | ObjectPath) -> ByteSource:
    """Open a file for ranged reads; raises OSError or FormatError."""
    return RemoteSource(place) if isinstance(place, ObjectPath) else LocalSource(place)


def read_ranges(source: ByteSource, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Read ranges from start to end, neighbors at once, in the given order; FormatError if the file ends before."""
    spans: list[tuple[int, int]] = []
    span_of = [0] * len(ranges)
    for position in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, end = ranges[position]
        if spans and start - spans[-1][1] <= _GAP_BYTES and end - spans[-1][0] <= _SPAN_BYTES:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
        span_of[position] = len(spans) - 1
    blocks = source.read_many(spans)
    for block, (start, end) in zip(blocks, spans, strict=True):
        if len(block) != end - start:
            raise FormatError(f"the file ends at byte {start + len(block):,}, before byte {end:,}")
    return [
        memoryview(blocks[span])[start - spans[span][0] : end - spans[span][0]]
        for span, (start, end) in zip(span_of, ranges, strict=True)
    ]


def ask_hub(name: str) -> str:
    """Ask the Hugging Face hub once for a model, since its own tools retry for many seconds; return what is wrong.

    That is `NO_MODEL`, or why it cannot be reached; nothing of a mirror that serves files without describing them.
    """
    from huggingface_hub import HfApi, errors

    try:
        # Read by huggingface_hub when it is first imported, which may have been before it was set.
        HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).model_info(name, timeout=_HUB_S)
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return NO_MODEL
    except Exception as error:  # also of the network below it, whose library differs between versions
        response = error.response if isinstance(error, errors.HfHubHTTPError) else None
        if response is None or response.status_code >= 500:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            return f"the hub cannot be reached: {reason[:200]}"
    return ""
