"""The training loop against a bare Megatron loop on a model's real shape, and packed rows against dense sequences."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from itertools import islice
from typing import Any

import numpy as np
import torch

from harness.bench.figures import BenchReport, Figure, take_turns
from harness.bench.gpu.environment import add_memory, peak_of
from harness.bench.gpu.profiling import add_trace, trace_steps
from harness.bench.gpu.sizes import Place, Sizes, fit, shape_of
from harness.bench.step import StepSettings, bare_step, in_turns, run_loop, step_flops, write_rows
from harness.bench.workspace import Workspace
from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.megatron import MegatronStep, RowTensors, to_device
from harness.megatron.data import Feed
from harness.megatron.job import join, on_rank_0, runtime
from harness.megatron.model import engine_layers, slow_parts
from harness.plan import ModelConfig, ParallelConfig, plan_memory, sequence_cost
from harness.schedule import ScheduleConfig
from harness.thd import ThdBatch, build_thd_batch
from harness.train import StepRecord

MOST_OVERHEAD = 1.02
MOST_WAIT = 0.005
LEAST_OF_DENSE = 0.95
_VOCABULARIES = {"1b": 128_256, "8b": 128_256}
_TINY_VOCABULARY = 512
# Of a model whose layers alone are looked at.
_SMALL_VOCABULARY = 8192
_TRACED = 2


def measure_step(place: Place, shape: str) -> BenchReport:
    """Measure the loop beside a bare Megatron loop, alone, and under the profiler; every rank calls this."""
    report, sizes = BenchReport("gpu", {}), place.sizes
    with ExitStack() as stack:
        job = stack.enter_context(runtime.start(place.device))
        parallel = ParallelConfig(distributed_optimizer=job.world_size > 1)
        layout = join(parallel, job.world_size)
        vocabulary = _TINY_VOCABULARY if sizes.is_tiny else _VOCABULARIES[shape]
        model, step = _build(shape, sizes, parallel, layout, job, vocabulary, report)
        turns = StepSettings(steps=sizes.steps, warm_up=sizes.warm_up)

        def write() -> str:
            with Workspace(place.folder, keep=True) as workspace:
                return str(write_rows(workspace, sizes.packs, sizes.row, vocabulary))

        path = on_rank_0(write)

        def make() -> Loader:
            return Loader(
                open_dataset(path),
                LoaderConfig(global_batch_size=sizes.rows * job.world_size, num_workers=sizes.workers),
                schedule=ScheduleConfig(max_tokens_per_rank=sizes.row),
                layout=layout,
                cost=sequence_cost(model),
            )

        batches = iter(stack.enter_context(Feed(make, layout, device=job.device)))
        loop, bare = in_turns(batches, step, turns, job.device)
        alone: list[StepRecord] = []
        run_loop(batches, step, turns, alone.append)
        del alone[: sizes.warm_up]
        traced = list(islice(batches, _TRACED))
        events = trace_steps(lambda: [step.train(batch) for batch in traced], job.device, place.folder)

        cost = sequence_cost(model)
        spent = sum(record.step_s for record in alone)
        done = torch.tensor(
            [
                sum(record.batch.num_tokens for record in alone),
                sum(step_flops(cost, record.batch) for record in alone),
                sum(record.data_wait_s for record in alone),
            ],
            dtype=torch.float64,
            device=job.device,
        )
        torch.distributed.all_reduce(done)
        tokens, flops, waited = done.tolist()
        planned = plan_memory(
            model, parallel, vocab_size=vocabulary, dp_size=job.world_size, max_tokens_per_rank=sizes.row
        )
        add_memory(report, job.device, planned.total)
        peak, source = peak_of(job.device, sizes.matrix)

    report.add_samples("our loop, a step", [1e3 * seconds for seconds in loop], "ms")
    report.add_samples("a bare Megatron loop, a step", [1e3 * seconds for seconds in bare], "ms")
    # Pairs share the same batch and the same seconds, so a busy machine moves both.
    ratios = [ours / theirs for ours, theirs in zip(loop, bare, strict=True)]
    report.add(
        Figure(
            "our loop over a bare one, the same batch",
            statistics.median(ratios),
            "x",
            at_most=sizes.aim(MOST_OVERHEAD),
            samples=tuple(ratios),
        )
    )
    share = waited / spent / job.world_size
    report.add(Figure("waiting for data, of a step", share, "share", at_most=sizes.aim(MOST_WAIT)))
    report.add(Figure("tokens", tokens / spent, "tok/s"))
    report.add(Figure("model FLOPs of a rank", flops / spent / job.world_size / 1e12, "TFLOP/s"))
    report.add(Figure("MFU", flops / spent / job.world_size / 1e12 / peak, ""))
    report.notes.append(source)
    add_trace(report, events, _TRACED)
    return report


def _build(
    shape: str,
    sizes: Sizes,
    parallel: ParallelConfig,
    layout: RankLayout,
    job: runtime.Runtime,
    vocabulary: int,
    report: BenchReport,
) -> tuple[ModelConfig, MegatronStep]:
    whole = shape_of(shape, sizes, job.device)
    model = fit(whole, parallel, vocab_size=vocabulary, ranks=job.world_size, row=sizes.row, device=job.device)
    has_engine = engine_layers(model, parallel, job.device)
    report.notes.append(
        f"{model.num_layers} of {whole.num_layers} layers of {model.hidden_size}, vocabulary {vocabulary:,}, "
        f"{model.dtype}, rows of {sizes.row:,} tokens, {job.world_size} ranks, layers of "
        f"{'Transformer Engine' if has_engine else 'PyTorch'}"
    )
    report.notes += slow_parts(model, parallel, job.device, has_engine=has_engine)
    return model, MegatronStep.build(model, parallel, layout, device=job.device, vocab_size=vocabulary)


def measure_packed(place: Place) -> BenchReport:
    """Measure layers on a packed row of chats, and on dense sequences of as many tokens and as much attention."""
    report, sizes = BenchReport("gpu", {}), place.sizes
    with runtime.start(place.device) as job:
        parallel = ParallelConfig()
        layout = join(parallel, job.world_size)
        vocabulary = _TINY_VOCABULARY if sizes.is_tiny else _SMALL_VOCABULARY
        model, step = _build("8b", sizes, parallel, layout, job, vocabulary, report)
        with Workspace(place.folder, keep=True) as workspace:
            reader = open_dataset(str(write_rows(workspace, sizes.packs, sizes.row, vocabulary)))
            # Of chats, a pack as it is stored on average: neither few long ones nor many short ones.
            row = sorted((build_thd_batch(pack.sequences()) for pack in reader), key=_attended)[len(reader) // 2]
        tokens, attended = len(row), _attended(row)
        count = max(1, round(tokens**2 / attended))
        length = tokens // count
        sides = {
            "packed chats": ([to_device(row, job.device)], np.diff(row.cu_seqlens)),
            "dense, the same tokens and attention": (
                [_dense(row, count, length, job.device)],
                np.full(count, length),
            ),
            "one dense sequence of the row": ([_dense(row, 1, tokens, job.device)], np.array([tokens])),
        }
        cost, peak_source = sequence_cost(model), peak_of(job.device, sizes.matrix)

        def seconds_of(rows: list[RowTensors]) -> float:
            return bare_step(step, rows, rows[0].tokens.shape[1], job.device, updates=False)

        times = take_turns(
            {name: lambda number, rows=rows: seconds_of(rows) for name, (rows, _) in sides.items()},  # type: ignore[misc]
            rounds=sizes.rounds,
        )
        planned = plan_memory(model, parallel, vocab_size=vocabulary, dp_size=1, max_tokens_per_rank=tokens).total
        add_memory(report, job.device, planned)
    for name, samples in times.items():
        lengths = sides[name][1].astype(np.float64)
        flops = 3 * float((cost.linear * lengths + cost.quadratic * lengths**2).sum())
        report.add_samples(f"MFU, {name}", [flops / seconds / 1e12 / peak_source[0] for seconds in samples], "")
    report.add_ratio(
        "MFU of packed chats over dense ones of the same tokens and attention",
        "MFU, packed chats",
        "MFU, dense, the same tokens and attention",
        at_least=sizes.aim(LEAST_OF_DENSE),
    )
    report.add_ratio(
        "MFU of packed chats over one dense sequence", "MFU, packed chats", "MFU, one dense sequence of the row"
    )
    report.notes += [
        f"{row.num_sequences} chats of {tokens:,} tokens, against {count} dense sequences of {length:,}",
        peak_source[1],
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
    fields = (row.tokens, row.labels, positions, row.loss_mask, row.padding_mask)
    tokens, labels, position_ids, loss_mask, padding_mask = map(grid, fields)
    return RowTensors(tokens, labels, position_ids, loss_mask, padding_mask, None)
