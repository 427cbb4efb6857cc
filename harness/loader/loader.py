"""Global batches in order, read by worker processes; complete, and equal for any number of workers."""

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

    Every rank computes the same global batch and schedule from lengths alone, and reads only its own sequences. Each
    `iter()` starts from `state`. Use the loader as a context manager around the training loop; on exit it ends its
    workers.

    Args:
        reader: an open dataset; pickled to workers that are not forked.
        schedule: settings of how sequences become rows; None for the defaults of ScheduleConfig.
        layout: place of this rank in the parallel layout; None for data parallelism with `dp_rank` and `dp_size`.
        dp_rank, dp_size: rank and number of ranks, instead of a layout; optional in a job of one rank.
        cost: cost of training a sequence, for `cost_balanced` and the imbalance of every step.
        tokenizer: hash of the tokenizer that made the dataset, compared on resume; empty for no comparison.
        blend: rule by which packs of the datasets joined in `reader` are drawn; None shuffles all packs together.
        features: decodes audio and images for the model's encoder, such as `harness.prep.media.MediaRules.features`;
            required for a dataset with media.
        state: position to resume from; None begins with epoch 0.
        num_steps: batches to yield; None for no limit.
        num_epochs: end before this epoch number (from 0); None for no limit.

    Raises:
        ScheduleError: a sequence of the dataset can never be placed.
        LoaderError: `state` belongs to another dataset, seed, order or tokenizer; while iterating, the epochs of a
            blend's source are exhausted.
        ConfigError: the dataset cannot fill a global batch, `blend` has another number of packs, `layout` is combined
            with `dp_rank` or `dp_size`, or a job of several ranks passes neither.
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
        # If no global batch can be made, raise here instead of in the first step.
        next(self._steps(LoaderState(config.seed)))
        where = f"data-parallel rank {self.layout.dp_rank}, {config.num_workers} workers"
        super().__init__(batches.read, config, where=where, data=str(getattr(reader, "path", "")))

    @property
    def num_steps_per_epoch(self) -> int | None:
        """Number of global batches in an epoch; None for a weighted blend, which is endless."""
        return None if self._num_packs is None else steps_per_epoch(self._config, self._num_packs)

    def rows_per_step(self, epoch: int) -> list[int] | None:
        """Return this rank's number of rows in each step of an epoch; None if endless. 10,000 steps take seconds."""
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
        # Ranges are generated ahead of training: raise only after the last batch was trained.
        if is_used_up:
            raise self._blend.used_up()

    def _steps(self, state: LoaderState) -> Iterator[BatchRange]:
        return self._blend.steps(self._config, epoch=state.epoch, packs_consumed=state.packs_consumed)
