"""Training run on any data: connect the ranks, open the run's folder, and train, record and save steps.

`sft` and `pretrain` open their data as a `Task`; all recipes share the rest of a run, which is here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from harness.errors import ConfigError
from harness.loader import LoaderState, RankBatch, RankLayout
from harness.loader.datasets import Sources
from harness.megatron.data.feed import Feed, together
from harness.megatron.data.live_feed import LiveFeed
from harness.megatron.job import runtime
from harness.megatron.job.waits import Waits
from harness.megatron.job.watchdog import StopSignals, Watchdog
from harness.megatron.model.fusions import slow_parts
from harness.megatron.model.gpt import engine_layers, use_transformer_engine
from harness.megatron.pretrained import Pretrained
from harness.megatron.run import resuming
from harness.megatron.run.checks import check_memory, check_validations, explained, slurm_folder
from harness.megatron.run.records import RunRecords
from harness.megatron.run.sampling import Answering, Sampler
from harness.megatron.state.checkpoint import CheckpointWriter, load_checkpoint
from harness.megatron.step import MegatronStep
from harness.plan import RunConfig
from harness.printing import redact_all
from harness.settings import to_plain, to_yaml
from harness.train import Progress, StepRecord, is_due
from harness.train.attempts import EXIT_STOPPED, Stop, write_stop
from harness.train.checkpoints import CHECKPOINTS, read_progress, whole_checkpoints
from harness.train.folder import leave_early_stop, open_run_folder
from harness.train.loop import Hooks, train
from harness.train.trackers import check_trackers

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class Task:
    """The part of a run that depends on the kind of data.

    Attributes:
        feeds: returns the training batches that follow `progress` (None: from the start), and the validation sets by
            name, each read once per validation; every rank takes part.
        pad_rows_to, max_sequences: arguments of `MegatronStep`.
        length: log message with the run's steps in epochs; empty if the data has no epochs.
    """

    feeds: Callable[[RankLayout, Progress | None, runtime.Runtime], tuple[Feed, dict[str, Feed]]]
    vocab_size: int
    pad_rows_to: int | None
    max_sequences: int | None
    pretrained: Pretrained | None
    data_names: Sequence[str]
    facts: Mapping[str, str]
    answering: Answering | None = None
    sources: Sources | None = None
    warnings: Sequence[str] = ()
    length: str = ""


OpenTask = Callable[[C, runtime.Runtime, Progress | None], Task]


def run_training(config: C, open_task: OpenTask[C]) -> int:
    """Train; return the exit code, 75 if a signal or a straggler stopped the run before its last step.

    Args:
        open_task: opens the data from the given progress (None for a new run), checks the settings against it, and sets
            `trainer.steps` if the length of the run is in epochs; called on every rank once the ranks have connected.

    Raises:
        HarnessError: invalid settings, data, checkpoint or run folder, or training failed; raised on every rank.
    """
    config = runtime.settle(config.with_steps())
    trainer = config.trainer
    with explained(config), ExitStack() as stack:
        if config.parallel.cuda_graphs:
            # Expandable segments would move registered memory.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        limits = {"timeout_s": trainer.patience_s, "meet_timeout_s": trainer.startup_timeout_s}
        ranks = stack.enter_context(runtime.start(trainer.device, deterministic=trainer.deterministic, **limits))
        signals = stack.enter_context(StopSignals())
        folder = slurm_folder(config)
        leave = partial(leave_early_stop, folder) if folder is not None else lambda stop: True
        with Watchdog(limit_s=trainer.startup_timeout_s, requested=signals.noticed, leave=leave) as watchdog:
            run = _Run(config, ranks, signals, watchdog, stack)
            run.open(open_task)
            run.open_records()
            with Waits(ranks.device) as run.waits:
                reason = train(
                    iter(run.training),
                    run.step,
                    trainer,
                    run,
                    validation={name: partial(run.validate, batches) for name, batches in run.validation.items()},
                    first_step=run.first_step,
                    validated=run.validated,
                )
                run.finish(reason)
        return run.close(reason)


class _Run(Hooks):
    """One rank's run, from opening its folder to its end, and its hooks; `newest` is None for a new run."""

    waits: Waits

    def __init__(
        self, config: RunConfig, ranks: runtime.Runtime, signals: StopSignals, watchdog: Watchdog, stack: ExitStack
    ) -> None:
        self._config, self._trainer, self._ranks = config, config.trainer, ranks
        self._signals, self._watchdog, self._stack = signals, watchdog, stack
        watchdog.at(0, "looking for a checkpoint")
        self.folder = folder = runtime.on_rank_0(lambda: resuming.choose_folder(config))
        self.newest, self._passed_over = resuming.find_start(config, folder)
        self._progress: Progress | None = None
        if (newest := self.newest) is not None:
            self._progress = runtime.on_rank_0(lambda: resuming.check_resumed(config, folder, newest))
            config.optimizer = runtime.on_rank_0(lambda: resuming.keep_recorded(config.optimizer, folder))
        elif config.model.lora_rank and config.model.init_from is None:
            what = f"model.lora_rank is {config.model.lora_rank}, but model.init_from is not set: the adapters would "
            what += "be trained on frozen random weights"
            fix = "set it to the folder or hub id of the base model, or train all weights with model.lora_rank=0"
            raise ConfigError(what, where="model.init_from", fix=fix)
        self.first_step = self._progress.step + 1 if self._progress is not None else 1

    def open(self, open_task: OpenTask[C]) -> None:
        """Open the data, build or load the model, and open the run's folder."""
        config, ranks, first_step, at = self._config, self._ranks, self.first_step, self._watchdog.at
        at(first_step, "opening the data")

        def checked() -> Task:
            config.check(ranks.world_size)
            check_trackers(self._trainer.trackers)
            use_transformer_engine(config.model.attention, ranks.device)
            return open_task(config, ranks, self._progress)  # type: ignore[arg-type]

        self._task = task = together(checked, device=ranks.device)
        config.optimizer = config.optimizer.resolved(config.model, self._trainer.steps)
        self._layout = layout = runtime.join(
            config.parallel, ranks.world_size, timeout_s=self._trainer.patience_s, shares_rows=config.shares_rows
        )
        self.training, self.validation = task.feeds(layout, self._progress, ranks)
        self._stack.enter_context(self.training)
        runtime.on_rank_0(lambda: check_validations(config, self.validation))
        at(first_step, "building the model")
        sizes = {"vocab_size": task.vocab_size, "dp_size": layout.dp_size}
        together(lambda: check_memory(config, ranks.device, **sizes), device=ranks.device)
        # A checkpoint replaces the pretrained weights.
        fill = task.pretrained.filler(layout) if task.pretrained is not None and self.newest is None else None
        self.step = MegatronStep(
            config.model,
            config.parallel,
            layout,
            device=ranks.device,
            vocab_size=task.vocab_size,
            optimizer=config.optimizer,
            pad_rows_to=task.pad_rows_to,
            max_sequences=task.max_sequences,
            fill=fill,
            loss_average=self._trainer.loss_average,
        )
        self.step.sources = task.sources
        if self.newest is not None:
            at(first_step, "loading the checkpoint")
            load_checkpoint(self.newest, self.step)
        at(first_step, "opening the run's folder")
        # Record the device that `auto` chose: a baseline recorded from the run needs it.
        self._settings = replace(config, trainer=replace(self._trainer, device=ranks.device.type))
        kinds = {"resumes": config.resume != "false", "trains": first_step <= self._trainer.last_step}
        opened = open_run_folder(self.folder, settings=to_yaml(self._settings), **kinds)
        self._identity = runtime.on_rank_0(lambda: self._stack.enter_context(opened))
        self._watchdog.training_begins(self.folder, limit_s=self._trainer.timeout_s)
        self.validated = runtime.on_rank_0(lambda: resuming.read_validations(self.folder, first_step))

    def open_records(self) -> None:
        """Open the records and checkpoints of the run, and log its warnings and where it resumes."""
        config, trainer, task, sampler = self._config, self._trainer, self._task, None
        if task.answering is not None:
            writes_to = self.folder if self._ranks.rank == 0 else None
            sampler = Sampler(self.step, task.answering, writes_to, trainer, self.first_step)
        self._records = RunRecords(
            trainer, self.folder, self._ranks, self._layout, first_step=self.first_step, sampler=sampler
        )
        self._stack.enter_context(self._records.progress)
        has_engine = engine_layers(config.model, config.parallel, self._ranks.device)
        of = {"has_engine": has_engine, "shares_rows": config.shares_rows}
        slow = slow_parts(config.model, config.parallel, self._ranks.device, **of)
        pretrained = task.pretrained.warnings if task.pretrained is not None else []
        for line in filter(None, (task.length, config.optimizer.describe())):
            self.log(line)
        for warning in [*config.warnings(), *task.warnings, *pretrained, *slow]:
            self.log(f"warning: {warning}")
        identity = self._identity
        if (newest := self.newest) is not None:
            start = (self.folder, identity, newest, self._passed_over)
            runtime.on_rank_0(lambda: resuming.report_resume(config, *start, self.log))
        folder = self.folder / CHECKPOINTS
        self._checkpoints = CheckpointWriter(
            folder,
            self.step,
            keep=trainer.keep_checkpoints,
            in_background=trainer.background_checkpoints,
            before_whole=self._records.sync,
            # The newest may turn out to be damaged, so chunks stay until the oldest checkpoint does not need them.
            on_whole=lambda _: self._mark_trained(whole_checkpoints(folder)[:1]),
            # An export reads these settings, so config.yaml may change.
            facts={"run": identity.run, "attempt": identity.attempt, "settings": redact_all(to_plain(self._settings))},
        )
        self.training.while_waiting = self._wait

    def save(self, number: int, state: LoaderState) -> None:
        with self._records.progress.doing("writing a checkpoint"):
            self._checkpoints.start(Progress(number, state))

    def stop(self) -> str | None:
        self._checkpoints.finish(wait=False)
        return self._signals.agreed() or self._records.leaving

    def at(self, number: int, activity: str) -> None:
        self._watchdog.at(number, activity)

    def log(self, line: str) -> None:
        self._records.progress.log(line)

    def waits_s(self) -> float:
        return self.waits.total_s()

    def record(self, made: StepRecord) -> None:
        self._records.step(made)
        if made.step == self.first_step and (size := self._task.pad_rows_to) is not None:
            padding = f"{1 - made.batch.imbalance.fill:.1%} of the tokens in this step are padding"
            self.log(f"rows are padded to {size:,} tokens (parallel.static_rows): {padding}")
        if self._trainer.drift_interval and is_due(made.step, self._trainer.drift_interval, self._trainer.last_step):
            self.step.check_drift(made.step)

    def validate(self, batches: Feed) -> Iterator[RankBatch]:
        with self._records.progress.doing("validating"):
            yield from islice(batches, self._trainer.eval_batches)

    def _wait(self) -> str | None:
        self.at(self._watchdog.step, "waiting for live chunks")
        return self.stop()

    def _mark_trained(self, checkpoints: list[Path]) -> None:
        """Mark the live chunks whose rows are all covered by these checkpoints."""
        if isinstance(self.training, LiveFeed):
            for path in checkpoints:
                self.training.trained(read_progress(path).loader)

    def finish(self, reason: str | None) -> None:
        """Wait until the last checkpoint is whole."""
        self._checkpoints.finish()
        if reason is None:
            self._mark_trained(whole_checkpoints(self.folder / CHECKPOINTS)[-1:])

    def close(self, reason: str | None) -> int:
        """Record why the run stopped, or write its report; return the exit code."""
        self._records.close("finished" if reason is None else "stopped")
        if reason is None:
            self._records.report(self._config, self._task.facts, self._task.data_names)
            return 0
        is_slow, done = reason == self._records.leaving, self._watchdog.step
        message = reason if is_slow else f"{reason} received"
        # Every rank writes this and the first one counts: srun ends the others as soon as one exits.
        write_stop(self.folder, Stop(done, "straggler" if is_slow else "signal", message))
        again = "true" if done else "auto"  # before the first step there is nothing to resume from
        self.log(f"{message}: stopped after step {done}; continue with run_dir={self.folder} resume={again}")
        return EXIT_STOPPED
