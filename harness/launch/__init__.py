"""Submit jobs to a Slurm cluster, and check their nodes before the first step.

`render` turns a `Job` and the settings of a cluster into a batch script, `plan_job` and `submit_job` go from an
experiment's name to a job in the queue, and `harness.launch.preflight` has the checks that the script runs on every
node. Read `script` first: the texts in it are what a job does.
"""

from __future__ import annotations

from harness.launch.cluster import ClusterConfig, SubmitConfig
from harness.launch.ranks import become_rank_of_slurm, place_in_slurm
from harness.launch.script import Job, render
from harness.launch.submit import check_arguments, plan_job, submit_job

__all__ = [
    "ClusterConfig",
    "Job",
    "SubmitConfig",
    "become_rank_of_slurm",
    "check_arguments",
    "place_in_slurm",
    "plan_job",
    "render",
    "submit_job",
]
