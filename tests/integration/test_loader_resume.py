"""A run that stops at any step resumes as if it had not, on other ranks, workers and batch sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ConfigError, LoaderError
from harness.formats import PackReader, open_dataset
from harness.loader import Loader, LoaderConfig, LoaderState, RankLayout
from harness.schedule import ScheduleConfig

from .conftest import WritePacks

NUM_PACKS = 23


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, write_packs: WritePacks) -> PackReader:
    return open_dataset(write_packs(tmp_path_factory.mktemp("loader") / "packs", NUM_PACKS))


def loader(
    reader: PackReader,
    *,
    size: int = 4,
    dp: tuple[int, int] = (0, 1),
    workers: int = 0,
    state: LoaderState | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    schedule: str = "dp_balanced",
    capacity: int = 64,
    **settings: bool | int,
) -> Loader:
    return Loader(
        reader,
        LoaderConfig(
            global_batch_size=size, block_packs=3, window_blocks=2, num_workers=workers, timeout_s=60.0, **settings
        ),
        schedule=ScheduleConfig(schedule, capacity),
        layout=RankLayout(dp_rank=dp[0], dp_size=dp[1]),
        state=state,
        num_steps=steps,
        num_epochs=epochs,
    )


@pytest.mark.parametrize("schedule", ["as_packed", "dp_balanced", "cost_balanced"])
def test_stopping_after_any_step_changes_nothing(reader: PackReader, schedule: str) -> None:
    whole = list(loader(reader, dp=(1, 2), steps=14, schedule=schedule))
    for stop, batch in enumerate(whole, start=1):
        state = LoaderState.from_json(batch.state.to_json())
        rest = list(loader(reader, dp=(1, 2), state=state, steps=14 - stop, schedule=schedule))
        assert [(b.epoch, b.step_in_epoch, b.digest()) for b in rest] == [
            (b.epoch, b.step_in_epoch, b.digest()) for b in whole[stop:]
        ]


def test_other_data_is_refused_unless_allowed(reader: PackReader, tmp_path: Path, write_packs: WritePacks) -> None:
    other = open_dataset(write_packs(tmp_path / "other", NUM_PACKS, seed=1))
    state = next(iter(loader(reader))).state
    with pytest.raises(LoaderError, match="the dataset's fingerprint was"):
        loader(other, state=state)
    with pytest.raises(LoaderError, match="the seed was 0 and is 1"):
        loader(reader, state=state, seed=1)
    with pytest.raises(LoaderError, match="the order was"):
        loader(reader, state=state, shuffle=False)
    batch = next(iter(loader(other, state=state, allow_other_data=True)))
    assert batch.step_in_epoch == 1


def test_validation_reads_one_epoch_as_stored(reader: PackReader) -> None:
    packs = [pack for batch in loader(reader, epochs=1, shuffle=False) for pack in batch.pack_ids.tolist()]
    assert packs == list(range(NUM_PACKS))


def test_a_ragged_end_is_dropped_only_on_request(reader: PackReader) -> None:
    assert [len(batch.pack_ids) for batch in loader(reader, size=10, epochs=2)] == [10, 10, 3, 10, 10, 3]
    dropped = list(loader(reader, size=10, epochs=2, drop_last=True))
    assert [(b.epoch, len(b.pack_ids)) for b in dropped] == [(0, 10), (0, 10), (1, 10), (1, 10)]
    rest = list(loader(reader, size=10, epochs=2, drop_last=True, state=dropped[1].state))
    assert [batch.digest() for batch in rest] == [batch.digest() for batch in dropped[2:]]
    with pytest.raises(ConfigError, match="23 packs cannot fill a global batch of 24"):
        loader(reader, size=24, drop_last=True)
