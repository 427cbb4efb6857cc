"""Object storage through PyArrow's filesystems: every call ends in bounded time, and errors name the cause.

Settings come from the environment, as the providers' own tools read it: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (or
AWS_S3_ENDPOINT_URL, which no tool of AWS reads but which is common),
AWS_REGION and the AWS credential chain; Google's application default credentials; AZURE_STORAGE_ACCOUNT with
AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or Azure's default credentials. `msc://PROFILE/KEY` goes through NVIDIA's
multi-storage-client (extra `msc`), whose file of settings MSC_CONFIG names. HARNESS_STORAGE_TIMEOUT_S (60) bounds
one request, all attempts together. No error shows credentials.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from harness.errors import ConfigError, FormatError
from harness.storage.files import OutputFile, Stamp, StoredFile
from harness.storage.uris import ObjectPath, redact

# One ranged request; a larger read takes several, so that each has its own time limit.
REQUEST_BYTES = 8 << 20
_TIMEOUT_NAME = "HARNESS_STORAGE_TIMEOUT_S"
_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
_MSC = "msc://"
# PyArrow's parts of an upload, from whose hashes S3 makes the ETag.
_PART_BYTES = 10 << 20
# Of an upload's parts, which only PyArrow can send again.
_UPLOAD_ATTEMPTS = 4

T = TypeVar("T")


class ObjectStore:
    """One bucket. Connects on first use, in each process anew; pickles."""

    def __init__(self, place: ObjectPath) -> None:
        self._place = ObjectPath(place.scheme, place.bucket, "")
        self._timeout_s = timeout_s()
        self._connections: dict[tuple[int, int], Any] = {}

    def find_size(self, place: ObjectPath) -> int | None:
        """Return the bytes of an object, or None if it does not exist."""
        import pyarrow.fs as pa_fs

        info = self.call(place, lambda files: files.get_file_info(_pyarrow_path(place)))
        return int(info.size) if info.type == pa_fs.FileType.File else None

    def check_bucket(self) -> None:
        """Raise FormatError if the bucket does not exist or may not be listed."""
        error = self._list_error()
        if error is not None and judge(error) is not Verdict.PASSING:
            raise explain(error, self._place) from None

    def open(self, place: ObjectPath) -> Any:
        """Open a PyArrow file for ranged reads with `read`."""
        return self.call(place, lambda files: files.open_input_file(_pyarrow_path(place)))

    def read(self, place: ObjectPath, file: Any, start: int, num_bytes: int) -> bytes:
        """Read exactly these bytes of an object that `open` opened; raises FormatError if it is shorter."""
        pieces = []
        for begin in range(start, start + num_bytes, REQUEST_BYTES):
            count = min(REQUEST_BYTES, start + num_bytes - begin)
            pieces.append(self.call(place, partial(_read_exactly, file=file, start=begin, num_bytes=count)))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_blocks(self, place: ObjectPath, num_bytes: int) -> Iterator[bytes]:
        """Read an object from its start, a request's worth at a time."""
        file = self.open(place)
        for start in range(0, num_bytes, REQUEST_BYTES):
            yield self.read(place, file, start, min(REQUEST_BYTES, num_bytes - start))

    def list(self, place: ObjectPath) -> dict[str, int]:
        """Return the bytes of all objects below a place, by their keys below it."""
        return {name: stamp.num_bytes for name, stamp in self.list_stamps(place).items()}

    def list_stamps(self, place: ObjectPath) -> dict[str, Stamp]:
        """Return the stamps of all objects below a place, by their keys below it; the versions are times."""
        import pyarrow.fs as pa_fs

        root = _pyarrow_path(place)
        selector = pa_fs.FileSelector(root, recursive=True, allow_not_found=True)

        def look(files: Any) -> Any:
            try:
                return files.get_file_info(selector)
            except NotADirectoryError:  # of msc://, for an object
                return []

        infos = self.call(place, look)
        root = root.removeprefix(_MSC)  # which listings leave out
        return {
            info.path[len(root) + 1 :]: Stamp(int(info.size), str(info.mtime_ns))
            for info in infos
            if info.type == pa_fs.FileType.File
        }

    def find_stamp(self, place: ObjectPath) -> Stamp:
        """Return the stamp of an object, with its ETag as version if the store gives one.

        Raises:
            FormatError: it does not exist, or may not be read.
        """
        file = self.open(place)
        # The client has these from opening the file.
        metadata = self.call(place, lambda _: file.metadata()) or {}
        facts = {_text(name).lower(): _text(value) for name, value in metadata.items()}
        version = facts.get("etag") or facts.get("last-modified") or ""
        if not version:
            info = self.call(place, lambda files: files.get_file_info(_pyarrow_path(place)))
            version = str(info.mtime_ns or "")
        return Stamp(int(file.size()), version.strip('"'))

    def delete(self, place: ObjectPath) -> None:
        """Delete an object; a missing one is no error."""

        def delete(files: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                files.delete_file(_pyarrow_path(place))

        self.call(place, delete)

    def open_upload(self, place: ObjectPath) -> Any:
        """Open a PyArrow stream for a new object, which exists only once the stream is closed."""
        return self.call(place, lambda files: files.open_output_stream(_pyarrow_path(place)), attempts=_UPLOAD_ATTEMPTS)

    def upload(self, place: ObjectPath, work: Callable[[], T]) -> T:
        """Run a step of an upload in bounded time and without a second attempt: streams cannot go back."""
        try:
            return _within(self._timeout_s, work)
        except Exception as error:
            raise self._explained(error, place, attempts=1, seconds=self._timeout_s) from None

    def call(self, place: ObjectPath, work: Callable[[Any], T], *, attempts: int = 1) -> T:
        """Run `work` on the filesystem, again after transient errors, until the time is up.

        Raises:
            FormatError: it failed permanently, or the time is up.
        """
        begin = time.monotonic()
        end = begin + self._timeout_s
        pause = _FIRST_PAUSE_S
        tried = 0
        while True:
            tried += 1
            # An attempt that hangs must leave time for another.
            limit = max(0.1, min(self._timeout_s / 3, end - time.monotonic()))
            try:
                return _within(limit, lambda: work(self._connect(attempts)))
            except (ConfigError, FormatError):
                raise
            except Exception as error:
                if judge(error) is not Verdict.PASSING or time.monotonic() + pause >= end:
                    seconds = time.monotonic() - begin
                    raise self._explained(error, place, attempts=tried, seconds=seconds) from None
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)

    def _explained(self, error: Exception, place: ObjectPath, *, attempts: int, seconds: float) -> FormatError:
        verdict = judge(error)
        if verdict is Verdict.PASSING:
            is_s3 = place.scheme == "s3"
            address = f" at {redact(s3_endpoint())}" if s3_endpoint() and is_s3 else ""
            return FormatError(
                f"object storage{address} did not answer: {attempts} attempts in {seconds:.1f} s, "
                f"the last: {_short(str(error))}",
                where=str(place),
                fix=f"check the network{' and AWS_ENDPOINT_URL' if is_s3 else ''}, or raise {_TIMEOUT_NAME}",
            )
        reason = error
        if verdict in (Verdict.MISSING, Verdict.DENIED):
            # Answers to HEAD have no body: only a listing distinguishes a wrong key from a wrong secret or bucket.
            reason = self._list_error() or error
        return explain(reason, place)

    def _list_error(self) -> Exception | None:
        """Return the error that listing the bucket ends in, if any."""
        import pyarrow.fs as pa_fs

        selector = pa_fs.FileSelector(_pyarrow_path(self._place))
        try:
            _within(self._timeout_s / 3, lambda: next(iter(self._connect(1).get_file_info(selector)), None))
        except Exception as error:
            return error
        return None

    def _connect(self, attempts: int) -> Any:
        # A client's connections and threads do not survive a fork.
        key = (os.getpid(), attempts)
        if key not in self._connections:
            connection = _connect(self._place, attempts, self._timeout_s)
            self._connections = {k: v for k, v in self._connections.items() if k[0] == key[0]} | {key: connection}
        return self._connections[key]

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectStore, (self._place,)


class _PartsDigest:
    """The ETag that S3 gives to an upload of parts: the MD5 of the parts' MD5s, and their number."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._part, self._left = _new_md5(), _PART_BYTES

    def update(self, data: memoryview) -> None:
        while len(data):
            piece, data = data[: self._left], data[self._left :]
            self._part.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._parts.append(self._part.digest())
                self._part, self._left = _new_md5(), _PART_BYTES

    def etag(self) -> str:
        is_open = self._left < _PART_BYTES or not self._parts
        parts = [*self._parts, self._part.digest()] if is_open else self._parts
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _new_md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def etag_of(path: Path) -> str:
    """Return the ETag that S3 gives to a file that `UploadFile` uploads."""
    parts = _PartsDigest()
    with path.open("rb") as file:
        while block := file.read(REQUEST_BYTES):
            parts.update(memoryview(block))
    return parts.etag()


class UploadFile(OutputFile):
    """An object under way. Bytes go out in parts of REQUEST_BYTES, and their size and hash are known at the end.

    Args:
        check: called before the object appears or is deleted; an error that it raises prevents that.
    """

    def __init__(self, store: ObjectStore, place: ObjectPath, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._digest = xxhash.xxh3_64()
        self._parts = _PartsDigest()
        self._num_bytes = 0
        self._store = store
        self._place = place
        self._buffer = bytearray()
        self._stream: Any = store.open_upload(place)

    def describe(self, name: str) -> StoredFile:
        """Return the manifest's entry of this file under a name."""
        return StoredFile(name, self._num_bytes, str(self._digest.hexdigest()))

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self._done:
            return len(view)
        self._digest.update(view)
        self._parts.update(view)
        self._num_bytes += len(view)
        self._buffer += view
        if len(self._buffer) >= REQUEST_BYTES:
            self._send()
        return len(view)

    def tell(self) -> int:
        return self._num_bytes

    def finish(self) -> None:
        """Complete the upload, and check what the store has.

        S3 names the hash of the bytes that it stored; where that is of another kind (encrypted buckets), they are read
        back. Of other stores the size is checked.

        Raises:
            FormatError: the store refuses the upload, or has other bytes.
        """
        if self._done:
            return
        self._send()
        self._check()
        self._store.upload(self._place, self._stream.close)
        self._done = True
        stored = self._store.find_stamp(self._place)
        if stored.num_bytes == self._num_bytes and (
            self._place.scheme != "s3" or stored.version == self._parts.etag() or self._reads_back()
        ):
            return
        raise FormatError(
            f"the object differs from what was uploaded: it has {stored.num_bytes:,} bytes, sent were "
            f"{self._num_bytes:,}",
            where=str(self._place),
            fix="write again; something else writes to this place, or the store is damaged",
        )

    def _reads_back(self) -> bool:
        total = xxhash.xxh3_64()
        for block in self._store.read_blocks(self._place, self._num_bytes):
            total.update(block)
        return bool(total.digest() == self._digest.digest())

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        self._buffer.clear()
        # PyArrow completes an upload whose stream is dropped: completed here and deleted, no half object remains.
        # Where the place may be another writer's by now, the stream is kept as it is until this process ends.
        try:
            self._check()
        except FormatError:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._stream))
            return
        try:
            self._store.upload(self._place, self._stream.close)
        finally:
            self._store.delete(self._place)

    def _send(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        if data:
            self._store.upload(self._place, lambda: self._stream.write(data))


class StagedFile(OutputFile):
    """An object that is written to a temporary file first, for formats that go back to a header, and then uploaded.

    Nothing is left on the disk when the process is killed.
    """

    def __init__(self, store: ObjectStore, place: ObjectPath, check: Callable[[], None] = lambda: None) -> None:
        self._store, self._place, self._check = store, place, check
        self._file = tempfile.TemporaryFile(prefix="harness-upload-")  # noqa: SIM115 - closed by finish and abort
        self._upload: UploadFile | None = None

    def describe(self, name: str) -> StoredFile:
        """Return the manifest's entry of this file under a name, with the hash of the bytes that were uploaded."""
        assert self._upload is not None
        return self._upload.describe(name)

    def write(self, data: bytes | memoryview) -> int:
        return len(data) if self._done else self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def seekable(self) -> bool:
        return True

    def finish(self) -> None:
        """Upload the file, and check it as `UploadFile.finish` does."""
        if self._done:
            return
        self._file.seek(0)
        upload = self._upload = UploadFile(self._store, self._place, self._check)
        while block := self._file.read(REQUEST_BYTES):
            upload.write(block)
        upload.finish()
        self._done = True
        self._file.close()

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        self._file.close()
        if self._upload is not None:
            self._upload.abort()


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _pyarrow_path(place: ObjectPath) -> str:
    bucket = place.bucket.partition("@")[0]
    path = f"{bucket}/{place.key}" if place.key else bucket
    return _MSC + path if place.scheme == "msc" else path


def _read_exactly(_files: Any, *, file: Any, start: int, num_bytes: int) -> bytes:
    data = bytes(file.read_at(num_bytes, start))
    if len(data) != num_bytes:
        raise OSError(f"{len(data):,} of {num_bytes:,} bytes arrived")
    return data


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise TimeoutError. PyArrow has no limit for a body that stops in the middle."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    # A thread that hangs is left alone: the connection's own idle limit ends it some seconds later.
    threading.Thread(target=run, name="object storage", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.1f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def timeout_s() -> float:
    text = os.environ.get(_TIMEOUT_NAME, "")
    try:
        value = float(text) if text else _TIMEOUT_S
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 3600:
        raise ConfigError(f"{_TIMEOUT_NAME} is {text!r}", where="environment", fix="use seconds from 0.5 to 3600")
    return value


def s3_endpoint() -> str:
    """Return the address of the S3 server that the environment names; empty for that of AWS."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_S3_ENDPOINT_URL")
    return next((value for name in names if (value := os.environ.get(name))), "")


def _connect(place: ObjectPath, attempts: int, timeout_s: float) -> Any:
    import pyarrow.fs as pa_fs

    if place.scheme == "s3":
        endpoint = s3_endpoint()
        scheme, _, host = endpoint.rpartition("://")
        if "@" in host:
            raise ConfigError(
                "credentials do not belong in AWS_ENDPOINT_URL",
                where="environment",
                fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region is None and not endpoint:
            region = pa_fs.resolve_s3_region(place.bucket)
        # The client rounds these to whole seconds of at least one.
        idle_s = max(1.0, timeout_s / 6)
        return pa_fs.S3FileSystem(
            endpoint_override=host.rstrip("/") or None,
            scheme=scheme or "https",
            region=region or "us-east-1",
            connect_timeout=idle_s,
            request_timeout=idle_s,
            retry_strategy=pa_fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        )
    if place.scheme == "gs":
        return pa_fs.GcsFileSystem(retry_time_limit=timedelta(seconds=timeout_s / 3))
    if place.scheme == "msc":
        try:
            from multistorageclient.contrib.async_fs import MultiStorageAsyncFileSystem
        except ImportError:
            raise ConfigError(
                "msc:// needs NVIDIA's multi-storage-client, which is not installed",
                where=str(place),
                fix="pip install '.[msc]', and name its settings in MSC_CONFIG",
            ) from None
        # Instances are shared by threads and forked processes otherwise.
        return pa_fs.PyFileSystem(pa_fs.FSSpecHandler(MultiStorageAsyncFileSystem(skip_instance_cache=True)))
    container, _, host = place.bucket.partition("@")
    account = host.partition(".")[0] or os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    if not account:
        raise ConfigError(
            f"no storage account for the container {container}",
            where=str(place),
            fix="set AZURE_STORAGE_ACCOUNT, or write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY",
        )
    return pa_fs.AzureFileSystem(
        account,
        account_key=os.environ.get("AZURE_STORAGE_KEY"),
        sas_token=os.environ.get("AZURE_STORAGE_SAS_TOKEN"),
    )


class Verdict(Enum):
    """Classes of errors, by the remedy."""

    PASSING = "try again"
    MISSING = "the object does not exist"
    NO_BUCKET = "the bucket does not exist"
    DENIED = "credentials or rights are wrong"
    REFUSED = "the request itself is refused"


# Names of errors as PyArrow and the three providers' libraries spell them.
_PATTERNS = (
    (Verdict.NO_BUCKET, r"NO_SUCH_BUCKET|NoSuchBucket|InvalidBucketName|ContainerNotFound|FilesystemNotFound"),
    (
        Verdict.DENIED,
        r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|Unable to locate credentials"
        r"|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT"
        r"|EXPIRED_TOKEN|ExpiredToken|REQUEST_TIME_TOO_SKEWED|PERMISSION_DENIED|UNAUTHENTICATED|AuthenticationFailed"
        r"|AuthorizationFailure|AuthorizationPermissionMismatch|HTTP status 40[13]\b|\b40[13] [A-Z]"
        r"|DefaultAzureCredential|[Cc]ould not (automatically determine|create credentials)",
    ),
    (Verdict.MISSING, r"NO_SUCH_KEY|NoSuchKey|RESOURCE_NOT_FOUND|HTTP status 404\b|BlobNotFound"),
    (Verdict.REFUSED, r"HTTP status (30[1278]|400|405|409|411|412|416|501)\b|INVALID_ARGUMENT|MALFORMED"),
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials with rights there",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
}
_AZURE_CREDENTIALS = "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or log in with Azure's own tools"


def judge(error: Exception) -> Verdict:
    """Classify an error of PyArrow's filesystems; an unknown OSError counts as transient."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Verdict.MISSING
    if isinstance(error, PermissionError):
        return Verdict.DENIED
    for verdict, pattern in _PATTERNS:
        if re.search(pattern, str(error)):
            return verdict
    return Verdict.PASSING if isinstance(error, OSError) else Verdict.REFUSED


def explain(error: Exception, place: ObjectPath) -> FormatError:
    """Turn a permanent error into one that names cause and fix."""
    text, verdict = str(error), judge(error)
    what = f"object storage refuses the request: {_short(text)}"
    fix = "check AWS_ENDPOINT_URL and AWS_REGION" if place.scheme == "s3" else "check the address"
    if verdict is Verdict.MISSING:
        what, fix = "no such object", "check the key; `/` separates folders"
    elif verdict is Verdict.NO_BUCKET:
        what, fix = f"no such bucket: {place.bucket}", "check the bucket's name, region and AWS_ENDPOINT_URL"
    elif verdict is Verdict.DENIED:
        what, fix = f"object storage denies access ({_short(text)})", _CREDENTIALS.get(place.scheme, _AZURE_CREDENTIALS)
        if "INVALID_ACCESS_KEY_ID" in text or "InvalidAccessKeyId" in text:
            what = "object storage does not know the access key"
        elif "SIGNATURE_DOES_NOT_MATCH" in text or "SignatureDoesNotMatch" in text:
            what = "object storage refuses the signature: the secret key, or this machine's clock, is wrong"
    elif "411" in text:
        fix = "this store takes no upload checksums: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    return FormatError(what, where=str(place), fix=fix)


def _short(text: str) -> str:
    """The first line, without the request's number, which only the store's own log can use."""
    line = redact(text.splitlines()[0] if text else "no reason given")
    return re.sub(r"\s*\(Request ID: [^)]*\)", "", line)[:300]
