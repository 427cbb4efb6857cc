"""Jobs on a Slurm cluster: the batch script, its submission, and what every node is asked before the first step."""

from __future__ import annotations

from harness.launch.cluster import SubmitConfig
from harness.launch.preflight.judge import Limits, judge_nodes
from harness.launch.preflight.probe import node_checks, place_in_slurm, run_checks
from harness.launch.ranks import become_rank_of_slurm
from harness.launch.script import render
from harness.launch.submit import plan_job, recipe_settings, split_overrides, submit_job

__all__ = [
    "Limits",
    "SubmitConfig",
    "become_rank_of_slurm",
    "judge_nodes",
    "node_checks",
    "place_in_slurm",
    "plan_job",
    "recipe_settings",
    "render",
    "run_checks",
    "split_overrides",
    "submit_job",
]
