"""The loop validates, records and saves when it should, and stops at a loss that is not a number."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from harness.errors import HarnessError
from harness.plan.settings import TrainerConfig
from harness.train.loop import Evaluation, Hooks, StepResult, train


class LinearLoss:
    """A step whose loss falls by one each time."""

    def __init__(self, *, nan_at: int = 0) -> None:
        self.trained: list[int] = []
        self.nan_at = nan_at

    def train(self, batch) -> StepResult:
        self.trained.append(batch.state)
        loss = float("nan") if len(self.trained) == self.nan_at else 10.0 - len(self.trained)
        return StepResult(loss, 100, 1.0, 0.1, False)

    def evaluate(self, batches) -> Evaluation:
        return Evaluation(float(sum(1 for _ in batches)), 5)


def batches(first: int = 1):
    return (SimpleNamespace(state=number, epoch=0, step_in_epoch=number) for number in itertools.count(first))


class Noted(Hooks):
    """Notes what a run is asked to save, record and log; stops for the reasons given, one after each step."""

    def __init__(self, *reasons: str | None) -> None:
        self.saved, self.records, self.logged = [], [], []
        self.reasons = iter(reasons)

    def save(self, number, state) -> None:
        self.saved.append((number, state))

    def record(self, made) -> None:
        self.records.append(made)

    def stop(self) -> str | None:
        return next(self.reasons, None)

    def log(self, line) -> None:
        self.logged.append(line)


def run(config: TrainerConfig, step: LinearLoss, *reasons, first_step: int = 1, most=None, validation=None, **more):
    """Train, on `most` batches if that is given; return the reason to stop and what was noted."""
    hooks, sets = Noted(*reasons), {"validation": lambda: [1, 2, 3]} if validation is None else validation
    steps = itertools.islice(batches(first_step), most)
    reason = train(steps, step, config, hooks, validation=sets, first_step=first_step, **more)
    return reason, hooks


def test_validation_and_checkpoints_come_at_their_intervals_and_at_the_end():
    _, noted = run(TrainerConfig(steps=7, eval_interval=3, checkpoint_interval=2), LinearLoss())
    assert noted.saved == [(2, 2), (4, 4), (6, 6), (7, 7)]
    assert [record.step for record in noted.records] == [1, 2, 3, 4, 5, 6, 7]
    assert [record.step for record in noted.records if record.evaluations] == [3, 6, 7]
    assert noted.records[2].evaluations["validation"] == Evaluation(3.0, 5)
    assert noted.records[2].result == StepResult(7.0, 100, 1.0, 0.1, False)
    _, noted = run(TrainerConfig(steps=4, eval_interval=0, checkpoint_interval=0), LinearLoss())
    assert noted.saved == [(4, 4)]
    assert [record.step for record in noted.records if record.evaluations] == [4]
    _, noted = run(TrainerConfig(steps=3, eval_interval=1, checkpoint_interval=1), LinearLoss())
    assert noted.saved == [(1, 1), (2, 2), (3, 3)]
    assert [record.step for record in noted.records if record.evaluations] == [1, 2, 3]


def test_times_are_of_this_step_and_those_without_waits_for_other_ranks(monkeypatch):
    # Every look at the clock comes a second after the one before; a quarter of each was waited for others.
    seconds, waits = itertools.count(100.0), itertools.count(7.0, 0.25)
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(Noted, "waits_s", lambda self: next(waits), raising=False)
    _, noted = run(TrainerConfig(steps=2, checkpoint_interval=1), LinearLoss(), validation={})
    times = [(made.step_s, made.data_wait_s, made.compute_s, made.data_s) for made in noted.records]
    assert times == [(2.0, 1.0, 0.75, 0.75)] * 2


def test_the_first_step_of_a_run_has_the_validations_before_it():
    sets = {"validation": lambda: [1], "code": lambda: [1, 2]}
    _, noted = run(TrainerConfig(steps=2, eval_interval=2), LinearLoss(), validation=sets)
    assert noted.records[0].initial == {"validation": Evaluation(1.0, 5), "code": Evaluation(2.0, 5)}
    assert noted.records[1].initial == {}
    assert noted.logged == ["before step 1: validation loss 1.0000", "before step 1: code loss 2.0000"]
    # A resumed run has had them, and one without intervals is validated at its end alone.
    for interval, first in ((2, 2), (0, 1)):
        _, noted = run(TrainerConfig(steps=2, eval_interval=interval), LinearLoss(), validation=sets, first_step=first)
        assert [record.initial for record in noted.records] == [{}] * len(noted.records)


def test_a_resumed_run_trains_the_steps_that_are_left():
    step = LinearLoss()
    _, noted = run(TrainerConfig(steps=6, checkpoint_interval=5), step, first_step=5)
    assert step.trained == [record.step for record in noted.records] == [5, 6]
    assert noted.saved == [(5, 5), (6, 6)]


@pytest.mark.parametrize(("made", "saves"), [(4, [2, 4]), (5, [2, 4, 5]), (0, [])])
def test_a_stream_that_ends_before_the_last_step_is_saved_once_and_returns_the_reason_to_stop(made, saves):
    # A signal ends the wait for data; steps before it saw none.
    config, reasons = TrainerConfig(steps=100, checkpoint_interval=2), [*[None] * made, "SIGTERM"]
    reason, noted = run(config, LinearLoss(), *reasons, most=made, validation={})
    assert ([number for number, _ in noted.saved], reason) == (saves, "SIGTERM")


def test_a_run_without_a_number_of_steps_trains_until_the_batches_end():
    _, noted = run(TrainerConfig(eval_interval=0, checkpoint_interval=20), LinearLoss(), most=65, validation={})
    assert (len(noted.records), [number for number, _ in noted.saved]) == (65, [20, 40, 60, 65])


class Plateau(LinearLoss):
    """A step with the given validation losses."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = iter(losses)

    def evaluate(self, batches) -> Evaluation:
        return Evaluation(next(self.losses), 5)


def test_validations_without_a_lower_loss_end_the_run_with_a_checkpoint():
    config = TrainerConfig(steps=20, eval_interval=2, checkpoint_interval=100, early_stop=2)
    _, noted = run(config, Plateau([9.0, 5.0, 4.0, 4.0, 4.5]))
    assert (noted.saved, noted.records[-1].step) == ([(8, 8)], 8)
    stopped = "stopped early after step 8: 2 validations without a lower loss"
    assert noted.logged == ["before step 1: validation loss 9.0000", stopped]
    # A lower loss in between restarts the count, and losses from before a resume count.
    assert run(config, Plateau([9.0, 5.0, 4.0, 5.1, 3.9, 4.0, 3.9]))[1].saved == [(12, 12)]
    assert run(config, Plateau([4.5]), first_step=8, validated=[5.0, 4.0, 4.0])[1].saved == [(8, 8)]
    # A loss that is not a number is not a lower one.
    nan = float("nan")
    assert run(config, Plateau([9.0, nan, 5.0, 5.0, nan]))[1].saved == [(8, 8)]
    assert run(config, Plateau([9.0, 5.0, nan, 4.0, nan, nan]))[1].saved == [(10, 10)]


def test_a_loss_that_is_not_a_number_stops_the_run_and_is_not_saved():
    with pytest.raises(HarnessError, match="the loss of step 2 is nan") as error:
        run(TrainerConfig(steps=4, checkpoint_interval=1), LinearLoss(nan_at=2))
    assert "optimizer.lr" in error.value.fix


class Node:
    """An object that refers to itself."""

    itself: Node


class Cycles(LinearLoss):
    """Leaves reference cycles at each batch, far more than the collector lets pass on its own."""

    per_batch = 5000

    def __init__(self, *, nan_at: int = 0) -> None:
        super().__init__(nan_at=nan_at)
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.most = 0

    def make(self) -> None:
        for _ in range(self.per_batch):
            node = Node()
            node.itself = node
            self.alive.add(node)
        self.most = max(self.most, len(self.alive))

    def train(self, batch) -> StepResult:
        self.make()
        return super().train(batch)

    def evaluate(self, batches) -> Evaluation:
        return Evaluation(float(sum(1 for _ in batches if not self.make())), 5)


@pytest.fixture
def collections() -> Iterator[Callable[[], int]]:
    """Return a function that counts the collections so far; the collector is afterwards as the tests need it."""
    seen = []

    def count(phase, info) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(count)
    yield lambda: len(seen)
    gc.callbacks.remove(count)
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.mark.submission
def test_garbage_is_collected_at_the_interval_and_at_no_other_time(collections):
    step, at, heap = Cycles(), [], [[] for _ in range(10_000)]
    hooks = Noted()
    hooks.at = lambda number, activity: at.append((number, collections(), len(gc.get_objects())))
    config = TrainerConfig(steps=9, eval_interval=0, collect_interval=4)
    train(itertools.islice(batches(), 9), step, config, hooks, validation={})
    counts = {number: count - at[0][1] for number, count, _ in at}
    assert counts == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1, 7: 1, 8: 1, 9: 2}
    # No later collection searches the objects that the first one leaves.
    assert [objects < len(heap) for number, _, objects in at if number in (1, 5)] == [False, False, True, True]
    assert step.most == 4 * Cycles.per_batch


@pytest.mark.submission
@pytest.mark.parametrize(("is_enabled", "nan_at"), [(True, 0), (False, 5)])
def test_the_collector_is_as_before_after_the_last_step_and_after_an_error(collections, is_enabled, nan_at):
    step, kept = Cycles(nan_at=nan_at), Node()
    kept.itself, of_kept = kept, weakref.ref(kept)
    if not is_enabled:
        gc.disable()
    with pytest.raises(HarnessError) if nan_at else nullcontext():
        run(TrainerConfig(steps=6, eval_interval=0, collect_interval=3), step, validation={})
    assert gc.isenabled() == is_enabled
    del kept
    gc.collect()
    assert not step.alive
    assert of_kept() is None  # it was alive at the collection of step 3, after which others leave such objects out


@pytest.mark.submission
def test_an_interval_of_zero_leaves_the_collector_alone(collections):
    before, step = collections(), Cycles()
    run(TrainerConfig(steps=3, eval_interval=0, collect_interval=0), step, validation={})
    assert collections() > before + 3
