"""A run or an export that SIGKILL ends at any call is finished by the same command: same losses, same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from counted_calls import Commands

from ..disks.faults import Disk, split, try_deaths
from .conftest import HELD, TRAINING, Pair

# Of each command; those of two ranks are spread over tests of two minutes each.
KILLS, PARTS = 50, 5
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands"), "training") as server:
        yield server


@pytest.mark.parametrize(
    ("name", "ranks", "part"),
    [*((name, 1, 0) for name in TRAINING), *(("train-live", 2, part) for part in range(PARTS))],
)
def test_a_killed_run_or_export_is_finished_by_the_same_command(disk, tmp_path, name, ranks, part, report_points):
    """With the same losses, norms and checksums of weights, or the same bytes."""
    kills = KILLS // (PARTS if ranks > 1 else 1)
    made = try_deaths(disk, TRAINING[name], tmp_path, kills, f"{name} {part}", ranks=ranks)
    outcome = "finished by the same command, with the same losses or bytes"
    report_points("kills", f"{name} on {ranks}, part {part + 1}", made, of="kills", outcome=outcome)


@pytest.mark.parametrize("name", ["train", "export"])
def test_a_second_run_or_export_in_a_folder_is_refused_and_the_first_finishes(disk: Disk, tmp_path, name) -> None:
    two = Pair(disk, TRAINING[name], tmp_path / "template")
    both, left = two.run(8)
    assert both.codes == [0, 2], both.output
    assert HELD.search(both.output), both.output
    assert name == "export" or "another run is still writing to this folder" in both.output
    assert left == two.expected


def test_a_second_run_on_the_same_chunks_is_refused_and_the_first_finishes(commands: Commands, tmp_path) -> None:
    command = TRAINING["train-live"]
    command.make(tmp_path)
    texts = (command.arguments, command.arguments.replace("{}/run", "{}/other"))
    runs = [["harness", *split(text, tmp_path)] for text in texts]
    both = commands.run(*runs, root=tmp_path / "run", at=8, stops=True)
    assert both.codes == [0, 2], both.output
    assert "another run trains on these chunks" in both.output
    assert HELD.search(both.output), both.output
