"""Read from the variables of a Slurm step which node, and which rank, this process is."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass

# As in the batch script: below the ports that the kernel gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 20000, 12000


@dataclass(frozen=True)
class NodePlace:
    """One node of a job.

    Attributes:
        node: its name in Slurm's node lists.
        number: its number, 0 for the first node.
        num_nodes: number of nodes of the job.
        attempt: identifies one start of one job.
    """

    node: str
    number: int
    num_nodes: int
    attempt: str


def place_in_slurm() -> NodePlace:
    """Return the place of this process's node, from the variables of its step."""
    env = os.environ
    return NodePlace(
        node=env.get("SLURMD_NODENAME", platform.node()),
        number=int(env.get("SLURM_NODEID", "0")),
        num_nodes=int(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1"))),
        attempt=f"{env.get('SLURM_JOB_ID', os.getpid())}.{env.get('SLURM_RESTART_COUNT', '0')}",
    )


def become_rank_of_slurm() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of a step of several tasks.

    For steps that no script of `harness submit` started, such as the sweeps of submitit. Does nothing where a launcher
    has set RANK, outside of Slurm, and in a step of one task.
    """
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or int(env.get("SLURM_NTASKS", "1")) == 1:
        return
    nodes = subprocess.run(
        ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    )
    env.update(
        RANK=env["SLURM_PROCID"],
        WORLD_SIZE=env["SLURM_NTASKS"],
        LOCAL_RANK=env["SLURM_LOCALID"],
        MASTER_ADDR=nodes.stdout.split()[0],
        MASTER_PORT=str(_FIRST_PORT + int(env["SLURM_JOB_ID"]) % _NUM_PORTS),
    )
