"""A worker that dies, hangs or runs out of memory is named in time, and leaves no process or shared memory."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_packs import write_packs

from harness.errors import FormatError, LoaderError
from harness.formats import open_dataset
from harness.loader import BatchRange, Loader, LoaderConfig
from harness.loader.workers import BatchStream
from harness.records import Pack
from harness.schedule import ScheduleConfig

RANK = Path(__file__).with_name("reading_rank.py")


def loader(folder: Path, **settings: object) -> Loader:
    config = LoaderConfig(**{"global_batch_size": 5, "timeout_s": 60.0, **settings})
    return Loader(open_dataset(folder), config, schedule=ScheduleConfig("dp_balanced", 4096), num_epochs=1000)


def in_time(condition: Callable[[], bool], *, seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def mapped_by_the_living() -> set[Path]:
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has just ended, or is another user's
            continue
        found |= {Path(line[line.index("/dev/shm") :]) for line in lines if " /dev/shm/" in line}
    return found


def has_ended(pid: int) -> bool:
    """Return whether the process has ended, also if its parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("which", [0, 1])
def test_the_hung_worker_among_several_is_named(in_every_format: dict[str, Path], which: int) -> None:
    with loader(in_every_format["binidx"], num_workers=2, timeout_s=4.0) as made:
        batches = iter(made)
        next(batches)
        pids = made.worker_pids()
        os.kill(pids[which], signal.SIGSTOP)
        with pytest.raises(LoaderError, match=rf"no data arrived for 4 s from .* process id {pids[which]} "):
            for _ in batches:
                pass
    assert all(map(has_ended, pids))


def test_workers_that_the_system_refuses_to_start_are_an_error_with_its_reason(in_every_format, monkeypatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with loader(in_every_format["binidx"], num_workers=2, start_method="fork") as made:
        monkeypatch.setattr(os, "fork", refuse)
        with pytest.raises(LoaderError, match="workers cannot be started: Resource temporarily unavailable") as refused:
            next(iter(made))
    assert "loader.num_workers" in refused.value.fix


def read_much(batch: BatchRange) -> bytes:
    return b"." * (10 << 20)


def test_a_worker_that_hangs_in_the_middle_of_a_batch_is_named() -> None:
    config = LoaderConfig(global_batch_size=1, num_workers=1, prefetch_factor=1, timeout_s=2.0)
    with BatchStream(read_much, config, where="rank 0") as stream:
        batches = stream.read(BatchRange(0, number, number, number + 1) for number in range(3))
        next(batches)
        # More than the connection holds: its end is sent while the batch is received.
        assert in_time(stream._workers[0].connection.poll)
        (pid,) = stream.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LoaderError, match=f"no data arrived for 2 s from .* process id {pid} "):
            next(batches)
    assert has_ended(pid)


def test_a_worker_without_memory_reports_it(tmp_path: Path) -> None:
    # Small batches first, which need no more than is there; then one with an array larger than what a new process has
    # freed. A forked process also has what earlier tests have freed.
    large = 9 << 20
    packs = (Pack(np.arange(length), np.zeros(length), [0]) for length in [4] * 40 + [large] + [4] * 7)
    reader = open_dataset(write_packs(tmp_path / "packs", packs, format="binidx", pack_size=large))
    alone = {"num_workers": 1, "prefetch_factor": 1, "start_method": "spawn", "shuffle": False, "timeout_s": 600.0}
    config = LoaderConfig(global_batch_size=8, **alone)
    with Loader(reader, config, schedule=ScheduleConfig("dp_balanced", large), num_epochs=1) as made:
        batches = iter(made)
        next(batches)
        pid = made.worker_pids()[0]
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        what = rf"process {pid} ran out of memory while it read a step|requires more memory than is available"
        with pytest.raises((LoaderError, FormatError), match=what) as caught:
            list(batches)
    assert "num_workers" in caught.value.fix or "shard_000000" in caught.value.where
    assert has_ended(pid)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_a_worker_that_reads_past_the_end_of_a_cut_file_names_it(tmp_path, start_method, capfd) -> None:
    packs = [Pack(np.full(4096, number), np.zeros(4096), [0]) for number in range(16)]
    write_packs(tmp_path / "packs", packs, format="binidx", pack_size=4096)
    cut = tmp_path / "packs" / "shard_000000.bin"
    with loader(tmp_path / "packs", global_batch_size=2, num_workers=1, start_method=start_method) as made:
        batches = iter(made)
        next(batches)
        os.truncate(cut, 0)
        with pytest.raises(LoaderError, match=r"died \(Bus error\): a mapped file was truncated") as caught:
            for _ in batches:
                pass
    assert str(tmp_path / "packs") in caught.value.where
    assert f"harness verify {tmp_path / 'packs'}" in caught.value.fix
    expected = rf"FormatError: the file was truncated or removed, or its disk failed, .*\n  where: {cut}\n"
    assert re.search(expected, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("start_method", "num_workers"),
    [("fork", 2), ("spawn", 1), pytest.param("forkserver", 1, marks=pytest.mark.nightly)],
)
def test_a_killed_worker_is_an_error_within_the_timeout_and_the_others_end(in_every_format, start_method, num_workers):
    settings = {"num_workers": num_workers, "start_method": start_method, "timeout_s": 20.0}
    with loader(in_every_format["jsonl"], **settings) as made:
        batches = iter(made)
        next(batches)
        pids = made.worker_pids()
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(LoaderError, match=rf"loader worker with process id {pids[0]} died") as caught:
            for _ in batches:
                pass
    assert "num_workers" in caught.value.fix
    assert all(map(has_ended, pids))


@pytest.mark.parametrize(
    "start_method",
    ["fork", pytest.param("spawn", marks=pytest.mark.nightly), pytest.param("forkserver", marks=pytest.mark.nightly)],
)
def test_workers_of_a_killed_rank_end_themselves(in_every_format: dict[str, Path], start_method: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, RANK, in_every_format["parquet"], "0", "1", "2", start_method, "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        process.kill()
        process.wait()
        assert in_time(lambda: all(map(has_ended, pids)))

    # Other processes of the machine keep running meanwhile; each maps the files it made there.
    def left() -> set[Path]:
        return set(Path("/dev/shm").iterdir()) - before - mapped_by_the_living()

    assert in_time(lambda: not left()), left()


def test_a_program_that_ends_with_an_error_and_an_open_loader_ends_with_its_workers(tmp_path: Path) -> None:
    write_packs(tmp_path / "packs", [Pack([1, 2, 3], [1, 1, 0], [0])] * 10, format="memmap", pack_size=8)
    code = """
import sys
from harness import Loader, LoaderConfig, open_dataset
loader = Loader(open_dataset(sys.argv[1]), LoaderConfig(global_batch_size=2, num_workers=1))
batches = iter(loader)
next(batches)
print(loader.worker_pids()[0], flush=True)
raise SystemError("a mistake of the program")
"""
    # Without the end of the workers the program waits for them until it is killed.
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "packs")], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 1
    assert "a mistake of the program" in done.stderr
    assert has_ended(int(done.stdout))
