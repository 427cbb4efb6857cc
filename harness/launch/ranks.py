"""A task of a Slurm step as a rank, where no batch script of `harness submit` has said so: sweeps under submitit."""

from __future__ import annotations

import os
import subprocess

# As in the batch script: below the ports that the kernel gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 20000, 12000


def become_rank_of_slurm() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of a step of several tasks.

    Nothing is changed where a launcher has set RANK, or there is one task or no Slurm.
    """
    said = os.environ
    if "RANK" in said or int(said.get("SLURM_NTASKS", "1")) == 1 or "SLURM_PROCID" not in said:
        return
    nodes = subprocess.run(
        ["scontrol", "show", "hostnames", said["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    )
    os.environ.update(
        RANK=said["SLURM_PROCID"],
        WORLD_SIZE=said["SLURM_NTASKS"],
        LOCAL_RANK=said["SLURM_LOCALID"],
        MASTER_ADDR=nodes.stdout.split()[0],
        MASTER_PORT=str(_FIRST_PORT + int(said["SLURM_JOB_ID"]) % _NUM_PORTS),
    )
