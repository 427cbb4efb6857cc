"""Every command that writes, on a disk that is full or fails at one of its calls.

The command names the fault and ends with exit code 2; afterwards the same command finishes, with the result of one that
nothing disturbed. Operations are those of the system: writes, renames and so on, of Python, pyarrow and torch alike.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from counted_calls import Commands

from .commands import Command, commands, figures, training
from .faults import (
    Disk,
    Fault,
    attempt,
    attempt_with_room,
    distinct,
    known,
    prepare,
    try_deaths,
)

COMMANDS, TRAINING = dict(commands()), dict(training())
EVERY = {**COMMANDS, **TRAINING}
# One of each kind of writer; the nightly tests have all.
SAMPLED = ("convert-memmap", "repack", "prepare-parquet", "indexed-convert", "live-produce-packs")
KINDS = {
    "full": Fault(error=errno.ENOSPC, stays_full=True),
    "quota": Fault(error=errno.EDQUOT, stays_full=True),
    "failing": Fault(error=errno.EIO),
}
# What a loss of power takes with it.
WITHOUT_POWER = ("bytes", "names")
# Above the objects of Python, below the buffers of a dataset of three packs.
_LARGE_BYTES = 1 << 14
FINISHED = "each named, and finished by the same command with the result of an undisturbed one"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    folder = tmp_path_factory.mktemp("disk")
    with Commands(folder / "scratch") as forks:
        yield Disk(forks, folder / "disk")


@pytest.fixture(scope="module")
def training_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    folder = tmp_path_factory.mktemp("disk")
    with Commands(folder / "scratch", "training") as forks:
        yield Disk(forks, folder / "disk")


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a real disk of a few megabytes in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "harness-test", folder]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def try_points(disk: Disk, command: Command, folder: Path, kind: str, points: int | None, seed: str) -> int:
    """Fail at a seeded sample of `points` calls, or at all that differ; return their number."""
    expected, calls = prepare(disk, command, folder / "template")
    chosen = distinct(calls)
    if points is not None:
        chosen = sorted(random.Random(seed).sample(chosen, points))
    fault = KINDS[kind]
    faults = [Fault(at, fault.error, fault.stays_full) for at in chosen]
    codes = [attempt(disk, command, folder / "template", expected, one).code for one in faults]
    assert 2 in codes  # some faults do not matter, as that of a removal
    return len(chosen)


def try_memory(disk: Disk, command: Command, folder: Path, points: int | None, seed: str) -> int:
    """Refuse a seeded sample of the allocations of 16 kB and more, or all; return their number."""
    expected, calls = prepare(disk, command, folder / "template", fault=Fault(smallest=_LARGE_BYTES))
    if not command.is_exact:
        expected = pytest.approx(expected, rel=1e-6)
    whole = known(disk, folder / "template")
    chosen = range(len(calls)) if points is None else sorted(random.Random(seed).sample(range(len(calls)), points))
    for at in chosen:
        attempt(disk, command, folder / "template", expected, Fault(at, smallest=_LARGE_BYTES), whole=whole)
    return len(chosen)


@pytest.mark.submission
@pytest.mark.parametrize("name", SAMPLED)
def test_a_fault_a_loss_of_power_or_memory_is_named_and_the_same_command_finishes(disk, tmp_path, name) -> None:
    kind = random.Random(name).choice(list(KINDS))
    assert try_points(disk, COMMANDS[name], tmp_path, kind, 1, name) == 1
    assert try_deaths(disk, COMMANDS[name], tmp_path, 1, name, WITHOUT_POWER) == 4
    assert try_memory(disk, COMMANDS[name], tmp_path, 2, name) == 2


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EVERY)
def test_a_power_failure_at_any_operation_leaves_a_run_that_resumes_exactly_or_a_dataset_that_is_whole_or_none(
    training_disk: Disk, tmp_path: Path, name: str, report_points: Callable[..., None]
) -> None:
    points = try_deaths(training_disk, EVERY[name], tmp_path, None, name, WITHOUT_POWER)
    report_points("disks", f"{name} without power", points, of="failures", outcome=FINISHED)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EVERY)
def test_any_large_allocation_that_is_refused_is_named_and_the_same_command_finishes(
    training_disk: Disk, tmp_path: Path, name: str, report_points: Callable[..., None]
) -> None:
    command = EVERY[name]
    if name.startswith("train"):
        # A library of products rounds otherwise where its buffer is refused.
        command = replace(command, result=figures, is_exact=False)
    points = try_memory(training_disk, command, tmp_path, 60, name)
    report_points("disks", f"{name} without memory", points, of="refusals", outcome=FINISHED)


def try_rooms(commands: Commands, command: Command, folder: Path, rooms: int, megabytes: int = 16) -> None:
    """Run a command on a real disk with that many different amounts of room, from none to nearly enough."""
    with small_disk(folder / "disk", megabytes) as place:
        disk = Disk(commands, place)
        expected, _ = prepare(disk, command, folder / "template")
        began = sum(file.stat().st_size for file in (folder / "template").rglob("*") if file.is_file())
        needed = shutil.disk_usage(place).used - began
        for number in range(rooms):
            attempt_with_room(disk, command, folder / "template", expected, needed * number // rooms)


@pytest.mark.submission
def test_a_real_disk_that_fills_up_is_named_and_the_same_command_finishes(disk: Disk, tmp_path: Path) -> None:
    try_rooms(disk.commands, COMMANDS["convert-parquet"], tmp_path, 2)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EVERY)
def test_a_real_disk_with_any_room_is_named_and_the_same_command_finishes(
    training_disk: Disk, tmp_path: Path, name: str
) -> None:
    command = EVERY[name]
    try_rooms(training_disk.commands, command, tmp_path, 12, 48 if name in TRAINING else 16)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_on_a_full_disk_ends_the_job_by_name_and_it_resumes(training_disk, tmp_path, rank) -> None:
    # With tensor parallelism both ranks write their part of a checkpoint.
    layout = " parallel.tensor_parallel_size=2"
    command, template = TRAINING["train"], tmp_path / "template"
    command = replace(command, arguments=command.arguments + layout, again=command.again + layout)
    expected, calls = prepare(training_disk, command, template, fault=Fault(rank=rank), ranks=2)
    chosen = distinct(calls)
    for at in random.Random(rank).sample(chosen, min(len(chosen), 12)):
        attempt(training_disk, command, template, expected, Fault(at, errno.ENOSPC, True, rank=rank), ranks=2)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["train", "train-resumed", "convert-parquet", "prepare-parquet"])
def test_a_file_that_cannot_be_read_is_named_and_the_same_command_finishes(training_disk, tmp_path, name) -> None:
    command, template = EVERY[name], tmp_path / "template"
    expected, calls = prepare(training_disk, command, template, fault=Fault(reads=True))
    for at in distinct(calls):
        if not calls[at].startswith(("read", "pread")):
            continue
        attempt(training_disk, command, template, expected, Fault(at, errno.EIO, reads=True))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERY)
def test_a_fault_at_any_operation_is_named_and_the_same_command_finishes_as_if_undisturbed(
    training_disk: Disk, tmp_path: Path, name: str, kind: str, report_points: Callable[..., None]
) -> None:
    points = try_points(training_disk, EVERY[name], tmp_path, kind, None, name)
    report_points("disks", f"{name} on a {kind} disk", points, of="faults", outcome=FINISHED)
