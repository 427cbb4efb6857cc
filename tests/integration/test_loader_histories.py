"""Whatever a run goes through, every pack is trained once an epoch and in the order that it always had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from harness.errors import LoaderError
from harness.formats import FORMATS, PackReader, open_dataset
from harness.loader import Blend, JoinedReader, Loader, LoaderConfig, LoaderState, RankBatch, RankLayout
from harness.loader.plan import PackSource
from harness.schedule import DYNAMIC, SCHEDULERS, ScheduleConfig
from harness.schedule.batch import largest_share


class History(RuleBasedStateMachine):
    """A run that is stopped, killed and resumed on other ranks, workers, formats and batch sizes.

    `order` is what an undisturbed run of one process reads; `trained` counts the packs of it that were trained. With a
    blend every reader is joined of two datasets in two formats.
    """

    def __init__(self, readers: dict[str, PackSource], order: list[tuple[int, int]], blend: Blend | None) -> None:
        super().__init__()
        self.readers = readers
        self.order = order
        self.blend = blend
        self.trained = 0
        self.state: str | None = None
        self.checkpoints: list[tuple[int, str | None]] = [(0, None)]
        self.ranks: list[Loader] = []
        self.batches: list[Iterator[RankBatch]] = []

    def open(self, format: str, config: LoaderConfig, dp_size: int, scheduler: str = "dp_balanced") -> list[Loader]:
        # The longest sequence is shared by as many ranks as may share one.
        tokens = 64 // largest_share(dp_size) if scheduler == DYNAMIC else 64
        return [
            Loader(
                self.readers[format],
                config,
                schedule=ScheduleConfig(scheduler, tokens),
                layout=RankLayout(dp_rank=rank, dp_size=dp_size, shares_rows=True),
                blend=self.blend,
                state=None if self.state is None else LoaderState.from_json(self.state),
            )
            for rank in range(dp_size)
        ]

    @precondition(lambda self: not self.ranks)
    @rule(
        format=st.sampled_from(list(FORMATS)),
        scheduler=st.sampled_from(list(SCHEDULERS)),
        dp_size=st.integers(1, 4),
        size=st.integers(1, 12),
        num_workers=st.sampled_from([0] * 19 + [2]),
        prefetch=st.integers(1, 3),
        persistent=st.booleans(),
    )
    def go_on(
        self, format: str, scheduler: str, dp_size: int, size: int, num_workers: int, prefetch: int, persistent: bool
    ) -> None:
        config = LoaderConfig(
            global_batch_size=size,
            block_packs=3,
            window_blocks=2,
            num_workers=num_workers,
            prefetch_factor=prefetch,
            persistent_workers=persistent,
            timeout_s=120.0,
        )
        self.ranks = self.open(format, config, dp_size, scheduler)
        self.batches = [iter(rank) for rank in self.ranks]

    @precondition(lambda self: self.ranks)
    @rule(steps=st.integers(1, 12))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            if self.trained + 12 > len(self.order):
                return
            parts = [next(batches) for batches in self.batches]
            epoch, packs = parts[0].epoch, parts[0].pack_ids.tolist()
            due = self.order[self.trained : self.trained + len(packs)]
            assert [(epoch, pack) for pack in packs] == due
            offsets = self.readers["memmap"].pack_offsets
            placed = [
                number
                for rank, part in enumerate(parts)
                for row, numbers in zip(part.rows, part.sequence_ids, strict=True)
                for number in numbers.tolist()
                if rank % row.shared_by == 0
            ]
            assert sorted(placed) == sorted(n for pack in packs for n in range(offsets[pack], offsets[pack + 1]))
            assert len({part.state for part in parts}) == 1
            self.trained += len(packs)
            self.state = parts[0].state.to_json()

    @precondition(lambda self: self.ranks)
    @rule()
    def stop(self) -> None:
        """Stop the run while prefetched batches are still untrained."""
        for rank, batches in zip(self.ranks, self.batches, strict=True):
            batches.close()
            rank.close()
        self.ranks, self.batches = [], []

    @rule()
    def save(self) -> None:
        self.checkpoints.append((self.trained, self.state))

    @rule()
    def crash(self) -> None:
        """Back to the newest checkpoint."""
        self.stop()
        self.trained, self.state = self.checkpoints[-1]

    @precondition(lambda self: self.state is not None)
    @rule(change=st.sampled_from(["seed", "order", "data"]))
    def try_another_run(self, change: str) -> None:
        config = LoaderConfig(
            seed=1 if change == "seed" else 0, block_packs=4 if change == "order" else 3, window_blocks=2, num_workers=0
        )
        format = "other" if change == "data" else "npy"
        with pytest.raises(LoaderError, match="on other data or in another order") as caught:
            self.open(format, config, 1)
        assert "loader.allow_other_data=true" in caught.value.fix
        for rank in self.open(format, replace(config, allow_other_data=True), 1):
            rank.close()

    def teardown(self) -> None:
        self.stop()


@pytest.fixture(scope="module")
def readers(
    in_every_format: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, write_packs: Callable[..., Path]
) -> dict[str, PackReader]:
    paths = {**in_every_format, "other": write_packs(tmp_path_factory.mktemp("other") / "packs", 37, seed=1)}
    return {name: open_dataset(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def joined(
    readers: dict[str, PackReader], tmp_path_factory: pytest.TempPathFactory, write_packs: Callable[..., Path]
) -> dict[str, JoinedReader]:
    """By format of the first dataset; the second is in the next one."""
    place = tmp_path_factory.mktemp("second")
    names = list(FORMATS)
    seconds = {name: open_dataset(write_packs(place / name, 11, format=name, seed=2)) for name in names}
    made = {
        name: JoinedReader([readers[name], seconds[after]])
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    }
    return {**made, "other": JoinedReader([readers["other"], seconds["npy"]])}


BLENDS = {
    "one dataset": None,
    "by weight": Blend(("a", "b"), (37, 11), (2.0, 1.0), (None, None)),
    "by size": Blend(("a", "b"), (37, 11), None, (1, 2)),
}


def run_histories(kind: str, readers: dict[str, PackReader], joined: dict[str, JoinedReader], count: int) -> None:
    blend = BLENDS[kind]
    sources: dict[str, PackSource] = dict(readers if blend is None else joined)
    config = LoaderConfig(global_batch_size=1, block_packs=3, window_blocks=2, num_workers=0)
    with Loader(
        sources["memmap"], config, schedule=ScheduleConfig("dp_balanced", 64), blend=blend, num_steps=1000
    ) as made:
        order = [(batch.epoch, pack) for batch in made for pack in batch.pack_ids.tolist()]
    if blend is None:
        assert sorted(order[: 27 * 37]) == [(epoch, pack) for epoch in range(27) for pack in range(37)]
    run_state_machine_as_test(
        lambda: History(sources, order, blend),
        settings=settings(
            max_examples=count,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=count < 1000,
        ),
    )


@pytest.mark.submission
@pytest.mark.parametrize(("kind", "count"), [("one dataset", 24), ("by weight", 12), ("by size", 12)])
def test_some_histories_train_every_pack_once_in_order(readers, joined, kind, count) -> None:
    run_histories(kind, readers, joined, count)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", BLENDS)
def test_two_thousand_histories_train_every_pack_once_in_order(readers, joined, kind) -> None:
    run_histories(kind, readers, joined, 2000)
