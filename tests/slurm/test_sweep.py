"""Hydra's `--multirun` with the submitit launcher: one Slurm job per combination of settings."""

from __future__ import annotations

import re
import sys

import pytest

from ..distributed.conftest import ROOT, read_metrics
from .conftest import SETTINGS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def test_a_sweep_of_two_learning_rates_runs_two_jobs_of_two_ranks(slurm, data, tmp_path):
    slurm.wait_idle()
    command = [sys.executable, "-m", "harness.recipes.sft", "--multirun", "hydra/launcher=submitit_slurm"]
    launcher = ["tasks_per_node=2", "cpus_per_task=1", "timeout_min=5", "partition=batch"]
    slurm.on(
        "login",
        *("env", "OMP_NUM_THREADS=1", *command, *(f"hydra.launcher.{option}" for option in launcher)),
        *(f"hydra.sweep.dir={tmp_path}/sweep", f"data.path={data}", *SETTINGS),
        *("trainer.steps=3", "optimizer.lr=1e-3,4e-3"),
        check=True,
        cwd=ROOT,
    )
    runs = [tmp_path / "sweep" / str(number) / "run" for number in (0, 1)]
    first, second = (read_metrics(run) for run in runs)
    assert [line["step"] for line in first] == [line["step"] for line in second] == [1, 2, 3]
    assert first[0]["loss"] == second[0]["loss"]
    assert first[2]["loss"] != second[2]["loss"]
    assert re.search(r"\| ranks +\| 2 on cpu", (runs[0] / "report.md").read_text())
    assert sorted(path.name[-2:] for path in (tmp_path / "sweep" / ".submitit").glob("*_?")) == ["_0", "_1"]
