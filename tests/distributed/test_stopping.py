"""Runs that are asked to stop, lose a rank, hang or cannot write a checkpoint: their messages, and how they resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from harness.train.attempts import decide

from .conftest import ROOT, command, environment, forked, kill_tree, overrides_of, read_metrics, run_command, run_sft
from .test_resume import SAME

pytestmark = pytest.mark.submission

# Long enough that none ends before its signal.
SETTINGS = ("trainer.steps=24", "trainer.eval_interval=0", "trainer.checkpoint_interval=4")
FOREVER = (*SETTINGS, "trainer.steps=100000")


class Job:
    """A run of several ranks that can be disturbed."""

    def __init__(self, arguments: list[str], folder: Path, log: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.log = folder, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                arguments,
                env={**environment(), **variables},
                cwd=ROOT,
                start_new_session=True,
                stdout=file,
                stderr=file,
            )

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 480
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def reach(self, step: int) -> None:
        self.wait_for(lambda: (found := read_metrics(self.folder)) and found[-1]["step"] >= step)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend every process of the job for the duration of the block."""
        everyone = self.everyone()
        for process in everyone:
            process.suspend()
        yield
        for process in everyone:
            process.resume()

    def everyone(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def rank(self, number: int) -> psutil.Process:
        ranks = psutil.Process(self.process.pid).children()
        return next(process for process in ranks if process.environ().get("RANK") == str(number))

    def end(self) -> tuple[int, str]:
        return self.process.wait(timeout=480), self.log.read_text()

    def stopped(self) -> dict[str, object]:
        return json.loads((self.folder / "_stopped.json").read_text())


@contextmanager
def started(
    dataset: Path, folder: Path, *overrides: str, ranks: int = 2, variables: Mapping[str, str] | None = None
) -> Iterator[Job]:
    arguments = command(dataset, folder, *overrides, ranks=ranks)
    with running(Job(arguments, folder, folder.parent / "log", variables or {})) as job:
        yield job


@contextmanager
def running(job: Job) -> Iterator[Job]:
    try:
        yield job
    finally:
        kill_tree(job.process)


def checkpoints_in(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????"))


def curve(folder: Path) -> list[dict[str, object]]:
    return [{name: line[name] for name in SAME} for line in read_metrics(folder)]


@pytest.mark.nightly
def test_a_signal_to_the_launcher_ends_the_run_after_a_checkpoint_and_it_resumes_with_the_same_losses(
    dataset, tmp_path
) -> None:
    folder = tmp_path / "run"
    # Spawned workers: a signal that ended them would leave the ranks without the data of their last step.
    settings = overrides_of(dataset, folder, *FOREVER, "loader.start_method=spawn", "parallel.ranks=2")
    with running(
        Job([sys.executable, "-m", "harness", "train", "sft", *settings], folder, tmp_path / "log", {})
    ) as job:
        job.reach(6)
        # A checkpoint is written beside the steps that follow it.
        job.wait_for(lambda: checkpoints_in(folder))
        # The leftovers of a run killed now: steps after the last checkpoint, and a lock without an owner.
        with job.suspended():
            shutil.copytree(folder, tmp_path / "killed", ignore=shutil.ignore_patterns("*.unfinished*"))
        for process in job.everyone():
            # Workers get it too, as from a scheduler; the launcher forwards it to the ranks once more.
            process.send_signal(signal.SIGTERM)
        code, output = job.end()
    assert code == 75, output
    assert "Traceback" not in output
    stopped = job.stopped()
    done = curve(folder)[-1]["step"]
    assert (stopped["reason"], stopped["step"]) == ("signal", done)
    assert f"SIGTERM received: stopped after step {done}" in output
    assert checkpoints_in(folder)[-1] == done
    assert decide(folder, exit_code=code).requeue

    # All in the same processes, which saves the seconds of their start.
    kept, more = checkpoints_in(tmp_path / "killed")[-1], (*SETTINGS, f"trainer.steps={done + 3}", "resume=auto")
    places = (folder, tmp_path / "killed", tmp_path / "whole")
    output = run_sft(2, tmp_path, [(overrides_of(dataset, place, *more), str(place), None) for place in places])
    assert not (folder / "_stopped.json").exists()
    # Both resumed from their checkpoints, and not from the beginning.
    assert f"resuming after step {done}, from {folder}" in output
    assert f"resuming after step {kept}, from {tmp_path / 'killed'}" in output
    assert curve(folder) == curve(tmp_path / "killed") == curve(tmp_path / "whole")


@pytest.mark.nightly
def test_a_lost_rank_is_named_and_its_unfinished_checkpoint_is_not_loaded(dataset, tmp_path) -> None:
    folder = tmp_path / "run"
    with started(dataset, folder, *FOREVER) as job:
        job.reach(5)
        victim = job.rank(1)
        victim.kill()
        _, output = job.end()
    stopped = job.stopped()
    assert (stopped["reason"], stopped["rank"]) == ("LostRankError", 1), output
    assert f"rank 1 has exited or is suspended (host {os.uname().nodename}, process {victim.pid})" in str(
        stopped["message"]
    )
    assert "resume=auto" in output
    assert decide(folder, exit_code=1).requeue


@pytest.mark.nightly
def test_a_rank_that_hangs_ends_the_job_and_is_named(dataset, tmp_path) -> None:
    folder = tmp_path / "run"
    with started(dataset, folder, *FOREVER, "trainer.timeout_s=30") as job:
        job.reach(5)
        job.rank(1).suspend()
        _, output = job.end()
    stopped = job.stopped()
    assert (stopped["reason"], stopped["rank"]) == ("hang", 1), output
    assert "no progress for 30 s in step" in output
    assert "rank 1 has exited or is suspended" in output
    assert decide(folder, exit_code=1).requeue


@pytest.mark.nightly
def test_a_checkpoint_without_disk_space_ends_the_run_and_keeps_earlier_ones(dataset, tmp_path) -> None:
    folder = tmp_path / "run"
    arguments = [*forked(2), "harness.recipes.sft", *overrides_of(dataset, folder, *SETTINGS)]
    code, output = run_command(["bash", "-c", 'ulimit -f 60; exec "$@"', "bash", *arguments])
    assert code != 0
    assert "the checkpoint of step 4 cannot be written: rank 0: " in output
    assert "File too large" in output
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT / "harness") not in output
    assert [path.name for path in (folder / "checkpoints").glob("step-*") if path.suffix == ""] == []
    assert not decide(folder, exit_code=code).requeue

    code, output = run_command([*arguments, "resume=auto"])
    assert code == 0, output
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, 25))
