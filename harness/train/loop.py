"""The training loop: batches in, steps out, metrics and checkpoints on the way.

It knows nothing of Megatron: the step and the checkpoint are handed in, so that the loop reads in one sitting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from harness.errors import HarnessError
from harness.loader import LoaderState, RankBatch
from harness.plan import TrainerConfig

# The validation set beside the training set, by which a run is judged.
OWN_VALIDATION = "validation"


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
        evaluations: those of further sets, by name.
        step_s: seconds from the end of the last step to the end of this one, without validation and checkpoint.
        data_wait_s: the part of them spent waiting for the loader.
    """

    step: int
    batch: RankBatch
    result: StepResult
    validation: Evaluation | None
    step_s: float
    data_wait_s: float
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)


class TrainStep(Protocol):
    def train(self, batch: RankBatch) -> StepResult: ...

    def evaluate(self, batches: Iterable[RankBatch]) -> Evaluation: ...


def train(
    batches: Iterator[RankBatch],
    step: TrainStep,
    config: TrainerConfig,
    *,
    validation: Mapping[str, Callable[[], Iterable[RankBatch]]],
    save: Callable[[int, LoaderState], None],
    record: Callable[[StepRecord], None],
    stop: Callable[[], str | None] = lambda: None,
    at: Callable[[int, str], None] = lambda step, doing: None,
    say: Callable[[str], None] = lambda line: None,
    first_step: int = 1,
    validated: Iterable[float] = (),
) -> str | None:
    """Train from `first_step` to `config.steps`.

    Args:
        batches: global batches in order, the first one for `first_step`. Where they end before `config.steps`, what was
            trained is saved.
        validation: by name of a validation set, what gives its batches anew each time; the one called `validation` is
            the run's own.
        save: writes a checkpoint of the given step and loader state.
        record: called once a step on every rank.
        stop: called after each step; a reason to stop, the same on every rank, makes it the last one, and it is saved.
        at: told the step and what is being done in it, whenever that changes.
        say: takes a line for the reader of the log.
        validated: losses of the run's validations before `first_step`, for `early_stop`.

    Returns:
        The reason that `stop` gave before `config.steps`, None where it gave none.

    Raises:
        HarnessError: the loss of a step is not finite; nothing is saved from that step on.
    """
    unsaved: LoaderState | None = None
    losses = list(validated)
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
        evaluations = {}
        if is_due(number, config.eval_interval, config.steps):
            evaluations = {
                name: step.evaluate(_told(batches_of(), partial(at, number, "validating")))
                for name, batches_of in validation.items()
            }
        own = evaluations.pop(OWN_VALIDATION, None)
        record(StepRecord(number, batch, result, own, took, waited, evaluations))
        losses += [] if own is None else [own.loss]
        is_over = own is not None and number < config.steps and _stands_still(losses, config.early_stop)
        reason = stop()
        saves = reason is not None or is_over or is_due(number, config.checkpoint_interval, config.steps)
        if saves:
            at(number, "writing a checkpoint")
            save(number, batch.state)
        unsaved = None if saves else batch.state
        if reason is not None and number < config.steps:
            return reason
        if is_over:
            say(f"stopped early after step {number}: {config.early_stop} validations without a lower loss")
            break
    return None


def _stands_still(losses: list[float], patience: int) -> bool:
    """True where none of the last `patience` losses is lower than all before them."""
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


def _told(batches: Iterable[RankBatch], tell: Callable[[], None]) -> Iterator[RankBatch]:
    for batch in batches:
        tell()
        yield batch


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether what is done every `interval` steps, 0 for never, and after the last is done after `step`."""
    return step == last or (interval > 0 and step % interval == 0)
