"""The watchdog names the rank that holds the others up, and ends a job that makes no progress."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from harness.megatron.job import runtime
from harness.megatron.job.watchdog import Beat, Watchdog, find_culprit
from harness.train.attempts import Stop

TRAINING = Beat(count=10, step=37, activity="training", idle_s=61.0, host="node1", process=4711)


def beats_of(**ranks: Beat) -> dict[int, Beat]:
    return {int(name[1:]): beat for name, beat in ranks.items()}


def later(beats: dict[int, Beat], *silent: int) -> dict[int, Beat]:
    return {rank: beat if rank in silent else replace(beat, count=beat.count + 4) for rank, beat in beats.items()}


def test_a_silent_rank_is_named_even_if_another_reads_data() -> None:
    beats = beats_of(
        r0=TRAINING, r1=replace(TRAINING, activity="reading data"), r2=replace(TRAINING, step=36, host="node2")
    )
    rank, sentence = find_culprit(beats, later(beats, 2))
    assert rank == 2
    assert sentence == ("rank 2 has died or is stopped (host node2, process 4711); last seen in step 36, training")


def test_the_first_of_several_silent_ranks_is_named_and_the_others_are_counted() -> None:
    beats = beats_of(r0=TRAINING, r4=TRAINING, r5=TRAINING)
    rank, sentence = find_culprit(beats, later(beats, 4, 5))
    assert rank == 4
    assert sentence.startswith("rank 4 (and 1 more) has died or is stopped")


def test_a_rank_that_reads_data_holds_up_those_that_train() -> None:
    beats = beats_of(r0=TRAINING, r1=replace(TRAINING, activity="reading data", idle_s=62.4), r2=TRAINING)
    assert find_culprit(beats, later(beats)) == (
        1,
        "rank 1 (host node1, process 4711) has been in step 37, reading data, for 62 s",
    )


def test_a_rank_one_step_behind_holds_up_the_others() -> None:
    beats = beats_of(r0=TRAINING, r1=TRAINING, r2=replace(TRAINING, step=36))
    assert find_culprit(beats, later(beats))[0] == 2


def test_no_rank_is_named_if_all_train_the_same_step() -> None:
    beats = beats_of(r0=TRAINING, r1=TRAINING)
    assert find_culprit(beats, later(beats)) == (
        None,
        "all 2 ranks are in step 37, training, and none makes progress",
    )


def test_no_rank_is_named_if_all_read_data_unless_there_is_only_one() -> None:
    reading = replace(TRAINING, activity="opening the data")
    beats = beats_of(r0=reading, r1=replace(reading, idle_s=61.2))
    assert find_culprit(beats, later(beats)) == (
        None,
        "all 2 ranks are in step 37, opening the data, and none makes progress",
    )
    alone = beats_of(r0=TRAINING)
    assert find_culprit(alone, later(alone))[0] == 0


@pytest.fixture
def ended(monkeypatch) -> tuple[threading.Event, list[int]]:
    """An event that is set when the process would have ended, and its exit codes."""
    event, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        event.set()

    monkeypatch.setattr(os, "_exit", end)
    return event, codes


def test_a_signal_ends_a_startup_that_lasts_longer_than_its_grace(ended, capsys) -> None:
    event, codes = ended
    left: list[Stop] = []
    requests = iter([("SIGTERM", 19.0), ("SIGTERM", 21.0)])
    with (
        runtime.start("cpu"),
        Watchdog(
            limit_s=4, requested=lambda: next(requests, None), leave=lambda stop: not left.append(stop)
        ) as watchdog,
    ):
        watchdog.at(8, "loading the checkpoint")
        assert event.wait(timeout=300)
    assert codes == [75]
    assert left == [Stop(7, "signal", "SIGTERM received before the first step, in step 8, loading the checkpoint")]
    assert "resume=auto starts again" in capsys.readouterr().err


def test_the_first_rank_in_the_store_reports_an_end(ended, capsys) -> None:
    """Two ranks end at the same time, and the other one was first in the run's folder."""
    event, _ = ended
    with (
        runtime.start("cpu"),
        Watchdog(limit_s=4, requested=lambda: ("SIGTERM", 21.0), leave=lambda stop: False),
    ):
        assert event.wait(timeout=300)
    assert "SIGTERM received before the first step" in capsys.readouterr().err


def test_a_signal_during_training_waits_for_the_next_step(ended, tmp_path) -> None:
    event, _ = ended
    with runtime.start("cpu"), Watchdog(limit_s=4, requested=lambda: ("SIGTERM", 100.0)) as watchdog:
        watchdog.training_begins(tmp_path, limit_s=4)
        assert not event.wait(timeout=2)


def test_a_startup_without_progress_ends_and_names_the_setting_to_raise(ended, capfd) -> None:
    event, codes = ended
    left: list[Stop] = []
    with runtime.start("cpu"), Watchdog(limit_s=0.4, leave=lambda stop: not left.append(stop)) as watchdog:
        watchdog.at(1, "opening the data")
        assert event.wait(timeout=300)
    assert codes[0] == 70
    assert (left[0].reason, left[0].rank) == ("hang", 0)
    assert "Raise trainer.startup_timeout_s" in capfd.readouterr().err


def test_a_hang_in_training_leaves_the_stacks_of_the_rank_in_the_runs_folder(ended, tmp_path, monkeypatch) -> None:
    event, _ = ended
    for name in ("NCCL_IB_HCA", "TORCH_NCCL_TRACE_BUFFER_SIZE", "MY_TOKEN"):
        monkeypatch.setenv(name, "x")
    with runtime.start("cpu"), Watchdog(limit_s=4) as watchdog:
        watchdog.training_begins(tmp_path, limit_s=0.4)
        watchdog.at(7, "training")
        assert event.wait(timeout=300)
    stacks = (tmp_path / "stacks" / "rank-00000.txt").read_text()
    assert stacks.startswith("rank 0 on ")
    assert ", step 7, training\nNCCL_IB_HCA=x\nTORCH_NCCL_TRACE_BUFFER_SIZE=x\n" in stacks
    assert "MY_TOKEN" not in stacks
    assert "test_a_hang_in_training_leaves" in stacks  # the main thread, where it was stuck
