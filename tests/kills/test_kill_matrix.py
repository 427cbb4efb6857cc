"""A command that SIGKILL ends at any write, rename or removal is finished by the same command, byte for byte."""

from __future__ import annotations

import pytest
from counted_calls import KILLED, points_of

from .cases import CASES, contents, fingerprint_of

FINISHED = "finished by the same command after each kill, byte for byte"


@pytest.mark.parametrize(
    ("case", "kills"),
    [
        *(
            pytest.param(case, case.kills, id=f"{case.name}, a tenth", marks=pytest.mark.submission)
            for case in CASES
            if case.kills
        ),
        *(pytest.param(case, 50, id=case.name, marks=pytest.mark.nightly) for case in CASES),
    ],
)
def test_a_killed_command_is_finished_by_the_same_command(commands, whole_of, case, kills, report_points) -> None:
    whole = whole_of(case)
    kills = min(kills, whole.count)
    made = 0
    for point in points_of(whole.count, kills, seed=case.name):
        whole.begin()
        killed = commands.run(whole.command, root=whole.out, at=point)
        assert killed.code == KILLED, f"call {point}: {killed.output}"
        made += 1
        where = f"killed in call {point} of {whole.count}, {killed.died_in}"
        assert fingerprint_of(whole.out) in {None, *whole.fingerprints}, where
        again = commands.run(whole.command, root=whole.out)
        assert again.code == 0, f"{where}: {again.output}"
        assert contents(whole.out) == whole.expected, where
    assert made == kills
    report_points("kills", case.name, made, of=f"of {whole.count} calls", outcome=FINISHED)
