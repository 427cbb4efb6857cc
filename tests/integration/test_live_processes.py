"""A producer and training ranks as processes of their own: killed, slow, out of space, and one that is too many."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from live_streams import some_packs, train, write_stream
from small_packs import write_packs

from harness.loader.live.folder import LiveFolder
from harness.parity.running import free_ports
from harness.train.metrics import whole_lines

from ..distributed.conftest import ROOT, environment
from .live_rank import SIZE

pytestmark = pytest.mark.submission

HARNESS = Path(sys.executable).parent / "harness"


@dataclass
class Side:
    """One side of a stream: processes that are started and killed together."""

    commands: list[tuple[list[str], dict[str, str]]]
    log: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        port = str(free_ports(1)[0])
        with self.log.open("ab") as log:
            self.running = [
                subprocess.Popen(
                    command, env={**environment(), **more, "MASTER_PORT": port}, cwd=ROOT, stdout=log, stderr=log
                )
                for command, more in self.commands
            ]

    def kill(self) -> None:
        for process in self.running:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self.running:
            process.wait()

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.running]

    def wait(self) -> list[int]:
        return [process.wait() for process in self.running]

    def output(self) -> str:
        return self.log.read_text()


@dataclass
class Stream:
    """A folder of chunks with what writes and what trains, and where training notes what it did.

    `variables` are those of all processes.
    """

    folder: Path | str
    out: Path
    variables: dict[str, str] = field(default_factory=dict)

    def producer(self, source: Path | str, *more: str, kind: str = "chat") -> Side:
        command = [str(HARNESS), "live", "produce", str(source), str(self.folder), f"chunks.kind={kind}", *more]
        return Side([(command, self.variables)], self.out / "producer.log")

    def ranks(
        self,
        count: int,
        *,
        interval: int = 2,
        step_s: float = 0.0,
        tokenizer: str = "",
        timeout_s: float = 600.0,  # a busy machine may take a minute to start a process
        collective_s: float = 600.0,
    ) -> Side:
        module = [sys.executable, "-m", "tests.integration.live_rank"]
        settings = (interval, step_s, tokenizer, timeout_s, collective_s)
        command = [*module, str(self.folder), str(self.out), *map(str, settings)]
        places = {**self.variables, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        return Side([(command, {**places, "RANK": str(rank)}) for rank in range(count)], self.out / "ranks.log")

    def trained(self) -> list[dict[str, Any]]:
        path = self.out / "trained.jsonl"
        return [json.loads(line) for line in whole_lines(path)] if path.exists() else []

    @property
    def is_done(self) -> bool:
        return (self.out / "done").exists()


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    (tmp_path / "out").mkdir()
    return Stream(tmp_path / "live", tmp_path / "out")


def until(condition: Callable[[], bool], *sides: Side) -> None:
    """Wait until a condition holds, however long that takes while no process of `sides` has failed."""
    while not condition():
        for side in sides:
            assert set(side.codes()) <= {None, 0}, side.output()[-3000:]
        time.sleep(0.02)


@pytest.mark.nightly
def test_both_sides_are_killed_and_fewer_ranks_go_on_with_every_row_once(stream: Stream, tmp_path: Path) -> None:
    rows = some_packs(120)
    write_packs(tmp_path / "source", rows, format="memmap", pack_size=64)
    write_stream(tmp_path / "reference", rows, [9] * 13 + [3])
    expected = train(tmp_path / "reference", dp_size=2, size=SIZE)

    options = ("chunks.rows=9", "chunks.max_waiting=2", "chunks.keep=1")
    producer = stream.producer(tmp_path / "source", *options, kind="packs")
    two, one = stream.ranks(2, step_s=0.02), stream.ranks(1)
    with two, producer:  # before there is a folder
        until(lambda: len(stream.trained()) >= 5, two, producer)
        producer.kill()
        until(lambda: len(stream.trained()) >= 7, two)
        two.kill()
        begun = [line["digests"] for line in stream.trained()]
        assert begun == expected.digests[: len(begun)]
        producer.start()
        with one:
            assert one.wait() == [0], one.output()
        assert producer.wait() == [0], producer.output()
    assert sorted(id for line in stream.trained() for id in line["ids"]) == expected.sequences
    contents = LiveFolder(stream.folder).look()
    # Chunks trained early are deleted during the run; the remaining ones are marked.
    assert 0 not in contents.chunks
    assert set(contents.chunks) == set(contents.completed)
    assert sorted(contents.chunks)[-1] == 13
