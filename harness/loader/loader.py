"""Global batches in order, through worker processes: complete, and the same for any number of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from harness.errors import ConfigError, LoaderError
from harness.loader.blend import Blend
from harness.loader.config import LoaderConfig, RankLayout, rank_layout
from harness.loader.order import BatchRange, steps_per_epoch
from harness.loader.plan import BatchReader, Features, PackSource, RankBatch, RawBatch, build_batch
from harness.loader.state import LoaderState
from harness.loader.workers import BatchStream
from harness.printing import count_of
from harness.schedule import ScheduleConfig, SequenceCost


class Loader(BatchStream[RawBatch]):
    """Yields one `RankBatch` per global batch, in order, across epochs.

    Every rank computes the same global batch and schedule from lengths alone and reads only its own sequences. Each
    `iter()` starts again from `state`. Use it as a context manager around the training loop: on exit it ends the
    workers.

    Args:
        reader: an open dataset; pickled to workers that are not forked.
        schedule: settings of how sequences become rows; None for the defaults of ScheduleConfig.
        layout: the place of this rank; None for data parallelism alone, as `dp_rank` and `dp_size` give it.
        dp_rank, dp_size: rank and number of ranks, without a layout; optional in a job of one rank.
        cost: of training a sequence, for `cost_balanced` and the imbalance of every step.
        tokenizer: hash of the tokenizer that made the dataset, compared on resume; empty to compare nothing.
        blend: rule by which packs of several datasets, which `reader` joins, are drawn; None shuffles all of them.
        features: decodes audio and images for the model's encoder, as `harness.prep.media.MediaRules.features`; a
            dataset with media is refused without it.
        state: position to resume from; None begins with epoch 0.
        num_steps: batches to yield; None for no limit.
        num_epochs: end before this epoch number (from 0); None for no limit.

    Raises:
        ScheduleError: a sequence of the dataset can never be placed.
        LoaderError: `state` belongs to another dataset, seed, order or tokenizer; while iterating, the epochs of a
            blend's source are used up.
        ConfigError: the dataset never fills a global batch, `blend` is of another number of packs, `layout` comes with
            a `dp_rank` or `dp_size`, or a job of several ranks gives neither.
    """

    def __init__(
        self,
        reader: PackSource,
        config: LoaderConfig,
        *,
        schedule: ScheduleConfig | None = None,
        layout: RankLayout | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        cost: SequenceCost | None = None,
        tokenizer: str = "",
        blend: Blend | None = None,
        features: Features | None = None,
        state: LoaderState | None = None,
        num_steps: int | None = None,
        num_epochs: int | None = None,
    ) -> None:
        if len(reader) == 0:
            raise LoaderError("the dataset contains no packs", where="the dataset", fix="use non-empty data")
        self._blend = blend or Blend.of_one(len(reader))
        if (blended := sum(self._blend.sizes)) != len(reader):
            what = f"the blend is of {count_of(blended, 'pack')}, and the dataset has {len(reader):,}"
            fix = "join the datasets of the blend, in its order, and pass that reader (harness.loader.JoinedReader)"
            raise ConfigError(what, where="data.blend", fix=fix)
        self._num_packs = self._blend.num_packs
        self._config = config = replace(config)
        self.layout = rank_layout(layout, dp_rank, dp_size)
        self._num_steps = num_steps
        self._num_epochs = num_epochs
        order = config.order_signature if blend is None else f"{config.order_signature} {blend.signature}"
        self.state = LoaderState(config.seed, fingerprint=reader.fingerprint, order=order, tokenizer=tokenizer)
        if state is not None:
            self.state = state.resumed(self.state, num_packs=self._num_packs, allow_other_data=config.allow_other_data)
        batches = BatchReader(
            reader,
            config,
            schedule=schedule or ScheduleConfig(),
            layout=self.layout,
            cost=cost,
            blend=self._blend,
            features=features,
        )
        batches.check()
        self._plan = batches.plan
        # Where no global batch can be made, raise here and not in the first step.
        next(self._steps(LoaderState(config.seed)))
        where = f"data-parallel rank {self.layout.dp_rank}, {config.num_workers} workers"
        super().__init__(batches.read, config, where=where, data=str(getattr(reader, "path", "")))

    @property
    def num_steps_per_epoch(self) -> int | None:
        """Global batches of one whole epoch; None for a blend with weights, which has no end."""
        return None if self._num_packs is None else steps_per_epoch(self._config, self._num_packs)

    def rows_per_step(self, epoch: int) -> list[int] | None:
        """Return this rank's rows in each step of a whole epoch; None without an end. Seconds for 10,000 steps."""
        if self._num_packs is None:
            return None
        steps = itertools.takewhile(lambda step: step.epoch == epoch, self._steps(LoaderState(self.state.seed, epoch)))
        return [self._plan(step)[2].num_microbatches for step in steps]

    def __iter__(self) -> Iterator[RankBatch]:
        is_used_up = False

        def steps() -> Iterator[BatchRange]:
            nonlocal is_used_up
            for step in self._steps(self.state):
                if self._num_epochs is not None and step.epoch >= self._num_epochs:
                    return
                yield step
            is_used_up = True

        for raw in self.read(itertools.islice(steps(), self._num_steps)):
            yield build_batch(raw, layout=self.layout, before=self.state, num_packs=self._num_packs)
        # Ranges run ahead of training: raise only after every batch that exists was trained.
        if is_used_up:
            raise self._blend.used_up()

    def _steps(self, state: LoaderState) -> Iterator[BatchRange]:
        return self._blend.steps(self._config, epoch=state.epoch, packs_consumed=state.packs_consumed)
