"""The lease of a bucket in every interleaving of two owners: kills, lost and late requests, pauses, renewals."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterator
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from interleavings import BrokenError, Clock, Threads, World, explore

from harness.errors import FormatError
from harness.storage import claims
from harness.storage.claims import Lease


class Store:
    """The requests of `ClaimStore`, to the store of the model."""

    place = PurePosixPath("bucket/prefix")

    def __init__(self, world: World) -> None:
        self.get, self.delete, self._world = world.get, world.delete, world

    def put(self, name: str, data: bytes, *, only_if: str | None = None) -> str | None:
        return self._world.put(name, data, only_if)


class Owners(World):
    """Two processes take the lease, write below it, and release it.

    A write that is protected arrives within the part of the lease in which its owner does not rely on it any more; all
    other requests may take any time.
    """

    hosts = ("host-a boot-a", "host-b boot-b")
    lease_class: type[Lease] = Lease
    tick_s, ticks = 15.0, 3

    def __init__(self) -> None:
        super().__init__()
        self.writing: dict[str, float] = {}
        self.pids: dict[str, int] = {}
        for number, host in enumerate(self.hosts):
            name = "ab"[number]
            self.pids[name] = 7 + number
            self.start(name, host, lambda: self.own())
        claims_time = Clock(self)
        # The names through which `harness.storage.claims` reaches the system.
        for name, value in {
            "time": claims_time,
            "threading": Threads(self),
            "uuid": SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=self.new_name())),
            "os": SimpleNamespace(getpid=self.getpid, kill=self.signal),
            "_host": lambda: self.process.host,
        }.items():
            setattr(claims, name, value)

    def getpid(self) -> int:
        return self.pids[self.process.main.name]

    def signal(self, pid: int, number: int) -> None:
        """`os.kill(pid, 0)`: looks at the processes of the machine of the caller, whatever its name is."""
        me = self.process.main
        others = [one for one in self.processes if one.main is one and self.machine(one.name) == self.machine(me.name)]
        if not any(self.pids[one.name] == pid and one.is_alive for one in others):
            raise ProcessLookupError

    def machine(self, name: str) -> str:
        """Machines differ unless both processes have one host with one boot."""
        return self.hosts["ab".index(name)] if "boot" in self.hosts[0] else name

    def own(self) -> None:
        name = self.process.name
        lease = self.lease_class(Store(self), "lease")  # type: ignore[arg-type]
        try:
            lease.acquire()
        except FormatError:
            return
        try:
            self.pause()  # works, for any time
            lease.check()
            self.write(name)
        except FormatError:
            pass
        finally:
            lease.release(remove=True)

    def write(self, name: str) -> None:
        self.writing[name] = self.now
        self.pause()
        del self.writing[name]
        content = self.objects.get("lease", (b"{}",))[0]
        owner = json.loads(content.partition(b"\n")[0]).get("token", "")
        assert owner.startswith(name), f"{name} writes below the lease of {owner or 'no owner'}"

    def may_tick(self) -> bool:
        limit = claims.LEASE_S * (1 - claims._SURE_PART) + 1e-6
        return all(self.now + self.tick_s - since <= limit for since in self.writing.values())

    def more_state(self) -> Hashable:
        return tuple(self.writing.items()), self.ticks

    def finish(self) -> None:
        """The next owner gets the lease, however the others ended."""
        self.is_over = False
        taken: list[bool] = []

        def take() -> None:
            lease = Lease(Store(self), "lease")  # type: ignore[arg-type]
            lease.acquire(wait=True)
            taken.append(True)

        self.faults = self.kills = 0
        self.pids["c"] = 99
        last = self.start("c", "host-c boot-c", take)
        for _ in range(20):
            if taken:
                return
            self.apply(("c", "goes"))
            if not last.ready():
                self.now += self.tick_s
        raise AssertionError("no process can take the lease any more")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    names = ("time", "threading", "uuid", "os", "_host")
    before = {name: getattr(claims, name) for name in names}
    yield
    for name, value in before.items():
        setattr(claims, name, value)


def model(base: type[Owners] = Owners, **settings: Any) -> type[Owners]:
    return type("Model", (base,), settings)


SAME = ("host-a boot-a", "host-a boot-a")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="pauses", marks=pytest.mark.submission),
        pytest.param({"ticks": 2, "kills": 1}, id="kills", marks=pytest.mark.submission),
        pytest.param({"ticks": 2, "faults": 1}, id="faults", marks=pytest.mark.submission),
        pytest.param({"ticks": 1, "kills": 1, "hosts": SAME}, id="one machine"),
    ],
)
def test_no_process_writes_below_the_lease_of_another_and_the_next_one_gets_it(settings: dict[str, Any]) -> None:
    states, ends = explore(model(**settings), most=20_000)
    assert states > 500
    assert ends > 5


class Deletes(Lease):
    def release(self, *, remove: bool) -> None:
        self._stop.set()
        with contextlib.suppress(FormatError):
            self._store.delete(self._name)


class Frees(Lease):
    def release(self, *, remove: bool) -> None:
        self._stop.set()
        with contextlib.suppress(FormatError):
            self._store.put(self._name, b"{}\n")


class ChecksNothing(Lease):
    def check(self) -> None:
        """Rely on the lease for ever."""


class TrustsItsCopy(Lease):
    def _put(self) -> None:
        self._etag = self._store.put(self._name, self._content(self._body)) or ""
        self._sure_until = claims._now() + 20


@pytest.mark.parametrize(
    "settings",
    [
        {"lease_class": Deletes},
        {"lease_class": Frees},
        {"lease_class": ChecksNothing},
        {"lease_class": TrustsItsCopy},
        {"hosts": ("host-a", "host-a"), "ticks": 1},
    ],
    ids=["deletes", "frees", "checks nothing", "renews without a condition", "no boot id"],
)
def test_the_model_finds_planted_faults(settings: dict[str, Any]) -> None:
    with pytest.raises(BrokenError, match="writes below the lease of"):
        explore(model(**settings))
