"""Find the jobs of a run in Slurm's queue, explain why one is pending, and cancel them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError

# Fields of `squeue --format`; a path may contain any character, so it is the last one.
_FORMAT = "%A|%T|%M|%l|%D|%S|%R|%o"
# Explanations of why a job is pending, with a remedy where there is one, by the beginning of squeue's reason. Other
# reasons are printed unchanged.
_REASONS = {
    "Resources": "it is next in line and waits for nodes in use",
    "Priority": "jobs with higher priority are ahead of it; `sprio -j {job}` shows its priority factors",
    "DependencyNeverSatisfied": "its dependency can no longer be satisfied: cancel it and submit the run again",
    "Dependency": "it waits for another job to end",
    "BeginTime": "its begin time is in the future, as for some minutes after a requeue",
    "JobHeldAdmin": "it is held by an administrator, who must release it",
    "JobH": "it is held: `scontrol release {job}` lets it start",
    "launch failed": "a node failed to start it (see its slurmd.log): `scontrol release {job}` retries",
    "ReqNodeNotAvail": "requested nodes are down, drained or reserved: check cluster.exclude and `sinfo -R`",
    "PartitionNodeLimit": "it requests more nodes than the partition allows: reduce nodes=",
    "PartitionTimeLimit": "its time limit exceeds that of the partition: reduce cluster.time",
    "Partition": "the partition does not start it: compare with `scontrol show partition`, or set cluster.partition",
    "Reservation": "its reservation has not started, or no longer exists (cluster.reservation)",
    "BadConstraints": "no node satisfies the request: check cluster.constraint, cluster.gpus_per_node, "
    "cluster.cpus_per_rank and cluster.memory",
    "AccountNotAllowed": "the partition does not accept this account: set cluster.account",
    "InvalidAccount": "the account does not exist, or is not yours: set cluster.account",
    "QOSNotAllowed": "the account or the partition does not allow this QOS: set cluster.qos",
    "InvalidQOS": "the QOS does not exist, or is not yours: set cluster.qos",
    "QOS": "a limit of its QOS is reached: it starts when that allows it, and never if the limit is of each job",
    "Assoc": "a limit of its account is reached: it starts when that allows it, and never if the limit is of each job",
}
# Nodes that the jobs of a run exclude: a name, a space and the reason per line. Remove a line to allow its node again.
EXCLUDED_FILE = "excluded_nodes"


@dataclass(frozen=True)
class QueuedJob:
    """A job in Slurm's queue.

    Attributes:
        elapsed, time_limit: durations as squeue prints them, such as `1:23` and `4:00:00`.
        starts: time at which it started or is expected to start; `N/A` if unknown.
        where: names of its nodes, or the explanation of why it is pending.
    """

    job_id: str
    state: str
    elapsed: str
    time_limit: str
    num_nodes: int
    starts: str
    where: str
    command: str

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"

    def __str__(self) -> str:
        if self.is_pending:
            expected = f", expected to start at {self.starts}" if self.starts != "N/A" else ""
            return f"job {self.job_id} is pending: {self.where}{expected}"
        return f"job {self.job_id} is {self.state.lower()} on {self.where}, {self.elapsed} of {self.time_limit}"


def explain_reason(reason: str, job_id: str) -> str:
    """Return an explanation of why a job is pending, with squeue's reason in parentheses."""
    code = reason.strip("()")
    words = next((words for name, words in _REASONS.items() if code.startswith(name)), None)
    return code if words is None else f"{words.format(job=job_id)} ({code})"


def jobs_of_run(run_dir: Path) -> list[QueuedJob]:
    """Return the pending and running jobs of a run: jobs of its script, and the job that has claimed the run.

    Raises HarnessError if squeue is not installed here, or the controller does not answer.
    """
    script = (run_dir / "job.sbatch").resolve()
    jobs = [job for job in _squeue("--me") if Path(job.command).resolve() == script]
    owner = ""
    with suppress(OSError):
        owner = (run_dir / "_job").read_text(errors="replace").strip()
    if owner.isdecimal() and owner not in {job.job_id for job in jobs}:
        jobs += _squeue(f"--jobs={owner}")
    return jobs


def cancel_jobs(jobs: Sequence[QueuedJob]) -> None:
    """Cancel all jobs, pending ones first, so that none of them starts; raise HarnessError if Slurm refuses one."""
    refused = []
    for job in sorted(jobs, key=lambda job: not job.is_pending):
        try:
            ask_slurm("scancel", job.job_id)
        except HarnessError as error:
            if "Invalid job id" not in error.what:  # it has already ended
                refused.append(error)
    if refused:
        raise refused[0]


def read_excluded(run_dir: Path) -> dict[str, str]:
    """Return the failed nodes that the jobs of a run exclude, each with the last reason."""
    with suppress(OSError):
        lines = (run_dir / EXCLUDED_FILE).read_text(errors="replace").splitlines()
        return {node: reason for node, _, reason in (line.partition(" ") for line in lines) if node}
    return {}


def ask_slurm(*command: str) -> str:
    """Return the output of a Slurm command; raise HarnessError if it is not installed here, or fails."""
    if shutil.which(command[0]) is None:
        raise HarnessError(f"{command[0]} is not installed here", where="PATH", fix="run the command on a login node")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        what = f"{command[0]} failed: {(done.stderr or done.stdout).strip()}"
        raise HarnessError(what, where=" ".join(command), fix="try again once the controller answers (`scontrol ping`)")
    return done.stdout


def output_of(*command: str) -> tuple[str, int | None]:
    """Return the output of a command, or its errors, and its exit code; "" and None if it is not installed."""
    if shutil.which(command[0]) is None:
        return "", None
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout or done.stderr * bool(done.returncode), done.returncode


def _squeue(*options: str) -> list[QueuedJob]:
    try:
        printed = ask_slurm("squeue", "--noheader", "--noconvert", f"--format={_FORMAT}", *options)
    except HarnessError as error:
        if "Invalid job id" in error.what:
            return []
        raise
    jobs = []
    for line in printed.splitlines():
        if line.count("|") >= _FORMAT.count("|"):
            job_id, state, elapsed, limit, nodes, starts, where, command = line.split("|", 7)
            where = explain_reason(where, job_id) if state == "PENDING" else where
            num_nodes = int(nodes) if nodes.isdecimal() else 0
            jobs.append(QueuedJob(job_id, state, elapsed, limit, num_nodes, starts, where, command))
    return jobs
