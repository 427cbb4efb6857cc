"""Object storage through PyArrow's filesystems: every call ends in bounded time, and errors say what is wrong.

Settings come from the environment, as the providers' own tools read it: AWS_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3),
AWS_REGION and the AWS credential chain; Google's application default credentials; AZURE_STORAGE_ACCOUNT with
AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or Azure's default credentials. HARNESS_STORAGE_TIMEOUT_S (60) bounds
how long one request is tried, all attempts together.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from harness.errors import ConfigError, FormatError
from harness.storage.bucket_errors import Verdict, explain, judge, unanswered
from harness.storage.uris import ObjectPath

# One ranged request; a larger read is made of several, so that each has its own time limit.
REQUEST_BYTES = 8 << 20
_TIMEOUT_NAME = "HARNESS_STORAGE_TIMEOUT_S"
_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
# Of an upload's parts, which only PyArrow can send again.
_UPLOAD_ATTEMPTS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a listing: its key below the place that was listed, and its size."""

    name: str
    num_bytes: int


class ObjectStore:
    """One bucket. Connects when it is first used, in each process anew; pickles."""

    def __init__(self, place: ObjectPath) -> None:
        self._place = ObjectPath(place.scheme, place.bucket, "")
        self._timeout_s = _timeout_s()
        self._connections: dict[tuple[int, int], Any] = {}

    def find_size(self, place: ObjectPath) -> int | None:
        """Bytes of an object, or None where there is none."""
        import pyarrow.fs as pa_fs

        info = self.call(place, lambda files: files.get_file_info(_inside(place)))
        return int(info.size) if info.type == pa_fs.FileType.File else None

    def check_bucket(self) -> None:
        """Raises FormatError where the bucket is not there or may not be listed."""
        error = self._ask_why()
        if error is not None and judge(error) is not Verdict.PASSING:
            raise explain(error, self._place) from None

    def read_whole(self, place: ObjectPath, limit: int) -> bytes:
        """A small object's bytes, `limit + 1` of them at most. Raises FormatError where there is none."""

        def read(files: Any) -> bytes:
            with files.open_input_file(_inside(place)) as file:
                return bytes(file.read_at(min(limit + 1, file.size()), 0))

        return self.call(place, read)

    def open(self, place: ObjectPath) -> Any:
        """A PyArrow file for ranged reads with `read`."""
        return self.call(place, lambda files: files.open_input_file(_inside(place)))

    def read(self, place: ObjectPath, file: Any, start: int, num_bytes: int) -> bytes:
        """Exactly these bytes of an object that was opened here; raises FormatError where it ends before."""
        pieces = []
        for begin in range(start, start + num_bytes, REQUEST_BYTES):
            count = min(REQUEST_BYTES, start + num_bytes - begin)
            pieces.append(self.call(place, partial(_read_exactly, file=file, start=begin, num_bytes=count)))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def list(self, place: ObjectPath) -> list[StoredObject]:
        """All objects below a place; empty where there are none."""
        import pyarrow.fs as pa_fs

        root = _inside(place)

        def find(files: Any) -> Any:
            return files.get_file_info(pa_fs.FileSelector(root, recursive=True, allow_not_found=True))

        return [
            StoredObject(info.path[len(root) + 1 :], int(info.size))
            for info in self.call(place, find)
            if info.type == pa_fs.FileType.File
        ]

    def delete(self, place: ObjectPath) -> None:
        """Delete an object; one that is not there is no error."""

        def delete(files: Any) -> None:
            try:
                files.delete_file(_inside(place))
            except FileNotFoundError:
                return

        self.call(place, delete)

    def open_upload(self, place: ObjectPath) -> Any:
        """A PyArrow stream for a new object, which is there only once the stream is closed."""
        return self.call(place, lambda files: files.open_output_stream(_inside(place)), attempts=_UPLOAD_ATTEMPTS)

    def upload(self, place: ObjectPath, work: Callable[[], T]) -> T:
        """A step of an upload, in bounded time and without a second attempt: streams cannot go back."""
        try:
            return _within(self._timeout_s, work)
        except Exception as error:
            raise self._explained(error, place, attempts=1, seconds=self._timeout_s) from None

    def call(self, place: ObjectPath, work: Callable[[Any], T], *, attempts: int = 1) -> T:
        """Do something with the filesystem: again while it fails in ways that pass, until the time is up.

        Raises:
            FormatError: it failed for good, or the time is up.
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
            return unanswered(error, place, attempts=attempts, seconds=seconds, setting=_TIMEOUT_NAME)
        reason = error
        if verdict in (Verdict.MISSING, Verdict.DENIED):
            # Answers to HEAD have no body: only a listing tells a wrong key from a wrong secret or bucket.
            reason = self._ask_why() or error
        return explain(reason, place)

    def _ask_why(self) -> Exception | None:
        import pyarrow.fs as pa_fs

        selector = pa_fs.FileSelector(_inside(self._place))
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


def _inside(place: ObjectPath) -> str:
    """What PyArrow calls a place: bucket and key."""
    bucket = place.bucket.partition("@")[0]
    return f"{bucket}/{place.key}" if place.key else bucket


def _read_exactly(_files: Any, *, file: Any, start: int, num_bytes: int) -> bytes:
    data = bytes(file.read_at(num_bytes, start))
    if len(data) != num_bytes:
        raise OSError(f"{len(data):,} of {num_bytes:,} bytes came")
    return data


def _within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, or TimeoutError. PyArrow's calls take no limit for a body that stops in the middle."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    # A thread that hangs is left behind: the connection's own idle limit ends it some seconds later.
    threading.Thread(target=run, name="object storage", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.1f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _timeout_s() -> float:
    text = os.environ.get(_TIMEOUT_NAME, "")
    try:
        value = float(text) if text else _TIMEOUT_S
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 3600:
        raise ConfigError(f"{_TIMEOUT_NAME} is {text!r}", where="environment", fix="use seconds from 0.5 to 3600")
    return value


def _connect(place: ObjectPath, attempts: int, timeout_s: float) -> Any:
    import pyarrow.fs as pa_fs

    if place.scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
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
        # Whole seconds of at least one are what the client below makes of these.
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
        limit = timedelta(seconds=timeout_s / 3)
        return pa_fs.GcsFileSystem(retry_time_limit=limit)
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
