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


READING = replace(TRAINING, activity="reading data", idle_s=62.4)
OPENING = replace(TRAINING, activity="opening the data")
BEHIND = replace(TRAINING, step=36, host="node2")


ME = "(host node1, process 4711)"


@pytest.mark.parametrize(
    ("beats", "silent", "culprit", "sentence"),
    [
        # A silent rank, even if another reads data; the first of several.
        ([TRAINING, READING, BEHIND], {2}, 2, "rank 2 has exited or is suspended (host node2, process 4711);"),
        ([TRAINING] * 3, {1, 2}, 1, f"rank 1 (and 1 more) has exited or is suspended {ME}; last seen in step 37"),
        # One with work of its own holds up those that train, and one that is a step behind all others.
        ([TRAINING, READING, TRAINING], (), 1, f"rank 1 {ME} has been in step 37, reading data, for 62 s"),
        ([TRAINING, TRAINING, BEHIND], (), 2, "rank 2 (host node2, process 4711) has been in step 36, training, for"),
        ([TRAINING] * 2, (), None, "all 2 ranks are in step 37, training, and none is making"),
        ([OPENING, replace(OPENING, idle_s=61.2)], (), None, "all 2 ranks are in step 37, opening the data, and none"),
        ([TRAINING], (), 0, f"rank 0 {ME} has been in step 37, training, for 61 s"),
    ],
)
def test_the_rank_that_holds_the_others_up_is_named(beats, silent, culprit, sentence) -> None:
    before = dict(enumerate(beats))
    after = {rank: beat if rank in silent else replace(beat, count=14) for rank, beat in before.items()}
    rank, found = find_culprit(before, after)
    assert rank == culprit
    assert found.startswith(sentence)


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
    assert "restart with resume=auto" in capsys.readouterr().err


def test_the_first_rank_in_the_store_reports_an_end(ended, capsys) -> None:
    """Two ranks end at the same time, and the other one was first in the run's folder."""
    event, _ = ended
    with runtime.start("cpu"), Watchdog(limit_s=4, requested=lambda: ("SIGTERM", 21.0), leave=lambda stop: False):
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
    assert "Increase trainer.startup_timeout_s" in capfd.readouterr().err


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
