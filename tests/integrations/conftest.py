"""Other trainers in environments of their own: their programs run as processes, on a small dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_packs import write_small_packs
from trainers import Trainer

from tests.integrations.environments import ENVIRONMENTS
from tests.scoreboard.environments import ENVIRONMENTS as SCOREBOARD


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 packs of up to 256 tokens, and 5 for validation; an epoch ends with a short step."""
    return write_small_packs(tmp_path_factory.mktemp("data"))


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[[str], Trainer]:
    """Open an environment by name; the test is skipped where it is not made."""

    def opened(name: str) -> Trainer:
        environment = ENVIRONMENTS.get(name) or SCOREBOARD[name]
        if not environment.is_made:
            pytest.skip(f"needs the environment of {name}: {environment.command}, or make test-integrations")
        return Trainer(environment, tmp_path)

    return opened
