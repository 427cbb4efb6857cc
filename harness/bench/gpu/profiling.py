"""Kernel time by kind, idle time, waits and hidden copies, from the trace of torch.profiler."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.bench.figures import BenchReport, Figure
from harness.bench.step import wait_for

# The first pattern that a name has decides its kind; names are CUDA's kernels, and PyTorch's operations on a CPU.
_KINDS = (
    ("communication", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast_coalesced"),
    ("copies", r"memcpy|memset|::copy_|::_to_copy|catarray|::cat\b|::clone"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|attention|attn"),
    ("matrices", r"gemm|cutlass|nvjet|xmma|cublas|::(?:add)?mm|::bmm|::matmul|::linear|::dot\b|splitk"),
    ("optimizer", r"multi_tensor|adam|lerp|addcdiv|addcmul|_foreach"),
    ("norms", r"norm|rsqrt|::mean|::pow"),
    ("loss", r"softmax|cross_entropy|nll|log_?sum|::exp\b|::max\b|::gather"),
    ("embedding", r"embedding|index_select|index_put|indexing_backward|::index"),
    ("elementwise", r"elementwise|triton|fused|::(?:mul|add|sub|div|silu|sigmoid|neg|fill_|zero_|sum)|reduce_kernel"),
)
_WAITS = re.compile(r"cuda(?:Stream|Device|Event)Synchronize|cudaMemcpy$")


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), "other")


def trace_steps(
    run: Callable[[], Any], device: torch.device, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run something under torch.profiler; return the events of its trace, and the time of each operation on the host.

    Times are in microseconds; an operation's is without that of the operations inside it.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        wait_for(device)
    path = folder / f"trace-{torch.distributed.get_rank()}.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    path.unlink()
    times = {one.key: one.self_cpu_time_total for one in profile.key_averages()}
    return [event for event in events if event.get("ph") == "X" and "dur" in event], times


def add_trace(
    report: BenchReport, events: Sequence[Mapping[str, Any]], on_host: Mapping[str, float], steps: int
) -> None:
    """Add shares of time by kind; of a GPU also its idle time, the host's waits, and copies that kernels hide."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_gpu = bool(kernels)
    times = defaultdict(float, {} if on_gpu else on_host)
    for kernel in kernels:
        times[kernel["name"]] += kernel["dur"]
    total = sum(times.values())
    shares: dict[str, float] = defaultdict(float)
    for name, spent in times.items():
        shares[kind_of(name)] += spent / total
    for kind, share in sorted(shares.items(), key=lambda item: -item[1]):
        report.add(Figure(f"time in {kind}", share, "share"))
    largest = sorted(times.items(), key=lambda item: -item[1])[:8]
    report.notes += [f"{spent / total:.1%} {kind_of(name)}: {name[:100]}" for name, spent in largest]
    if not on_gpu:
        report.notes.append("times are for PyTorch operations on a CPU, which does not wait for a device")
        return
    took = max(event["ts"] + event["dur"] for event in kernels) - min(event["ts"] for event in kernels)
    report.add(Figure("kernels and copies of a step", len(kernels) / steps, "launches"))
    report.add(Figure("device idle", 1 - busy_time(kernels) / took, "share"))
    waits = [event for event in events if event.get("cat") == "cuda_runtime" and _WAITS.match(event["name"])]
    report.add(Figure("waits of the host for the device, a step", len(waits) / steps, "calls"))
    copies = [event for event in kernels if event["cat"] == "gpu_memcpy" and "HtoD" in event["name"]]
    pageable = sum("Pageable" in event["name"] for event in copies)
    report.add(Figure("copies to the device, a step", len(copies) / steps, "copies"))
    report.add(Figure("of them from memory that is not pinned", pageable / steps, "copies"))
    computing = [event for event in kernels if event["cat"] == "kernel"]
    if copies:
        report.add(Figure("time of copies to the device under kernels", hidden_share(copies, computing), "share"))


def hidden_share(copies: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the copies' time in which a kernel runs too."""
    both = busy_time(copies) + busy_time(kernels) - busy_time([*copies, *kernels])
    return both / max(busy_time(copies), 1e-9)


def busy_time(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the time in which at least one of the events runs."""
    total, until = 0.0, -math.inf
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
