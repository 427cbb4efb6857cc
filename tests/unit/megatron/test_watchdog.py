"""Which rank holds the others up."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from harness.megatron.job import runtime
from harness.megatron.job.watchdog import Beat, Watchdog, find_culprit
from harness.train.attempts import Stop

TRAINING = Beat(count=10, step=37, doing="training", stood_s=61.0, host="node1", process=4711)


def told(**ranks: Beat) -> dict[int, Beat]:
    return {int(name[1:]): beat for name, beat in ranks.items()}


def later(beats: dict[int, Beat], *silent: int) -> dict[int, Beat]:
    return {rank: beat if rank in silent else replace(beat, count=beat.count + 4) for rank, beat in beats.items()}


def test_a_rank_that_has_stopped_telling_is_named_though_another_reads_data() -> None:
    beats = told(r0=TRAINING, r1=replace(TRAINING, doing="reading data"), r2=replace(TRAINING, step=36, host="node2"))
    rank, sentence = find_culprit(beats, later(beats, 2))
    assert rank == 2
    assert sentence == ("rank 2 is gone or stopped (host node2, process 4711); last heard of in step 36, training")


def test_of_several_silent_ranks_the_first_is_named_and_the_others_are_counted() -> None:
    beats = told(r0=TRAINING, r4=TRAINING, r5=TRAINING)
    rank, sentence = find_culprit(beats, later(beats, 4, 5))
    assert rank == 4
    assert sentence.startswith("rank 4 (and 1 more) is gone or stopped")


def test_the_rank_that_reads_data_holds_those_up_that_train() -> None:
    beats = told(r0=TRAINING, r1=replace(TRAINING, doing="reading data", stood_s=62.4), r2=TRAINING)
    assert find_culprit(beats, later(beats)) == (
        1,
        "rank 1 (host node1, process 4711) has been in step 37, reading data, for 62 s",
    )


def test_the_rank_a_step_behind_holds_the_others_up() -> None:
    beats = told(r0=TRAINING, r1=TRAINING, r2=replace(TRAINING, step=36))
    assert find_culprit(beats, later(beats))[0] == 2


def test_where_all_ranks_train_the_same_step_none_is_named() -> None:
    beats = told(r0=TRAINING, r1=TRAINING)
    assert find_culprit(beats, later(beats)) == (
        None,
        "all 2 ranks are in step 37, training, and none goes on",
    )


def test_where_all_ranks_read_data_none_is_named_and_where_one_rank_is_all_it_is() -> None:
    reading = replace(TRAINING, doing="opening the data")
    beats = told(r0=reading, r1=replace(reading, stood_s=61.2))
    assert find_culprit(beats, later(beats)) == (
        None,
        "all 2 ranks are in step 37, opening the data, and none goes on",
    )
    alone = told(r0=TRAINING)
    assert find_culprit(alone, later(alone))[0] == 0


@pytest.fixture
def ended(monkeypatch) -> tuple[threading.Event, list[int]]:
    """Set when the process would have ended, and its exit codes."""
    event, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        event.set()

    monkeypatch.setattr(os, "_exit", end)
    return event, codes


def test_a_signal_ends_a_startup_that_goes_on_for_longer_than_its_grace(ended, capsys) -> None:
    event, codes = ended
    left: list[Stop] = []
    asked = iter([("SIGTERM", 19.0), ("SIGTERM", 21.0)])
    with (
        runtime.start("cpu"),
        Watchdog(limit_s=4, asked=lambda: next(asked, None), leave=lambda stop: not left.append(stop)) as watchdog,
    ):
        watchdog.at(8, "loading the checkpoint")
        assert event.wait(timeout=10)
    assert codes == [75]
    assert left == [Stop(7, "signal", "SIGTERM came before the first step, in step 8, loading the checkpoint")]
    assert "resume=auto starts again" in capsys.readouterr().err


def test_an_end_is_told_by_whoever_is_first_in_the_store(ended, capsys) -> None:
    """Two ranks that end at the same time: the other one has been first in the run's folder."""
    event, _ = ended
    with (
        runtime.start("cpu"),
        Watchdog(limit_s=4, asked=lambda: ("SIGTERM", 21.0), leave=lambda stop: False),
    ):
        assert event.wait(timeout=10)
    assert "SIGTERM came before the first step" in capsys.readouterr().err


def test_a_signal_to_a_run_that_trains_is_left_to_its_next_step(ended, tmp_path) -> None:
    event, _ = ended
    with runtime.start("cpu"), Watchdog(limit_s=4, asked=lambda: ("SIGTERM", 100.0)) as watchdog:
        watchdog.training_begins(tmp_path, limit_s=4)
        assert not event.wait(timeout=2)


def test_a_startup_that_stands_still_ends_with_the_setting_that_it_may_need(ended, capfd) -> None:
    event, codes = ended
    left: list[Stop] = []
    with runtime.start("cpu"), Watchdog(limit_s=0.4, leave=lambda stop: not left.append(stop)) as watchdog:
        watchdog.at(1, "opening the data")
        assert event.wait(timeout=10)
    assert codes[0] == 70
    assert (left[0].reason, left[0].rank) == ("hang", 0)
    assert "Raise trainer.startup_timeout_s" in capfd.readouterr().err
