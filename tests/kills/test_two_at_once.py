"""Two commands on one folder: the second is refused, names the first, and changes nothing; the first finishes whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..disks.faults import Disk
from .conftest import COMMANDS, HELD, NOBODY, Pair, sampled


@pytest.mark.parametrize("name", sampled())
def test_the_second_of_two_is_refused_and_the_first_finishes(disk: Disk, tmp_path: Path, name: str) -> None:
    two = Pair(disk, COMMANDS[name], tmp_path / "template")
    both, left = two.run(two.count // 2)
    assert both.codes == [0, 2], both.output
    assert f"another process is writing here: {HELD.search(both.output)[0]}" in both.output
    assert "Traceback" not in both.output
    assert left == two.expected


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
def test_at_any_point_of_the_first_the_second_is_refused_or_finds_it_finished(disk, tmp_path, name) -> None:
    two = Pair(disk, COMMANDS[name], tmp_path / "template")
    for point in range(0, two.count, max(1, two.count // 40)):
        both, left = two.run(point)
        where = f"the first stopped in call {point} of {two.count}, {both.died_in}: {both.output}"
        # The one that came first to its lock is whole; before that, that is the second.
        assert 0 in both.codes, where
        assert set(both.codes) <= {0, 2}, where
        assert "Traceback" not in both.output, where
        assert left == two.expected, where


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
@pytest.mark.parametrize("name", sampled(("indexed-convert",)))
def test_another_user_is_told_who_holds_a_folder(public: Disk, tmp_path: Path, name: str) -> None:
    two = Pair(public, COMMANDS[name], tmp_path / "template")
    both, left = two.run(two.count // 2, uids=[0, NOBODY])
    assert both.codes == [0, 2], both.output
    assert f"another process is writing here: {HELD.search(both.output)[0]}" in both.output
    assert left == two.expected
