"""Jobs that are asked to stop, lose a node, or fail: they requeue and resume with the losses of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from .conftest import SlurmJob, losses_here

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]
# Long enough to be disturbed in the middle on any machine.
LONG = (
    *("trainer.steps=150", "trainer.checkpoint_interval=20"),
    # The preflight takes as long as these runs and has tests of its own.
    *("cluster.ranks_per_node=1", "cluster.preflight.enabled=false"),
)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> list[float]:
    """The losses of two ranks on this machine, without Slurm."""
    return losses_here(data, tmp_path_factory.mktemp("undisturbed") / "run", 2, *LONG[:2])


def attempts(job: SlurmJob) -> list[dict]:
    return [json.loads(line) for line in (job.run_dir / "attempts.jsonl").read_text().splitlines()]


def resumed_step(job: SlurmJob) -> int:
    """Return the step of the checkpoint that the last attempt resumed from."""
    return int(re.findall(r"resuming after step (\d+), from", job.log)[-1])


def wait_for_step(job: SlurmJob, step: int) -> None:
    job.wait_for(lambda: len(job.metrics) >= step, f"step {step}")


@pytest.mark.parametrize("kind", ["srun", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_a_job_asked_to_stop_checkpoints_requeues_and_resumes(submit, undisturbed, kind):
    job = submit(*LONG, f"cluster.launcher={kind}")
    wait_for_step(job, 25)
    job.signal("USR2")
    assert job.wait() == "COMPLETED", job.log
    assert job.facts["Restarts"] == "1"
    assert job.losses == undisturbed
    (stopped,) = attempts(job)
    assert (stopped["reason"], stopped["step"] > 24) == ("signal", True)
    # It checkpointed at that step, between two intervals: no step is repeated.
    assert f"stopped as asked after step {stopped['step']}" in job.log
    assert resumed_step(job) == stopped["step"]
    assert "attempt 2 on node[1-2]" in job.log


def test_a_preempted_job_checkpoints_and_resumes_after_the_urgent_one(submit, slurm, undisturbed):
    job = submit(*LONG)
    wait_for_step(job, 25)
    urgent = SlurmJob(
        slurm,
        slurm.on(
            "login",
            *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"),
            "--wrap=sleep 2",
            check=True,
        ).strip(),
        job.run_dir,
    )
    assert job.wait() == "COMPLETED", job.log
    assert urgent.facts["JobState"] == "COMPLETED"
    assert urgent.facts["EndTime"] <= job.facts["StartTime"]
    assert (job.facts["Restarts"], job.losses == undisturbed) == ("1", True)
    (stopped,) = attempts(job)
    assert stopped["reason"] == "signal"
    assert resumed_step(job) == stopped["step"]


@pytest.mark.parametrize(
    "node", ["node1", pytest.param("node2", marks=pytest.mark.nightly)]
)  # the batch script runs on the first
def test_a_node_that_dies_costs_only_the_steps_since_the_last_checkpoint(submit, slurm, undisturbed, node):
    job = submit(*LONG)
    wait_for_step(job, 45)
    slurm.kill_node(node)
    job.wait_for(lambda: job.facts["JobState"] == "PENDING" and job.facts["Restarts"] != "0", "requeue")
    slurm.start_slurmd(node)
    assert job.wait() == "COMPLETED", job.log
    assert int(job.facts["Restarts"]) >= 1
    assert len(attempts(job)) == int(job.facts["Restarts"])
    assert resumed_step(job) in range(20, 150, 20)
    assert job.losses == undisturbed


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param(signal.SIGKILL, "srun: error: node2: task 1: Killed", marks=pytest.mark.nightly),
        (signal.SIGSTOP, "rank 1 has exited or is suspended (host node2, process"),
    ],
)
def test_a_rank_that_is_killed_or_hangs_is_named_and_the_job_resumes(submit, slurm, undisturbed, how, message):
    job = submit(*LONG, "trainer.timeout_s=40")
    wait_for_step(job, 45)
    os.kill(slurm.rank_on("node2"), how)
    assert job.wait() == "COMPLETED", job.log
    assert (job.facts["Restarts"], job.losses == undisturbed) == ("1", True)
    assert message in job.log
    (failed,) = attempts(job)
    assert f"failed after step {failed['step']}" in job.log
    assert resumed_step(job) in range(20, 150, 20)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_killed_ranks_start_again_in_the_same_job_and_then_through_slurm(submit, slurm, undisturbed, launcher):
    job = submit(*LONG, "cluster.restarts=1", f"cluster.launcher={launcher}")
    for step in (45, 85):
        wait_for_step(job, step)
        os.kill(slurm.rank_on("node2"), signal.SIGKILL)
    assert job.wait() == "COMPLETED", job.log
    assert (job.facts["Restarts"], job.losses == undisturbed) == ("1", True)
    first, second = attempts(job)
    assert (first["again"], second["again"]) == ("in the job", "through Slurm")
    assert min(first["lost_s"], second["lost_s"]) > 0
    assert "restart 1 of 1 in this job" in job.log
    report = (Path(job.run_dir) / "report.md").read_text()
    assert "restarted in the job" in report


def test_a_run_resumes_on_another_number_of_nodes(submit, undisturbed):
    job = submit(*LONG, "cluster.ranks_per_node=2")
    wait_for_step(job, 25)
    job.signal("USR2")
    job.wait_for(lambda: job.facts["JobState"] == "PENDING", "requeue")
    job.cluster.on("login", "scancel", job.job_id, check=True)
    job.wait()
    job = submit(*LONG, nodes=1, run_dir=job.run_dir)
    assert job.wait() == "COMPLETED", job.log
    (stopped,) = attempts(job)
    assert stopped["reason"] == "signal"
    assert [line["step"] for line in job.metrics] == list(range(1, 151))
    assert 25 <= stopped["step"] < 150
    assert resumed_step(job) == stopped["step"]
    # Sums over four ranks or one are rounded in another order than sums over two.
    assert job.losses == pytest.approx(undisturbed, rel=1e-5)


def test_a_job_that_keeps_failing_in_the_same_way_is_not_requeued(submit, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase $2 in harness.recipes.*) exit 9 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = submit(
        *("trainer.steps=2", "cluster.ranks_per_node=1", "cluster.preflight.enabled=false"),
        *(f"cluster.python={python}", "cluster.max_same_failures=2"),
    )
    assert job.wait() == "FAILED", job.log
    assert job.facts["Restarts"] == "1"
    assert job.facts["ExitCode"] == "9:0"
    assert "2 identical failures at the same step" in job.log


@pytest.mark.parametrize("kind", ["srun", "torchrun"])
def test_a_run_that_refuses_its_settings_is_not_requeued(submit, kind):
    job = submit(
        *("trainer.steps=2", "cluster.ranks_per_node=1", "model.max_sequence_length=100"),
        *(f"cluster.launcher={kind}", "cluster.preflight.enabled=false"),
    )
    assert job.wait() == "FAILED", job.log
    assert job.facts["Restarts"] == "0"
    assert "ConfigError: the dataset's pack_size 256 exceeds" in job.log
