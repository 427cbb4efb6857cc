"""What every run has, whatever its data: settings, and the way to its first step.

The run's folder is looked for, data, model and checkpoint are opened, and then the folder is the run's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from harness.errors import ConfigError
from harness.loader import RankLayout
from harness.megatron.data import Feed, LiveFeed, together
from harness.megatron.job import Watchdog, join, runtime
from harness.megatron.model import build_model, check_same_adapters
from harness.megatron.state import checkpoint
from harness.megatron.step import MegatronStep
from harness.megatron.weights import Pretrained
from harness.plan import RunConfig, TrainerConfig
from harness.prep import ChatTokenizer
from harness.settings import to_yaml
from harness.train import (
    CHECKPOINTS,
    METRICS_FILE,
    OWN_VALIDATION,
    choose_run_folder,
    note_lost,
    open_run_folder,
    read_metrics,
)


@dataclass(frozen=True)
class Task:
    """What a recipe adds to a run.

    Attributes:
        feeds: the training batches from where the run is, None for its begin, and the validation sets by name, each of
            which is gone through once a validation; every rank takes part.
        vocab_size: of the model.
        row_tokens: pad every row to so many tokens, None to leave rows as long as they are.
        pretrained: weights to begin with.
        facts: about data and schedule, for the run's report.
        tokenizer: of the data; samples need it.
    """

    feeds: Callable[[RankLayout, checkpoint.Progress | None, runtime.Runtime], tuple[Feed | LiveFeed, dict[str, Feed]]]
    vocab_size: int
    row_tokens: int | None
    pretrained: Pretrained | None
    facts: Mapping[str, str]
    tokenizer: ChatTokenizer | None = None


@dataclass(frozen=True)
class Run:
    """A run before its next step.

    Attributes:
        folder: of the run; nobody else writes there.
        newest: the checkpoint that it goes on from, None for a new run.
        first_step: the next one.
        training, validation: of `Task.feeds`.
        step: holds the weights that `first_step` begins with.
        validated: losses of the validations before it.
    """

    ranks: runtime.Runtime
    task: Task
    layout: RankLayout
    folder: Path
    newest: Path | None
    first_step: int
    training: Feed | LiveFeed
    validation: dict[str, Feed]
    step: MegatronStep
    validated: list[float]


def open_run(
    config: RunConfig,
    open_task: Callable[[runtime.Runtime], Task],
    ranks: runtime.Runtime,
    watchdog: Watchdog,
    stack: ExitStack,
) -> Run:
    """Everything before the first step; what has to be closed goes onto `stack`.

    Raises:
        HarnessError: settings, data, a checkpoint or the run's folder are refused; on every rank.
    """
    trainer = config.trainer
    watchdog.at(0, "looking for a checkpoint")
    folder, newest = runtime.on_rank_0(lambda: _choose_folder(config))
    progress = checkpoint.read_progress(newest) if newest is not None else None
    first_step = progress.step + 1 if progress else 1
    watchdog.at(first_step, "opening the data")
    task = together(lambda: open_task(ranks), device=ranks.device)
    layout = join(config.parallel, ranks.world_size, timeout_s=trainer.patience_s)
    training, validation = task.feeds(layout, progress, ranks)
    stack.enter_context(training)
    runtime.on_rank_0(lambda: _check_validations(trainer, validation))
    watchdog.at(first_step, "building the model")
    step = _make_step(config, task, layout, ranks.device, is_new=newest is None)
    if newest is not None:
        watchdog.at(first_step, "loading the checkpoint")
        checkpoint.load(newest, step)
    watchdog.at(first_step, "opening the run's folder")
    # The device that `auto` took is a fact of the run, which a baseline made of it has to tell.
    told = to_yaml(replace(config, trainer=replace(trainer, device=ranks.device.type)))
    opened = open_run_folder(folder, settings=told, goes_on=config.resume != "false")
    runtime.on_rank_0(lambda: stack.enter_context(opened))
    watchdog.training_begins(folder, limit_s=trainer.timeout_s)
    validated = runtime.on_rank_0(lambda: _validated(folder, first_step))
    return Run(ranks, task, layout, folder, newest, first_step, training, validation, step, validated)


def _make_step(
    config: RunConfig, task: Task, layout: RankLayout, device: torch.device, *, is_new: bool
) -> MegatronStep:
    return MegatronStep(
        build_model(
            config.model,
            config.parallel,
            vocab_size=task.vocab_size,
            device=device,
            # A checkpoint has the weights that these became.
            fill=task.pretrained.filler(layout) if task.pretrained is not None and is_new else None,
        ),
        optimizer=config.optimizer,
        parallel=config.parallel,
        layout=layout,
        device=device,
        vocab_size=task.vocab_size,
        decay_steps=config.trainer.steps,
        row_tokens=task.row_tokens,
    )


def _choose_folder(config: RunConfig) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to go on from, if there is one."""
    folder = choose_run_folder(config.run_dir, runs=config.runs, name=config.name, resume=config.resume)
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if job is not None and config.run_dir is not None and restarts.isdecimal():
        note_lost(folder, job=job, restarts=int(restarts))
    if config.resume == "false":
        return folder, None
    newest, passed_over = checkpoint.find_newest(folder / CHECKPOINTS)
    for error in passed_over:
        print(f"passed over: {error.what}\n  where: {error.where}", file=sys.stderr)
    if newest is not None:
        _check_adapters(config, folder)
        done = checkpoint.read_progress(newest).step
        if done > config.trainer.steps:
            raise ConfigError(
                f"{done} steps are done, and trainer.steps is {config.trainer.steps}",
                where=str(newest),
                fix=f"trainer.steps={done} or more, or start a new run",
            )
    return folder, newest


def _check_validations(trainer: TrainerConfig, validation: Mapping[str, Feed]) -> None:
    if trainer.early_stop and not (trainer.eval_interval and OWN_VALIDATION in validation):
        raise ConfigError(
            "early_stop asks for validations, and there are none before the last step",
            where="trainer.early_stop",
            fix="set trainer.eval_interval, and name a validation set: data.validation_path, or a share in data.split",
        )


def _check_adapters(config: RunConfig, folder: Path) -> None:
    with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # a folder that tells nothing is no reason
        check_same_adapters(config.model, yaml.safe_load((folder / "config.yaml").read_text())["model"], str(folder))


def _validated(folder: Path, first_step: int) -> list[float]:
    """Losses of the validations before `first_step`."""
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.exists() else []
    return [one.validation_loss for one in steps if one.step < first_step and one.validation_loss is not None]
