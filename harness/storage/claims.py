"""Objects owned by one process at a time: conditional requests of a bucket, and leases built on them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, FormatError
from harness.storage.bucket import Verdict, delete_object, judge, naming_errors
from harness.storage.connections import ObjectPath, connect, load_obstore
from harness.storage.files import held_error

# A lease that was not renewed for LEASE_S is free. Its owner renews it often enough to miss several renewals, and
# relies on a renewal for only a part of that time, which leaves the rest for its requests to arrive.
LEASE_S, _RENEW_S, _LOOK_S = 30.0, 3.0, 0.5
_SURE_PART = 2 / 3
# Keeps counting while the machine sleeps, if the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ClaimStore:
    """Objects below a prefix, with conditional requests. Picklable. ConfigError for msc://, which has none."""

    def __init__(self, place: ObjectPath) -> None:
        if place.scheme == "msc":
            what = "msc:// does not support conditional requests, which exclude a second writer"
            fix = "use a folder on a file system that all machines share, or s3://, gs:// or abfs://"
            raise ConfigError(what, where=str(place), fix=fix)
        self.place = place

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Return the contents and ETag of an object, or None if it does not exist."""
        with _missing_as_none(self.place / name) as place:
            found = connect(place).get(place.key)
            return bytes(found.bytes()), self._etag(found.meta)
        return None

    def put(self, name: str, data: bytes | Path, *, only_if: str | None = None) -> str | None:
        """Write an object; return its ETag, or None if the condition fails and the stored bytes differ.

        Condition: the object still has the ETag `only_if`, or does not exist if it is ""; None writes unconditionally.
        """
        if only_if is None:
            return self._put(name, data, "overwrite")
        if only_if:
            # Some S3 servers (Ceph before 18) compare the ETag without the quotes of HTTP, others require them.
            bare = {"e_tag": only_if, "version": only_if}
            etag = self._put(name, data, bare) if self.place.scheme == "s3" else None
            etag = etag or self._put(name, data, {**bare, "e_tag": f'"{only_if}"'})
        else:
            etag = self._put(name, data, "create")
        if etag is None:
            # If a response was lost, the repeated request conflicts with the object written by the first one.
            found = self.get(name)
            if found is not None and found[0] == (data.read_bytes() if isinstance(data, Path) else data):
                return found[1]
        return etag

    def _put(self, name: str, data: bytes | Path, mode: Any) -> str | None:
        kinds = load_obstore().exceptions
        refusals = contextlib.suppress(kinds.AlreadyExistsError, kinds.PreconditionError)
        # A missing object with an ETag condition also fails.
        with _missing_as_none(self.place / name) as place, refusals:
            return self._etag(connect(place).put(place.key, data, mode=mode, use_multipart=False))
        return None

    def _etag(self, found: Any) -> str:
        # Google compares generations, which obstore calls versions; S3 versions exist only in versioned buckets.
        return str((self.place.scheme == "gs" and found["version"]) or found["e_tag"]).strip('"')

    def download(self, name: str, path: Path) -> bool:
        """Download an object to a file; return True if it exists."""
        with naming_errors(self.place / name), path.open("wb") as file, _missing_as_none(self.place / name) as place:
            for block in connect(place).get(place.key):
                file.write(block)
            return True
        return False

    def delete(self, name: str) -> None:
        delete_object(self.place / name)


@contextlib.contextmanager
def _missing_as_none(place: ObjectPath) -> Iterator[ObjectPath]:
    """Turn request errors into FormatErrors; leave the block silently if the object, not its bucket, is missing."""
    with naming_errors(place):
        try:
            yield place
        except FileNotFoundError as error:
            if judge(error) is not Verdict.MISSING:
                raise


class Lease:
    """An object owned by one process, with the methods of `Marker`, renewed in the background while it is held.

    A killed process leaves its lease. Another process on the same machine takes it over at once, on another machine
    after it was not renewed for LEASE_S. No clocks are compared: the new owner watches the object for that long. An
    owner that cannot renew its lease stops at the next `check`. The object is never deleted, because stores that ignore
    conditions on deletions (MinIO, Ceph before 20) would delete the next owner's lease; a lease without an owner is
    free. After `acquire` was refused, `holder` describes the owner.
    """

    def __init__(self, store: ClaimStore, name: str) -> None:
        self._store, self._name = store, name
        self.holder = ""
        self._owner: dict[str, Any] = {}
        self._body = b""
        self._etag, self._token, self._sure_until = "", "", 0.0
        self._lock = threading.Lock()
        self._lost: FormatError | None = None
        self._stop = threading.Event()
        self._renewing: threading.Thread | None = None

    @property
    def where(self) -> str:
        return str(self._store.place / self._name)

    def check(self) -> None:
        """Renew the lease before a protected write, unless it is certainly held; FormatError if it was taken over."""
        if self._lost is not None or _now() >= self._sure_until:
            with self._lock:
                self._put()

    def acquire(self, *, wait: bool = False, log: Callable[[str], None] = lambda line: None) -> bytes:
        """Take the lease and return the note of an interrupted owner; FormatError if another process holds it.

        With `wait`, wait without limit until that process releases it; `log` receives a line that names it.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._token = uuid.uuid4().hex
        self._owner = {"pid": os.getpid(), "host": _host(), "since": since, "token": self._token}
        seen, until = "", 0.0
        while True:
            found = self._store.get(self._name)
            if found is None:
                body, expected, is_free = b"", "", True
            else:
                owner, body = parse_lease(found[0])
                expected = found[1]
                if expected != seen:
                    if seen and owner and not wait:
                        raise self._refused(owner)
                    if owner and not seen and not _is_dead(owner):
                        log(f"waiting for {_name(owner)}: {self.where}")
                    seen, until = expected, _now() + LEASE_S
                is_free = not owner or _is_dead(owner) or _now() >= until
            if is_free:
                sent = _now()
                etag = self._store.put(self._name, self._content(body), only_if=expected)
                if etag is not None:
                    break
                continue
            if owner.get("host") == self._owner["host"] and _was_renewed(owner) and not wait:
                raise self._refused(owner)
            time.sleep(_LOOK_S)
        self._etag, self._body, self._lost, self._sure_until = etag, body, None, sent + LEASE_S * _SURE_PART
        self._stop = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()
        return body

    def write(self, data: bytes) -> None:
        """Replace the one-line note for a later owner if this one is killed; FormatError if it was taken over."""
        assert b"\n" not in data
        with self._lock:
            self._body = data
            self._put()

    def touch(self) -> None:
        """Do nothing: the lease is renewed in the background."""

    def release(self, *, remove: bool) -> None:
        """Release the lease, except in a forked child; `remove` deletes the note for the next owner."""
        renewing, self._renewing = self._renewing, None
        if renewing is None or self._owner["pid"] != os.getpid():
            return
        self._stop.set()
        renewing.join()
        with self._lock, contextlib.suppress(FormatError):
            self._owner, self._body = {}, b"" if remove else self._body
            self._put()

    def _put(self) -> None:
        if self._lost is not None:
            raise self._lost
        for _ in range(2):
            sent = _now()
            etag = self._store.put(self._name, self._content(self._body), only_if=self._etag)
            if etag is not None:
                self._etag, self._sure_until = etag, sent + LEASE_S * _SURE_PART
                return
            found = self._store.get(self._name)
            owner = parse_lease(found[0])[0] if found is not None else {}
            if found is None or owner.get("token") != self._token:
                break
            self._etag = found[1]  # an earlier renewal succeeded, but its response was lost
        self._lost = self._refused(owner)
        raise self._lost

    def _content(self, body: bytes) -> bytes:
        return json.dumps({**self._owner, "renewed": time.time()} if self._owner else {}).encode() + b"\n" + body

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW_S):
            # A failure here repeats in the next `write`, which reports it.
            with self._lock, contextlib.suppress(FormatError):
                self._put()

    def _refused(self, owner: dict[str, Any]) -> FormatError:
        self.holder = _name(owner)
        return held_error(self.holder, self.where)


def parse_lease(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Parse the contents of a lease; return its owner, empty if it was released, and its note."""
    head, _, body = content.partition(b"\n")
    try:
        owner = json.loads(head)
    except (ValueError, RecursionError):
        return {}, b""
    return (owner if isinstance(owner, dict) and "token" in owner else {}), body


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown process"
    host = str(owner.get("host")).partition(" ")[0]
    return f"process {owner.get('pid')} on {host}, since {owner.get('since')}"


def _is_dead(owner: dict[str, Any]) -> bool:
    return owner.get("host") == _host() and type(owner.get("pid")) is int and not is_running(owner["pid"])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _was_renewed(owner: dict[str, Any]) -> bool:
    """Return True if an owner on this machine, with the same clock, renewed its lease recently.

    Otherwise its process id may belong to another process by now, and the object is watched like a remote owner's.
    """
    renewed = owner.get("renewed")
    return isinstance(renewed, (int, float)) and abs(time.time() - renewed) < LEASE_S


@cache
def _host() -> str:
    """Return host name, boot id and process id namespace (containers have their own).

    Host names repeat, and the first namespace has the same id on all machines. Without a boot id, a random one is used.
    """
    try:
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it is no path
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        space, boot = "", uuid.uuid4().hex
    return f"{socket.gethostname()} {boot} {space}".strip()


def _now() -> float:
    return time.clock_gettime(_CLOCK)
