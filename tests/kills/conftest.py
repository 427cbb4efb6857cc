"""Commands of tests/disks in processes that die or stop, or are of another user."""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counted_calls import Commands, Ran

from ..disks.commands import Command, commands, training
from ..disks.faults import Disk, Fault, begin, prepare, split

COMMANDS, TRAINING = dict(commands()), dict(training())
NOBODY = 65534
HELD = re.compile(rf"process \d+ on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
# One of each kind of writer, in `.ci/run`; the nightly tests have all.
SAMPLED = ("repack", "import", "indexed-convert", "indexed-family", "live-produce-chat")
CONVERTED = tuple(f"convert-{name}" for name in ("parquet", "memmap", "binidx", "npy", "parquet-file"))


def sampled(names: tuple[str, ...] = (*SAMPLED, *CONVERTED)) -> list[Any]:
    """Return the names of all commands as parameters, those of the sample for `.ci/run`."""
    marks = {True: pytest.mark.submission, False: pytest.mark.nightly}
    return [pytest.param(name, marks=marks[name in names]) for name in COMMANDS]


@pytest.fixture(scope="session", name="commands")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands")) as made:
        yield made


@pytest.fixture
def disk(commands: Commands, tmp_path: Path) -> Disk:
    return Disk(commands, tmp_path / "disk")


@pytest.fixture
def public(commands: Commands) -> Iterator[Disk]:
    """A folder that any user can enter; those of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="harness-tests-"))
    folder.chmod(0o755)
    yield Disk(commands, folder)
    shutil.rmtree(folder)


class Pair:
    """Two processes of one command: the first stops at a call until the second has ended.

    Attributes:
        expected: what the command leaves when it runs alone, after `count` calls.
    """

    def __init__(self, disk: Disk, command: Command, template: Path) -> None:
        self.disk, self.command, self.template = disk, command, template
        self.expected, calls = prepare(disk, command, template)
        self.count = len(calls)

    def run(self, at: int, **options: Any) -> tuple[Ran, Any]:
        """Return how both ended, and what they left."""
        folder = begin(self.disk, self.template)
        if "uids" in options:
            for path in (folder, self.disk.folder / "temporary"):
                path.mkdir(exist_ok=True)
                path.chmod(0o777)
        words = split(self.command.arguments, folder)
        both = self.disk.run(words, copies=2, fault=Fault(at), stops=True, **options)
        return both, self.command.result(folder)
