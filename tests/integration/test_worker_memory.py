"""Many workers of one dataset share its pages and keep few files open."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.formats import FORMATS, open_dataset

RANK = Path(__file__).with_name("reading_rank.py")
MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Of all processes together, in bytes; a page that several of them have counts once.

    Attributes:
        anonymous: not from a file.
        mapped: from files of the dataset.
    """

    anonymous: int
    mapped: int


def read_with(path: Path, *, ranks: int, workers: int) -> Memory:
    """The memory of `ranks` processes with `workers` workers each once they have read all of a dataset."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, RANK, path, str(rank), str(ranks), str(workers), "fork", "0"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
            for rank in range(ranks)
        ]
        pids = [pid for process in processes for pid in process.stdout.readline().split()]
        assert len(pids) == ranks * (1 + workers)
        found = [
            dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            for pid in pids
        ]
        mapped = sum(mapped_from(path, pid) for pid in pids)
        for process in processes:
            process.stdin.close()
    assert all(process.returncode == 0 for process in processes)
    return Memory(sum(int(one["Pss_Anon:"]) for one in found) * 1024, mapped)


def mapped_from(folder: Path, pid: str) -> int:
    """A process's share of the pages that are mapped from files below a folder: libraries are others' too."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # a mapping's first line
            counts = values[-1].startswith(f"{folder}/")
        elif name == "Pss:" and counts:
            total += int(values[0]) * 1024
    return total


# Resident memory is judged, which needs a machine that runs nothing else.
@pytest.mark.nightly
@pytest.mark.parametrize("format", ["memmap", "binidx"])
def test_workers_of_a_whole_node_share_the_pages_of_a_dataset(tmp_path: Path, write_packs, format: str) -> None:
    sizes, ranks, workers = (1024, 32768), 8, 4
    paths = [write_packs(tmp_path / str(size), size, format=format, pack_size=4096) for size in sizes]
    bytes_more = sum(
        sign * file.stat().st_size
        for sign, path in zip((-1, 1), paths, strict=True)
        for file in path.rglob("*")
        if file.is_file()
    )
    small, large = (read_with(path, ranks=ranks, workers=workers) for path in paths)
    # Each process reads its own part: were it kept, all of them together would hold the whole. Buffers are allowed.
    buffers = 2 * MIB * ranks * (1 + workers)
    assert bytes_more > 2 * buffers
    assert large.anonymous - small.anonymous < buffers
    assert large.mapped - small.mapped < 1.1 * bytes_more
    # The pages were really read by way of these mappings.
    assert large.mapped - small.mapped > 0.5 * bytes_more


def shard_files(pid: str, folder: Path) -> set[str]:
    """Files below a folder that a process has open or mapped, its index left out; once it has stopped reading ahead."""
    before: set[str] | None = None
    while True:
        found = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.add(str(link.readlink()))
        found = {one for one in found if one.startswith(str(folder)) and "/index/" not in one}
        if found == before:
            return found
        before = found
        time.sleep(0.2)


@pytest.mark.nightly
@pytest.mark.parametrize("format", FORMATS)
def test_a_worker_keeps_few_of_500_shards_open(tmp_path: Path, write_packs, format: str) -> None:
    path = write_packs(tmp_path / "packs", 500, format=format, packs_per_shard=1)
    assert len(open_dataset(path).files()) == 500
    command = [sys.executable, RANK, path, "0", "1", "2", "fork", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        main, *workers = process.stdout.readline().split()
        assert not shard_files(main, path)
        assert len(workers) == 2
        assert all(len(shard_files(pid, path)) <= 64 for pid in workers)
        process.stdin.close()
