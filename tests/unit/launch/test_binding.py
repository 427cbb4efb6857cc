"""Ranks that torchrun starts are bound to cores near their GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launch.ranks import cores_of_rank, read_cores, read_gpu_nodes

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


def test_more_ranks_than_cores_share_all_of_them():
    assert cores_of_rank(2, 4, {0: [0, 1]}) == {0, 1}


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
