"""The newest releases of trainers with a release in most weeks: which moved, and what they broke."""

from __future__ import annotations

import json
import re
import subprocess
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import test_megatron_bridge as bridge_tests
import test_swift as swift_tests
from trainers import Trainer

from harness.conformance import TargetProcess
from tests.integrations.environments import ENVIRONMENTS, PEERS, Environment
from tests.scoreboard.__main__ import WRITTEN, targets
from tests.scoreboard.environments import ENVIRONMENTS as SCOREBOARD

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
CHECKS = ["assistant-alone-is-trained", "epoch-is-complete-unpacked"]


def check_bridge(environment: Environment, dataset: Path, folder: Path) -> None:
    trainer = Trainer(environment, folder)
    bridge_tests.test_rows_of_one_length_and_evaluations_on_the_first_packs(trainer, dataset)
    bridge_tests.test_bridges_own_reader_reads_the_files_of_a_conversion(trainer, dataset, folder, "parquet")


def check_swift(environment: Environment, dataset: Path, folder: Path) -> None:
    swift_tests.test_ms_swift_trains_the_packs_of_a_converted_dataset(Trainer(environment, folder), dataset, folder)
    check_scoreboard("ms-swift", environment, folder)


def check_scoreboard(name: str, environment: Environment, folder: Path) -> None:
    """Compare some checks of conformance against the scoreboard."""
    (row,) = (row for row in json.loads(WRITTEN.read_text())["rows"] if row["trainer"] == name)
    process = TargetProcess(str(targets()[name]), folder / name, python=str(environment.python), limit_s=600.0)
    found = {verdict.check: (verdict.outcome, verdict.text) for verdict in process.run(CHECKS, lambda verdict: None)}
    assert found == {name: (row["verdicts"][name]["outcome"], row["verdicts"][name]["text"]) for name in CHECKS}


Check = Callable[[Environment, Path, Path], None]
CHECKS_OF: dict[str, tuple[Environment, Check]] = {
    "megatron-bridge": (ENVIRONMENTS["megatron_bridge"], check_bridge),
    "ms-swift": (SCOREBOARD["ms-swift"], check_swift),
    "trl": (SCOREBOARD["trl"], lambda environment, _, folder: check_scoreboard("trl", environment, folder)),
    "nemo-automodel": (
        SCOREBOARD["automodel"],
        lambda environment, _, folder: check_scoreboard("automodel", environment, folder),
    ),
}


def newest_release(peer: str, environment: Environment) -> str:
    """Return the newest release that the package index has for the Python of an environment."""
    asked = subprocess.run(
        [environment.python, "-m", "pip", "index", "versions", peer], capture_output=True, text=True, check=False
    )
    found = re.search(rf"^{re.escape(peer)} \((\S+)\)", asked.stdout, re.MULTILINE)
    if found is None:
        pytest.skip(f"the package index does not answer: {asked.stderr[-500:]}")
    return found[1]


@pytest.mark.parametrize("peer", PEERS)
def test_the_newest_release_of_a_peer_works_as_the_one_of_the_repository(peer, dataset, tmp_path) -> None:
    environment, check = CHECKS_OF[peer]
    environment.make()
    if not environment.is_made:
        pytest.skip(f"there is no Python for {peer}")
    newest = newest_release(peer, environment)
    if newest != PEERS[peer]:
        environment = environment.with_release(peer, newest)
        warnings.warn(f"{peer} moved from {PEERS[peer]} to {newest}", stacklevel=1)
    try:
        environment.make()
        check(environment, dataset, tmp_path)
    except (AssertionError, OSError, subprocess.SubprocessError):
        traceback.print_exc()
        pytest.fail(f"{peer} {newest} broke; the repository is written for {PEERS[peer]}", pytrace=False)
