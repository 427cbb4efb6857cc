"""Objects of a bucket: ranged reads, listings, and uploads that appear completely or not at all.

See `connections` for settings. Every call ends in bounded time, errors name the cause, and no error shows credentials.

The local cache is bounded, evicts the least recently used entries, and is shared by the processes of a machine. An
entry contains files that belong together (a shard, or an index) and is named by their hashes in the manifest, so that
two addresses of one dataset share it. The process that locks an entry downloads it, checks sizes and hashes, and
renames it into place. Entries in use are locked and not evicted, so they can exceed the bound.

    HARNESS_CACHE        folder of the cache; default `$XDG_CACHE_HOME/harness` or `~/.cache/harness`
    HARNESS_CACHE_BYTES  maximum size in bytes; default 64 GiB
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from harness.errors import ConfigError, FormatError
from harness.printing import redact
from harness.storage.connections import TIMEOUT_NAME, MscStore, ObjectPath, connect, load_obstore, s3_endpoint
from harness.storage.files import OutputFile, Stamp, StoredFile, file_digest, is_open_at

# Size of a ranged request and of a part of an upload. Larger reads are split, so that each part has its own time limit.
REQUEST_BYTES = 8 << 20
MISSING_OBJECT = "no such object"
_UPLOADS = 2
_FOLDER_NAME, _BYTES_NAME = "HARNESS_CACHE", "HARNESS_CACHE_BYTES"
_MAX_BYTES = 64 << 30
_UPLOAD = "upload the dataset again, from a copy in which `harness verify` finds nothing wrong"
_LOCK, _PARTIAL = ".lock", ".partial"

Download = Callable[[StoredFile, Path], None]


def find_size(place: ObjectPath) -> int | None:
    """Return the size of an object in bytes, or None if it does not exist."""
    with naming_errors(place), contextlib.suppress(FileNotFoundError):
        return int(connect(place).head(place.key)["size"]) if place.key else None
    return None


def check_bucket(place: ObjectPath) -> None:
    """Raise FormatError if the bucket of a place does not exist or may not be listed."""
    bucket = replace(place, key="")
    with naming_errors(bucket):
        if (error := _list_error(bucket)) is not None and judge(error) is not Verdict.PASSING:
            raise error


def read_object(place: ObjectPath, start: int, num_bytes: int) -> bytes:
    """Read exactly these bytes of an object; raises FormatError if it is shorter."""
    return b"".join(read_blocks(place, num_bytes, start))


def read_blocks(place: ObjectPath, num_bytes: int, start: int = 0) -> Iterator[bytes]:
    """Yield bytes of an object, one request at a time; raises FormatError if it is shorter."""
    for begin in range(start, start + num_bytes, REQUEST_BYTES):
        count = min(REQUEST_BYTES, start + num_bytes - begin)
        with naming_errors(place):
            block = bytes(connect(place).get_range(place.key, start=begin, length=count))
        if len(block) != count:
            fix = "open it again; it was replaced with a shorter one"
            raise FormatError(f"the object ends before byte {begin + count:,}", where=str(place), fix=fix)
        yield block


def object_digest(place: ObjectPath, num_bytes: int) -> str:
    """Return the xxh3_64 hash (hexadecimal) of an object of this size."""
    total = xxhash.xxh3_64()
    for block in read_blocks(place, num_bytes):
        total.update(block)
    return str(total.hexdigest())


def find_stamp(place: ObjectPath) -> Stamp:
    """Return the stamp of an object, with its ETag as version if the store gives one."""
    with naming_errors(place):
        found = connect(place).head(place.key)
    return Stamp(int(found["size"]), str(found["e_tag"] or _time_of(found)).strip('"'))


def delete_object(place: ObjectPath) -> None:
    """Delete an object; a missing one is no error."""
    with naming_errors(place), contextlib.suppress(FileNotFoundError):
        connect(place).delete(place.key)


def open_upload(place: ObjectPath) -> Any:
    """Open a stream for a new object, which exists only once the stream is closed."""
    with naming_errors(place):
        store = connect(place)
        if isinstance(store, MscStore):
            return store.open_writer(place.key)
        return load_obstore().open_writer(store, place.key, buffer_size=REQUEST_BYTES, max_concurrency=_UPLOADS)


def list_below(place: ObjectPath) -> dict[str, tuple[Stamp, float]]:
    """Return the objects below a place by relative key: a stamp with the modification time as version, and the age.

    The age is in seconds, by this machine's clock.
    """
    with naming_errors(place):
        now, found = time.time(), [one for page in connect(place).list(place.key) for one in page]
    start = len(place.key) + 1 if place.key else 0
    below = {str(one["path"])[start:]: one for one in found if len(one["path"]) > start}
    folders: set[str] = set()
    for name in below:
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    # Web consoles and PyArrow create empty objects `x/` for folders, which are listed as `x`.
    return {
        name: (Stamp(int(one["size"]), _time_of(one)), max(0.0, now - one["last_modified"].timestamp()))
        for name, one in below.items()
        if one["size"] or name not in folders
    }


@contextlib.contextmanager
def naming_errors(place: ObjectPath) -> Iterator[None]:
    """Turn errors of a storage client into FormatErrors."""
    try:
        yield
    except (ConfigError, FormatError):
        raise
    except Exception as error:
        raise explain(error, place) from None


def _list_error(place: ObjectPath) -> Exception | None:
    try:
        next(iter(connect(place).list(place.key)), None)
    except Exception as error:
        return error
    return None


def _time_of(found: Any) -> str:
    written = found["last_modified"]
    return str(int(written.timestamp()) * 10**9 + written.microsecond * 1000)


class _PartsDigest:
    """Computes the ETag that S3 gives to an upload: its MD5, or the MD5 of its parts' MD5s and the number of parts."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._part, self._left = _new_md5(), REQUEST_BYTES

    def update(self, data: memoryview) -> None:
        while len(data):
            piece, data = data[: self._left], data[self._left :]
            self._part.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._parts.append(self._part.digest())
                self._part, self._left = _new_md5(), REQUEST_BYTES

    def etag(self) -> str:
        if not self._parts:
            return str(self._part.hexdigest())  # sent whole
        parts = [*self._parts, self._part.digest()] if self._left < REQUEST_BYTES else self._parts
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


_new_md5 = partial(hashlib.md5, usedforsecurity=False)


def etag_of(path: Path) -> str:
    """Return the ETag that S3 gives to a file uploaded with `UploadFile`."""
    parts = _PartsDigest()
    with path.open("rb") as file:
        while block := file.read(REQUEST_BYTES):
            parts.update(memoryview(block))
    return parts.etag()


class UploadFile(OutputFile):
    """An upload in progress, sent in parts of REQUEST_BYTES; its size and hash are computed on the way.

    `check` is called before the object becomes visible and can prevent that by raising. Staged uploads are written to a
    temporary file first, for formats that seek back to a header; nothing remains of it if the process is killed.
    """

    def __init__(self, place: ObjectPath, check: Callable[[], None], *, is_staged: bool) -> None:
        self._place, self._check = place, check
        self._digest = xxhash.xxh3_64()
        self._parts = _PartsDigest()
        self._num_bytes = 0
        self._staged: Any = None
        self._stream: Any = None
        if is_staged:
            self._staged = tempfile.TemporaryFile(prefix="harness-upload-")  # noqa: SIM115 - closed at the end
        else:
            self._stream = open_upload(place)

    def describe(self, name: str) -> StoredFile:
        return StoredFile(name, self._num_bytes, str(self._digest.hexdigest()))

    def write(self, data: bytes | memoryview) -> None:
        if self._staged is not None:
            self._staged.write(data)
        else:
            self._send(data)

    def seek(self, position: int) -> None:
        if self._staged is None:
            super().seek(position)
        self._staged.seek(position)

    def _send(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if not len(view):
            return
        self._digest.update(view)
        self._parts.update(view)
        self._num_bytes += len(view)
        with naming_errors(self._place):
            self._stream.write(view)

    def finish(self) -> None:
        """Complete the upload and check the stored object; raise FormatError if it is refused or differs.

        S3 reports a hash of the stored bytes; if it is of another kind (encrypted buckets), the object is read back.
        For other stores, the size is checked.
        """
        if self._done:
            return
        if self._staged is not None:
            self._staged.seek(0)
            self._stream = open_upload(self._place)
            while block := self._staged.read(REQUEST_BYTES):
                self._send(block)
            self._staged.close()
        self._check()
        with naming_errors(self._place):
            self._stream.close()
        self._done = True
        stored = find_stamp(self._place)
        if stored.num_bytes == self._num_bytes and (
            self._place.scheme != "s3"
            or stored.version == self._parts.etag()
            or object_digest(self._place, self._num_bytes) == self._digest.hexdigest()
        ):
            return
        what = f"the object differs from what was uploaded: {stored.num_bytes:,} bytes, {self._num_bytes:,} were sent"
        fix = "write it again; another process is writing to this location, or the store is damaged"
        raise FormatError(what, where=str(self._place), fix=fix)

    def abort(self) -> None:
        """Drop the parts that were sent. The object itself is not touched: it may belong to another writer by now."""
        if self._done:
            return
        self._done = True
        if self._staged is not None:
            self._staged.close()
        if self._stream is not None:
            error = InterruptedError()
            with contextlib.suppress(Exception):  # without a network, a lifecycle rule has to delete the parts
                self._stream.__exit__(type(error), error, None)


# Kinds of errors by remedy: PASSING errors are transient; REFUSED means that the request itself is invalid.
Verdict = Enum("Verdict", ("PASSING", "MISSING", "NO_BUCKET", "DENIED", "REFUSED"))

# Patterns for the class names of an error, on the first line, and for messages of obstore, multi-storage-client and the
# three providers. The first match counts.
_PATTERNS = (
    (Verdict.NO_BUCKET, r"NoSuchBucket|InvalidBucketName|ContainerNotFound|FilesystemNotFound"),
    (
        Verdict.DENIED,
        r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|Unable to locate credentials|ExpiredToken"
        r"|RequestTimeTooSkewed|AuthenticationFailed|AuthorizationFailure|AuthorizationPermissionMismatch"
        r"|status code: 40[13]\b|169\.254\.|metadata\.google|token request|Azure CLI|CredentialRetrievalError",
    ),
    (Verdict.MISSING, r"\A.*\b(FileNotFoundError|NotADirectoryError|IsADirectoryError)\b"),
    (Verdict.DENIED, r"\A.*\b(PermissionError|PermissionDeniedError|UnauthenticatedError)\b"),
    (Verdict.MISSING, r"NoSuchKey|BlobNotFound|does not exist|status code: 404\b"),
    (Verdict.REFUSED, r"status code: (30\d|4\d\d)\b|InvalidConfig|not found"),
    (Verdict.PASSING, r"\A.*\b(OSError|RuntimeError|GenericError)\b"),
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials with access",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
}
_AZURE_CREDENTIALS = "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or log in with Azure's own tools"


def judge(error: Exception) -> Verdict:
    """Classify an error of a storage client; unknown network errors count as transient."""
    text = f"{' '.join(kind.__name__ for kind in type(error).__mro__)}\n{error}"
    return next((verdict for verdict, pattern in _PATTERNS if re.search(pattern, text)), Verdict.REFUSED)


def explain(error: Exception, place: ObjectPath) -> FormatError:
    """Return a FormatError with cause and fix for an error of a storage client."""
    verdict = judge(error)
    if verdict in (Verdict.MISSING, Verdict.DENIED):
        # Responses to HEAD have no body: only a listing distinguishes a wrong key from wrong credentials or bucket.
        error = _list_error(replace(place, key="")) or error
        verdict = judge(error)
    text, is_s3 = str(error), place.scheme == "s3"
    what = f"object storage rejected the request: {_short(text)}"
    fix = "check AWS_ENDPOINT_URL and AWS_REGION" if is_s3 else "check the address"
    if verdict is Verdict.PASSING:
        address = f" at {s3_endpoint()}" if is_s3 and s3_endpoint() else ""
        what = f"object storage did not answer{address}: {_short(text)}"
        fix = f"check the network{' and AWS_ENDPOINT_URL' if is_s3 else ''}, or raise {TIMEOUT_NAME}"
    elif verdict is Verdict.MISSING:
        what, fix = MISSING_OBJECT, "check the key; `/` separates folders"
    elif verdict is Verdict.NO_BUCKET:
        what, fix = f"no such bucket: {place.bucket}", "check the bucket's name, region and AWS_ENDPOINT_URL"
    elif verdict is Verdict.DENIED:
        what, fix = f"object storage denied access ({_short(text)})", _CREDENTIALS.get(place.scheme, _AZURE_CREDENTIALS)
        if "InvalidAccessKeyId" in text:
            what = "object storage does not know the access key"
        elif "SignatureDoesNotMatch" in text:
            what = "object storage rejected the signature: the secret key, or this machine's clock, is wrong"
    return FormatError(what, where=str(place), fix=fix)


def _short(text: str) -> str:
    """Return the first line without request ids, which are only useful in the store's own log."""
    line = redact(text.splitlines()[0] if text else "no reason given")
    return re.sub(r"<(RequestId|HostId)>[^<]*</\1>", "", line)[:400]


# ---- local copies


class Entry:
    """Local files in `folder`, under their paths in the manifest, which are not evicted until `release`."""

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
    """Cache shared by the processes of this machine; raises ConfigError for invalid environment variables."""

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
        """Return the entry of these files, downloaded if missing; FormatError if they differ or the disk fails."""
        text = "\n".join(f"{stored.path} {stored.num_bytes} {stored.xxh3}" for stored in files)
        name = str(xxhash.xxh3_128_hexdigest(text.encode()))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                # Wait while another process downloads it, which takes bounded time.
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
        """Lock an entry; return the descriptor of its lock file, or None if it is missing, removed or in use."""
        lock = self.folder / (name + _LOCK)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as undo, contextlib.suppress(BlockingIOError):
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, kind)
            # Eviction removes the lock file: a lock on a removed file protects nothing.
            if is_open_at(lock, descriptor):
                undo.pop_all()
                return descriptor
        return None

    def _download(self, name: str, descriptor: int, files: Sequence[StoredFile], download: Download) -> None:
        num_bytes = sum(stored.num_bytes for stored in files)
        # Reserve the space now, so that two concurrent downloads do not both claim it.
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
            # This process holds the lock, so no other one uses the entry.
            (self.folder / (name + _LOCK)).unlink(missing_ok=True)
            raise

    def _free_space(self) -> None:
        """Evict least recently used entries that are not in use, until the rest is within the bound."""
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
