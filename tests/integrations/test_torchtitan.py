"""torchtitan's own `Trainer` on a CPU: it trains the rows of the loader, and resumes on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainers import Trainer, rows_of_loader

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
PROGRAM = "titan_train.py"


@pytest.fixture
def titan(trainer: Callable[[str], Trainer]) -> Trainer:
    return trainer("torchtitan")


def settings(data: Path, steps: int, folder: Path, *, local_batch_size: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "dump_folder": str(folder),
        "seq_len": 256,
        "local_batch_size": local_batch_size,
        "global_batch_size": 6,
        "steps": steps,
        "save_interval": 4,
        "dataloader": {
            "dataset_path": str(data / "train"),
            "global_batch_size": 6,
            "num_workers": 1,
            "block_packs": 4,
            **changes,
        },
    }


def assert_same(
    received: list[dict[str, Any]], data: Path, first: int, last: int, *, dp_rank: int = 0, dp_size: int = 1
) -> None:
    """Compare microbatches against the rows of these steps, counted from 1, as the loader gives them to one rank."""
    expected = rows_of_loader(data, first, last, dp_rank=dp_rank, dp_size=dp_size, row_tokens=256)
    rows = [
        {name: values[row] for name, values in batch.items()}
        for batch in received
        for row in range(len(batch["labels"]))
    ]
    trained = [row for row in rows if (row["labels"] != -100).any()]
    assert len(rows) == (last - first + 1) * 6 // dp_size
    assert len(trained) == len(expected)
    for row, ours in zip(trained, expected, strict=True):
        np.testing.assert_array_equal(row["input"], ours.tokens)
        np.testing.assert_array_equal(row["positions"], ours.position_ids)
        np.testing.assert_array_equal(row["labels"], np.where(ours.loss_mask > 0, ours.labels, -100))


def test_a_run_of_torchtitan_trains_the_rows_of_the_loader_and_continues_on_two_ranks(titan, dataset, tmp_path) -> None:
    folder = tmp_path / "run"
    first = titan.train(PROGRAM, settings(dataset, 4, folder))
    second = titan.train(PROGRAM, settings(dataset, 9, folder, local_batch_size=3), ranks=2)

    assert_same(first.rows[0], dataset, 1, 4)
    for rank in (0, 1):
        assert_same(second.rows[rank], dataset, 5, 9, dp_rank=rank, dp_size=2)

    whole = titan.train(PROGRAM, settings(dataset, 9, tmp_path / "whole"))
    assert [*whole.losses] == [*range(1, 10)]
    assert first.losses | second.losses == pytest.approx(whole.losses, rel=1e-5)
    assert whole.losses[9] < whole.losses[1] - 0.1, "nothing was learned, so that losses prove little"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "cost_balanced"}, "torchtitan fixes the number of microbatches"),
        ({"global_batch_size": 7}, "a global batch of 7 packs cannot be divided into microbatches of 3 on 1 ranks"),
        ({"dataset": "c4"}, "a dataset of torchtitan is set: c4"),
        ({"dataset_path": "nowhere"}, "nowhere"),
    ],
)
def test_what_torchtitan_cannot_run_is_refused_by_name(titan, dataset, tmp_path, changes, message) -> None:
    given = settings(dataset, 1, tmp_path / "run", local_batch_size=3, **changes)

    assert message in titan.run(PROGRAM, {**given, "out": "."}, code=1)
