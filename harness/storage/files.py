"""Files that are written completely or not at all, lock files of writers, and errors of memory-mapped files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakSet

import xxhash

from harness.errors import FormatError, os_errors_as

TEMPORARY_SUFFIX = ".tmp"
_READ_BYTES = _MARKER_BYTES = 1 << 20
# From <signal.h>: SA_SIGINFO | SA_RESETHAND, and where siginfo_t has the address on 64-bit systems.
_FLAGS, _ADDRESS = 0x4 | 0x80000000, 16


@dataclass(frozen=True)
class StoredFile:
    """One file of a dataset: path relative to the dataset's folder, size in bytes, xxh3_64 hash."""

    path: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Stamp:
    """Size and version: the modification time of a file in nanoseconds, or the ETag (or time) of an object."""

    num_bytes: int
    version: str


class OutputFile(ABC):
    """A file being written, which gets its name in `finish`."""

    _done = False

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""

    def seek(self, position: int) -> None:
        """Move to a position that was already written."""
        raise OSError(errno.ESPIPE, "This file is written front to back")

    @abstractmethod
    def finish(self) -> None:
        """Make the file durable and give it its name."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the file; does nothing after `finish`."""


class AtomicFile(OutputFile):
    """A file on a disk, under a temporary name until `finish`; the next writer of the path replaces leftovers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary_path = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._file: BinaryIO = self.temporary_path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._named(error) from None

    def seek(self, position: int) -> None:
        self._file.seek(position)

    def flush(self) -> None:
        """Make written bytes visible to other readers of the temporary file."""
        self._file.flush()

    def finish(self) -> None:
        """Sync the bytes to disk and rename the file. The directory entry is durable after `sync_path`."""
        if self._done:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.temporary_path.replace(self.path)
        except OSError as error:
            raise self._named(error) from None
        self._done = True

    def _named(self, error: OSError) -> OSError:
        """Add the name of this file to an error if the system call did not provide one."""
        error.filename = error.filename or str(self.path)
        return error

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        # Not reported: the caller already has the error with the cause, and the next writer replaces the file.
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self.temporary_path.unlink(missing_ok=True)


class Marker:
    """A small file that is locked while a writer is active, and remains if the writer dies.

    Only this process holds the lock: a forked child closes its copy of the descriptor, which would otherwise keep the
    lock after this process is killed. The first line of the file names the process, host and time of the last owner.
    The second is a note that the owner wrote; a truncated note reads as empty. After `acquire` was refused, `holder`
    describes the current owner.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holder = ""
        self.was_created = False
        self._descriptor = -1
        self._owner = b""
        _MARKERS.add(self)

    def acquire(self) -> bytes:
        """Create the marker, or take over an unlocked one; return its note. FormatError if another process holds it."""
        while True:
            self.was_created = not self.path.exists()
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except PermissionError:
                self.refuse_if_held()  # another user may hold it
                raise
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                content = os.pread(descriptor, _MARKER_BYTES, 0)
                os.close(descriptor)
                raise self._refused(content) from None
            except OSError:
                pass  # Some network file systems have no locks; users must then avoid concurrent writers.
            # The previous holder may have removed the file between our open and our lock.
            if is_open_at(self.path, descriptor):
                break
            os.close(descriptor)
        self._descriptor = descriptor
        left = _marker_body(os.pread(descriptor, _MARKER_BYTES, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode() + b"\n"
        with suppress(OSError):  # on a full disk only the owner's name is lost
            self._replace(self._owner + left + b"\n")
        return left

    def write(self, data: bytes) -> None:
        """Replace the one-line note for a later writer if this one is killed. On a disk error, the old note remains."""
        assert b"\n" not in data
        self._replace(self._owner + data + b"\n", is_durable=True)

    def check(self) -> None:
        """Do nothing: the kernel keeps the lock while this process lives."""

    def touch(self) -> None:
        """Update the modification time, which shows that the owner is active."""
        os.utime(self.path)

    def read(self) -> bytes:
        """Return the last owner's note without the lock; empty during a write. Raises OSError."""
        return _marker_body(self.path.read_bytes())

    def refuse_if_held(self) -> None:
        """Raise the FormatError of `acquire` if another process holds the marker; requires no write permission."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused(os.pread(descriptor, _MARKER_BYTES, 0)) from None
        except OSError:
            pass
        finally:
            os.close(descriptor)

    def release(self, *, remove: bool) -> None:
        """Unlock the marker; a second call does nothing."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if remove:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def _replace(self, content: bytes, *, is_durable: bool = False) -> None:
        former = os.pread(self._descriptor, _MARKER_BYTES, 0)
        try:
            self._put(content)
            if is_durable:
                os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):  # its blocks are allocated, even if the disk is full
                self._put(former)
            raise

    def _put(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            at += os.pwrite(self._descriptor, content[at:], at)
        # Truncate last, so that a kill in between leaves complete lines.
        os.ftruncate(self._descriptor, len(content))

    def _refused(self, content: bytes) -> FormatError:
        try:
            owner = json.loads(content.partition(b"\n")[0])
            self.holder = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
        except (ValueError, KeyError, TypeError, RecursionError):  # from an earlier version, or being written
            self.holder = "an unknown process"
        return held_error(self.holder, str(self.path))


class PlacingClaim:
    """Exclusive use of files that a writer moves into place at its end, protected by a marker next to them.

    A writer that is killed while it moves files leaves a note in the marker: the files are then unfinished, and the
    next writer replaces them. In that case, and while files are moved, `is_placing` is true. `refuse_existing` raises
    an error if finished files exist that must not be replaced. Without a marker nothing is locked.
    """

    def __init__(self, marker: Marker | None, refuse_existing: Callable[[], None]) -> None:
        self._marker, self._refuse_existing = marker, refuse_existing
        self.is_placing = False

    def enter(self) -> None:
        """Lock the marker, whose folder must exist; raises like `refuse_existing` and `Marker.acquire`."""
        if self._marker is None or not self._marker.path.exists():
            self._refuse_existing()
        if self._marker is None:
            return
        self.is_placing = bool(self._marker.acquire())
        try:
            if not self.is_placing:
                # Check again, because the previous owner may have finished in between.
                self._refuse_existing()
        except BaseException:
            self.release()
            raise

    def place(self) -> None:
        """Record that the files are about to be moved into place."""
        self.is_placing = True
        if self._marker is not None:
            self._marker.write(b"placing")

    def release(self, *, remove: bool = True) -> None:
        """Unlock the marker; `remove` also deletes its note."""
        if self._marker is not None:
            self._marker.release(remove=remove)


def explain_os_errors(where: object) -> AbstractContextManager[None]:
    """Turn system errors of a write, such as a full disk, into FormatErrors that name the location."""
    fix = "fix the cause (space, permissions, quota) and run the same command again"
    return os_errors_as(FormatError, "writing failed", where=where, fix=fix)


def held_error(holder: str, where: str) -> FormatError:
    what = f"another process is writing here: {holder}"
    return FormatError(what, where=where, fix="wait for it, or choose another destination")


def _marker_body(content: bytes) -> bytes:
    owner, _, rest = content.partition(b"\n")
    if b'"since"' not in owner:
        return content  # from an earlier version
    body, end, _ = rest.partition(b"\n")
    return body if end else b""


def _unlock_in_child() -> None:
    for marker in _MARKERS:
        if marker._descriptor >= 0:
            os.close(marker._descriptor)
            marker._descriptor = -1


_MARKERS: WeakSet[Marker] = WeakSet()
os.register_at_fork(after_in_child=_unlock_in_child)


def is_open_at(path: Path, descriptor: int) -> bool:
    """Return True if a path still names the file of an open descriptor."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def make_folder(folder: Path) -> bool:
    """Create a folder and its parents durably; return True if it was missing."""
    if folder.is_dir():
        return False
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_path(folder.parent)
    return True


def sync_path(path: Path) -> None:
    """Sync a file's bytes or a folder's entries to disk; otherwise a power failure can lose a renamed file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync files only
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Sync a file, or a folder with all its contents, to disk."""
    for one in path.rglob("*") if path.is_dir() else ():
        sync_path(one)
    sync_path(path)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts `shard_2` before `shard_10`; unique for every name.

    Directory listings are unordered, and every machine must read `1` and `01` in the same order.
    """
    parts = re.split(r"(\d+)", name)
    # int() accepts every digit that \d matches, including non-ASCII digits.
    key = [(0, int(part), "") if index % 2 else (1, 0, part) for index, part in enumerate(parts)]
    return [*key, (-1, 0, name)]


def file_digest(path: Path) -> str:
    """xxh3_64 (hexadecimal) of a file's bytes; an OSError names the file."""
    total = xxhash.xxh3_64()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                total.update(block)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return str(total.hexdigest())


class _Action(ctypes.Structure):
    """The libc's `struct sigaction`."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def name_bus_errors(*, dies: bool = False) -> None:
    """Print a named error when this process reads a mapped page that is no longer there, and end it with exit code 2.

    Another process cut the file short while it was mapped, or the disk failed: the system then sends SIGBUS, which ends
    a process without a word. Call it once in the main thread of a command; it does nothing except on 64-bit Linux. With
    `dies` it ends by the signal, for a worker whose parent reports how it ended.
    """
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return
    action = _Action(handler=ctypes.cast(_handler(dies), ctypes.c_void_p), flags=_FLAGS)
    ctypes.CDLL(None).sigaction(int(signal.SIGBUS), ctypes.byref(action), None)


@functools.cache  # also so that it lives as long as the process
def _handler(dies: bool) -> Any:
    # C calls this in the middle of the failed read. Running Python here is safe, unlike in handlers of asynchronous
    # signals, because the read is a plain copy that holds no lock. A `signal` handler would only run after the read.
    def explain(_number: int, info: int, _context: int) -> None:
        try:
            error = bus_error_at(ctypes.c_uint64.from_address(info + _ADDRESS).value)
            os.write(2, f"FormatError: {error}\n".encode(errors="replace"))
        finally:
            if not dies:
                os._exit(2)  # an exception cannot be raised from here

    return ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(explain)


def bus_error_at(address: int) -> FormatError:
    """Return the error for an unreadable page at an address of this process."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if not (begin <= address < end and name):
            continue
        if name[0].startswith("/dev/shm/"):
            what = "a page of shared memory cannot be used: /dev/shm is full, or another process removed the file"
            return FormatError(what, where=name[0], fix="free space in /dev/shm; for a container, increase --shm-size")
        missing = f"byte {int(offset, 16) + address - begin:,} is missing"
        what = f"the file was truncated or removed, or its disk failed, while it was read: {missing}"
        fix = "copy the file again (check its disk: dmesg), and run `harness verify` and then the same command again"
        return FormatError(what, where=name[0], fix=fix)
    where = f"address {address:#x} of process {os.getpid()}"
    return FormatError("a memory page cannot be read", where=where, fix="see dmesg")
