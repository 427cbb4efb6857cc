"""A run that ended is started again, or not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import FormatError, HarnessError
from harness.train.attempts import (
    ATTEMPTS_FILE,
    STOPPED_FILE,
    Stop,
    decide,
    note_lost,
    read_attempts,
    record_resume,
    write_stop,
)
from harness.train.checkpoints import RUN_FILE, begin_attempt


def test_attempts_without_progress_are_the_last_however_they_end(tmp_path: Path) -> None:
    answers = []
    for number in range(11):
        write_stop(tmp_path, Stop((7, 5, 6)[number % 3], ("hang", "signal", "LoaderError")[number % 3], "x"))
        answers.append(decide(tmp_path, exit_code=1).requeue)
    assert answers == [True] * 10 + [False]
    (tmp_path / ATTEMPTS_FILE).unlink()
    for step in range(30):  # preempted again and again, one step at a time
        write_stop(tmp_path, Stop(step, "signal", "x"))
        assert decide(tmp_path, exit_code=75).requeue


def test_a_run_that_was_asked_to_stop_continues_however_often(tmp_path: Path) -> None:
    for _ in range(9):
        write_stop(tmp_path, Stop(40, "signal", "SIGUSR2"))
        decision = decide(tmp_path, exit_code=75, max_same=2)
        assert decision.requeue
        assert decision.message == "stopped by request after step 40: SIGUSR2; it will continue from its checkpoint"
    assert len((tmp_path / ATTEMPTS_FILE).read_text().splitlines()) == 9


def test_a_stop_that_no_rank_could_record_is_recognized_by_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    for _ in range(3):
        decision = decide(tmp_path, exit_code=75, max_same=2)
        assert decision.requeue
    assert (
        decision.message
        == "stopped by request after step 2: the ranks received a signal; it will continue from its checkpoint"
    )


@pytest.mark.parametrize(
    ("ends", "most", "requeued"),
    [
        ([(7, "LoaderError")] * 3, 3, [True, True, False]),
        # Another step or another failure begins a new count, and a signal in between does not.
        ([(7, "hang"), (7, "hang"), (8, "hang"), (8, "LoaderError"), (8, "hang")], 3, [True] * 5),
        ([(7, "hang"), (7, "signal"), (7, "hang")], 2, [True, True, False]),
        ([(7, "hang"), (7, "lost"), (7, "hang")], 2, [True, True, False]),
    ],
)
def test_the_same_failure_at_the_same_step_is_tried_so_often(tmp_path: Path, ends, most, requeued) -> None:
    answers = []
    for step, reason in ends:
        write_stop(tmp_path, Stop(step, reason, "a worker died", rank=2))
        answers.append(decide(tmp_path, exit_code=1, max_same=most))
    assert [answer.requeue for answer in answers] == requeued
    if not requeued[-1]:
        assert answers[-1].message.endswith(f"{most} identical failures at the same step")


def test_a_killed_run_is_judged_by_its_exit_code_and_its_last_whole_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert decide(tmp_path, exit_code=137, max_same=2).requeue
    assert not decide(tmp_path, exit_code=137, max_same=2).requeue
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert decide(tmp_path, exit_code=137, max_same=2).requeue


def test_attempts_say_how_the_run_starts_again_and_what_the_resume_lost(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    checkpoint = tmp_path / "checkpoints" / "step-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / RUN_FILE).write_text("{}")
    os.utime(checkpoint / RUN_FILE, (0, 0))  # long ago
    identity = begin_attempt(tmp_path)
    for step, in_job in ((7, True), (8, False)):
        write_stop(tmp_path, Stop(step, "hang", "rank 1"))
        assert decide(tmp_path, exit_code=1, in_job=in_job).requeue
        note_lost(tmp_path, job="12", restarts=0 if in_job else 1)
        record_resume(tmp_path, identity, 7, checkpoint, [])
        record_resume(tmp_path, identity, 7, checkpoint, [])  # by hand, later: no attempt of a job ended in between
    write_stop(tmp_path, Stop(9, "ConfigError", "x", requeue=False))
    assert not decide(tmp_path, exit_code=1, in_job=True).requeue
    lines = read_attempts(tmp_path)
    assert [line.again for line in lines] == ["in the job", "through Slurm", None]
    assert [(line.lost_s or 0) >= 40 for line in lines] == [True, True, False]
    assert replace(lines[0], lost_s=40.4).describe() == (
        "ended after step 7: hang: rank 1 (job 12), restarted in the job, 40 s lost"
    )


def test_a_restart_in_the_job_is_none_by_slurm(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    write_stop(tmp_path, Stop(7, "hang", "rank 1"))
    assert decide(tmp_path, exit_code=1, in_job=True).requeue
    note_lost(tmp_path, job="12", restarts=1)  # Slurm's own, after a node died
    assert [line.reason for line in read_attempts(tmp_path)] == ["hang", "lost"]


def test_a_successor_that_starts_its_ranks_again_records_its_predecessor_once(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    note_lost(tmp_path, job="13", restarts=0, predecessor="12")
    for step in (2, 3):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        assert decide(tmp_path, exit_code=1, in_job=True).requeue
        note_lost(tmp_path, job="13", restarts=0, predecessor="12")
    assert [(line.job, line.step) for line in read_attempts(tmp_path)] == [("12", 1), ("13", 2), ("13", 3)]


def test_a_finished_run_and_refused_input_are_not_tried_again(tmp_path: Path) -> None:
    assert decide(tmp_path, exit_code=0).requeue is False
    assert not (tmp_path / ATTEMPTS_FILE).exists()
    assert not decide(tmp_path / "not yet there", exit_code=2).requeue
    write_stop(tmp_path, Stop(3, "ConfigError", "x", requeue=False))
    assert not decide(tmp_path, exit_code=1).requeue


def test_the_error_of_the_first_of_several_ranks_is_kept(tmp_path: Path) -> None:
    assert write_stop(tmp_path, Stop(3, "hang", "rank 1", rank=1))
    assert not write_stop(tmp_path, Stop(3, "HarnessError", "rank 0 lost its peer", rank=0))
    assert json.loads((tmp_path / STOPPED_FILE).read_text())["rank"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [STOPPED_FILE]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    whole = {"step": 1, "reason": "hang", "message": "x", "rank": None, "requeue": True}
    for damaged in ({}, {**whole, "step": []}, {**whole, "step": "1"}, {**whole, "lost_s": "1"}):
        (tmp_path / ATTEMPTS_FILE).write_text(json.dumps(damaged) + "\n")
        with pytest.raises(FormatError, match="cannot be read"):
            decide(tmp_path, exit_code=1)


def noted(folder: Path) -> list[tuple[str, int]]:
    lines = (folder / ATTEMPTS_FILE).read_text().splitlines()
    return [(line["reason"], line["step"]) for line in map(json.loads, lines)]


def test_attempts_whose_node_died_are_recorded_by_the_next_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    note_lost(tmp_path, job="12", restarts=0)
    assert not (tmp_path / ATTEMPTS_FILE).exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    write_stop(tmp_path, Stop(1, "hang", "rank 1"))
    assert decide(tmp_path, exit_code=1).requeue
    note_lost(tmp_path, job="12", restarts=1)  # which recorded itself
    write_stop(tmp_path, Stop(2, "signal", "SIGUSR2 received"))
    note_lost(tmp_path, job="12", restarts=3)
    # Otherwise a refusal of this attempt would be mistaken for it.
    assert not (tmp_path / STOPPED_FILE).exists()
    note_lost(tmp_path, job="12", restarts=3)
    assert noted(tmp_path) == [("hang", 1), ("lost", 2), ("signal", 2)]
    # An attempt of another job in this folder is recorded, and does not count for this job.
    write_stop(tmp_path, Stop(2, "hang", "rank 1"))
    note_lost(tmp_path, job="13", restarts=0)
    note_lost(tmp_path, job="13", restarts=1)
    assert noted(tmp_path)[3:] == [("hang", 2), ("lost", 2)]


def test_the_end_of_a_job_that_could_not_report_is_recorded_by_its_successor(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    note_lost(tmp_path, job="13", restarts=0, predecessor="12")
    note_lost(tmp_path, job="13", restarts=0, predecessor="12")  # its ranks started again
    assert noted(tmp_path) == [("lost", 2)]
    write_stop(tmp_path, Stop(2, "signal", "SIGTERM received"))
    note_lost(tmp_path, job="14", restarts=0, predecessor="13")
    assert noted(tmp_path) == [("lost", 2), ("signal", 2)]
    for job in range(15, 23):
        note_lost(tmp_path, job=str(job), restarts=0, predecessor=str(job - 1))
    with pytest.raises(HarnessError, match="the last 10 attempts made no progress beyond step 2"):
        note_lost(tmp_path, job="23", restarts=0, predecessor="22")


def test_a_job_whose_nodes_die_again_and_again_stops(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for restarts in range(11):
        note_lost(tmp_path, job="12", restarts=restarts)
    with pytest.raises(HarnessError, match="the last 10 attempts made no progress beyond step 1"):
        note_lost(tmp_path, job="12", restarts=11)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    note_lost(tmp_path, job="12", restarts=12)


def test_a_line_or_a_reason_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    assert decide(tmp_path, exit_code=137).requeue
    with (tmp_path / ATTEMPTS_FILE).open("a") as file:
        file.write('{"step": 0, "rea')
    assert decide(tmp_path, exit_code=137).requeue
    assert noted(tmp_path) == [("exit code 137", 0)] * 2

    # A reason that was cut short is none: the exit code decides.
    (tmp_path / STOPPED_FILE).write_text('{"step": 4, "rea')
    assert not decide(tmp_path, exit_code=2).requeue
    assert write_stop(tmp_path / "gone", Stop(3, "hang", "rank 1"))  # nowhere to write: the rank prints it
