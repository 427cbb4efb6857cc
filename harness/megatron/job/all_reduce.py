"""Whether the ranks of a job can add up a tensor: what the preflight asks before training starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from harness.errors import HarnessError
from harness.megatron.job.runtime import choose_device

# Large enough for the rate of the links to show, small beside a GPU's memory.
_GPU_BYTES, _CPU_BYTES = 256 << 20, 1 << 20


def _nccl_version() -> tuple[int, ...]:
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return version()


def check_all_reduce(*, timeout_s: float) -> dict[str, Any]:
    """Add up a tensor over all ranks of this process's job, by NCCL on GPUs and by gloo without.

    Returns:
        backend, ranks, the number of GPUs that this process sees, NCCL's version, seconds_s from the start to the
        first sum, and rate_s in GB/s over the ranks' links.

    Raises:
        HarnessError: no GPU for this rank, ranks that do not meet, or a wrong sum.
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
        found, expected = float(numbers[-1]), ranks * (ranks + 1) / 2
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
    if found != expected:
        raise HarnessError(f"{backend} gives {found:g} as the sum of {expected:g}", fix="a GPU or a link is broken")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    moved = 2 * (ranks - 1) / ranks * numbers.numel() * 4
    return {
        "backend": backend,
        "ranks": ranks,
        "visible GPUs": torch.cuda.device_count(),
        "nccl": ".".join(map(str, _nccl_version())) if is_gpu else "none",
        "seconds_s": first_s,
        "rate_s": moved / took_s / 1e9,
    }
