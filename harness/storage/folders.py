"""One interface to a folder of files on a disk or in object storage, for readers and writers of datasets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.errors import FormatError
from harness.storage import bucket
from harness.storage.bucket import REQUEST_BYTES, Entry, LocalCache, UploadFile
from harness.storage.claims import ClaimStore, Lease
from harness.storage.connections import ObjectPath, is_uri
from harness.storage.files import AtomicFile, Marker, StoredFile, file_digest, make_folder, sync_path

_MARKER_BYTES = 1 << 20
# Lease of the writer of a prefix. It remains without an owner and is not listed as a file of the folder.
_LEASE_NAME = "_lease"


def _where(folder: Folder, name: str = "") -> str:
    """Return the full path of a file or of the folder, for error messages."""
    return str(folder.place / name) if name else str(folder.place)


def _write(folder: Folder, name: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a complete file piece by piece and make it durable."""
    file = folder.create_file(name)
    try:
        for piece in pieces:
            file.write(piece)
        file.finish()
    except BaseException:
        file.abort()
        raise
    folder.sync([name])


class LocalFolder:
    """Files in a local folder, named by `/`-separated paths. Picklable. `BucketFolder` has the same methods."""

    where, write = _where, _write

    def __init__(self, path: Path) -> None:
        self.place = path

    @cached_property
    def _root(self) -> Path:
        return self.place.resolve()

    def names(self) -> list[str]:
        """List the names of files and folders directly inside."""
        return [entry.name for entry in os.scandir(self.place)]

    def exists(self, name: str) -> bool:
        return (self.place / name).exists()

    def find_size(self, name: str) -> int:
        """Return a file's size in bytes; raises OSError if it is missing, FormatError for a link out of the folder."""
        path = self.place / name
        num_bytes = path.stat().st_size
        try:
            inside = path.resolve().is_relative_to(self._root)
        except RuntimeError as error:
            raise OSError(str(error)) from None  # a cycle of links
        if not inside:
            raise FormatError("is a link that leaves the dataset's folder", fix="copy the file itself")
        return num_bytes

    def digest(self, name: str) -> str:
        """Return xxh3_64 (hexadecimal) of a file's bytes; raises OSError or FormatError."""
        return file_digest(self.place / name)

    def read(self, name: str, limit: int) -> bytes | None:
        """Read at most `limit` bytes of a small file, or return None if it does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError), (self.place / name).open("rb") as file:
            return file.read(limit)
        return None

    def fetch(self, files: Sequence[StoredFile]) -> Entry:
        """Return an entry with local copies of the files, which remain until it is released."""
        return Entry(self.place)

    def copy(self) -> Path:
        """Return a local folder with the same files: this one, or a copy of a small remote one."""
        return self.place

    @property
    def scratch(self) -> Path:
        """Local folder for a writer's notes; stable across attempts if writing can resume."""
        return self.place

    def make(self) -> bool:
        """Create the folder; return True if it was missing."""
        if self.place.exists() and not self.place.is_dir():
            raise FormatError("the destination is a file, expected a folder", where=self.where(), fix="choose another")
        return make_folder(self.place)

    def create_file(self, name: str) -> AtomicFile:
        """Open a new file, which gets its name when it is finished."""
        path = self.place / name
        if path.parent != self.place:
            make_folder(path.parent)
        return AtomicFile(path)

    def sync(self, names: Sequence[str]) -> None:
        """Make the names of finished files durable."""
        for folder in {(self.place / name).parent for name in names} | {self.place}:
            sync_path(folder)

    def describe(self, names: Sequence[str]) -> tuple[StoredFile, ...]:
        """Return size and hash of finished files."""
        # Hash the bytes on disk, not the bytes passed to `write`.
        paths = ((name, self.place / name) for name in names)
        return tuple(StoredFile(name, path.stat().st_size, file_digest(path)) for name, path in paths)

    def remove(self, name: str, keep: Collection[str] = ()) -> None:
        """Remove a file, or a folder and its contents except the files to keep."""
        path = self.place / name
        if path.is_dir() and not path.is_symlink():
            for entry in list(path.iterdir()):
                self.remove(f"{name}/{entry.name}", keep)
            if not any(path.iterdir()):
                path.rmdir()
        elif name not in keep:
            path.unlink()

    def lock(self, name: str) -> Marker:
        """Return the marker with this name, not yet acquired."""
        return Marker(self.place / name)

    def discard(self, *, empty: bool) -> None:
        """Remove the scratch folder; with `empty`, also the folder itself if it is empty."""
        if empty:
            with suppress(OSError):
                self.place.rmdir()


class BucketFolder:
    """A prefix in object storage, listed once when a name is first needed.

    There are no renames. An upload is invisible until it is complete, and the next writer removes files of an
    interrupted one. Incomplete uploads of a killed process remain invisible, but are billed until a lifecycle rule of
    the bucket removes them. `check`, set by the lease, is called before each change and can prevent it by raising.
    """

    where, write = _where, _write

    def __init__(self, place: ObjectPath) -> None:
        self.place = place
        self.is_staged = False  # write new files to a temporary file first, so that writers can seek
        self.check: Callable[[], None] = lambda: None
        self._listing: dict[str, int] | None = None
        self._uploads: dict[str, UploadFile] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return BucketFolder, (self.place,)

    def _sizes(self) -> dict[str, int]:
        if self._listing is None:
            self._listing = {name: stamp.num_bytes for name, (stamp, _) in bucket.list_below(self.place).items()}
            self._listing.pop(_LEASE_NAME, None)
        return self._listing

    def names(self) -> list[str]:
        return list(dict.fromkeys(name.partition("/")[0] for name in self._sizes()))

    def files(self) -> list[str]:
        """List the names of all objects, at any depth."""
        return list(self._sizes())

    def exists(self, name: str) -> bool:
        return bucket.find_size(self.place / name) is not None

    def find_size(self, name: str) -> int:
        if name not in self._sizes():
            raise FileNotFoundError(2, "No such object")
        return self._sizes()[name]

    def digest(self, name: str) -> str:
        return bucket.object_digest(self.place / name, self.find_size(name))

    def read(self, name: str, limit: int) -> bytes | None:
        if name not in self._sizes():
            return None
        return bucket.read_object(self.place / name, 0, min(limit, self._sizes()[name]))

    def fetch(self, files: Sequence[StoredFile]) -> Entry:
        return LocalCache().get(files, self._download)

    def copy(self) -> Path:
        files = [StoredFile(name, num_bytes, self.digest(name)) for name, num_bytes in sorted(self._sizes().items())]
        if not files:
            raise FormatError("the files do not exist", where=self.where(), fix="check the key")
        return self.fetch(files).folder

    def _download(self, stored: StoredFile, path: Path) -> None:
        with path.open("wb", buffering=0) as copy:
            for block in bucket.read_blocks(self.place / stored.path, stored.num_bytes):
                copy.write(block)

    @property
    def scratch(self) -> Path:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="harness-index-")
        return Path(self._scratch.name)

    def make(self) -> bool:
        return False

    def create_file(self, name: str) -> UploadFile:
        self._listing = None
        self._uploads[name] = UploadFile(self.place / name, self.check, is_staged=self.is_staged)
        return self._uploads[name]

    def upload(self, name: str, path: Path) -> bool:
        """Upload a local file unless S3 already has the same bytes; return True if it was sent."""
        place, num_bytes, sizes = self.place / name, path.stat().st_size, self._sizes()
        may_be_whole = place.scheme == "s3" and sizes.get(name) == num_bytes
        if may_be_whole and bucket.find_stamp(place).version == bucket.etag_of(path):
            return False
        with path.open("rb") as file:
            self.write(name, iter(lambda: file.read(REQUEST_BYTES), b""))
        # Keep the listing instead of requesting it again for every file.
        self._listing = sizes | {name: num_bytes}
        return True

    def sync(self, names: Sequence[str]) -> None:
        """Do nothing: a finished upload is durable."""

    def describe(self, names: Sequence[str]) -> tuple[StoredFile, ...]:
        return tuple(self._uploads[name].describe(name) for name in names)

    def remove(self, name: str, keep: Collection[str] = ()) -> None:
        for file in [one for one in self._sizes() if one == name or one.startswith(f"{name}/")]:
            if file not in keep:
                self.check()
                bucket.delete_object(self.place / file)
                del self._sizes()[file]

    def lock(self, name: str) -> BucketMarker:
        return BucketMarker(self, name)

    def discard(self, *, empty: bool) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()


Folder = LocalFolder | BucketFolder


@dataclass
class BucketMarker:
    """An object that marks a write in progress, with the methods of `Marker`; protected by a lease except in msc://."""

    folder: BucketFolder
    name: str
    was_created: bool = True
    _lease: Lease | None = None
    _acquired: bool = False

    def acquire(self) -> bytes:
        """Take the lease, create the object, and return the note of an interrupted writer. FormatError if held."""
        folder = self.folder
        if folder.place.scheme != "msc":
            self._lease = Lease(ClaimStore(folder.place), _LEASE_NAME)
            self._lease.acquire()
            folder.check, folder._listing = self._lease.check, None
        try:
            left = folder.read(self.name, _MARKER_BYTES)
            self.was_created = left is None
            if left is None:
                folder.write(self.name, ())
        except BaseException:
            self.release(remove=False)
            raise
        self._acquired = True
        return left or b""

    def write(self, data: bytes) -> None:
        self.folder.write(self.name, [data])

    def release(self, *, remove: bool) -> None:
        try:
            if self._acquired and remove:
                self.folder.check()
                bucket.delete_object(self.folder.place / self.name)
        finally:
            self._acquired = False
            if self._lease is not None:
                self._lease.release(remove=True)


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file under a temporary name, sync it, rename it and sync its directory entry."""
    LocalFolder(path.parent).write(path.name, [data] if isinstance(data, bytes) else data)


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder at a path or URI, which may not exist yet. Raises ConfigError for a malformed URI."""
    text = os.fspath(path)
    return BucketFolder(ObjectPath.parse(text)) if is_uri(text) else LocalFolder(Path(text))
