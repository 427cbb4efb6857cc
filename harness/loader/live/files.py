"""The files of a folder of live chunks: on a file system that all ranks share, or in S3."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from harness.errors import FormatError
from harness.storage import (
    LocalCache,
    Marker,
    ObjectPath,
    StoredFile,
    is_uri,
    join_path,
    make_folder,
    sync_path,
    write_atomically,
)
from harness.storage.bucket import list_below
from harness.storage.claims import ClaimStore, Lease, parse_lease
from harness.storage.files import TEMPORARY_SUFFIX, Stamp

# A listing of a bucket answers for so long what is there; polling ranks would send several requests a look.
_LISTING_S = 1.0


class LocalFiles:
    """Files by name, on a file system.

    Attributes:
        place: the path or URI of the folder.
        look_s: seconds between two looks of a producer that waits for room.
    """

    look_s = 0.2

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)

    def names(self) -> list[str]:
        """List the names as of now; empty where there is no folder. Raises OSError or FormatError."""
        try:
            return os.listdir(self.path)  # noqa: PTH208 - half the time of Path.iterdir, and called every second
        except FileNotFoundError:
            return []

    def exists(self) -> bool:
        return self.path.is_dir()

    def make(self) -> None:
        make_folder(self.path)

    def remove_temporary(self) -> None:
        """Remove what a killed producer left half."""
        for name in self.path.glob(f"chunk_*{TEMPORARY_SUFFIX}"):
            name.unlink(missing_ok=True)

    def find(self, name: str) -> tuple[int, float] | None:
        """Return the bytes of a file, and the seconds since it was written; None if it is missing."""
        try:
            found = (self.path / name).stat()
        except OSError:
            return None
        return found.st_size, max(0.0, time.time() - found.st_mtime)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small file; None if it is missing."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_mark(self, name: str) -> bytes:
        """Return what the last owner of a lock wrote."""
        return Marker(self.path / name).read()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole."""
        write_atomically(self.path / name, data)

    def delete(self, name: str) -> None:
        """Delete a file; a missing one is no error."""
        (self.path / name).unlink(missing_ok=True)

    def lock(self, name: str) -> Marker:
        return Marker(self.path / name)

    def begin_chunk(self, name: str) -> Path:
        """Return the file of this machine to write a chunk into."""
        return self.path / name

    def finish_chunk(self, name: str, path: Path) -> None:
        """Make a chunk that was written to `path` durable; raise FormatError if another writer has made one."""
        sync_path(self.path)

    def drop_chunk(self, name: str, path: Path) -> None:
        """Remove a chunk that was begun and has no record."""
        path.unlink(missing_ok=True)

    def open_chunk(self, name: str, stored: StoredFile | None) -> tuple[Path, object] | None:
        """Return a file of this machine with a chunk, whole, for as long as the object beside it is kept.

        Args:
            stored: the size and hash that it must have, if they are known.

        Returns:
            None if it is missing.
        """
        return self.path / name, None


class BucketFiles:
    """Objects below a prefix, with the methods of `LocalFiles`.

    Chunks are made in a temporary folder, and read from copies in the local cache.
    """

    look_s = _LISTING_S

    def __init__(self, place: ObjectPath) -> None:
        self.place = str(place)
        self._store = ClaimStore(place)
        self._listing: dict[str, tuple[Stamp, float]] = {}
        self._listed_at = -_LISTING_S
        self._chunks: tempfile.TemporaryDirectory[str] | None = None
        self._made = ""

    def names(self) -> list[str]:
        self._listing, self._listed_at = list_below(self._store.place), time.monotonic()
        return list(dict.fromkeys(name.partition("/")[0] for name in self._listing))

    def _listed(self, name: str) -> tuple[Stamp, float] | None:
        if time.monotonic() - self._listed_at >= _LISTING_S:
            self.names()
        return self._listing.get(name)

    def exists(self) -> bool:
        return bool(self.names())

    def make(self) -> None:
        """Do nothing: a bucket has no folders."""

    def remove_temporary(self) -> None:
        """Do nothing: uploads appear whole."""

    def find(self, name: str) -> tuple[int, float] | None:
        if (found := self._listed(name)) is None:
            return None
        return found[0].num_bytes, found[1] + time.monotonic() - self._listed_at

    def read(self, name: str) -> bytes | None:
        found = self._store.get(name) if self._listed(name) is not None else None
        return None if found is None else found[0]

    def read_mark(self, name: str) -> bytes:
        return parse_lease(self.read(name) or b"")[1]

    def write(self, name: str, data: bytes) -> None:
        self._listed_at = -_LISTING_S
        # A producer that has lost its lease must not replace the records of the next one.
        if self._store.put(name, data, only_if="") is None:
            raise conflict(name, self.place)

    def delete(self, name: str) -> None:
        self._listed_at = -_LISTING_S
        self._store.delete(name)

    def lock(self, name: str) -> Lease:
        return Lease(self._store, name)

    def begin_chunk(self, name: str) -> Path:
        if self._chunks is None:
            self._chunks = tempfile.TemporaryDirectory(prefix="harness-live-")
        return Path(self._chunks.name) / name

    def finish_chunk(self, name: str, path: Path) -> None:
        self._listed_at = -_LISTING_S
        if self._store.put(name, path, only_if="") is None:
            raise conflict(name, self.place)
        self._made = name
        path.unlink()

    def drop_chunk(self, name: str, path: Path) -> None:
        path.unlink(missing_ok=True)
        if self._made == name:  # not the chunk of another producer
            self.delete(name)

    def open_chunk(self, name: str, stored: StoredFile | None) -> tuple[Path, object] | None:
        if self._listed(name) is None:
            return None
        if stored is None:
            kept = tempfile.TemporaryDirectory(prefix="harness-live-")
            path = Path(kept.name) / name
            return (path, kept) if self._store.download(name, path) else None
        entry = LocalCache().get([stored], self._download)
        return entry.folder / name, entry

    def _download(self, stored: StoredFile, path: Path) -> None:
        if not self._store.download(stored.path, path):
            raise FormatError(
                "the chunk was deleted", where=join_path(self.place, stored.path), fix="see `harness live status`"
            )


def conflict(name: str, place: str) -> FormatError:
    """Return the error for a file that another writer has made in a folder."""
    fix = "another program writes to this folder; use a separate folder for each"
    return FormatError(f"{name} already exists", where=place, fix=fix)


LiveFiles = LocalFiles | BucketFiles


def open_files(path: str | Path) -> LiveFiles:
    """Return the files at a path or URI; raises ConfigError for msc://."""
    return BucketFiles(ObjectPath.parse(str(path))) if is_uri(str(path)) else LocalFiles(Path(path))
