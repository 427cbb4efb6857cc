"""The training loop: batches in, steps out, metrics and checkpoints on the way.

It knows nothing of Megatron: the step and the checkpoint are handed in, so that the loop reads in one sitting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from harness.errors import ConfigError, HarnessError
from harness.loader.state import LoaderState
from harness.loader.step import StepBatch


@dataclass
class TrainerConfig:
    """How long to train, when to look, and what to keep.

    Attributes:
        steps: optimizer steps of the whole run, those before a resume included.
        eval_interval: steps between validations, 0 for none; the last step is always validated.
        eval_batches: global batches of one validation, None for the whole validation set.
        checkpoint_interval: steps between checkpoints, 0 for only the last.
        keep_checkpoints: how many of the newest to keep.
        background_checkpoints: train on while a checkpoint is written; the next one waits for it.
        device: auto, cpu or cuda.
        timeout_s: a rank that makes no progress for so long ends the job, with a message that names it.
        record_digests: write digests of every step's data into the run's folder (`harness.report.parity.digests`).
        record_batches: write the data itself too, for small runs: 28 bytes a token before compression.
    """

    steps: int = 60
    eval_interval: int = 20
    eval_batches: int | None = None
    checkpoint_interval: int = 20
    keep_checkpoints: int = 2
    background_checkpoints: bool = True
    device: str = "auto"
    timeout_s: float = 600.0
    record_digests: bool = False
    record_batches: bool = False

    def __post_init__(self) -> None:
        for name, low in {"steps": 1, "eval_interval": 0, "checkpoint_interval": 0, "keep_checkpoints": 1}.items():
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", where=f"trainer.{name}", fix=f"a number of {low} or more"
                )
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}", where="trainer.timeout_s", fix="seconds above 0")
        if self.eval_batches is not None and self.eval_batches < 1:
            raise ConfigError(
                f"eval_batches is {self.eval_batches}", where="trainer.eval_batches", fix="1 or more, or null for all"
            )


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, the same on every rank.

    Attributes:
        loss: mean over the trained tokens of the global batch, in nats.
        trained_tokens: of the global batch.
        grad_norm: before clipping.
        learning_rate: that this step used.
        skipped: the optimizer refused the step (gradients not finite).
    """

    loss: float
    trained_tokens: int
    grad_norm: float
    learning_rate: float
    skipped: bool


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats over the trained tokens of a validation."""

    loss: float
    trained_tokens: int


@dataclass(frozen=True)
class StepRecord:
    """All that is told about one step.

    Attributes:
        step: 1 for the first.
        validation: None where this step was not followed by one.
        step_s: seconds from the end of the last step to the end of this one, without validation and checkpoint.
        data_wait_s: the part of them spent waiting for the loader.
    """

    step: int
    batch: StepBatch
    result: StepResult
    validation: Evaluation | None
    step_s: float
    data_wait_s: float


class Step(Protocol):
    def train(self, batch: StepBatch) -> StepResult: ...

    def evaluate(self, batches: Iterable[StepBatch]) -> Evaluation: ...


def train(
    batches: Iterator[StepBatch],
    step: Step,
    config: TrainerConfig,
    *,
    validation: Callable[[], Iterable[StepBatch]] | None,
    save: Callable[[int, LoaderState], None],
    record: Callable[[StepRecord], None],
    stop: Callable[[], str | None] = lambda: None,
    at: Callable[[int, str], None] = lambda step, doing: None,
    first_step: int = 1,
) -> str | None:
    """Train from `first_step` to `config.steps`.

    Args:
        batches: global batches in order, the first one for `first_step`. Where they end before `config.steps`, what was
            trained is saved.
        validation: gives the validation batches anew each time, None where there is no validation set.
        save: writes a checkpoint of the given step and loader state.
        record: called once a step on every rank.
        stop: called after each step; a reason to stop, the same on every rank, makes it the last one, and it is saved.
        at: told the step and what is being done in it, whenever that changes.

    Returns:
        Why it stopped before `config.steps`, None where it did not.

    Raises:
        HarnessError: the loss of a step is not finite; nothing is saved from that step on.
    """
    unsaved: LoaderState | None = None
    for number in range(first_step, config.steps + 1):
        at(number, "reading data")
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:  # a stream that has ended, or that was waited for when the run was asked to stop
            at(number - 1, "writing a checkpoint")
            if unsaved is not None:
                save(number - 1, unsaved)
            return stop()
        waited = time.perf_counter() - began
        at(number, "training")
        result = step.train(batch)
        if result.loss != result.loss or result.loss in (float("inf"), float("-inf")):
            raise HarnessError(
                f"the loss of step {number} is {result.loss}",
                where=f"epoch {batch.epoch}, global batch {batch.step_in_epoch}, "
                f"learning rate {result.learning_rate:g}",
                fix="lower optimizer.lr or lengthen optimizer.warmup_steps; the checkpoints before it are whole",
            )
        took = time.perf_counter() - began
        evaluation = None
        if validation is not None and _due(number, config.eval_interval, config.steps):
            evaluation = step.evaluate(_told(validation(), partial(at, number, "validating")))
        record(StepRecord(number, batch, result, evaluation, took, waited))
        reason = stop()
        saves = reason is not None or _due(number, config.checkpoint_interval, config.steps)
        if saves:
            at(number, "writing a checkpoint")
            save(number, batch.state)
        unsaved = None if saves else batch.state
        if reason is not None and number < config.steps:
            return reason
    return None


def _told(batches: Iterable[StepBatch], tell: Callable[[], None]) -> Iterator[StepBatch]:
    for batch in batches:
        tell()
        yield batch


def _due(step: int, interval: int, last: int) -> bool:
    return step == last or (interval > 0 and step % interval == 0)
