"""Files that other programs wrote, on a disk or in object storage: find, identify, and read them front to back."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import BinaryIO

import xxhash

from harness.storage.bucket import ObjectStore
from harness.storage.files import Stamp, file_digest
from harness.storage.ranges import RemoteSource
from harness.storage.uris import ObjectPath, Place, is_uri

# Of an object, read ahead: each request costs tens of milliseconds.
_REQUEST_BYTES = 4 << 20


def parse_place(path: str) -> Place:
    """Return the place that a path or URI names; raises ConfigError for a malformed URI."""
    return ObjectPath.parse(path) if is_uri(path) else Path(path)


def stamp_of(place: Place) -> Stamp:
    """Return the stamp of a file; raises OSError or FormatError if it is missing."""
    if isinstance(place, ObjectPath):
        return ObjectStore(place).find_stamp(place)
    stat = place.stat()
    return Stamp(stat.st_size, str(stat.st_mtime_ns))


def digest_of(place: Place, start: int, end: int) -> str:
    """Return xxh3_64 (hexadecimal) of a file's bytes from `start` to `end`."""
    if not isinstance(place, ObjectPath):
        return file_digest(place, start, end)
    total, left = xxhash.xxh3_64(), end - start
    with open_stream(place) as stream:
        stream.seek(start)
        while block := stream.read(min(left, _REQUEST_BYTES)):
            total.update(block)
            left -= len(block)
    return str(total.hexdigest())


def open_stream(place: Place) -> BinaryIO:
    """Open a file for reading from any position; raises OSError or FormatError."""
    if isinstance(place, ObjectPath):
        return io.BufferedReader(RemoteSource(place), _REQUEST_BYTES)
    return place.open("rb")


def list_objects(folder: ObjectPath) -> dict[str, Stamp]:
    """Return the stamps of all objects below a prefix, by their keys below it, with times as versions.

    Raises:
        FormatError: the bucket does not exist, or may not be listed.
    """
    store = ObjectStore(folder)
    stamps = store.list_stamps(folder)
    if not stamps:
        store.check_bucket()
    return stamps


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression that matches whole `/`-separated paths as a glob does: `*`, `**`, `?` and `[...]`."""
    text = ""
    for part in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]/]+\]|[^*?\[]+|\[", pattern):
        if part == "**/":
            text += r"(?:[^/]+/)*"
        elif part in ("*", "**", "?"):
            text += {"*": r"[^/]*", "**": r".*", "?": r"[^/]"}[part]
        elif part.startswith("[") and len(part) > 1:
            inner = part[1:-1].replace("\\", r"\\")
            text += f"[^{inner[1:]}]" if inner[0] == "!" else f"[{inner}]"
        else:
            text += re.escape(part)
    try:
        return re.compile(text, re.DOTALL)
    except re.error:
        return re.compile(re.escape(pattern))


def is_glob(path: str) -> bool:
    """Return whether a path has a wildcard."""
    return any(mark in path for mark in "*?[")
