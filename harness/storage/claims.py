"""Objects that one process at a time may own: conditional requests of a bucket, and leases made of them."""

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

# A lease that is not renewed for that long is free. Its owner renews it often enough to miss several times, and relies
# on a renewal for a part of that time only: what it sends has the rest to arrive.
LEASE_S, _RENEW_S, _LOOK_S = 30.0, 3.0, 0.5
_SURE_PART = 2 / 3
# Counts on while the machine sleeps, where the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ClaimStore:
    """The objects below a prefix, with conditional requests; picklable. ConfigError for msc://, which has none."""

    def __init__(self, place: ObjectPath) -> None:
        if place.scheme == "msc":
            what = "msc:// does not support conditional requests, which exclude a second writer"
            fix = "use a folder on a file system that all machines share, or s3://, gs:// or abfs://"
            raise ConfigError(what, where=str(place), fix=fix)
        self.place = place

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Return the bytes of an object and its ETag, or None if it does not exist."""
        with _missing_as_none(self.place / name) as place:
            found = connect(place).get(place.key)
            return bytes(found.bytes()), self._etag(found.meta)
        return None

    def put(self, name: str, data: bytes | Path, *, only_if: str | None = None) -> str | None:
        """Write an object whole; return its ETag, or None where the condition does not hold and its bytes are others.

        The object must still have the ETag `only_if`; with "" it must not exist; None writes in any case.
        """
        if only_if is None:
            return self._put(name, data, "overwrite")
        if only_if:
            # Some S3 servers (Ceph before 18) compare the text with the quotes of HTTP, others require them.
            bare = {"e_tag": only_if, "version": only_if}
            etag = self._put(name, data, bare) if self.place.scheme == "s3" else None
            etag = etag or self._put(name, data, {**bare, "e_tag": f'"{only_if}"'})
        else:
            etag = self._put(name, data, "create")
        if etag is None:
            # Where an answer was lost on its way, the request that was sent again finds what the first one wrote.
            found = self.get(name)
            if found is not None and found[0] == (data.read_bytes() if isinstance(data, Path) else data):
                return found[1]
        return etag

    def _put(self, name: str, data: bytes | Path, mode: Any) -> str | None:
        kinds = load_obstore().exceptions
        refusals = contextlib.suppress(kinds.AlreadyExistsError, kinds.PreconditionError)
        # Missing is an object with a condition on it.
        with _missing_as_none(self.place / name) as place, refusals:
            return self._etag(connect(place).put(place.key, data, mode=mode, use_multipart=False))
        return None

    def _etag(self, found: Any) -> str:
        # Google compares generations, which obstore calls versions; versions of S3 are for buckets that keep old ones.
        return str((self.place.scheme == "gs" and found["version"]) or found["e_tag"]).strip('"')

    def download(self, name: str, path: Path) -> bool:
        """Write an object to a file; return whether it exists."""
        with naming_errors(self.place / name), path.open("wb") as file, _missing_as_none(self.place / name) as place:
            for block in connect(place).get(place.key):
                file.write(block)
            return True
        return False

    def delete(self, name: str) -> None:
        delete_object(self.place / name)


@contextlib.contextmanager
def _missing_as_none(place: ObjectPath) -> Iterator[ObjectPath]:
    """Name the errors of requests for an object, and leave the block where it, and not its bucket, does not exist."""
    with naming_errors(place):
        try:
            yield place
        except FileNotFoundError as error:
            if judge(error) is not Verdict.MISSING:
                raise


class Lease:
    """An object that one process owns, with the methods of `Marker`: it is renewed in the background while it is held.

    A process that is killed leaves it; the next one takes it over at once on the same machine, and elsewhere when
    it was not renewed for LEASE_S. No clocks are compared: the taker watches the object for that long. An owner
    that cannot renew it stops at the next `check`. The object is never deleted, because stores that ignore conditions
    on deletions (MinIO, Ceph before 20) would delete that of the next owner: a lease without an owner is free. After
    `acquire` was refused, `holder` is who holds it.
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
        """Renew the lease unless surely held, before each write that it protects; FormatError if it was taken over."""
        if self._lost is not None or _now() >= self._sure_until:
            with self._lock:
                self._put()

    def acquire(self, *, wait: bool = False, log: Callable[[str], None] = lambda line: None) -> bytes:
        """Take the lease, and return what an interrupted owner left in it; FormatError if another process holds it.

        With `wait`, wait until that process releases it, however long that takes; `log` gets a line that names it.
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
        """Replace what a later owner finds if this one is killed; one line. FormatError if it was taken over."""
        assert b"\n" not in data
        with self._lock:
            self._body = data
            self._put()

    def touch(self) -> None:
        """Do nothing: the lease is renewed in the background."""

    def release(self, *, remove: bool) -> None:
        """Give the lease up if it is this process's own, not a fork's; `remove` leaves nothing to the next owner."""
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
            self._etag = found[1]  # an earlier renewal arrived, and the answer to it did not
        self._lost = self._refused(owner)
        raise self._lost

    def _content(self, body: bytes) -> bytes:
        return json.dumps({**self._owner, "renewed": time.time()} if self._owner else {}).encode() + b"\n" + body

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW_S):
            # What fails here fails again in the next `write`, which somebody waits for.
            with self._lock, contextlib.suppress(FormatError):
                self._put()

    def _refused(self, owner: dict[str, Any]) -> FormatError:
        self.holder = _name(owner)
        return held_error(self.holder, self.where)


def parse_lease(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the owner of a lease, empty if it was given up, and what it wrote, from the bytes of its object."""
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
    """Return whether an owner on this machine, whose clock this is, renewed its lease lately.

    Where it did not, its number is that of another process by now: the object is watched, as that of another machine.
    """
    renewed = owner.get("renewed")
    return isinstance(renewed, (int, float)) and abs(time.time() - renewed) < LEASE_S


@cache
def _host() -> str:
    """Return the name of this machine, its boot, and the space of its process ids (containers have their own).

    Names repeat, and all machines have the same id for their first space. A boot without an id is equal to no other.
    """
    try:
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it is no path
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        space, boot = "", uuid.uuid4().hex
    return f"{socket.gethostname()} {boot} {space}".strip()


def _now() -> float:
    return time.clock_gettime(_CLOCK)
