"""The node and the rank of a process, from the variables of its Slurm step, and its cores near its GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launch.ranks import (
    NodePlace,
    become_rank_of_slurm,
    cores_of_rank,
    place_in_slurm,
    read_cores,
    read_gpu_nodes,
)

STEP = {"SLURM_JOB_ID": "424242", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NNODES": "2"}
STEP |= {"SLURM_NODEID": "1", "SLURMD_NODENAME": "gpu08", "SLURM_NTASKS": "16", "SLURM_PROCID": "9"}
STEP |= {"SLURM_LOCALID": "1"}
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
    step()
    assert place_in_slurm() == NodePlace(node="gpu08", number=1, num_nodes=2, attempt="424242.2")


@pytest.mark.parametrize("changed", [{"RANK": "3"}, {"SLURM_NTASKS": "1"}, {"SLURM_PROCID": None}])
def test_a_rank_of_a_launcher_and_a_single_task_are_left_alone(step, changed):
    step(**changed)
    become_rank_of_slurm()
    assert os.environ.get("RANK") == changed.get("RANK")
    assert "MASTER_ADDR" not in os.environ


# Two processors of four cores with two threads each, as the kernel numbers them.
CORES = {0: [0, 8, 1, 9, 2, 10, 3, 11], 1: [4, 12, 5, 13, 6, 14, 7, 15]}


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """The files of such a machine, with two GPUs of which the first is at the second processor."""
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for core in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    for bus, node in (("0000:1b:00.0", 1), ("0000:8b:00.0", 0)):
        folder = tmp_path / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_cores_are_read_by_numa_node_with_their_threads_side_by_side(system):
    assert read_cores(range(16), system) == CORES
    assert read_cores({0, 2, 8, 4}, system) == {0: [0, 8, 2], 1: [4]}
    assert read_cores({5, 3}, system / "none") == {0: [3, 5]}
    assert cores_of_rank(2, 4, {0: [0, 1]}) == {0, 1}


@pytest.mark.parametrize(
    ("num_ranks", "gpu_nodes", "expected"),
    [
        (2, [1, 0], [{4, 12, 5, 13, 6, 14, 7, 15}, {0, 8, 1, 9, 2, 10, 3, 11}]),
        (4, [0, 0, 1, 1], [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]),
        (4, [], [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]),
        (3, [0, 0, 0], [{0, 8}, {1, 9}, {2, 10}]),
        (2, [3, 3], [{0, 8, 1, 9, 2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}]),  # a node without allowed cores
    ],
)
def test_ranks_share_the_cores_of_the_numa_node_of_their_gpus(num_ranks, gpu_nodes, expected):
    assert [cores_of_rank(rank, num_ranks, CORES, gpu_nodes) for rank in range(num_ranks)] == expected


def test_the_numa_node_of_each_gpu_is_found_by_its_bus(system, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 00000000:1B:00.0\necho 00000000:8B:00.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    assert read_gpu_nodes(system) == [1, 0]
    (system / "bus/pci/devices/0000:8b:00.0/numa_node").write_text("-1\n")  # a machine without NUMA
    assert read_gpu_nodes(system) == []


def test_a_rank_of_torchrun_binds_itself_and_its_threads():
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    program = (
        "import os; from harness.launch.ranks import bind_rank; bind_rank(); print(*sorted(os.sched_getaffinity(0)))"
    )
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(len(allowed))}
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **place, **more},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for more in ({"HARNESS_BIND_RANKS": "1"}, {"HARNESS_BIND_RANKS": ""})
    ]
    assert (len(found[0]), len(found[1])) == (1, len(allowed))
