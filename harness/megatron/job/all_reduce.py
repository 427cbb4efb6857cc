"""Measure the links and processors of a job before training: the all-reduce and matrix product of the preflight."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from harness.errors import HarnessError
from harness.megatron.job.runtime import choose_device, gather

# Large enough to measure the rate of the links, small compared with a GPU's memory.
_GPU_BYTES, _CPU_BYTES = 256 << 20, 4 << 20
# Rows of the square matrices to multiply.
_GPU_ROWS, _CPU_ROWS = 8192, 512
_REPEATS = 3
# If the whole tensor would take longer than `_LONGEST_S`, measure with 1 / `_SMALLER` of it, so slow links get a rate.
_SMALLER, _LONGEST_S = 64, 2.0


def check_all_reduce(*, timeout_s: float) -> dict[str, Any]:
    """Sum a tensor over all ranks, over each node and over pairs of nodes, with NCCL on GPUs or gloo on CPUs.

    Rates are bus bandwidths in GB/s: 2 (n - 1) / n of the tensor's bytes per second for n ranks.

    Returns:
        backend, ranks, the number of visible GPUs, NCCL's version, seconds_s from the start until the first sum, and
        rate_s over all ranks; node_rates_s by node, for nodes with several ranks; pair_rates_s by `NODE NODE`, for
        every node and the next one, in jobs of three or more nodes; ranks_s, for every rank its node, the TFLOP/s of a
        matrix product, and the GB/s of copies within its memory and from the host's.

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
        few = numbers[: numbers.numel() // _SMALLER]
        torch.distributed.all_reduce(few)
        total, expected = float(few[-1]), ranks * (ranks + 1) / 2
        first_s = time.perf_counter() - began
        rate = _rate(numbers, list(range(ranks)))
        node_rates, pair_rates, own = _measure_nodes(numbers, device)
    except RuntimeError as error:
        what = f"{backend} all-reduce over {ranks} ranks failed: {str(error).splitlines()[0][:300]}"
        where = f"MASTER_ADDR {os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
        fix = "cluster.env.NCCL_DEBUG=INFO (TORCH_CPP_LOG_LEVEL=INFO for gloo) shows the link; NCCL_SOCKET_IFNAME, "
        fix += "GLOO_SOCKET_IFNAME and NCCL_IB_HCA select others"
        raise HarnessError(what, where=where, fix=fix) from None
    if total != expected:
        fix = "replace the broken GPU or link: sums of the same numbers must agree"
        what = f"{backend} returned a sum of {total:g}, expected {expected:g}"
        raise HarnessError(what, where=socket.gethostname(), fix=fix)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    nccl: Any = torch.cuda.nccl if is_gpu else None  # untyped
    return {
        "backend": backend,
        "ranks": ranks,
        "visible GPUs": torch.cuda.device_count(),
        "nccl": ".".join(map(str, nccl.version())) if is_gpu else "none",
        "seconds_s": first_s,
        "rate_s": rate,
        "node_rates_s": node_rates,
        "pair_rates_s": pair_rates,
        "ranks_s": own,
    }


def _measure_nodes(
    numbers: torch.Tensor, device: torch.device
) -> tuple[dict[str, float], dict[str, float], list[dict[str, Any]]]:
    """Return the rates within each node, between pairs of nodes, and the measurements of every rank, on every rank."""
    rank = torch.distributed.get_rank()
    own = {"node": os.environ.get("SLURMD_NODENAME", socket.gethostname()), **_measure_processor(device)}
    gathered = gather(own)
    by_node: dict[str, list[int]] = {}
    for number, entry in enumerate(gathered):
        by_node.setdefault(entry["node"], []).append(number)
    nodes = list(by_node)
    rounds = [{node: members for node, members in by_node.items() if len(members) > 1}]
    # Each node is paired with two others: a node with a low rate in both pairs is the slow one.
    ring = [(node, nodes[(number + 1) % len(nodes)]) for number, node in enumerate(nodes)] if len(nodes) > 2 else []
    # Pairs of one round share no node; with an odd number of pairs, the last one gets its own round.
    even = len(ring) - len(ring) % 2
    parts = filter(None, (ring[:even:2], ring[1:even:2], ring[even:]))
    rounds += [{f"{one} {other}": by_node[one] + by_node[other] for one, other in part} for part in parts]
    measured: dict[str, float] = {}
    for groups in rounds:
        handles = {name: torch.distributed.new_group(members) for name, members in groups.items()}
        torch.distributed.barrier()
        for name, members in groups.items():
            if rank in members:
                measured[name] = _rate(numbers, members, handles[name])
    rates: dict[str, float] = {}
    for of_rank in gather(measured):
        for name, rate in of_rank.items():
            rates[name] = min(rate, rates.get(name, rate))
    within = {name: rate for name, rate in rates.items() if name in rounds[0]}
    return within, {name: rate for name, rate in rates.items() if name not in within}, gathered


def _rate(numbers: torch.Tensor, members: Sequence[int], group: Any = None) -> float:
    """Return the rate of the fastest of several all-reduces over a group, or 0 for a group of one rank."""
    if len(members) < 2:
        return 0.0
    few = numbers[: numbers.numel() // _SMALLER]
    torch.distributed.all_reduce(few, group=group)  # opens the connections
    few_s = min(_seconds(lambda: torch.distributed.all_reduce(few, group=group)) for _ in range(_REPEATS))
    slowest = torch.tensor([few_s], device=numbers.device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX, group=group)
    moved, took = few.numel() * 4, float(slowest)
    if took * _SMALLER < _LONGEST_S:
        moved = numbers.numel() * 4
        took = min(_seconds(lambda: torch.distributed.all_reduce(numbers, group=group)) for _ in range(_REPEATS))
    return 2 * (len(members) - 1) / len(members) * moved / took / 1e9


def _measure_processor(device: torch.device) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    rows = _GPU_ROWS if is_gpu else _CPU_ROWS
    left = torch.ones(rows, rows, device=device, dtype=torch.bfloat16 if is_gpu else torch.float32)
    measured = {"gemm_tflops": 2 * rows**3 / _median_seconds(lambda: left @ left) / 1e12}
    source = torch.ones((_GPU_BYTES if is_gpu else _CPU_BYTES) // 4, device=device)
    target = torch.empty_like(source)
    # Twice the bytes, because a copy reads and writes them.
    measured["copy_gb_s"] = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source)) / 1e9
    if is_gpu:
        host = torch.ones(source.numel(), pin_memory=True)
        measured["from_host_gb_s"] = host.nbytes / _median_seconds(lambda: target.copy_(host)) / 1e9
    return measured


def _median_seconds(work: Any) -> float:
    _seconds(work)
    return statistics.median(_seconds(work) for _ in range(_REPEATS))


def _seconds(work: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return max(time.perf_counter() - began, 1e-9)
