"""A model's real shape: the training loop against a bare one and traced, packed rows, and checkpoints."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.bench.figures import BenchReport, Figure
from harness.bench.gpu.environment import add_memory, fit, matrix_of, peak_of, shape_of
from harness.bench.sizes import Sizes
from harness.bench.step import LoopBench, bare_step, flops_of, wait_for, write_rows
from harness.bench.workspace import Workspace
from harness.formats import open_dataset
from harness.loader import LoaderState
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import on_rank_0
from harness.megatron.model.fusions import slow_parts
from harness.megatron.model.gpt import engine_layers
from harness.megatron.state.checkpoint import CheckpointWriter
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, ParallelConfig, plan_memory, sequence_cost
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch
from harness.train import Progress

_LEAST_OF_DENSE = 0.95
# Training may wait as long as one copy of a rank's own state takes.
_MOST_WAIT = 1.0
_VOCABULARY, _TINY_VOCABULARY = 128_256, 512
# Of models whose layers alone are looked at, or that are saved.
_FEW_TOKENS, _SAVED_TOKENS = 8192, 32_768
_TRACED = 2
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


def measure_step(sizes: Sizes, workspace: Workspace, shape: str) -> BenchReport:
    """Measure the loop beside a bare Megatron loop, alone, and under the profiler; every rank calls this."""
    report = BenchReport("gpu")
    with runtime.start(sizes.device) as job:
        parallel = ParallelConfig(distributed_optimizer=job.world_size > 1)
        vocabulary = _TINY_VOCABULARY if sizes.is_tiny else _VOCABULARY
        model, step = _build(shape, sizes, parallel, job, vocabulary, report)
        path = on_rank_0(lambda: write_rows(workspace, sizes.packs, sizes.pack_size, vocabulary))
        with LoopBench(sizes, model, step, job, path) as bench:
            peak, source = peak_of(job.device, matrix_of(sizes))
            bench.add_figures(report, peak_tflops=peak)
            traced = list(islice(bench.batches, _TRACED))
            trace = trace_steps(lambda: [step.train(batch) for batch in traced], job.device, workspace.folder)
        of = {"vocab_size": vocabulary, "dp_size": job.world_size, "max_tokens_per_rank": sizes.pack_size}
        add_memory(report, job.device, plan_memory(model, parallel, **of))
    report.notes.append(source)
    add_trace(report, *trace, _TRACED)
    return report


def _build(
    shape: str, sizes: Sizes, parallel: ParallelConfig, job: runtime.Runtime, vocabulary: int, report: BenchReport
) -> tuple[ModelConfig, MegatronStep]:
    whole, row, layout = shape_of(shape, sizes, job.device), sizes.pack_size, runtime.join(parallel, job.world_size)
    model = fit(whole, parallel, vocab_size=vocabulary, ranks=job.world_size, row=row, device=job.device)
    has_engine = engine_layers(model, parallel, job.device)
    report.notes.append(
        f"{model.num_layers} of {whole.num_layers} layers of {model.hidden_size}, vocabulary {vocabulary:,}, "
        f"{model.dtype}, rows of {row:,} tokens, {job.world_size} ranks, layers of "
        f"{'Transformer Engine' if has_engine else 'PyTorch'}"
    )
    report.notes += slow_parts(model, parallel, job.device, has_engine=has_engine)
    return model, MegatronStep(model, parallel, layout, device=job.device, vocab_size=vocabulary)


def measure_packed(sizes: Sizes, workspace: Workspace, shape: str) -> BenchReport:
    """Measure layers on a packed row of chats, and on dense sequences of as many tokens and as much attention."""
    report = BenchReport("gpu")
    with runtime.start(sizes.device) as job:
        parallel, vocabulary = ParallelConfig(), _TINY_VOCABULARY if sizes.is_tiny else _FEW_TOKENS
        model, step = _build(shape, sizes, parallel, job, vocabulary, report)
        reader = open_dataset(str(write_rows(workspace, sizes.packs, sizes.pack_size, vocabulary)))
        # Of chats, a pack as it is stored on average: neither few long ones nor many short ones.
        row = sorted((build_thd_batch(pack.sequences()) for pack in reader), key=_attended)[len(reader) // 2]
        tokens = len(row)
        count = max(1, round(tokens**2 / _attended(row)))
        length = tokens // count
        cost, (peak, peak_source) = sequence_cost(model), peak_of(job.device, matrix_of(sizes))

        def mfu(row: RowTensors, lengths: Any, number: int) -> float:
            seconds = bare_step(step, [row], row.tokens.shape[1], job.device, updates=False)
            return flops_of(cost, lengths) / seconds / 1e12 / peak

        dense, whole = (_dense(row, *of, job.device) for of in ((count, length), (1, tokens)))
        sides = {
            "MFU, packed chats": partial(mfu, to_device(row, job.device), np.diff(row.cu_seqlens)),
            "MFU, dense, the same tokens and attention": partial(mfu, dense, np.full(count, length)),
            "MFU, one dense sequence of the row": partial(mfu, whole, np.array([tokens])),
        }
        name = "MFU of packed chats over dense ones of the same tokens and attention"
        report.compare(name, sides, sizes.rounds, "", at_least=sizes.aim(_LEAST_OF_DENSE))
        title = "MFU of packed chats over one dense sequence"
        report.add_ratio(title, "MFU, packed chats", "MFU, one dense sequence of the row")
        of = {"vocab_size": vocabulary, "dp_size": 1, "max_tokens_per_rank": tokens}
        add_memory(report, job.device, plan_memory(model, parallel, **of))
    report.notes += [
        f"{row.num_sequences} chats of {tokens:,} tokens, against {count} dense sequences of {length:,}",
        peak_source,
        "forward and backward of one microbatch, without the optimizer",
    ]
    return report


def _attended(row: ThdBatch) -> int:
    return int((np.diff(row.cu_seqlens).astype(np.int64) ** 2).sum())


def _dense(row: ThdBatch, count: int, length: int, device: torch.device) -> RowTensors:
    """Return the row's first tokens as `count` sequences of one length, which no bounds divide."""

    def grid(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[: count * length].reshape(count, length))).to(device)

    positions = np.tile(np.arange(length, dtype=np.int64), count)
    fields = (row.tokens, row.labels, row.loss_mask, row.padding_mask, positions)
    tokens, labels, loss_mask, padding_mask, position_ids = map(grid, fields)
    return RowTensors(tokens, labels, loss_mask, padding_mask, position_ids, loss_mask.sum().to(torch.int), None)


class SavingRank:
    """Saves of one rank in the background, each with the seconds that training waits and that one copy takes."""

    def __init__(self, step: MegatronStep, folder: Path, job: Any) -> None:
        self._device = job.device
        # As many bytes as a rank has to save: its optimizer state, and an equal part of the weights.
        (part,) = getattr(step.optimizer, "chained_optimizers", [step.optimizer])
        mains = [main for group in part.optimizer.param_groups for main in group["params"]]
        states = [value for main in mains for value in part.optimizer.state[main].values() if value.dim()]
        weights = [weight.detach().view(-1) for chunk in step.chunks for weight in chunk.parameters()]
        parts = [weight[: weight.numel() // job.world_size] for weight in weights]
        self._owned = [*(main.detach() for main in mains), *states, *parts]
        self.owned_bytes = sum(tensor.nbytes for tensor in self._owned)
        self._writer = CheckpointWriter(folder, step, keep=1)
        self._number, self._began = 0, 0.0

    def begin(self) -> float:
        """Begin a save on all ranks at once; return the seconds that training waits for it."""
        self._number += 1
        torch.distributed.barrier()
        self._began = time.perf_counter()
        self._writer.start(Progress(self._number, LoaderState(0)))
        return time.perf_counter() - self._began

    def finish(self) -> float:
        """Wait until the checkpoint is complete; return the seconds since its save began."""
        self._writer.finish()
        return time.perf_counter() - self._began

    def copy(self) -> float:
        """Return the seconds of one copy of the rank's own state: to pinned memory from a GPU, else to new memory."""
        on_gpu, own = self._device.type == "cuda", self._owned
        room = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) if on_gpu else None for one in own]
        torch.distributed.barrier()
        wait_for(self._device)
        start = time.perf_counter()
        made = [
            tensor.clone() if target is None else target.copy_(tensor, non_blocking=True)
            for target, tensor in zip(room, own, strict=True)
        ]
        wait_for(self._device)
        spent = time.perf_counter() - start
        del made
        return spent


def measure_checkpoint(sizes: Sizes, workspace: Workspace, word: str) -> BenchReport:
    """Save half of a model of the shape `1b` while it trains; every rank of the job calls this."""
    report = BenchReport("gpu")
    with runtime.start(sizes.device) as job:
        parallel = ParallelConfig(distributed_optimizer=job.world_size > 1)
        layout = runtime.join(parallel, job.world_size)
        vocabulary = _TINY_VOCABULARY if sizes.is_tiny else _SAVED_TOKENS
        # Half of the layers: two checkpoints, the one before and the one being written, fit on a small disk.
        model = shape_of("1b", sizes, job.device, share=0.5)
        step = MegatronStep(model, parallel, layout, device=job.device, vocab_size=vocabulary)
        ids = np.arange(sizes.pack_size + 1, dtype=np.int32) % vocabulary
        row = build_thd_batch([SequenceView(ids, np.r_[np.ones(sizes.pack_size, np.uint8), [0]])])
        rows = [to_device(row, job.device)] * sizes.global_batch

        def train() -> float:
            return 1e3 * bare_step(step, rows, sizes.pack_size, job.device)

        before = [train() for _ in range(sizes.steps + 1)][1:]
        folder = workspace.folder / "checkpoints"
        rank = SavingRank(step, folder, job)
        blocked, copies, during, whole = [], [], [], []
        for number in range(3):  # the first also decides who writes what, and pins memory
            blocked.append(1e3 * rank.begin())
            during += [train() for _ in range(2)] if number else []
            whole.append(rank.finish())
            copies.append(1e3 * rank.copy())
    shutil.rmtree(folder, ignore_errors=True)
    report.add(Figure("a rank's own state", rank.owned_bytes / 1e9, "GB"))
    report.add_samples("a step", before, "ms")
    report.add(Figure("training waits for the first checkpoint", blocked[0], "ms"))
    waits = report.add_samples("training waits for a checkpoint", blocked[1:], "ms").name
    copy = report.add_samples("one copy of a rank's own state to pinned memory", copies[1:], "ms").name
    report.add_ratio("waiting over one copy", waits, copy, at_most=sizes.aim(_MOST_WAIT))
    report.add_samples("a step while one is written", during, "ms")
    report.add_ratio("steps while one is written over others", "a step while one is written", "a step")
    report.add(Figure("a checkpoint is complete after", statistics.median(whole[1:]), "s"))
    return report


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
