"""Local copies of remote files: bounded, least recently used first out, shared by the processes of a machine.

An entry holds files that belong together (those of a shard, or an index) and is named by the hashes that the manifest
lists, so that two addresses of one dataset share it. The holder of its lock downloads it once, checks sizes and
hashes, and renames it into place. An entry that a process has open is locked and is not evicted: open entries can
exceed the bound.

    HARNESS_CACHE        the folder; `$XDG_CACHE_HOME/harness` or `~/.cache/harness` by default
    HARNESS_CACHE_BYTES  its bound, 64 GiB by default
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from harness.errors import ConfigError, FormatError
from harness.storage.files import StoredFile, file_digest, is_open_at

_FOLDER_NAME, _BYTES_NAME = "HARNESS_CACHE", "HARNESS_CACHE_BYTES"
_MAX_BYTES = 64 << 30
_UPLOAD = "upload the dataset again, from a copy in which `harness verify` finds nothing wrong"
_LOCK, _PARTIAL = ".lock", ".partial"

Download = Callable[[StoredFile, Path], None]


class Entry:
    """Local files in `folder`, under the paths that the manifest gives them, that are not evicted until `release`."""

    def __init__(self, folder: Path, descriptor: int = -1) -> None:
        self.folder = folder
        self._descriptor = descriptor

    def release(self) -> None:
        """Allow eviction; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


class LocalCache:
    """The cache of this machine's processes, by the settings above; raises ConfigError for a malformed one."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self.folder = Path(os.environ.get(_FOLDER_NAME) or f"{base}/harness").expanduser()
        text = os.environ.get(_BYTES_NAME, "")
        try:
            self.max_bytes = int(text) if text else _MAX_BYTES
        except ValueError:
            self.max_bytes = -1
        if self.max_bytes < 0:
            raise ConfigError(f"{_BYTES_NAME} is {text!r}", where="environment", fix="use a whole number of bytes")

    def get(self, files: Sequence[StoredFile], download: Download) -> Entry:
        """Return the entry of these files, downloaded if missing; FormatError if others arrive, or the disk refuses."""
        text = "\n".join(f"{stored.path} {stored.num_bytes} {stored.xxh3}" for stored in files)
        name = str(xxhash.xxh3_128_hexdigest(text.encode()))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                # Waits while another process downloads it, which takes bounded time.
                if (shared := self._lock(name, fcntl.LOCK_SH)) is not None:
                    if (self.folder / name).is_dir():
                        os.utime(self.folder / (name + _LOCK))
                        return Entry(self.folder / name, shared)
                    os.close(shared)
                if (own := self._lock(name, fcntl.LOCK_EX, create=True)) is not None:
                    try:
                        if not (self.folder / name).is_dir():
                            self._download(name, own, files, download)
                    finally:
                        os.close(own)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fix = f"free space, or set {_BYTES_NAME} below the size of the disk" if full else "check permissions"
            what = f"the local cache cannot be used: {error.strerror or error}"
            fix = f"{fix}; to use another folder, set {_FOLDER_NAME}"
            raise FormatError(what, where=str(error.filename or self.folder), fix=fix) from error

    def _lock(self, name: str, kind: int, *, create: bool = False) -> int | None:
        """Lock an entry; return its open lock file, or None if there is none, or it is removed or in use."""
        lock = self.folder / (name + _LOCK)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
        except FileNotFoundError:
            return None
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, kind)
            # Eviction removes the lock file: a lock on a removed file protects nothing.
            if is_open_at(lock, descriptor):
                return descriptor
        os.close(descriptor)
        return None

    def _download(self, name: str, descriptor: int, files: Sequence[StoredFile], download: Download) -> None:
        num_bytes = sum(stored.num_bytes for stored in files)
        # Counts from now on, so that two downloads at once do not both take the same space.
        os.pwrite(descriptor, str(num_bytes).encode(), 0)
        self._free_space()
        partial = self.folder / (name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            for stored in files:
                path = partial / stored.path
                path.parent.mkdir(parents=True, exist_ok=True)
                download(stored, path)
                num_bytes, digest = path.stat().st_size, file_digest(path)
                if (num_bytes, digest) != (stored.num_bytes, stored.xxh3):
                    what = f"{stored.path} was copied with the hash {digest} of {num_bytes:,} bytes, expected "
                    raise FormatError(f"{what}{stored.xxh3} of {stored.num_bytes:,}", fix=_UPLOAD)
            partial.rename(self.folder / name)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            # We hold the lock, so no process uses it.
            (self.folder / (name + _LOCK)).unlink(missing_ok=True)
            raise

    def _free_space(self) -> None:
        """Remove the least recently used entries that are not open, until the rest is within the bound."""
        entries = []
        for lock in self.folder.glob(f"*{_LOCK}"):
            with contextlib.suppress(OSError, ValueError):
                entries.append((lock.stat().st_mtime_ns, int(lock.read_text() or "0"), lock.name.removesuffix(_LOCK)))
        total = sum(num_bytes for _, num_bytes, _ in entries)
        for _, num_bytes, name in sorted(entries):
            if total <= self.max_bytes:
                return
            with contextlib.suppress(OSError):
                if (descriptor := self._lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                    try:
                        for end in ("", _PARTIAL):
                            shutil.rmtree(self.folder / (name + end), ignore_errors=True)
                        (self.folder / (name + _LOCK)).unlink(missing_ok=True)
                        total -= num_bytes
                    finally:
                        os.close(descriptor)
