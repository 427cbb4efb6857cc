"""A training run, whatever its data: ranks meet, the run's folder opens, steps are trained, told of and saved.

A recipe opens its data and says how batches come of them; everything else of a run is here, once for all recipes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import yaml

from harness.config import to_yaml
from harness.errors import ConfigError, HarnessError
from harness.loader.config import LoaderConfig
from harness.loader.state import LoaderState
from harness.loader.step import StepBatch
from harness.megatron import checkpoint, runtime
from harness.megatron.checkpoint_writer import CheckpointWriter
from harness.megatron.compat import MEGATRON_VERSION
from harness.megatron.feed import Feed
from harness.megatron.live_feed import LiveFeed
from harness.megatron.lora import check_same_adapters
from harness.megatron.model import build_model
from harness.megatron.model_config import ModelConfig
from harness.megatron.pretrained import Pretrained
from harness.megatron.sampling import Sampler
from harness.megatron.step import MegatronStep, OptimizerConfig
from harness.megatron.stopping import StopSignals
from harness.megatron.topology import ParallelConfig, Topology, join
from harness.megatron.watchdog import Watchdog
from harness.prep.tokenize import ChatTokenizer
from harness.report.attempts import EXIT_STOPPED, Stop, write_stop
from harness.report.metrics import METRICS_FILE, MetricsWriter, plot_loss, read_metrics, step_metrics, write_report
from harness.report.parity.digests import DigestWriter, merge_ranks, rank_rows
from harness.report.progress import RunProgress
from harness.report.run_folder import (
    CHECKPOINTS,
    choose_run_folder,
    leave_refusal,
    open_run_folder,
    whole_checkpoints,
)
from harness.train import OWN_VALIDATION, StepRecord, TrainerConfig, is_due, train


@dataclass
class RunConfig:
    """Settings that every recipe that trains has.

    Attributes:
        name: of the experiment; runs are numbered below `runs` under it.
        run_dir: the run's folder, None for the next (or, to resume, the newest) `<runs>/<name>-NNN`.
        resume: false, true or auto.
    """

    loader: LoaderConfig = field(default_factory=LoaderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    name: str = "run"
    runs: str = "runs"
    run_dir: str | None = None
    resume: str = "false"

    def __post_init__(self) -> None:
        self.resume = str(self.resume).lower()


@dataclass(frozen=True)
class Task:
    """What a recipe adds to a run.

    Attributes:
        feeds: the training batches from where the run is, None for its begin, and the validation sets by name, each of
            which is gone through once a validation; called on every rank, once they have met.
        vocab_size: of the model.
        row_tokens: pad every row to so many tokens, None to leave rows as long as they are.
        pretrained: weights to begin with.
        facts: about data and schedule, for the run's report.
        tokenizer: of the data; samples need it.
    """

    feeds: Callable[[Topology, checkpoint.Progress | None, runtime.Runtime], tuple[Feed | LiveFeed, dict[str, Feed]]]
    vocab_size: int
    row_tokens: int | None
    pretrained: Pretrained | None
    facts: Mapping[str, str]
    tokenizer: ChatTokenizer | None = None


def leaving_refusals(config: RunConfig, run: Callable[[], int]) -> int:
    """`run`, whose refusal of its settings is left for Slurm's script to see, which starts such a job not again."""
    try:
        return run()
    except HarnessError as error:
        if config.run_dir is not None and "SLURM_JOB_ID" in os.environ:
            leave_refusal(Path(config.run_dir), error)
        raise


def run_training(config: RunConfig, task: Task, *, world_size: int) -> int:
    """Train; gives the exit code, 75 where a signal ended the run before its last step.

    Raises:
        HarnessError: settings, data, a checkpoint or the run's folder are refused, or training failed; on every rank.
    """
    with ExitStack() as stack:
        # The watchdog speaks first: it knows which rank the others wait for.
        patience_s = config.trainer.timeout_s + 60
        ranks = stack.enter_context(runtime.start(config.trainer.device, timeout_s=patience_s))
        signals = stack.enter_context(StopSignals())
        folder, newest = runtime.on_rank_0(lambda: _choose_folder(config))
        progress = checkpoint.read_progress(newest) if newest is not None else None
        topology = join(config.parallel, world_size)
        runtime.on_rank_0(lambda: _check_adapters(config, folder) if newest is not None else None)
        training, validation = task.feeds(topology, progress, ranks)
        stack.enter_context(training)
        if config.trainer.early_stop and not (config.trainer.eval_interval and OWN_VALIDATION in validation):
            raise ConfigError(
                "early_stop asks for validations, and there are none before the last step",
                where="trainer.early_stop",
                fix="set trainer.eval_interval, and a validation set in data",
            )
        step = _make_step(config, task, topology, ranks.device, is_new=newest is None)
        if newest is not None:
            checkpoint.load(newest, step)
        first_step = progress.step + 1 if progress else 1
        if first_step > config.trainer.steps + 1:
            raise ConfigError(
                f"{first_step - 1} steps are done, and trainer.steps is {config.trainer.steps}",
                where=str(newest),
                fix=f"trainer.steps={first_step - 1} or more, or start a new run",
            )
        # The device that `auto` took is a fact of the run, which a baseline made of it has to tell.
        told = to_yaml(replace(config, trainer=replace(config.trainer, device=ranks.device.type)))
        opened = open_run_folder(folder, settings=told, goes_on=config.resume != "false")
        runtime.on_rank_0(lambda: stack.enter_context(opened))
        validated = runtime.on_rank_0(lambda: _validated(folder, first_step))
        speaks = ranks.rank == 0
        records = config.trainer.record_digests or config.trainer.record_batches
        digests = DigestWriter(folder, first_step=first_step) if speaks and records else None
        shown = stack.enter_context(RunProgress(config.trainer.steps, done=first_step - 1, quiet=not speaks))
        trackers = config.trainer.trackers
        writer = MetricsWriter(folder, first_step=first_step, trackers=trackers, say=shown.say) if speaks else None
        sampler = None
        if task.tokenizer is not None and config.trainer.sample_prompts:
            sampler = Sampler(
                step,
                task.tokenizer,
                folder if speaks else None,
                prompts=config.trainer.sample_prompts,
                max_tokens=config.trainer.sample_tokens,
                multiple=config.parallel.row_multiple,
                first_step=first_step,
            )
        if newest is not None:
            shown.say(f"goes on behind step {first_step - 1}, from {newest}")

        def record_data(taken: StepRecord) -> None:
            own = rank_rows(
                taken.batch,
                process=ranks.rank,
                dp_rank=topology.dp_rank,
                is_first_stage=topology.is_first_stage,
                is_last_stage=topology.is_last_stage,
                keep=config.trainer.record_batches,
            )
            parts = runtime.gather_on_rank_0(own)
            if digests is not None:
                digests.write(merge_ranks(taken.step, taken.batch, parts))

        def record(taken: StepRecord) -> None:
            # Before the metrics: a step that these have is one whose data is known.
            if records:
                record_data(taken)
            metrics = step_metrics(taken)
            if writer is not None:
                writer.write(metrics)
            shown.step(metrics)
            if sampler is not None and is_due(taken.step, config.trainer.eval_interval, config.trainer.steps):
                with shown.doing("answering prompts"):
                    for prompt, answer in sampler.answer(taken.step):
                        shown.say(f"  {prompt!r}: {answer!r}")

        checkpoints = CheckpointWriter(
            folder / CHECKPOINTS,
            step,
            keep=config.trainer.keep_checkpoints,
            in_background=config.trainer.background_checkpoints,
            # The newest may turn out to be damaged: chunks stay until no checkpoint needs them.
            on_whole=lambda _: _mark_trained(training, whole_checkpoints(folder / CHECKPOINTS)[:1]),
        )

        def save(number: int, state: LoaderState) -> None:
            with shown.doing("writing a checkpoint"):
                checkpoints.start(checkpoint.Progress(number, state))

        def stop() -> str | None:
            checkpoints.poll()
            return signals.agreed()

        def validate(batches: Feed) -> Iterable[StepBatch]:
            return shown.doing_each("validating", _first(iter(batches), config.trainer.eval_batches))

        with Watchdog(folder, limit_s=config.trainer.timeout_s) as watchdog:

            def wait() -> str | None:
                watchdog.at(watchdog.step, "waiting for live chunks")
                return stop()

            if isinstance(training, LiveFeed):
                training.call_while_waiting(wait)
            reason = train(
                iter(training),
                step,
                config.trainer,
                validation={name: partial(validate, batches) for name, batches in validation.items()},
                save=save,
                record=record,
                stop=stop,
                at=watchdog.at,
                say=shown.say,
                first_step=first_step,
                validated=validated,
            )
            checkpoints.finish()
            if reason is None:
                _mark_trained(training, whole_checkpoints(folder / CHECKPOINTS)[-1:])
        if writer is not None:
            writer.close("finished" if reason is None else "stopped")
        if digests is not None:
            digests.close()
        if reason is not None:
            done = watchdog.step
            # Every rank, the first of them counts: srun ends the others as soon as one has left.
            write_stop(folder, Stop(done, "signal", f"{reason} came"))
            shown.say(f"{reason} came: stopped after step {done}, run_dir={folder} resume=true goes on")
            return EXIT_STOPPED
        if writer is not None:
            steps = read_metrics(folder / METRICS_FILE)
            plot_loss(steps, folder / "loss.png")
            write_report(folder, steps, {**task.facts, **_facts(config, task, ranks.device, world_size)})
            shown.say(f"run {folder}, loss plot {folder / 'loss.png'}, report {folder / 'report.md'}")
    return 0


def _make_step(
    config: RunConfig, task: Task, topology: Topology, device: torch.device, *, is_new: bool
) -> MegatronStep:
    return MegatronStep(
        build_model(
            config.model,
            config.parallel,
            vocab_size=task.vocab_size,
            device=device,
            # A checkpoint has the weights that these became.
            fill=task.pretrained.filler(topology) if task.pretrained is not None and is_new else None,
        ),
        optimizer=config.optimizer,
        parallel=config.parallel,
        topology=topology,
        device=device,
        vocab_size=task.vocab_size,
        decay_steps=config.trainer.steps,
        row_tokens=task.row_tokens,
    )


def _facts(config: RunConfig, task: Task, device: torch.device, world_size: int) -> dict[str, str]:
    """What a run's report tells of model, ranks and versions."""
    model, parallel = config.model, config.parallel
    return {
        "model": f"{model.num_layers} layers of {model.hidden_size}, {model.num_attention_heads} heads, "
        f"vocabulary {task.vocab_size:,}, {model.dtype}",
        "ranks": f"{world_size} on {device}: tensor {parallel.tensor_parallel_size}, "
        f"pipeline {parallel.pipeline_parallel_size}, context {parallel.context_parallel_size}",
        "versions": f"megatron-core {MEGATRON_VERSION}, torch {torch.__version__}",
    }


def _mark_trained(training: Feed | LiveFeed, held_by: list[Path]) -> None:
    """Mark the live chunks of which these checkpoints hold every row."""
    if isinstance(training, LiveFeed):
        for path in held_by:
            training.trained(checkpoint.read_progress(path).loader)


def _choose_folder(config: RunConfig) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to go on from, if there is one."""
    folder = choose_run_folder(config.run_dir, runs=config.runs, name=config.name, resume=config.resume)
    if config.resume == "false":
        return folder, None
    newest, passed_over = checkpoint.find_newest(folder / CHECKPOINTS)
    for error in passed_over:
        print(f"passed over: {error.what}\n  where: {error.where}", file=sys.stderr)
    return folder, newest


def _check_adapters(config: RunConfig, folder: Path) -> None:
    with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # a folder that tells nothing is no reason
        check_same_adapters(config.model, yaml.safe_load((folder / "config.yaml").read_text())["model"], str(folder))


def _validated(folder: Path, first_step: int) -> list[float]:
    """Losses of the validations before `first_step`."""
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.exists() else []
    return [one.validation_loss for one in steps if one.step < first_step and one.validation_loss is not None]


def _first(batches: Iterator[StepBatch], count: int | None) -> Iterator[StepBatch]:
    for number, batch in enumerate(batches, start=1):
        yield batch
        if number == count:
            return
