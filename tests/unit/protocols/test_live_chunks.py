"""Live chunks in the interleavings of a producer and the ranks of a run, each killed at any operation and restarted."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from interleavings import BrokenError, Clock, Event, GreenletExit, Threads, World, explore

from harness.errors import HarnessError
from harness.loader import LiveConfig, LoaderState, RankLayout
from harness.loader.datasets import LiveSource
from harness.loader.live import LiveProducer
from harness.loader.live import consumer as consumer_module
from harness.loader.live import folder as folder_module
from harness.loader.live import producer as producer_module
from harness.loader.live import rank as rank_module
from harness.loader.live.consumer import LiveLoader
from harness.loader.live.folder import LiveFolder, ReadyRecord
from harness.loader.live.position import positions_from_json, positions_to_json
from harness.loader.live.rank import BatchPlan, FolderReader, Waiting
from harness.records import Pack
from harness.schedule import SequenceCost


class Files:
    """The files of a `LiveFolder` in the objects of a world. What no other process can notice is no step of its own."""

    place, look_s = "live", 0.2

    def __init__(self, world: Streams) -> None:
        self._world = world

    def where(self, name: str = "") -> str:
        return name

    def make(self) -> None: ...

    def remove_temporary(self) -> None: ...

    def names(self) -> list[str]:
        # A run looks for chunks that it has trained; a producer for marks, which appear at any time.
        if self._world.process.name.startswith("producer"):
            self._world.pause()
        self._world.look()
        return list(self._world.objects)

    def find(self, name: str) -> tuple[int, float] | None:
        return (len(self._world.objects[name][0]), 0.0) if name in self._world.objects else None

    def read(self, name: str) -> bytes | None:
        self._world.look()
        return self._world.objects.get(name, (None,))[0]

    def read_mark(self, name: str) -> bytes:
        return self.read(name) or b""

    def write(self, name: str, data: bytes) -> None:
        self._world.pause()
        self._world.change(name, data)

    def touch(self, name: str) -> None:
        self.write(name, b"")

    def delete(self, name: str) -> None:
        if name in self._world.objects:
            self._world.pause()
            self._world.change(name, None)

    def lock(self, name: str) -> Any:
        return Lock(self, self._world, name)

    def begin_chunk(self, name: str) -> str:
        return name

    def finish_chunk(self, name: str, path: str) -> None: ...

    def drop_chunk(self, name: str, path: str) -> None:
        self.delete(name)

    def open_chunk(self, name: str, stored: object) -> tuple[Any, None] | None:
        if name not in self._world.objects:
            return None
        return SimpleNamespace(name=name, rows=json.loads(self._world.objects[name][0])), None


class Lock:
    """`Marker`, whose owner is a process of the model."""

    def __init__(self, files: Files, world: Streams, name: str) -> None:
        self._files, self._world, self._name = files, world, name

    def acquire(self) -> bytes:
        return self._files.read_mark(self._name)

    def write(self, data: bytes) -> None:
        if self._files.read(self._name) != data:
            if self._name == "_consumer" or self._world.mortal == "producer":
                self._world.pause()
            self._world.change(self._name, data)

    def check(self) -> None:
        if not self._world.process.is_alive:
            raise GreenletExit

    def release(self, *, remove: bool) -> None: ...


class Rows(list[int]):
    """`ChunkRows` of numbers."""

    __module__ = "interleavings:"
    world: Streams
    num_bytes = 0

    def __init__(self, kind: str, suffix: str) -> None: ...

    def add(self, row: int) -> None:
        self.append(row)

    def write(self, path: str) -> None:
        Files(self.world).write(path, json.dumps(self).encode())

    def record(self, path: str, last: ReadyRecord, *, stream: str, position: Any) -> ReadyRecord:
        total = last.total_rows + len(self)
        return ReadyRecord(
            "packs", len(self), len(self), 2, 1, path, "", stream, total, total, total, position, "", 0.0
        )


class Chunk:
    """`LiveChunk` of numbers; each is the first token of a pack."""

    __module__ = "interleavings:"
    kind = "packs"

    def __init__(self, path: Any, record: ReadyRecord, place: str, kept: None, reader: Any = None) -> None:
        self.path, self.place, self.num_rows, self.stream = path, place, len(path.rows), record.stream

    def where(self, row: int) -> str:
        return self.place

    def pack(self, row: int) -> Pack:
        return Pack([self.path.rows[row], 2], [1, 0], [0])

    def close(self) -> None: ...


class Stream(FolderReader):
    __module__ = "interleavings:"

    def _hint(self, index: int, end: int | None) -> str:
        return ""


def place(reads: Any, plan: Any) -> Any:
    return SimpleNamespace(placed=SimpleNamespace(num_microbatches=max(len(read.lengths) for read in reads)))


class Loader(LiveLoader):
    """`LiveLoader` whose batches are rows without tensors."""

    __module__ = "interleavings:"

    def _batch(self, rows: Any, placement: Any, reads: Any) -> Any:
        return [int(live.pack.input_ids[0]) for live in rows if live is not None], self._state.live


class Streams(World):
    """A producer of `num_rows` rows, and a run that trains them; the next attempt has another number of ranks.

    Attributes:
        checkpoint: the position of the last checkpoint, and the rows that its history has trained.
        ranks: of each attempt.
    """

    num_rows, max_waiting, kills = 3, 2, 0
    mortal = ""
    ranks: tuple[int, ...] = (1, 1)
    loader: type[Loader] = Loader
    marks_first = False
    checkpoint: tuple[str, tuple[int, ...]] = ("", ())

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.attempts = 0, {"producer": 0, "run": 0}
        self.looked: dict[str, int] = {}
        clock = Clock(self)
        clock.sleep = self.sleep
        Rows.world = self
        for name, value in patches(self, clock).items():
            setattr(*name, value)
        self.begin("producer")
        self.begin("run")

    def begin(self, who: str) -> None:
        self.attempts[who] += 1
        body = self.produce if who == "producer" else self.train
        self.start(f"{who}{self.attempts[who]}", "host", body)

    # ---- what processes do

    def produce(self) -> None:
        one = LiveProducer("live", kind="packs", rows_per_chunk=1, max_waiting=self.max_waiting, keep=0)
        while not one.ended and one.num_rows < self.num_rows:
            one.add(one.num_rows)
        one.end()
        one.close()

    def train(self) -> None:
        """Train as `LiveFeed` and its caller do: a checkpoint first, then the marks of what it covers."""
        me = self.process
        num_ranks = self.ranks[min(self.attempts["run"], len(self.ranks)) - 1]
        job = SimpleNamespace(offers={}, rows={}, size=num_ranks, start=self.checkpoint)
        others = [
            self.start(f"{me.name}.{number}", "host", lambda number=number: self.train_rank(number, job), me)
            for number in range(1, num_ranks)
        ]
        try:
            self.train_rank(0, job)
        except HarnessError as error:
            raise AssertionError(f"the run is refused: {error.what}") from error
        self.pause(lambda: all(one.greenlet.dead for one in others), is_local=True)

    def train_rank(self, number: int, job: Any) -> None:
        live, history = job.start
        folder_, mark = LiveFolder("live"), Lock(Files(self), self, "_consumer")
        plan = BatchPlan(RankLayout(dp_rank=number, dp_size=job.size), job.size, 8, SequenceCost())
        (position,) = positions_from_json(live, 1)
        config = LiveConfig(blend=[LiveSource("live", 1.0)], pack_size=8, timeout_s=1e6)

        def report(positions: Any, offers: Any) -> None:
            waits = [offer.waiting.chunk for offer in offers if offer.waiting is not None]
            status = {"read_below": positions[0].done_below, "read": sorted(positions[0].finished)}
            mark.write(json.dumps({**status, "waiting_for": waits}).encode())

        loader = self.loader(
            [Stream(config, plan, position=position)],
            plan,
            exchange=lambda mine: self.gather(job.offers, job.size, number, mine),
            state=LoaderState(seed=0, live=live),
            timeout_s=1e6,
            report=report if number == 0 else lambda positions, offers: None,
        )
        for batch in loader:
            if isinstance(batch, Waiting):
                continue
            rows, live = batch
            history = (*history, *self.gather(job.rows, job.size, number, rows))
            if number == 0:
                for work in (self.mark, self.save) if self.marks_first else (self.save, self.mark):
                    work(folder_, live, history)

    def save(self, folder_: LiveFolder, live: str, history: tuple[int, ...]) -> None:
        self.pause()
        self.checkpoint = live, history

    def mark(self, folder_: LiveFolder, live: str, history: tuple[int, ...]) -> None:
        folder_.complete(positions_from_json(live, 1)[0].trained_chunks(folder_.look().chunks))

    def gather(self, slots: dict[Any, list[Any]], size: int, number: int, mine: list[Any]) -> list[Any]:
        """Return the values of all ranks, once all have come here."""
        turn = slots.setdefault((number, "turn"), [0])
        turn[0] += 1
        at = turn[0]
        slots[number, at] = mine
        self.pause(lambda: all((one, at) in slots for one in range(size)), is_local=True)
        return [value for one in range(size) for value in slots[one, at]]

    # ---- time, which passes only with changes

    def look(self) -> None:
        self.looked.setdefault(self.process.name.rstrip("+"), self.writes)

    def change(self, name: str, data: bytes | None) -> None:
        before = self.objects.pop(name, None)
        if data is not None:
            self.objects[name] = data, ""
        self.writes += before != self.objects.get(name)

    def sleep(self, seconds: float) -> None:
        self.pause(self.until_changed(self.looked.pop(self.process.name.rstrip("+"), self.writes)), is_local=True)

    def until_changed(self, then: int) -> Callable[[], bool]:
        # No variable of a process, which would make each state another one.
        return lambda: self.writes != then

    # ---- for the explorer

    def events(self) -> Iterator[Event]:
        return (event for event in super().events() if event[1] != "kill" or event[0].startswith(self.mortal))

    def apply(self, event: Event) -> None:
        super().apply(event)
        if event[1] == "kill":
            self.begin(event[0].rstrip("0123456789"))

    def more_state(self) -> Hashable:
        return self.checkpoint, tuple(one.is_alive and one.ready() for one in self.processes)

    def check(self) -> None:
        _, history = self.checkpoint
        assert len(set(history)) == len(history), f"rows {history} were trained"
        there = {name[:11] for name in self.objects if name.endswith(".jsonl")}
        for name in self.objects:
            if name.endswith((".ready", ".completed")) and name[:11] not in there:
                # Chunk number n has row n.
                assert int(name[6:11]) in history, f"{name[:11]} is deleted, and the checkpoint needs it"

    def finish(self) -> None:
        history = sorted(self.checkpoint[1])
        assert history == list(range(self.num_rows)), f"only rows {history} were trained"


class Reading:
    """The executor of `LiveLoader`: another process of the rank reads ahead."""

    __module__ = "interleavings:"

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, read: Callable[[], Any]) -> Any:
        found: list[Any] = []
        me = self._world.process
        reader = self._world.start(f"{me.name}+", me.host, lambda: found.append(read()), me.main)
        self._world.processes = [one for one in self._world.processes if one.name != reader.name or one is reader]

        def result() -> Any:
            self._world.pause(lambda: reader.greenlet.dead, is_local=True)
            return found[0]

        return SimpleNamespace(result=result)


def patches(world: Any, clock: Any) -> dict[tuple[Any, str], Any]:
    """The names through which the code under test reaches the system."""
    return {
        (folder_module, "open_files"): lambda path: Files(world),
        (folder_module, "LiveChunk"): Chunk,
        (producer_module, "ChunkRows"): Rows,
        (producer_module, "threading"): world and Threads(world),
        (producer_module, "uuid"): SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=world.new_name())),
        (producer_module, "time"): clock,
        (consumer_module, "time"): clock,
        (consumer_module, "place"): place,
        (consumer_module, "ThreadPoolExecutor"): lambda **settings: Reading(world),
        (rank_module, "time"): clock,
    }


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, name in patches(None, None):
        monkeypatch.setattr(target, name, getattr(target, name))


def model(**settings: Any) -> type[Streams]:
    return type("Model", (Streams,), settings)


RUN_KILLED = {"kills": 1, "mortal": "run", "max_waiting": 1}
PRODUCER_KILLED = {"num_rows": 2, "kills": 1, "mortal": "producer", "max_waiting": 1}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="no kills"),
        pytest.param(RUN_KILLED, id="run killed", marks=pytest.mark.submission),
        pytest.param(PRODUCER_KILLED, id="producer killed", marks=pytest.mark.submission),
        pytest.param({"ranks": (2, 1), **RUN_KILLED, "num_rows": 2}, id="other ranks", marks=pytest.mark.submission),
    ],
)
def test_every_row_is_trained_once_and_no_chunk_is_deleted_that_the_checkpoint_needs(settings: dict[str, Any]) -> None:
    states, ends = explore(model(**settings), most=20_000)
    assert states > 100
    assert ends > 0


class ReadsOn(Loader):
    """Saves the position of rows that are read ahead, in place of those that are trained."""

    def _batch(self, rows: Any, placement: Any, reads: Any) -> Any:
        (position,) = positions_from_json(self._state.live, 1)
        ahead = position.done_below + len(self._streams)
        live = positions_to_json([replace(position, done_below=ahead, rows=position.rows + 1)])
        return super()._batch(rows, placement, reads)[0], live


def forget_the_newest(self: LiveFolder, contents: Any, *, keep: int, spare: int) -> None:
    DELETE(self, contents, keep=keep, spare=-1)


def begin_without_a_mark(self: LiveProducer, state: str, *, writing: int | None = None) -> None:
    WRITE_STATUS(self, state)


DELETE, WRITE_STATUS = LiveFolder.delete_completed, LiveProducer._write_status


@pytest.mark.submission
@pytest.mark.parametrize(
    ("settings", "change", "found"),
    [
        ({"marks_first": True}, None, "is deleted, and the checkpoint needs it"),
        ({"loader": ReadsOn, **RUN_KILLED}, None, "were trained|the run is refused"),
        (PRODUCER_KILLED, (LiveFolder, "delete_completed", forget_the_newest), "belongs to the stream|were trained"),
        (PRODUCER_KILLED, (LiveProducer, "_write_status", begin_without_a_mark), "were trained"),
    ],
    ids=["marks before the checkpoint", "saves what is read", "deletes the newest record", "half chunks are kept"],
)
def test_the_model_finds_planted_faults(
    settings: dict[str, Any], change: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change is not None:
        monkeypatch.setattr(*change)
    with pytest.raises(BrokenError, match=found):
        explore(model(**settings), most=20_000)
