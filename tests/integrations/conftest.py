"""Other trainers in environments of their own: their programs run as processes, on a small dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from environments import ENVIRONMENTS
from trainers import Trainer

from harness.formats import Provenance, open_writer
from harness.records import Pack


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 packs of up to 256 tokens, and 5 for validation; an epoch ends with a short step."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("validation", 5)):
        provenance = Provenance(tokenizer="none", tokenizer_hash="0" * 16, counts={"vocab_size": 300})
        with open_writer(folder / split, format="parquet", pack_size=256, provenance=provenance) as writer:
            for _ in range(count):
                lengths = rng.integers(5, 80, size=rng.integers(1, 4))
                starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
                ids = np.concatenate([(rng.integers(0, 290) + np.arange(n) % 7) for n in lengths])
                mask = rng.integers(0, 4, size=ids.shape[0]) > 0
                mask[starts[1:] - 1] = False
                mask[-1] = False
                writer.append(Pack(ids, mask, starts))
    return folder


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[[str], Trainer]:
    """Open an environment by name; the test is skipped where it is not made."""

    def opened(name: str) -> Trainer:
        environment = ENVIRONMENTS[name]
        if not environment.is_made:
            pytest.skip(f"needs the environment of {name}: {environment.command}, or make test-integrations")
        return Trainer(environment, tmp_path)

    return opened
