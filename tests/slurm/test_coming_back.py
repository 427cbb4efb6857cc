"""Jobs come back by themselves: through a controller that is away, at a time limit, and where their script is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from ..distributed.conftest import ROOT
from .conftest import HARNESS, SlurmJob
from .test_resuming import LONG, attempts, resumed_step, undisturbed, wait_for_step

__all__ = ["undisturbed"]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def arguments_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def fingerprint(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the inode of the files of a run that only its own job may change."""
    files = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {str(path): (path.stat().st_size, path.stat().st_ino) for path in files}


def test_a_job_is_requeued_although_the_controller_is_away_when_a_rank_dies(submit, slurm, undisturbed):
    job = submit(*LONG)
    wait_for_step(job, 45)
    slurm.end_daemon("slurmctld", signal.SIGKILL)
    try:
        os.kill(slurm.rank_on("node2"), signal.SIGKILL)
        deadline = time.monotonic() + 480
        while "no answer from Slurm" not in job.log:
            assert time.monotonic() < deadline, job.log
            time.sleep(0.5)
        time.sleep(10)
    finally:
        slurm.start_controller()
    assert job.wait() == "COMPLETED", job.log
    assert (job.facts["Restarts"], job.losses == undisturbed) == ("1", True)
    assert len(attempts(job)) == 1


@pytest.mark.nightly  # four minutes
def test_a_warning_that_meets_the_time_limit_continues_in_the_next_attempt(submit, slurm, undisturbed):
    """A rank that is stopped saves nothing until Slurm ends the job, and kills the script seconds after the limit."""
    job = submit(*LONG, "cluster.time='3'", "cluster.signal_lead_s=20")
    wait_for_step(job, 45)
    os.kill(slurm.rank_on("node2"), signal.SIGSTOP)
    job.wait_for(lambda: job.facts["Restarts"] == "1", "requeue at the time limit")
    assert job.wait() == "COMPLETED", job.log
    assert job.losses == undisturbed
    # Slurm wakes the rank when it ends the job, so that the ranks may save after all. Later attempts may end so, too.
    assert int(re.findall(r"resuming after step (\d+), from", job.log)[0]) >= 40
    assert len(attempts(job)) == int(job.facts["Restarts"])


@pytest.mark.parametrize("kind", ["afterany", pytest.param("singleton", marks=pytest.mark.nightly)])
def test_a_successor_continues_a_run_whose_script_was_lost(submit, slurm, undisturbed, kind):
    job = submit(*LONG, f"cluster.successor={kind}")
    wait_for_step(job, 45)
    successor = SlurmJob(slurm, (job.run_dir / "logs" / f"successor-{job.job_id}").read_text().strip(), job.run_dir)
    assert successor.facts["JobState"] == "PENDING"
    (script,) = [
        pid for pid in slurm.processes("node1") if arguments_of(pid)[1:2] and "slurm_script" in arguments_of(pid)[1]
    ]
    os.kill(script, signal.SIGKILL)
    assert job.wait() == "FAILED", job.log
    assert successor.wait() == "COMPLETED", job.log
    assert job.losses == undisturbed
    assert resumed_step(job) >= 40  # the end of the script may leave the ranks time to save
    assert [attempt["job"] for attempt in attempts(job)] == [job.job_id]
    # That of the successor itself has nothing left to do.
    assert "finished" in job.log
    assert not slurm.on("login", "squeue", "--noheader").strip()


def test_a_second_job_of_a_live_run_changes_nothing_and_the_run_is_shown_and_canceled_for_good(submit, slurm):
    # No checkpoint is removed meanwhile, however far the live run gets.
    job = submit(*LONG, "trainer.steps=100000", "trainer.keep_checkpoints=100000", nodes=1)
    wait_for_step(job, 25)
    before = {path: inode for path, (_, inode) in fingerprint(job.run_dir).items() if ".unfinished" not in path}
    second = SlurmJob(
        slurm, slurm.on("login", "sbatch", "--parsable", job.run_dir / "job.sbatch", check=True).strip(), job.run_dir
    )
    assert second.wait() == "FAILED"
    log = (job.run_dir / "logs" / f"sft-{second.job_id}.out").read_text()
    assert f"job {job.job_id} is running and has this run: job {second.job_id} ends without touching it" in log
    after = {path: inode for path, (_, inode) in fingerprint(job.run_dir).items()}
    assert {path: inode for path, inode in after.items() if path in before} == before
    assert not (job.run_dir / "attempts.jsonl").exists()

    refused = slurm.on("login", *HARNESS, "submit", "sft", f"run_dir={job.run_dir}", cwd=ROOT)
    assert f"this run is already in the queue: job {job.job_id} is running on node" in refused
    values = json.loads(slurm.on("login", *HARNESS, "status", job.run_dir, "--json", check=True, cwd=ROOT))
    assert values["step"] >= 25
    assert [entry["job_id"] for entry in values["jobs"]] == [job.job_id]
    printed = slurm.on("login", *HARNESS, "logs", job.run_dir, "--rank", "0", check=True, cwd=ROOT)
    assert re.search(r"step +\d+", printed)
    printed = slurm.on("login", *HARNESS, "cancel", job.run_dir, check=True, cwd=ROOT)
    assert f"canceled: job {job.job_id} is running" in printed
    assert job.wait() == "CANCELLED", job.log
    # Even now Slurm would requeue it, and start it after a while.
    time.sleep(15)
    assert (job.facts["JobState"], job.facts["Restarts"]) == ("CANCELLED", "0")
    assert "cancelled: the job is not requeued" in job.log
