"""The written scoreboard and the notes of its targets; the trainers themselves run in environments of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.conformance import CHECKS, OUTCOMES
from tests.scoreboard.__main__ import WRITTEN, notes_of, row_of, targets
from tests.scoreboard.environments import ENVIRONMENTS


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(WRITTEN.read_text())["rows"]


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
            known = notes_of(targets()[row["trainer"]])
            assert notes == {name: note for name, note in known.items() if name in row["verdicts"]}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", targets())
def test_a_trainer_answers_as_the_scoreboard_says(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    if name in ENVIRONMENTS and not ENVIRONMENTS[name].is_made:
        pytest.skip(f"no environment: make scoreboard TRAINERS={name}")
    (stored,) = [row for row in rows if row["trainer"] == name]
    new = row_of(name, targets()[name], list(stored["verdicts"]), tmp_path)

    outcomes = [{check: cell["outcome"] for check, cell in row["verdicts"].items()} for row in (stored, new)]
    assert outcomes[1] == outcomes[0]
