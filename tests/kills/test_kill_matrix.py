"""A command that SIGKILL ends at any write, rename or removal is finished by the same command, byte for byte."""

from __future__ import annotations

import pytest

from ..disks.faults import try_deaths
from .conftest import COMMANDS, CONVERTED, SAMPLED


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        *(pytest.param(name, 5, id=f"{name}, a tenth", marks=pytest.mark.submission) for name in SAMPLED),
        *(pytest.param(name, 1, id=f"{name}, one", marks=pytest.mark.submission) for name in CONVERTED),
        *(pytest.param(name, None, id=name, marks=pytest.mark.nightly) for name in COMMANDS),
    ],
)
def test_a_killed_command_is_finished_by_the_same_command(disk, tmp_path, name, kills, report_points) -> None:
    made = try_deaths(disk, COMMANDS[name], tmp_path, kills, name)
    assert made == kills or kills is None
    outcome = "finished by the same command after each kill, byte for byte"
    report_points("kills", name, made, of="kills", outcome=outcome)
