"""Submit jobs to a Slurm cluster, and check their nodes before the first step.

`render` turns a `Job` and the settings of a cluster into a batch script, `plan_job` and `submit_job` go from an
experiment's name to a job in the queue, `jobs_of_run` finds the jobs of a run there, and `harness.launch.preflight` has
the checks that the script runs on every node. Read `script` first: the texts in it are what a job does.
"""

from __future__ import annotations

from harness.launch.binding import bind_rank
from harness.launch.cluster import ClusterConfig, PreflightConfig, SubmitConfig
from harness.launch.detect import detect_cluster
from harness.launch.local import STORE_FD, start_ranks
from harness.launch.queue import QueuedJob, cancel_jobs, explain_reason, jobs_of_run, read_excluded
from harness.launch.ranks import become_rank_of_slurm, place_in_slurm
from harness.launch.script import Job, render
from harness.launch.submit import check_arguments, plan_job, refuse_second_job, submit_job

__all__ = [
    "STORE_FD",
    "ClusterConfig",
    "Job",
    "PreflightConfig",
    "QueuedJob",
    "SubmitConfig",
    "become_rank_of_slurm",
    "bind_rank",
    "cancel_jobs",
    "check_arguments",
    "detect_cluster",
    "explain_reason",
    "jobs_of_run",
    "place_in_slurm",
    "plan_job",
    "read_excluded",
    "refuse_second_job",
    "render",
    "start_ranks",
    "submit_job",
]
