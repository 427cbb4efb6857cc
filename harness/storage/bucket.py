"""Objects of one bucket: read by ranges, listed, and uploaded complete or not at all; errors name the cause.

`connections` has the settings. Every call ends in bounded time, and no error shows credentials.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from harness.errors import ConfigError, FormatError
from harness.printing import redact
from harness.storage.connections import TIMEOUT_NAME, MscStore, connect, load_obstore, s3_endpoint
from harness.storage.files import OutputFile, Stamp, StoredFile
from harness.storage.uris import MISSING_OBJECT, ObjectPath

# One ranged request, and one part of an upload; a larger read takes several, so that each has its own time limit.
REQUEST_BYTES = 8 << 20
_UPLOADS = 2


def find_size(place: ObjectPath) -> int | None:
    """Return the bytes of an object, or None if it does not exist."""
    with naming_errors(place):
        try:
            return int(connect(place).head(place.key)["size"]) if place.key else None
        except FileNotFoundError:
            return None


def check_bucket(place: ObjectPath) -> None:
    """Raise FormatError if the bucket of a place does not exist or may not be listed."""
    bucket = replace(place, key="")
    error = _list_error(bucket)
    if isinstance(error, ConfigError):
        raise error
    if error is not None and judge(error) is not Verdict.PASSING:
        raise explain(error, bucket) from None


def read_object(place: ObjectPath, start: int, num_bytes: int) -> bytes:
    """Read exactly these bytes of an object; raises FormatError if it is shorter."""
    return b"".join(read_blocks(place, num_bytes, start))


def read_blocks(place: ObjectPath, num_bytes: int, start: int = 0) -> Iterator[bytes]:
    """Read bytes of an object, a request's worth at a time; raises FormatError if it is shorter."""
    for begin in range(start, start + num_bytes, REQUEST_BYTES):
        count = min(REQUEST_BYTES, start + num_bytes - begin)
        with naming_errors(place):
            block = bytes(connect(place).get_range(place.key, start=begin, length=count))
        if len(block) != count:
            fix = "open it again; it was replaced with a shorter one"
            raise FormatError(f"the object ends before byte {begin + count:,}", where=str(place), fix=fix)
        yield block


def object_digest(place: ObjectPath, num_bytes: int) -> str:
    """Return xxh3_64 (hexadecimal) of an object of this size."""
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
    """Return the stamps of the objects below a place, by their keys below it, with times of writing as versions.

    With each, the seconds since then by this machine's clock.
    """
    with naming_errors(place):
        now, found = time.time(), [one for page in connect(place).list(place.key) for one in page]
    start = len(place.key) + 1 if place.key else 0
    below = {str(one["path"])[start:]: one for one in found if len(one["path"]) > start}
    folders: set[str] = set()
    for name in below:
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    # Consoles and PyArrow make empty objects `x/` for folders, which are listed as `x`.
    return {
        name: (Stamp(int(one["size"]), _time_of(one)), max(0.0, now - one["last_modified"].timestamp()))
        for name, one in below.items()
        if one["size"] or name not in folders
    }


@contextlib.contextmanager
def naming_errors(place: ObjectPath) -> Iterator[None]:
    """Turn the errors of a client into FormatErrors."""
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
    """The ETag that S3 gives to an upload: its MD5, or the MD5 of the MD5s of its parts, and their number."""

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
    """Return the ETag that S3 gives to a file that `UploadFile` uploads."""
    parts = _PartsDigest()
    with path.open("rb") as file:
        while block := file.read(REQUEST_BYTES):
            parts.update(memoryview(block))
    return parts.etag()


class UploadFile(OutputFile):
    """An object under way. Bytes go out in parts of REQUEST_BYTES, and their size and hash are known at the end.

    `check` is called before the object appears; an error that it raises prevents that. Staged bytes go to a temporary
    file first, for formats that go back to a header, of which nothing is left when the process is killed.
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
        """Complete the upload, and check what the store has; raise FormatError if it refuses, or has other bytes.

        S3 names the hash of the bytes that it stored; where that is of another kind (encrypted buckets), they are read
        back. Of other stores the size is checked.
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
        """Drop the parts that were sent. The place itself is not touched: it may be another writer's by now."""
        if self._done:
            return
        self._done = True
        if self._staged is not None:
            self._staged.close()
        if self._stream is not None:
            error = InterruptedError()
            with contextlib.suppress(Exception):  # a store without its network keeps them until a rule deletes them
                self._stream.__exit__(type(error), error, None)


class Verdict(Enum):
    """Classes of errors, by the remedy."""

    PASSING = "try again"
    MISSING = "the object does not exist"
    NO_BUCKET = "the bucket does not exist"
    DENIED = "the credentials are wrong or lack permissions"
    REFUSED = "the request itself is refused"


# Of the names of an error's classes, on the first line, and of what obstore and multi-storage-client write, with the
# names of errors of the three providers; the first that is found counts.
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
    """Classify an error of a client; an unknown error of its network counts as transient."""
    text = f"{' '.join(kind.__name__ for kind in type(error).__mro__)}\n{error}"
    return next((verdict for verdict, pattern in _PATTERNS if re.search(pattern, text)), Verdict.REFUSED)


def explain(error: Exception, place: ObjectPath) -> FormatError:
    """Turn an error of a client into one that names cause and fix."""
    verdict = judge(error)
    if verdict in (Verdict.MISSING, Verdict.DENIED):
        # Answers to HEAD have no body: only a listing distinguishes a wrong key from a wrong secret or bucket.
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
    """The first line, without the request's number, which only the store's own log can use."""
    line = redact(text.splitlines()[0] if text else "no reason given")
    return re.sub(r"<(RequestId|HostId)>[^<]*</\1>", "", line)[:400]
