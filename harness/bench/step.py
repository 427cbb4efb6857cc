"""`harness bench step`: the training loop beside Megatron-Core's bare step, on the same batches in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from harness.bench.figures import CPU, BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, make_packs
from harness.formats import open_dataset, open_writer
from harness.loader import Loader, LoaderConfig, RankBatch, RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.data.feed import Feed
from harness.megatron.job import runtime
from harness.megatron.step import MegatronStep
from harness.parity.isolation import run_rows
from harness.plan import ModelConfig, ParallelConfig, TrainerConfig, sequence_cost
from harness.schedule import ScheduleConfig, SequenceCost
from harness.train import StepRecord, StepResult
from harness.train.loop import Hooks, train

_VOCABULARY = 8192
# Processor time that the loop may take of a step of any model, and the feed of a microbatch.
_MOST_LOOP_MS, _MOST_FEED_MS = 1.0, 0.3
_MOST_WAIT, _MOST_WAIT_ON_GPU = 0.01, 0.005
_MOST_OVER_BARE_ON_GPU = 1.02


def bench_step(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure in one process: the loop and Megatron's bare step take turns on the same batches."""
    report = BenchReport("step")
    progress("writing the data")
    path = write_rows(workspace, sizes.packs, sizes.pack_size, _VOCABULARY)
    with runtime.start(sizes.device) as job:
        on_gpu = job.device.type == "cuda"
        model = small_model(sizes.layers, sizes.hidden, _VOCABULARY, dtype="bfloat16" if on_gpu else "float32")
        layout = runtime.join(ParallelConfig(), job.world_size)
        step = MegatronStep(model, ParallelConfig(), layout, device=job.device, vocab_size=_VOCABULARY)
        progress("the loop and the bare step, in turns; then each part alone")
        with LoopBench(sizes, model, step, job, path) as bench:
            bench.add_figures(report, peak_tflops=sizes.peak_tflops)
    name = torch.cuda.get_device_name(job.device) if on_gpu else "CPU"
    report.notes.append(f"device: {name}, model in {model.dtype}")
    return report


def small_model(layers: int, hidden: int, vocab_size: int, *, dtype: str = "float32") -> ModelConfig:
    """Return a dense model whose heads are 32 wide, and whose feed-forward is three times as wide as it is."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=hidden // 32,
        num_query_groups=hidden // 64,
        vocab_size=vocab_size,
        dtype=dtype,
    )


def give_state(step: MegatronStep) -> None:
    """Make a step without gradients: an optimizer that has made none has no state to save."""
    for chunk in step.chunks:
        chunk.zero_grad_buffer()
    step.optimizer.step()


def open_feed(
    path: Path,
    layout: RankLayout,
    device: torch.device,
    schedule: ScheduleConfig,
    *,
    global_batch: int,
    workers: int = 0,
    cost: SequenceCost | None = None,
) -> Feed:
    config = LoaderConfig(global_batch_size=global_batch, num_workers=workers)
    reader = open_dataset(str(path))
    return Feed(lambda: Loader(reader, config, schedule=schedule, layout=layout, cost=cost), device=device)


class LoopBench(ExitStack):
    """The training loop and a bare Megatron loop over the batches of one loader; every rank of a job makes one.

    Sizes are those of a step of each data-parallel rank; a quarter as many steps run before the measured ones.
    """

    def __init__(self, sizes: Sizes, model: ModelConfig, step: MegatronStep, job: Any, path: Path) -> None:
        super().__init__()
        self._sizes, self._step, self._job, self._cost = sizes, step, job, sequence_cost(model)
        self._warm_up = -(-sizes.steps // 4)
        schedule, (workers,) = ScheduleConfig(max_tokens_per_rank=sizes.max_tokens_per_rank), sizes.first("workers", 1)
        place, size = (path, step.layout, job.device, schedule), sizes.global_batch * job.world_size
        feed = open_feed(*place, global_batch=size, workers=workers, cost=self._cost)
        self.batches = iter(self.enter_context(feed))

    def add_figures(self, report: BenchReport, *, peak_tflops: float) -> None:
        """Measure both loops in turns, then the feed and ours alone, and add what they give; MFU only with a peak."""
        sizes, on_gpu = self._sizes, self._job.device.type == "cuda"
        loop, bare = self._in_turns()
        report.add_samples("our loop, a step", loop, "ms")
        report.add_samples("a bare Megatron loop, a step", bare, "ms")
        # Pairs share the same batch and the same seconds, so a busy machine moves both.
        ratios = [ours / theirs for ours, theirs in zip(loop, bare, strict=True)]
        most = sizes.aim(_MOST_OVER_BARE_ON_GPU) if on_gpu else None
        report.add_samples("our loop over a bare one, the same batch", ratios, "x", at_most=most)
        if not on_gpu:
            report.notes.append("steps are in milliseconds of processor time")
        batches, feed = self._feed_alone()
        report.add_samples("processor time of the feed, a microbatch", feed, "ms", at_most=sizes.aim(_MOST_FEED_MS))
        own = self._loop_alone(batches)
        report.add_samples("processor time of our loop, a step", own, "ms", at_most=sizes.aim(_MOST_LOOP_MS))
        alone: list[StepRecord] = []
        self._run_loop(self.batches, alone.append)
        del alone[: self._warm_up]
        spent = sum(record.step_s for record in alone)
        counts = [
            sum(record.batch.num_tokens for record in alone),
            sum(flops_of(self._cost, np.diff(row.cu_seqlens)) for record in alone for row in record.batch.rows),
            sum(record.data_wait_s for record in alone),
        ]
        of_ranks = torch.tensor(counts, dtype=torch.float64, device=self._job.device)
        torch.distributed.all_reduce(of_ranks)
        tokens, flops, waited = of_ranks.tolist()
        share, tflops = waited / spent / self._job.world_size, flops / spent / self._job.world_size / 1e12
        most = sizes.aim(_MOST_WAIT_ON_GPU if on_gpu else _MOST_WAIT)
        report.add(Figure("waiting for data, of a step", share, "share", at_most=most))
        report.add(Figure("tokens", tokens / spent, "tok/s"))
        report.add(Figure("model FLOPs of a rank", tflops, "TFLOP/s"))
        if peak_tflops:
            report.add(Figure("MFU", tflops / peak_tflops, ""))

    def _in_turns(self) -> tuple[list[float], list[float]]:
        """Return the milliseconds of measured steps of the loop, and of a bare step on the same batch next to it.

        They are of processor time on a CPU; on a GPU, whose waits are processor time too, on the clock.
        """
        loop: list[float] = []
        bare: list[float] = []
        device = self._job.device
        clock = time.perf_counter if device.type == "cuda" else CPU
        began = 0.0

        def step_bare(batch: RankBatch) -> None:
            rows = [to_device(row, device) for row in batch.rows]
            bare.append(1e3 * bare_step(self._step, rows, max(map(len, batch.rows)), device, clock=clock))

        def bare_before_every_other() -> Iterator[RankBatch]:
            nonlocal began
            for number, batch in enumerate(self.batches, start=1):
                if number % 2:
                    step_bare(batch)
                began = clock()
                yield batch

        def record(step_record: StepRecord) -> None:
            # The wait for data is measured separately: here it includes bare steps, while workers read ahead.
            loop.append(1e3 * (clock() - began))
            if not step_record.step % 2:
                step_bare(step_record.batch)

        self._run_loop(bare_before_every_other(), record)
        return loop[self._warm_up :], bare[self._warm_up :]

    def _feed_alone(self) -> tuple[list[RankBatch], list[float]]:
        """Return the batches of as many steps, and the milliseconds that each measured one took a microbatch."""
        batches: list[RankBatch] = []
        spent: list[float] = []
        for _ in range(self._warm_up + self._sizes.steps):
            began = CPU()
            batches.append(next(self.batches))
            spent.append(1e3 * (CPU() - began) / len(batches[-1].rows))
        return batches, spent[self._warm_up :]

    def _loop_alone(self, batches: list[RankBatch]) -> list[float]:
        """Return the milliseconds of measured steps in which nothing is read and nothing computed."""
        result = StepResult(loss=1.0, trained_tokens=1, grad_norm=1.0, learning_rate=0.0, skipped=False)
        ends = [CPU()]
        self._run_loop(iter(batches), lambda _: ends.append(CPU()), SimpleNamespace(train=lambda _: result))
        return [1e3 * (end - start) for start, end in pairwise(ends)][self._warm_up :]

    def _run_loop(self, batches: Iterator[RankBatch], record: Callable[[StepRecord], None], step: Any = None) -> None:
        config = TrainerConfig(steps=self._warm_up + self._sizes.steps, eval_interval=0, checkpoint_interval=0)

        class Recording(Hooks):
            def record(self, made: StepRecord) -> None:
                record(made)

        train(batches, step or self._step, config, Recording(), validation={})


def flops_of(cost: SequenceCost, lengths: Any) -> float:
    """Count the FLOPs of training on sequences of these lengths, without padding and recomputation.

    The backward pass costs twice the forward pass, whose cost is that of `harness.plan.model.sequence_cost`. MFU is
    this over seconds times the device's peak.
    """
    return 3.0 * float(cost.of(lengths).sum())


def bare_step(
    step: MegatronStep,
    rows: list[RowTensors],
    seq_length: int,
    device: torch.device,
    *,
    updates: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of a step as a Megatron training script makes it, on tensors that are ready."""
    wait_for(device)
    start = clock()
    for chunk in step.chunks:
        chunk.zero_grad_buffer()
    step.optimizer.zero_grad()
    reports = run_rows(step.chunks, rows, seq_length)
    if updates:
        step.optimizer.step()
        step.scheduler.step(increment=1)
    sum(float(losses["loss"]) for losses in reports)  # a script logs its loss, which waits for the device
    wait_for(device)
    return clock() - start


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_rows(workspace: Workspace, packs: int, pack_size: int, vocabulary: int) -> Path:
    """Return a dataset of that many packs of conversation-like lengths, whose tokens are below `vocabulary`."""
    path = workspace.folder / f"step-{packs}x{pack_size}-of-{vocabulary}"
    if not path.exists():
        with open_writer(path, format="parquet", pack_size=pack_size) as writer:
            for pack in make_packs(packs, pack_size):
                writer.append(replace(pack, input_ids=pack.input_ids % vocabulary))
    return path
