"""Enumerate the interleavings of a few processes that run real code over shared objects, one operation at a time.

Each process is a greenlet. Code reaches another process only through operations that call `World.pause` first, and
there the explorer chooses who goes on, who is killed, whose request or answer is lost or late, and when time passes. A
state is what is shared, the clock, and the variables of each process: one that was met before is not explored again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest

from harness import errors
from harness.errors import FormatError

pytest.importorskip("greenlet")  # the image has the nightly tests' packages only
from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")
Event = tuple[str, str]
# Ways of an operation on a store that fails: its request is lost, its answer is, or its request arrives later.
FAULTS = ("unsent", "unanswered", "late")
# Modules whose objects belong to the state of a process.
STATEFUL = ("harness.loader.live", "harness.storage.claims", "interleavings:")


class BrokenError(AssertionError):
    """A property does not hold; `path` has the events that lead there."""

    def __init__(self, what: str, path: list[Event]) -> None:
        super().__init__(f"{what}, after {' '.join(f'{who}:{how}' for who, how in path)}")


class Process:
    """A process of the model.

    Attributes:
        ready: whether it can go on, asked again after each event.
        is_local: its next step touches nothing that is shared, so the order of that does not matter.
        fault_kinds: ways in which its next operation may fail.
    """

    def __init__(self, name: str, host: str, body: Callable[[], object], main: Process | None = None) -> None:
        self.name, self.host, self.main = name, host, main or self
        self.greenlet = greenlet(lambda how: body())
        self.greenlet.process = self
        self.ready: Callable[[], bool] = lambda: True
        self.fault_kinds: tuple[str, ...] = ()
        self.is_killed, self.is_local = False, True
        self.known: Hashable = None

    @property
    def is_alive(self) -> bool:
        return not self.main.is_killed and not self.greenlet.dead

    def variables(self) -> Hashable:
        """Return where it stands in each of its functions, with their variables."""
        if not self.is_alive:
            return None
        if self.known is None:
            frames, frame, met = [], self.greenlet.gr_frame, set[int]()
            while frame is not None:
                if frame.f_code.co_filename != __file__:
                    frames.append((frame.f_code.co_name, frame.f_lasti, freeze(frame.f_locals, met)))
                frame = frame.f_back
            self.known = tuple(frames)
        return self.known


def freeze(value: Any, met: set[int], depth: int = 6) -> Hashable:
    """Return a value that is equal for equal variables: of objects of the code under test, their attributes, once."""
    kind = type(value)
    if value is None or kind in (str, bytes, int, float, bool):
        return value
    if kind is dict:
        return tuple([(name, freeze(one, met, depth - 1)) for name, one in value.items()])
    if kind in (list, tuple, set, frozenset):
        return tuple([freeze(one, met, depth - 1) for one in value])
    if depth and id(value) not in met and kind.__module__.startswith(STATEFUL):
        met.add(id(value))
        names = getattr(value, "__dict__", None) or getattr(kind, "__slots__", ())
        return freeze({name: getattr(value, name) for name in names}, met, depth - 1)
    return str(value) if isinstance(value, Exception) else kind.__name__


class World:
    """State that the processes of a model share; subclasses start them, and name the conditions that must hold.

    Attributes:
        objects: the object store: content and version by name.
        now: seconds; time passes by `tick_s`, `ticks` times at most.
        faults, kills: how many may still happen.
    """

    tick_s, ticks, faults, kills = 10.0, 0, 0, 0

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.late: list[Callable[[], object]] = []
        self.now, self.num_names = 1000.0, 0
        self.is_over = False
        self._hub = getcurrent()

    # ---- for the code under test

    def start(self, name: str, host: str, body: Callable[[], object], main: Process | None = None) -> Process:
        process = Process(name, host, body, main)
        self.processes.append(process)
        return process

    @property
    def process(self) -> Process:
        return getcurrent().process

    def pause(
        self, ready: Callable[[], bool] = lambda: True, faults: tuple[str, ...] = (), *, is_local: bool = False
    ) -> str:
        """Let the others go on until the explorer chooses this process; returns how its operation goes."""
        process = self.process
        if self.is_over or not process.is_alive:
            raise GreenletExit
        process.ready, process.fault_kinds, process.is_local = ready, faults, is_local
        how = str(self._hub.switch())
        if how == "kill":
            raise GreenletExit
        return how

    def operate(self, work: Callable[[], T], *, writes: bool = True) -> T:
        """Run an operation on the store, at a moment and with a fault that the explorer chooses."""
        how = self.pause(faults=FAULTS if writes else FAULTS[:1])
        if how == "late":
            self.late.append(work)
        if how in ("unsent", "late"):
            raise FormatError("the store did not answer")
        result = work()
        if how == "unanswered":
            raise FormatError("the store did not answer")
        return result

    def sleep(self, seconds: float) -> None:
        """Sleep until something happens that can change what a look finds: time or a write."""
        then = self.now, self.objects.copy()
        self.pause(lambda: then != (self.now, self.objects), is_local=True)

    def new_name(self) -> str:
        self.num_names += 1
        return f"{self.process.name}{self.num_names}"

    # ---- the store: conditional requests, each of them atomic

    def get(self, name: str) -> tuple[bytes, str] | None:
        return self.operate(lambda: self.objects.get(name), writes=False)

    def put(self, name: str, data: bytes, condition: str | None) -> str | None:
        """`condition` is an ETag, "" for an object that must not exist, None for none."""

        def write() -> str | None:
            version = self.objects[name][1] if name in self.objects else ""
            if condition is not None and condition != version:
                return None
            self.objects[name] = (data, str(hash(data)))
            return str(hash(data))

        return self.operate(write)

    def delete(self, name: str) -> None:
        self.operate(lambda: self.objects.pop(name, None) and None)

    # ---- for the explorer

    def state(self) -> Hashable:
        late = tuple(freeze([one.cell_contents for one in work.__closure__ or ()], set()) for work in self.late)
        variables = tuple(one.variables() for one in self.processes)
        return frozenset(self.objects.items()), variables, late, self.now, self.faults, self.kills, self.more_state()

    def more_state(self) -> Hashable:
        return None

    def events(self) -> Iterator[Event]:
        alive = [one for one in self.processes if one.is_alive]
        for one in alive:
            if one.is_local and one.ready():
                yield one.name, "goes"
                return
        for one in alive:
            if one.ready():
                yield one.name, "goes"
                if self.faults:
                    yield from ((one.name, kind) for kind in one.fault_kinds)
            if self.kills and one.main is one:
                yield one.name, "kill"
        for index in range(len(self.late)):
            yield "late", str(index)
        if self.ticks and alive and self.may_tick():
            yield "time", "passes"

    def may_tick(self) -> bool:
        return True

    def apply(self, event: Event) -> None:
        who, how = event
        if who == "time":
            self.now, self.ticks = self.now + self.tick_s, self.ticks - 1
        elif who == "late":
            self.late.pop(int(how))()
        else:
            process = next(one for one in self.processes if one.name == who)
            for one in self.processes:
                if one.main is process.main:
                    one.known = None
            if how == "kill":
                self.kills -= 1
                process.is_killed = True
                for one in self.processes:
                    if one.main is process and one.greenlet:
                        one.greenlet.throw(GreenletExit)
            else:
                self.faults -= how != "goes"
                process.greenlet.parent = self._hub = getcurrent()
                process.greenlet.switch(how)

    def check(self) -> None:
        """Raise AssertionError where a property does not hold now."""

    def finish(self) -> None:
        """Raise AssertionError where a property does not hold at the end, when nothing more can happen."""

    def close(self) -> None:
        self.is_over = True
        for one in self.processes:
            if one.greenlet:
                one.greenlet.throw(GreenletExit)


@contextmanager
def cheaply() -> Iterator[None]:
    """Look for garbage rarely, because what was met stays, and never for secrets in errors: both take much time."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(errors, "redact", str)
            yield
    finally:
        gc.set_threshold(*usual)


@cheaply()
def explore(make: Callable[[], World], *, most: int = 10**9) -> tuple[int, int]:
    """Enumerate all interleavings; returns the numbers of states and of ends.

    Raises:
        BrokenError: a property does not hold.
    """
    met: set[Hashable] = set()
    left: list[list[Event]] = [[]]
    ends = 0
    while left:
        path = left.pop()
        world = make()
        try:
            for event in path:
                world.apply(event)
            while True:
                world.check()
                state = world.state()
                if state in met:
                    break
                assert len(met) < most, f"more than {most:,} states"
                met.add(state)
                events = list(world.events())
                if not events:
                    ends += 1
                    world.finish()
                    break
                left.extend([*path, event] for event in events[1:])
                path = [*path, events[0]]
                world.apply(events[0])
        except AssertionError as error:
            raise BrokenError(str(error).partition("\n")[0], path) from error
        finally:
            world.close()
    return len(met), ends


class Clock:
    """The `time` of a world, for modules that read it."""

    CLOCK_MONOTONIC = 1

    def __init__(self, world: World) -> None:
        self.sleep = world.sleep
        self.monotonic = self.time = lambda: world.now
        self.clock_gettime = lambda which: world.now
        self.strftime = lambda *args: "then"
        self.gmtime = lambda *args: None


class Lock:
    __module__ = "interleavings:"
    owner: Any = None
    depth = 0

    def __init__(self, world: World) -> None:
        self.world = world

    def acquire(self, blocking: bool = True) -> bool:
        me = getcurrent()
        if self.owner not in (None, me):
            if not blocking:
                return False
            self.world.pause(lambda: self.owner is None)
        self.owner, self.depth = me, self.depth + 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()


class Flag:
    __module__ = "interleavings:"
    is_set = False

    def __init__(self, world: World) -> None:
        self.world = world

    def set(self) -> None:
        self.is_set = True

    def wait(self, timeout: float) -> bool:
        until = self.world.now + timeout
        self.world.pause(lambda: self.is_set or self.world.now >= until)
        return self.is_set


class Thread:
    def __init__(self, world: World, target: Callable[[], object], **settings: object) -> None:
        self.world = world
        main = world.process.main
        self.process = world.start(f"{main.name}+", main.host, target, main)

    def start(self) -> None:
        """Do nothing: the explorer may choose it from now on."""

    def join(self) -> None:
        self.world.pause(lambda: self.process.greenlet.dead, is_local=True)


class Threads:
    """The `threading` of a world: locks, events and threads whose every wait is a choice of the explorer."""

    def __init__(self, world: World) -> None:
        self.Lock = self.RLock = partial(Lock, world)
        self.Event, self.Thread = partial(Flag, world), partial(Thread, world)
