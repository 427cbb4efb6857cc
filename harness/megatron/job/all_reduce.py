"""Add up a tensor over the ranks of a job: the preflight's check of the links before training starts."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from harness.errors import HarnessError
from harness.megatron.job.runtime import choose_device

# Large enough to measure the rate of the links, small compared with a GPU's memory.
_GPU_BYTES, _CPU_BYTES = 256 << 20, 1 << 20


def check_all_reduce(*, timeout_s: float) -> dict[str, Any]:
    """Add up a tensor over all ranks of the job, by NCCL on GPUs and by gloo on CPUs.

    Returns:
        backend, ranks, the number of visible GPUs, NCCL's version, seconds_s from the start to the first sum, and
        rate_s in GB/s over the ranks' links.

    Raises:
        HarnessError: this rank has no GPU, ranks are missing, or the sum is wrong.
    """
    began = time.perf_counter()
    device = choose_device("auto")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if is_gpu else "gloo"
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        numbers = torch.full(((_GPU_BYTES if is_gpu else _CPU_BYTES) // 4,), float(rank + 1), device=device)
        torch.distributed.all_reduce(numbers)
        total, expected = float(numbers[-1]), ranks * (ranks + 1) / 2
        first_s = time.perf_counter() - began
        again = time.perf_counter()
        torch.distributed.all_reduce(numbers)
        if is_gpu:
            torch.cuda.synchronize()
        took_s = time.perf_counter() - again
    except RuntimeError as error:
        raise HarnessError(
            f"{backend} cannot add up over {ranks} ranks: {str(error).splitlines()[0][:300]}",
            where=f"MASTER_ADDR {os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}",
            fix="cluster.env.NCCL_DEBUG=INFO (TORCH_CPP_LOG_LEVEL=INFO for gloo) shows which link; NCCL_SOCKET_IFNAME, "
            "GLOO_SOCKET_IFNAME and NCCL_IB_HCA name the right ones",
        ) from None
    if total != expected:
        fix = "replace the broken GPU or link: sums of the same numbers must agree"
        raise HarnessError(
            f"{backend} returned a sum of {total:g}, expected {expected:g}", where=socket.gethostname(), fix=fix
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    nccl: Any = torch.cuda.nccl if is_gpu else None  # untyped
    moved = 2 * (ranks - 1) / ranks * numbers.numel() * 4
    return {
        "backend": backend,
        "ranks": ranks,
        "visible GPUs": torch.cuda.device_count(),
        "nccl": ".".join(map(str, nccl.version())) if is_gpu else "none",
        "seconds_s": first_s,
        "rate_s": moved / took_s / 1e9,
    }
