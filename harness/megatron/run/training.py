"""A training run, whatever its data: ranks meet, the run's folder opens, steps are trained, told of and saved.

A recipe opens its data and says how batches come of them; everything else of a run is here, once for all recipes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from harness.errors import HarnessError
from harness.loader import LoaderState, RankBatch
from harness.megatron.compat import MEGATRON_VERSION
from harness.megatron.data import Feed, LiveFeed
from harness.megatron.job import StopSignals, Watchdog, runtime
from harness.megatron.run.opening import Run, Task, open_run
from harness.megatron.run.records import RunRecords
from harness.megatron.sampling import Sampler
from harness.megatron.state import CheckpointWriter, checkpoint
from harness.plan import RunConfig
from harness.train import (
    CHECKPOINTS,
    EXIT_STOPPED,
    Stop,
    leave_early_stop,
    leave_refusal,
    train,
    whole_checkpoints,
    write_stop,
)


def run_training(config: RunConfig, open_task: Callable[[runtime.Runtime], Task]) -> int:
    """Train; gives the exit code, 75 where a signal ended the run before its last step.

    Args:
        open_task: checks the settings and opens the data; called on every rank, once they have met.

    Raises:
        HarnessError: settings, data, a checkpoint or the run's folder are refused, or training failed; on every rank.
    """
    try:
        return _run(config, open_task)
    except HarnessError as error:
        if (folder := _folder_of_slurm(config)) is not None:
            leave_refusal(folder, error)
        raise


def _run(config: RunConfig, open_task: Callable[[runtime.Runtime], Task]) -> int:
    trainer = config.trainer
    with ExitStack() as stack:
        limits = {"timeout_s": trainer.patience_s, "meet_timeout_s": trainer.startup_timeout_s}
        started = runtime.start(trainer.device, **limits)
        ranks = stack.enter_context(started)
        signals = stack.enter_context(StopSignals())

        def leave(stop: Stop) -> bool:
            folder = _folder_of_slurm(config)
            return folder is None or leave_early_stop(folder, stop)

        with Watchdog(limit_s=trainer.startup_timeout_s, asked=signals.noticed, leave=leave) as watchdog:
            run = open_run(config, open_task, ranks, watchdog, stack)
            records = RunRecords(
                trainer, run.folder, ranks, run.layout, first_step=run.first_step, sampler=_sampler(config, run)
            )
            stack.enter_context(records)
            if run.newest is not None:
                records.say(f"goes on behind step {run.first_step - 1}, from {run.newest}")
            reason = _train(config, run, records, signals, watchdog)
        records.close("finished" if reason is None else "stopped")
        if reason is not None:
            done = watchdog.step
            # Every rank, the first of them counts: srun ends the others as soon as one has left.
            write_stop(run.folder, Stop(done, "signal", f"{reason} came"))
            records.say(f"{reason} came: stopped after step {done}, run_dir={run.folder} resume=true goes on")
            return EXIT_STOPPED
        records.report({**run.task.facts, **_facts(config, run.task, ranks)})
    return 0


def _train(config: RunConfig, run: Run, records: RunRecords, signals: StopSignals, watchdog: Watchdog) -> str | None:
    """Train to the last step, whose checkpoint is whole at the end; gives the signal that ended it earlier."""
    trainer, folder = config.trainer, run.folder / CHECKPOINTS
    checkpoints = CheckpointWriter(
        folder,
        run.step,
        keep=trainer.keep_checkpoints,
        in_background=trainer.background_checkpoints,
        # The newest may turn out to be damaged: chunks stay until no checkpoint needs them.
        on_whole=lambda _: _mark_trained(run.training, whole_checkpoints(folder)[:1]),
    )

    def save(number: int, state: LoaderState) -> None:
        with records.doing("writing a checkpoint"):
            checkpoints.start(checkpoint.Progress(number, state))

    def stop() -> str | None:
        checkpoints.poll()
        return signals.agreed()

    def wait() -> str | None:
        watchdog.at(watchdog.step, "waiting for live chunks")
        return stop()

    def validate(batches: Feed) -> Iterable[RankBatch]:
        return records.doing_each("validating", _first(iter(batches), trainer.eval_batches))

    if isinstance(run.training, LiveFeed):
        run.training.call_while_waiting(wait)
    reason = train(
        iter(run.training),
        run.step,
        trainer,
        validation={name: partial(validate, batches) for name, batches in run.validation.items()},
        save=save,
        record=records.step,
        stop=stop,
        at=watchdog.at,
        say=records.say,
        first_step=run.first_step,
        validated=run.validated,
    )
    checkpoints.finish()
    if reason is None:
        _mark_trained(run.training, whole_checkpoints(folder)[-1:])
    return reason


def _sampler(config: RunConfig, run: Run) -> Sampler | None:
    if run.task.tokenizer is None or not config.trainer.sample_prompts:
        return None
    return Sampler(
        run.step,
        run.task.tokenizer,
        run.folder if run.ranks.rank == 0 else None,
        prompts=config.trainer.sample_prompts,
        max_tokens=config.trainer.sample_tokens,
        pad_to_multiple=config.parallel.pad_to_multiple,
        first_step=run.first_step,
    )


def _folder_of_slurm(config: RunConfig) -> Path | None:
    """The run's folder where Slurm's script has made it, and reads there why a try ended before its first step."""
    return Path(config.run_dir) if config.run_dir is not None and "SLURM_JOB_ID" in os.environ else None


def _facts(config: RunConfig, task: Task, ranks: runtime.Runtime) -> dict[str, str]:
    """What a run's report tells of model, ranks and versions."""
    model, parallel = config.model, config.parallel
    return {
        "model": f"{model.num_layers} layers of {model.hidden_size}, {model.num_attention_heads} heads, "
        f"vocabulary {task.vocab_size:,}, {model.dtype}",
        "ranks": f"{ranks.world_size} on {ranks.device}: tensor {parallel.tensor_parallel_size}, "
        f"pipeline {parallel.pipeline_parallel_size}, context {parallel.context_parallel_size}",
        "versions": f"megatron-core {MEGATRON_VERSION}, torch {torch.__version__}",
    }


def _mark_trained(training: Feed | LiveFeed, held_by: list[Path]) -> None:
    """Mark the live chunks of which these checkpoints hold every row."""
    if isinstance(training, LiveFeed):
        for path in held_by:
            training.trained(checkpoint.read_progress(path).loader)


def _first(batches: Iterator[RankBatch], count: int | None) -> Iterator[RankBatch]:
    for number, batch in enumerate(batches, start=1):
        yield batch
        if number == count:
            return
