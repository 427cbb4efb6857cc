"""Try a command with a fault at each call: it names the fault, and the same command finishes afterwards.

A fault is a disk that is full or fails, a power failure, or an allocation that is refused.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from counted_calls import KILLED, Commands, Ran, environments_of, keep_forced, lose_power

from harness.errors import HarnessError
from harness.formats import open_dataset

from .commands import Command, contents

_NAMED = re.compile(r"^(rank \d+: )?\w+Error: \S.*\n  where: \S", re.MULTILINE)
# The interpreter's own words about a .pth file that it could not read when it started the process that renders, and
# about a glyph that a font could not load.
_NOT_OURS = re.compile(
    r"Error processing line \d+ of .*?Remainder of file ignored"
    r"|Exception ignored in: 'read_from_file_callback'\nTraceback .*?MemoryError:",
    re.DOTALL,
)
# Torch's C++ code does not pass the system's reason on.
_TORCHS = "the disk is full or failing"


@dataclass(frozen=True)
class Fault:
    """Number `at` of the calls below a folder fails with `error`; the rest is as for `Commands.run`.

    Attributes:
        rank: whose calls are counted; None for those of all.
    """

    at: int = -1
    error: int = 0
    stays_full: bool = False
    reads: bool = False
    everyone: bool = False
    rank: int | None = 0
    smallest: int = 0
    forced: Path | None = None


@dataclass(frozen=True)
class Disk:
    """A folder that is a disk for the commands that run on it."""

    commands: Commands
    folder: Path

    def run(
        self, arguments: list[str], *, fault: Fault | None = None, ranks: int = 1, copies: int = 1, **more: Any
    ) -> Ran:
        """Run `harness ARGUMENTS`, its temporary files on the disk too; `more` is as for `Commands.run`."""
        fault = fault or Fault()
        temporary = self.folder / "temporary"
        temporary.mkdir(parents=True, exist_ok=True)
        return self.commands.run(
            *[["harness", *arguments]] * ranks * copies,
            root=self.folder,
            at=fault.at,
            error=fault.error,
            stays_full=fault.stays_full,
            reads=fault.reads,
            everyone=fault.everyone or fault.forced is not None,
            smallest=fault.smallest,
            forced=fault.forced,
            counted=fault.rank,
            environments=[{"TMPDIR": str(temporary), **place} for place in environments_of(ranks)] * copies,
            **more,
        )


def split(text: str, folder: Path) -> list[str]:
    return text.replace("{}", str(folder)).split()


def prepare(
    disk: Disk, command: Command, template: Path, *, fault: Fault | None = None, ranks: int = 1
) -> tuple[Any, list[str]]:
    """Make the input, run the command undisturbed; return its result and the calls of a rank."""
    if not template.exists():
        template.mkdir(parents=True)
        command.make(template)
        if command.before:
            ended = disk.run(split(command.before, template))
            assert ended.code == 0, ended.output
    folder = begin(disk, template)
    ended = disk.run(split(command.arguments, folder), fault=fault, ranks=ranks)
    assert ended.code == 0, ended.output
    return command.result(folder), ended.calls


def attempt(
    disk: Disk,
    command: Command,
    template: Path,
    expected: Any,
    fault: Fault,
    *,
    ranks: int = 1,
    whole: set[tuple[str, str]] | None = None,
) -> Ran:
    """Run the command with a fault, and again without; assert all that holds for any fault.

    Where an allocation is refused, code in Rust and C++ may end the process in place of an error.

    Args:
        whole: of `known`; then what opens as a dataset between the two runs is one of these.
    """
    folder = begin(disk, template)
    before = [contents(folder / name) for name in command.inputs]
    ended = disk.run(split(command.arguments, folder), fault=fault, ranks=ranks)
    reason = os.strerror(fault.error) if fault.error else ""
    at = f"{reason or 'no memory'} at {fault.at}, {ended.died_in}"
    if fault.smallest:
        ended = replace(ended, output=_NOT_OURS.sub("", ended.output))
    has_aborted = fault.smallest and ended.code == -signal.SIGABRT and "memory allocation of" in ended.output
    assert has_aborted or not (problem := judge(ended, reason)), f"{at}: {problem}\n{ended.output}"
    if whole is not None:
        check_whole(command, folder, whole, at)
    _finish(disk, command, folder, before, ended, expected, at, ranks)
    return ended


def check_whole(command: Command, folder: Path, whole: set[tuple[str, str]], at: str) -> None:
    """Fail if a part of what a command writes opens as a dataset; a stream may be read before it is whole."""
    opened = fingerprints(folder)
    assert opened.items() <= whole or "live" in command.arguments.split(), f"{at}: a part opens: {opened}"


def attempt_with_room(disk: Disk, command: Command, template: Path, expected: Any, room: int) -> Ran:
    """Run the command on a real disk with `room` bytes left, and again with more; assert the same as `attempt`."""
    folder, ballast = begin(disk, template), disk.folder / "ballast"
    before = [contents(folder / name) for name in command.inputs]
    free = shutil.disk_usage(disk.folder).free
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - room))
    ended = disk.run(split(command.arguments, folder))
    ballast.unlink()
    at = f"{room:,} bytes left"
    assert not (problem := judge(ended, os.strerror(errno.ENOSPC))), f"{at}: {problem}\n{ended.output}"
    _finish(disk, command, folder, before, ended, expected, at, 1)
    return ended


def try_deaths(
    disk: Disk,
    command: Command,
    folder: Path,
    points: int | None,
    seed: str,
    losses: tuple[str, ...] = ("nothing",),
    *,
    ranks: int = 1,
) -> int:
    """Let a command die at a seeded sample of `points` calls, or at all that differ, and run it again.

    Asserts the same as `attempt`, and returns the number of deaths. Of several ranks, half of the times one is killed,
    which the others must notice, and half of the times all.

    Args:
        losses: `nothing` for SIGKILL, and for a loss of power `names` or only `bytes` that were not forced to disk.
            Power fails after the end of the command too, when the result must be there without another attempt.
    """
    template, rank = folder / "template", 0 if ranks == 1 else None
    expected, calls = prepare(disk, command, template, fault=Fault(rank=rank), ranks=ranks)
    whole, chosen = known(disk, template), distinct(calls)
    if points is not None:
        chosen = sorted(random.Random(seed).sample(chosen, min(points, len(chosen))))
    made = [(at, loses) for at in (-1, *chosen) for loses in losses if at >= 0 or loses != "nothing"]
    for at, loses in made:
        place, forced = begin(disk, template), disk.folder.with_name("forced") if loses != "nothing" else None
        before = [contents(place / name) for name in command.inputs]
        if forced:
            keep_forced(place, forced)
        fault = Fault(at, forced=forced, everyone=ranks > 1 and at % 2 == 0, rank=rank)
        ended = disk.run(split(command.arguments, place), fault=fault, ranks=ranks, grace_s=20)
        if forced:
            lose_power(place, forced, names=loses == "names")
        where = f"died at {at}, {ended.died_in}, {loses} lost"
        # Where a process that it started is killed, such as one that writes a checkpoint, the command ends by itself.
        codes = (0,) if at < 0 else (KILLED,) if forced else (KILLED, 2)
        assert ended.code in codes or (ranks > 1 and KILLED in ended.codes), f"{where}: {ended.codes}\n{ended.output}"
        check_whole(command, place, whole, where)
        _finish(disk, command, place, before, ended, expected, where, ranks)
    return len(made)


def fingerprints(folder: Path) -> dict[str, str]:
    """Return by name the fingerprint of each dataset below a folder that opens, from all of its packs."""
    found = {}
    for path in [*folder.glob("out.*"), *(path for path in folder.rglob("*") if path.is_dir())]:
        with suppress(HarnessError), closing(open_dataset(path)) as reader:
            if len(reader):  # an empty `bad_records.jsonl` alone opens as no packs
                found[str(path.relative_to(folder))] = reader.digest_packs()
    return found


def known(disk: Disk, template: Path) -> set[tuple[str, str]]:
    """Return the fingerprints of what was there before a command, and of what it has just left."""
    return {one for folder in (template, disk.folder / "work") for one in fingerprints(folder).items()}


def begin(disk: Disk, template: Path) -> Path:
    """Copy what a command finds to where it runs; return the folder."""
    folder = disk.folder / "work"
    for old in (folder, disk.folder / "temporary"):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder


def _finish(
    disk: Disk,
    command: Command,
    folder: Path,
    before: list[dict[str, str]],
    ended: Ran,
    expected: Any,
    at: str,
    ranks: int,
) -> None:
    assert [contents(folder / name) for name in command.inputs] == before, f"{at}: its input was changed"
    if ended.code != 0:
        again = disk.run(split(command.again or command.arguments, folder), ranks=ranks)
        assert again.code == 0, f"{at}: the same command failed afterwards\n{again.output}\nfirst:\n{ended.output}"
    result = command.result(folder)
    assert result == expected, f"{at}: another result: {difference(result, expected)}"


def judge(ended: Ran, reason: str) -> str:
    """Return what is wrong with the end of a command on a disk that refuses with `reason`, empty if nothing is."""
    if ended.code is None:
        return "it hangs"
    if "Traceback" in ended.output or "Exception ignored" in ended.output:
        return "a traceback"
    if ended.code not in (0, 2):
        return f"exit code {ended.code}"
    if ended.code == 2 and not _NAMED.search(ended.output):
        return "no named error"
    if ended.code == 2 and reason not in ended.output and _TORCHS not in ended.output:
        return "the error has another reason"
    return ""


def difference(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        return str(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))[:6])
    return f"{str(a)[:200]} and {str(b)[:200]}"


def distinct(calls: list[str]) -> list[int]:
    """Return the first, second and last of the calls that do the same to files whose names differ in numbers."""
    alike: dict[str, list[int]] = {}
    for number, call in enumerate(calls):
        alike.setdefault(re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", call), []).append(number)
    return sorted({number for numbers in alike.values() for number in [*numbers[:2], numbers[-1]]})
