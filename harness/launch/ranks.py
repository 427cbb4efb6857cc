"""Determine the node and rank of this process in a job, and bind it to cores near its GPU, as srun does for tasks."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.launch.queue import ask_slurm, output_of

# As in the batch script: below the ports that the kernel assigns to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_SYSTEM = Path("/sys")


@dataclass(frozen=True)
class NodePlace:
    """A node of a job, numbered from 0; `attempt` identifies one start of the job."""

    node: str
    number: int
    num_nodes: int
    attempt: str


def place_in_slurm() -> NodePlace:
    """Return the place of this process's node in the job, from the variables of its Slurm step."""
    env = os.environ
    return NodePlace(
        node=env.get("SLURMD_NODENAME", platform.node()),
        number=int(env.get("SLURM_NODEID", "0")),
        num_nodes=int(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1"))),
        attempt=f"{env.get('SLURM_JOB_ID', os.getpid())}.{env.get('SLURM_RESTART_COUNT', '0')}",
    )


def become_rank_of_slurm() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of a step with several tasks.

    Used in steps that were not started by a script of `harness submit`, such as sweeps of submitit. Does nothing if a
    launcher has set RANK, outside of Slurm, and in steps with one task.
    """
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or int(env.get("SLURM_NTASKS", "1")) == 1:
        return
    nodes = ask_slurm("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"])
    env.update(
        RANK=env["SLURM_PROCID"],
        WORLD_SIZE=env["SLURM_NTASKS"],
        LOCAL_RANK=env["SLURM_LOCALID"],
        MASTER_ADDR=nodes.split()[0],
        MASTER_PORT=str(_FIRST_PORT + int(env["SLURM_JOB_ID"]) % _NUM_PORTS),
    )


def bind_rank(system: Path = _SYSTEM) -> None:
    """Bind this process, and the processes that it starts, to its rank's share of the node's cores.

    The ranks whose GPUs are on the same NUMA node divide its cores. Without GPUs, or if their NUMA nodes are unknown,
    all ranks divide the cores of the node in NUMA order. Memory is allocated on the NUMA node that first writes it.
    Does nothing unless the batch script has set HARNESS_BIND_RANKS.
    """
    if not os.environ.get("HARNESS_BIND_RANKS"):
        return
    local_rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cores = read_cores(os.sched_getaffinity(0), system)
    os.sched_setaffinity(0, cores_of_rank(local_rank, num_ranks, cores, read_gpu_nodes(system)))


def cores_of_rank(
    local_rank: int, num_ranks: int, cores: Mapping[int, Sequence[int]], gpu_nodes: Sequence[int] = ()
) -> set[int]:
    """Return a rank's cores, given the `cores` of each NUMA node (sibling threads adjacent) and each GPU's node."""
    own, mates = [core for node in sorted(cores) for core in cores[node]], list(range(num_ranks))
    if len(gpu_nodes) >= num_ranks and all(cores.get(node) for node in gpu_nodes[:num_ranks]):
        node = gpu_nodes[local_rank]
        own, mates = list(cores[node]), [rank for rank in mates if gpu_nodes[rank] == node]
    share = len(own) // len(mates)
    first = mates.index(local_rank) * share
    # With fewer cores than ranks, all ranks share all cores.
    return set(own[first : first + share] if share else own)


def read_cores(allowed: Collection[int], system: Path = _SYSTEM) -> dict[int, list[int]]:
    """Return the allowed cores by NUMA node, sibling threads adjacent; all under node 0 if the nodes are unknown."""
    found: dict[int, list[int]] = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        with suppress(OSError):
            cores = [core for core in _read_list(folder / "cpulist") if core in allowed]
            found[int(folder.name.removeprefix("node"))] = sorted(cores, key=lambda core: (_first(core, system), core))
    return found if sum(map(len, found.values())) == len(allowed) else {0: sorted(allowed)}


def read_gpu_nodes(system: Path = _SYSTEM) -> list[int]:
    """Return the NUMA node of each GPU in the order of nvidia-smi; empty if one is unknown."""
    printed, code = output_of("nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader")
    try:
        files = [system / "bus/pci/devices" / f"{address_of(bus)}.{bus[-1]}" / "numa_node" for bus in printed.split()]
        nodes = [int(file.read_text()) for file in files] if code == 0 else []
    except (OSError, ValueError):
        return []
    return nodes if min(nodes, default=-1) >= 0 else []


def address_of(bus: str) -> str:
    """Return the address of a GPU in the kernel's form; nvidia-smi's form has a longer domain and a function."""
    return re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bus.lower()).partition(".")[0]


def _first(core: int, system: Path) -> int:
    """Return the first thread of the core that this thread belongs to."""
    try:
        return _read_list(system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")[0]
    except (OSError, IndexError):
        return core


def _read_list(path: Path) -> list[int]:
    """Read a list in the kernel's notation, such as `0-3,8-11`."""
    numbers: list[int] = []
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1) if first else ()
    return numbers
