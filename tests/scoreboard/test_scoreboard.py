"""The written scoreboard and the notes of its targets; the trainers themselves run in environments of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.conformance import CHECKS, OUTCOMES
from tests.scoreboard.__main__ import WRITTEN, main, notes_of, row_of, targets, write_rows
from tests.scoreboard.environments import ENVIRONMENTS


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(WRITTEN.read_text())["rows"]
    return found


def test_every_trainer_answers_every_check_with_a_command_that_repeats_it(rows: list[dict[str, Any]]) -> None:
    assert [row["trainer"] for row in rows] == [name for name in targets() if name in {row["trainer"] for row in rows}]
    for row in rows:
        assert list(row["verdicts"]) == list(CHECKS)
        for name, cell in row["verdicts"].items():
            assert cell["outcome"] in OUTCOMES
            assert cell["command"] == f"python -m tests.scoreboard {row['trainer']} --checks {name}"


def test_every_failure_is_explained_and_no_target_raises(rows: list[dict[str, Any]]) -> None:
    cells = {(row["trainer"], name): cell for row in rows for name, cell in row["verdicts"].items()}

    assert [place for place, cell in cells.items() if cell["outcome"] == "FAIL" and not cell["note"]] == []
    assert [place for place, cell in cells.items() if cell["outcome"] == "ERROR"] == []


def test_the_scoreboard_has_the_notes_and_descriptions_of_today(rows: list[dict[str, Any]]) -> None:
    checks = json.loads(WRITTEN.read_text())["checks"]

    assert {check["name"]: check["about"] for check in checks} == {name: one.about for name, one in CHECKS.items()}
    for row in rows:
        if row["trainer"] in targets():
            notes = {name: cell["note"] for name, cell in row["verdicts"].items() if cell["note"]}
            assert notes == notes_of(targets()[row["trainer"]])


def test_a_row_replaces_the_old_one_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "scoreboard.json"
    first, second, new = (
        {"trainer": name, "version": version, "date": "2026-11-26", "verdicts": {}}
        for name, version in (("plain", "1"), ("trl", "1"), ("trl", "2"))
    )
    write_rows([first, second], path)
    write_rows([new], path)

    rows = json.loads(path.read_text())["rows"]
    assert [(row["trainer"], row["version"]) for row in rows] == [("trl", "2"), ("plain", "1")]


def test_a_note_about_a_check_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "some_target.py"
    target.write_text('NOTES: dict[str, str] = {"no-such-check": "a note"}\n')

    with pytest.raises(SystemExit, match="NOTES has no check 'no-such-check'"):
        notes_of(target)


def test_unknown_trainers_and_checks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in ((["foo"], "no trainer 'foo'"), (["plain", "--checks", "foo"], "no check 'foo'")):
        monkeypatch.setattr("sys.argv", ["scoreboard", *arguments])
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", targets())
def test_a_trainer_answers_as_the_scoreboard_says(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    if name in ENVIRONMENTS and not ENVIRONMENTS[name].is_made:
        pytest.skip(f"no environment: make scoreboard TRAINERS={name}")
    (stored,) = [row for row in rows if row["trainer"] == name]
    new = row_of(name, targets()[name], list(CHECKS), tmp_path)

    outcomes = [{check: cell["outcome"] for check, cell in row["verdicts"].items()} for row in (stored, new)]
    assert outcomes[1] == outcomes[0]
