"""Files of another user, folders without write permission, and a umask that hides files from others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..disks.commands import contents
from ..disks.faults import Disk, begin, prepare, split
from .conftest import COMMANDS, CONVERTED, NOBODY, SAMPLED, sampled

as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")


@as_another_user
@pytest.mark.parametrize(
    ("name", "hides"),
    [
        *(pytest.param(name, True, marks=pytest.mark.submission) for name in SAMPLED),
        *(pytest.param(*one.values, False, marks=one.marks) for one in sampled()),
    ],
)
def test_hidden_files_and_a_folder_that_cannot_be_written_to_are_named_errors(public, tmp_path, name, hides) -> None:
    command = COMMANDS[name]
    (tmp_path / "template").mkdir()
    command.make(tmp_path / "template")
    folder = begin(public, tmp_path / "template")
    folder.chmod(0o777 if hides else 0o755)
    for path in folder.rglob("*"):
        if hides and path.is_file():
            path.chmod(0o600)
    before = contents(folder)
    ran = public.commands.run(["harness", *split(command.arguments, folder)], root=folder, uids=[NOBODY])
    assert ran.code == 2, ran.output
    assert "Permission denied" in ran.output
    assert "where:" in ran.output
    assert "Traceback" not in ran.output
    assert str(folder / ("source" if hides else "")) in ran.output
    assert contents(folder) == before or hides


@pytest.mark.submission
@pytest.mark.parametrize("name", ["convert-memmap", "indexed-family"])
def test_with_a_umask_that_hides_files_everything_is_written_as_usual(disk: Disk, tmp_path: Path, name: str) -> None:
    expected, _ = prepare(disk, COMMANDS[name], tmp_path / "template")
    folder = begin(disk, tmp_path / "template")
    ran = disk.run(split(COMMANDS[name].arguments, folder), umask=0o077)
    assert ran.code == 0, ran.output
    assert COMMANDS[name].result(folder) == expected
    assert modes_of(folder) == {"0o100600"}


@pytest.mark.submission
@pytest.mark.parametrize("name", [*SAMPLED, *CONVERTED])
def test_what_is_written_can_be_read_by_those_whom_the_umask_admits(disk: Disk, tmp_path: Path, name: str) -> None:
    prepare(disk, COMMANDS[name], tmp_path / "template")
    assert modes_of(disk.folder / "work") == {"0o100644"}


def modes_of(folder: Path) -> set[str]:
    """Return the modes of the files that a command wrote."""
    tops = list(folder.glob("out*"))
    return {oct(path.stat().st_mode) for top in tops for path in (top, *top.rglob("*")) if path.is_file()}
