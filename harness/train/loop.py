"""The training loop: batches in, optimizer steps, metrics and checkpoints out.

It knows nothing of Megatron-Core: the step, the checkpoint and everything else are passed in.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from harness.errors import HarnessError
from harness.loader import LoaderState, RankBatch
from harness.plan import TrainerConfig
from harness.printing import count_of

# Name of the validation set of the training data, which `early_stop` and `validation_loss` refer to.
OWN_VALIDATION = "validation"


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank, under the names of `harness.train.StepMetrics`.

    Attributes:
        loss: mean over the global batch, in nats, by `TrainerConfig.loss_average`.
        skipped: True if the optimizer refused the step because gradients were not finite.
    """

    loss: float
    trained_tokens: int
    grad_norm: float
    learning_rate: float
    skipped: bool
    experts: dict[str, float] = field(default_factory=dict)
    source_losses: dict[str, float] = field(default_factory=dict)
    source_expert_loads: dict[str, float] = field(default_factory=dict)
    mtp_losses: list[float] = field(default_factory=list)
    mtp_tokens: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Result of a validation.

    Attributes:
        loss: mean in nats over all of it, as of a step.
        expert_load: tokens of a layer's busiest expert over the mean, as a mean over layers; None for a dense model.
    """

    loss: float
    trained_tokens: int
    expert_load: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """Everything that is recorded of one step.

    Attributes:
        step_s: seconds from the end of the previous step to the end of this one, without validation and checkpoint.
        data_wait_s: the part of step_s spent waiting for the loader.
        compute_s, data_s: time in computation and in the loader, without waiting for other ranks.
        evaluations: of each validation set by name; empty if no validation followed this step.
        initial: of every validation set before this step, the first of the run; else empty.
    """

    step: int
    batch: RankBatch
    result: StepResult
    step_s: float
    data_wait_s: float
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    compute_s: float = 0.0
    data_s: float = 0.0
    initial: Mapping[str, Evaluation] = field(default_factory=dict)


class TrainStep(Protocol):
    """The part of a framework that the loop needs."""

    def train(self, batch: RankBatch) -> StepResult: ...

    def evaluate(self, batches: Iterable[RankBatch]) -> Evaluation: ...


class Hooks:
    """Work of a run around its steps, on every rank; here, none."""

    def save(self, number: int, state: LoaderState) -> None:
        """Write a checkpoint of a step and the loader's state."""

    def record(self, made: StepRecord) -> None:
        """Record a step."""

    def stop(self) -> str | None:
        """Return a reason to stop after this step, the same on every rank; it is then saved."""
        return None

    def at(self, number: int, activity: str) -> None:
        """Note the step and the activity in it, whenever either changes."""

    def log(self, line: str) -> None:
        """Print a line."""

    def waits_s(self) -> float:
        """Return the seconds that this rank has spent in exchanges with other ranks so far."""
        return 0.0


def train(
    batches: Iterator[RankBatch],
    step: TrainStep,
    config: TrainerConfig,
    hooks: Hooks,
    *,
    validation: Mapping[str, Callable[[], Iterable[RankBatch]]],
    first_step: int = 1,
    validated: Iterable[float] = (),
) -> str | None:
    """Train from `first_step` to `config.steps`, or until the batches end.

    Where there are validations, the first is before step 1.

    Args:
        batches: global batches in order, starting with that of `first_step`. If they end before `config.steps`, the
            steps so far are saved.
        validation: by name of a validation set, a function that returns its batches; the set named `validation`
            belongs to the training data.
        validated: validation losses before `first_step`, for `early_stop`.

    Returns:
        The reason that `hooks.stop` returned before `config.steps`, or None.

    Raises:
        HarnessError: the loss of a step is not finite; nothing is saved from that step on.
    """
    with _collected_by_hand(config.collect_interval) as collect:
        loop = _Loop(step, config, hooks, validation, list(validated), collect)
        for number in range(first_step, config.last_step + 1):
            batch = loop.read(number, batches)
            if batch is None:
                return loop.reason
            if number == 1 and config.eval_interval:
                loop.validate_first()
            result = step.train(batch)
            if loop.complete(number, batch, result):
                return loop.reason
            collect()
    return None


@contextmanager
def _collected_by_hand(interval: int) -> Iterator[Callable[[], None]]:
    """Collect garbage at every `interval`-th call of the function that this yields, and at no other time."""
    # Left alone, as with an interval of 0, the collector stops each rank at another time, and all wait each time.
    calls, was_enabled = 0, gc.isenabled()

    def collect() -> None:
        nonlocal calls
        calls += 1
        if interval and calls % interval == 0:
            gc.collect()
            if calls == interval:
                gc.freeze()  # later collections leave out what stays, and take 1 ms instead of 60 to 90

    if interval:
        gc.disable()
    try:
        yield collect
    finally:
        if interval and calls >= interval:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass
class _Loop:
    """The parts of `train` around each step, with its arguments and its state between steps."""

    step: TrainStep
    config: TrainerConfig
    hooks: Hooks
    validation: Mapping[str, Callable[[], Iterable[RankBatch]]]
    losses: list[float]
    collect: Callable[[], None]
    unsaved: LoaderState | None = None
    reason: str | None = None
    _initial: dict[str, Evaluation] = field(default_factory=dict)
    _lap: tuple[float, float] = (0.0, 0.0)
    _read_s: tuple[float, float] = (0.0, 0.0)

    def validate_first(self) -> None:
        """Validate before step 1, whose batch is read: workers must not be forked from a process that has read."""
        self._initial = self._evaluate(1)
        for name, found in self._initial.items():
            self.hooks.log(f"before step 1: {name} loss {found.loss:.4f}")
        self.hooks.at(1, "training")
        self._time()

    def read(self, number: int, batches: Iterator[RankBatch]) -> RankBatch | None:
        """Return the next batch; None, with the steps so far saved, if there is none."""
        self.hooks.at(number, "reading data")
        self._time()
        batch = next(batches, None)
        if batch is None:  # the stream has ended, or a signal came while the run waited for it
            self.hooks.at(number - 1, "writing a checkpoint")
            if self.unsaved is not None:
                self.hooks.save(number - 1, self.unsaved)
            self.reason = self.hooks.stop()
            return None
        self._read_s = self._time()
        self.hooks.at(number, "training")
        return batch

    def complete(self, number: int, batch: RankBatch, result: StepResult) -> bool:
        """Validate, record and save what is due after a step; return True if it is the last one."""
        if not math.isfinite(result.loss):
            where = f"epoch {batch.epoch}, global batch {batch.step_in_epoch}, learning rate {result.learning_rate:g}"
            fix = "lower optimizer.lr or lengthen optimizer.warmup_steps; earlier checkpoints are not affected"
            raise HarnessError(f"the loss of step {number} is {result.loss}", where=where, fix=fix)
        (waited, data_s), (computed, compute_s) = self._read_s, self._time()
        evaluations = self._evaluate(number) if is_due(number, self.config.eval_interval, self.config.last_step) else {}
        own = evaluations.get(OWN_VALIDATION)
        took = waited + computed
        initial, self._initial = self._initial, {}
        self.hooks.record(StepRecord(number, batch, result, took, waited, evaluations, compute_s, data_s, initial))
        # One that is not a number is no lower loss, and hides none.
        self.losses += [] if own is None else [own.loss if math.isfinite(own.loss) else math.inf]
        patience = self.config.early_stop
        has_enough = own is not None and 0 < patience < len(self.losses)
        has_stalled = has_enough and min(self.losses[-patience:]) >= min(self.losses[:-patience])
        reason = self.hooks.stop()
        ends = reason is not None or has_stalled
        self.unsaved = batch.state
        if ends or is_due(number, self.config.checkpoint_interval, self.config.last_step):
            self.hooks.at(number, "writing a checkpoint")
            self.hooks.save(number, batch.state)
            self.unsaved = None
        if number == self.config.last_step:
            return True
        self.reason = reason
        if reason is None and has_stalled:
            without = count_of(patience, "validation")
            self.hooks.log(f"stopped early after step {number}: {without} without a lower loss")
        return ends

    def _time(self) -> tuple[float, float]:
        """Return the seconds since the last call, and those of them that this rank did not wait for others."""
        waits_s, now = self.hooks.waits_s(), time.perf_counter()
        (then, before), self._lap = self._lap, (now, waits_s)
        return now - then, now - then - (waits_s - before)

    def _evaluate(self, number: int) -> dict[str, Evaluation]:
        def watched(batches: Iterable[RankBatch]) -> Iterator[RankBatch]:
            for batch in batches:
                self.hooks.at(number, "validating")
                yield batch
                self.collect()

        return {name: self.step.evaluate(watched(open_batches())) for name, open_batches in self.validation.items()}


def is_due(step: int, interval: int, last: int) -> bool:
    """Return True if `step` is the last one or a multiple of `interval`; an interval of 0 leaves only the last."""
    return step == last or (interval > 0 and step % interval == 0)
