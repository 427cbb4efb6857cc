"""The node and the rank of a process, from the variables of its Slurm step."""

from __future__ import annotations

import os

import pytest

from harness.launch.ranks import NodePlace, become_rank_of_slurm, place_in_slurm

STEP = {
    "SLURM_JOB_ID": "424242",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu08",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def step(monkeypatch, tmp_path):
    """step(**changed): set the variables of a step, with a `scontrol` that knows its nodes; None removes a variable."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[07-08]" ] && echo gpu07 && echo gpu08\n')
    scontrol.chmod(0o755)
    # Restored after the test, where the code under test sets them.
    for name in RANK:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def enter(**changed: str | None) -> None:
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        for name, value in {**STEP, **changed}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return enter


def test_a_task_of_a_step_takes_its_rank_and_meets_the_others_at_the_first_node(step):
    step()
    become_rank_of_slurm()
    assert [os.environ[name] for name in RANK] == ["9", "16", "1", "gpu07", str(20000 + 424242 % 12000)]


@pytest.mark.parametrize("changed", [{"RANK": "3"}, {"SLURM_NTASKS": "1"}, {"SLURM_PROCID": None}])
def test_a_rank_of_a_launcher_and_a_single_task_are_left_alone(step, changed):
    step(**changed)
    become_rank_of_slurm()
    assert os.environ.get("RANK") == changed.get("RANK")
    assert "MASTER_ADDR" not in os.environ


def test_a_node_knows_its_place_and_the_attempt(step):
    step()
    assert place_in_slurm() == NodePlace(node="gpu08", number=1, num_nodes=2, attempt="424242.2")
