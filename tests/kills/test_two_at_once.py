"""Two commands on one folder: the second is refused, names the first, and changes nothing; the first finishes whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from counted_calls import Commands

from .cases import CASES, HELD, NOBODY, Whole, contents


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.submission if case.kills > 1 else pytest.mark.nightly)
        for case in CASES
    ],
)
def test_the_second_of_two_is_refused_and_the_first_finishes(commands, whole_of, case) -> None:
    whole = whole_of(case)
    whole.begin()
    both = commands.run(whole.command, whole.command, root=whole.out, at=whole.count // 2, stops=True)
    assert both.codes == [0, 2], both.output
    assert f"another process is writing here: {HELD.search(both.output)[0]}" in both.output
    assert "Traceback" not in both.output
    assert contents(whole.out) == whole.expected


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_at_any_point_of_the_first_the_second_is_refused_or_finds_it_finished(commands, whole_of, case) -> None:
    whole = whole_of(case)
    for point in range(0, whole.count, max(1, whole.count // 40)):
        whole.begin()
        both = commands.run(whole.command, whole.command, root=whole.out, at=point, stops=True)
        where = f"the first stopped in call {point} of {whole.count}, {both.died_in}: {both.output}"
        # The one that came first to its lock is whole; before that, that is the second.
        assert 0 in both.codes, where
        assert set(both.codes) <= {0, 2}, where
        assert "Traceback" not in both.output, where
        assert contents(whole.out) == whole.expected, where


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("indexed convert", marks=pytest.mark.submission),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("convert memmap", "import one.parquet", "live produce")
        ),
    ],
)
def test_another_user_is_told_who_holds_a_folder(commands: Commands, public: Path, name: str) -> None:
    folder = public / name
    folder.mkdir(mode=0o755)
    whole = Whole(next(case for case in CASES if case.name == name), commands, public / "inputs", folder)
    whole.begin()
    whole.out.chmod(0o777)
    second = [NOBODY if number else 0 for number in range(2)]
    both = commands.run(whole.command, whole.command, root=whole.out, at=whole.count // 2, stops=True, uids=second)
    assert both.codes == [0, 2], both.output
    assert f"another process is writing here: {HELD.search(both.output)[0]}" in both.output
    assert contents(whole.out) == whole.expected
