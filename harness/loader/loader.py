"""Global batches in order, through worker processes: complete, the same for any number of them, never a hang."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import TracebackType

from harness.errors import LoaderError
from harness.loader.blend import Blend
from harness.loader.config import LoaderConfig
from harness.loader.layout import RankLayout
from harness.loader.order import BatchRange, steps_from, steps_per_epoch
from harness.loader.plan import BatchReader, PackSource, RankBatch, RawBatch, build_batch
from harness.loader.state import LoaderState
from harness.loader.stream import BatchStream
from harness.schedule import ScheduleConfig, SequenceCost

__all__ = ["Loader", "LoaderConfig"]


class Loader:
    """Yields one `RankBatch` a global batch, in order, across epochs.

    Every rank computes the same global batch and schedule from lengths alone and reads only its own sequences. Each
    `iter()` starts again from `state`. Use it as a context manager, around the training loop: leaving it ends the
    workers, and a worker's death that reaches the loop as torch's RuntimeError leaves as a LoaderError.

    Args:
        reader: an open dataset; it is pickled to workers that are not forked.
        config: see LoaderConfig.
        schedule: how sequences become rows.
        layout: where this rank stands; None for a job of one rank.
        cost: what a sequence costs to train, for `cost_balanced` and the imbalance of every step.
        tokenizer: hash of what made the dataset, which a run that goes on compares; empty asks nothing.
        blend: how the packs of several datasets, which `reader` joins, are drawn; None shuffles all of them.
        state: go on from here; None begins with epoch 0.
        num_steps: the number of batches to yield; None is without end.
        num_epochs: end before this epoch number (from 0); None is without end.

    Raises:
        ScheduleError: a sequence of the dataset can never be placed.
        LoaderError: `state` belongs to another dataset, seed, order or tokenizer.
        ConfigError: the dataset never fills a global batch.
        LoaderError: while iterating, once the epochs of a blend's source are used up.
    """

    def __init__(
        self,
        reader: PackSource,
        config: LoaderConfig,
        *,
        schedule: ScheduleConfig,
        layout: RankLayout | None = None,
        cost: SequenceCost | None = None,
        tokenizer: str = "",
        blend: Blend | None = None,
        state: LoaderState | None = None,
        num_steps: int | None = None,
        num_epochs: int | None = None,
    ) -> None:
        if len(reader) == 0:
            raise LoaderError("the dataset has no packs", fix="prepare it from data that is not empty")
        self._dataset_packs = len(reader)
        self._num_packs = len(reader) if blend is None else blend.num_packs
        self._blend = blend
        self._order = config.order()
        self._layout = layout or RankLayout()
        self._num_steps = num_steps
        self._num_epochs = num_epochs
        order = self._order.signature if blend is None else f"{self._order.signature} {blend.signature}"
        fresh = LoaderState(config.seed, fingerprint=reader.fingerprint, order=order, tokenizer=tokenizer)
        self.state = fresh
        if state is not None:
            self.state = state.resumed(fresh, num_packs=self._num_packs, allow_other_data=config.allow_other_data)
        step_reader = BatchReader(
            reader, order=self._order, schedule=schedule, layout=self._layout, cost=cost, blend=blend
        )
        step_reader.check()
        # Raises here, and not in the first step, where no global batch can be made.
        next(self._all_steps(LoaderState(config.seed)))
        self._stream: BatchStream[RawBatch] = BatchStream(
            step_reader, config, where=f"data-parallel rank {self._layout.dp_rank}, {config.num_workers} workers"
        )

    @property
    def num_packs(self) -> int | None:
        """Packs of one whole epoch; None for a blend with weights, which has no end."""
        return self._num_packs

    @property
    def num_steps_per_epoch(self) -> int | None:
        """Global batches of one whole epoch; None for a blend with weights."""
        return None if self._num_packs is None else steps_per_epoch(self._order, self._num_packs)

    def __iter__(self) -> Iterator[RankBatch]:
        is_used_up = False

        def all_steps() -> Iterator[BatchRange]:
            nonlocal is_used_up
            yield from self._all_steps(self.state)
            is_used_up = True

        steps = all_steps()
        if self._num_epochs is not None:
            num_epochs = self._num_epochs
            steps = itertools.takewhile(lambda step: step.epoch < num_epochs, steps)
        steps = itertools.islice(steps, self._num_steps)
        for raw in self._stream.read(steps):
            yield build_batch(raw, layout=self._layout, before=self.state, num_packs=self._num_packs)
        # Steps are made ahead of training: what there is was trained before this is said.
        if is_used_up and self._blend is not None:
            raise self._blend.used_up()

    def worker_pids(self) -> list[int]:
        """Process ids of the living workers; empty before the first batch and with num_workers 0."""
        return self._stream.worker_pids()

    def close(self) -> None:
        """End the workers and wait until they are gone. The loader can be iterated again."""
        self._stream.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, error, traceback)

    def _all_steps(self, state: LoaderState) -> Iterator[BatchRange]:
        epoch, packs_consumed = state.epoch, state.packs_consumed
        if self._blend is not None:
            return self._blend.steps(self._order, epoch=epoch, packs_consumed=packs_consumed)
        return steps_from(self._order, self._dataset_packs, epoch=epoch, packs_consumed=packs_consumed)
