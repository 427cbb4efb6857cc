"""Files of another user, folders without write permission, and a umask that hides files from others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from counted_calls import Commands

from .cases import CASES, NOBODY, Case, contents

# Those that need no other command before them.
ALONE = [
    pytest.param(case, id=case.name, marks=pytest.mark.submission if case.kills > 1 else pytest.mark.nightly)
    for case in CASES
    if not case.name.endswith(("another", "merge", "--append"))
]
as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")


@as_another_user
@pytest.mark.parametrize("case", ALONE)
def test_a_folder_that_cannot_be_written_to_is_a_named_error(commands: Commands, public: Path, case: Case) -> None:
    out = public / "closed"
    out.mkdir(mode=0o755, exist_ok=True)
    ran = commands.run(case.command(public / "inputs", out), root=out, uids=[NOBODY])
    assert ran.code == 2, ran.output
    assert "Permission denied" in ran.output
    assert "where:" in ran.output
    assert "Traceback" not in ran.output
    assert contents(out) == {}


@as_another_user
@pytest.mark.submission
@pytest.mark.parametrize("name", ["convert npy", "repack", "import", "indexed convert", "live produce"])
def test_files_that_another_user_hides_are_a_named_error(commands: Commands, public: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    hidden, out = public / f"hidden {name}", public / f"out {name}"
    out.mkdir()
    out.chmod(0o777)
    hidden.mkdir()
    for path in (public / "inputs").rglob("*"):
        copy = hidden / path.relative_to(public / "inputs")
        copy.mkdir() if path.is_dir() else copy.write_bytes(path.read_bytes())
    for path in hidden.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
    ran = commands.run(case.command(hidden, out), root=out, uids=[NOBODY])
    assert ran.code == 2, ran.output
    assert "Permission denied" in ran.output
    assert "Traceback" not in ran.output
    assert str(hidden) in ran.output


@pytest.mark.submission
@pytest.mark.parametrize("name", ["convert memmap", "indexed family"])
def test_with_a_umask_that_hides_files_everything_is_written_as_usual(commands, whole_of, name) -> None:
    whole = whole_of(next(case for case in CASES if case.name == name))
    whole.begin()
    ran = commands.run(whole.command, root=whole.out, umask=0o077)
    assert ran.code == 0, ran.output
    assert contents(whole.out) == whole.expected
    assert {path.stat().st_mode & 0o077 for path in whole.out.rglob("*") if path.is_file()} == {0}


@pytest.mark.submission
@pytest.mark.parametrize("case", [case for case in CASES if case.kills], ids=lambda case: case.name)
def test_what_is_written_can_be_read_by_those_whom_the_umask_admits(whole_of, case) -> None:
    whole = whole_of(case)
    assert set(whole.modes.values()) == {"0o100644"}, whole.modes
