"""Benches of one step: `step` times the loop beside Megatron's own, `kernels` counts what a microbatch launches."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.attention import SelfAttention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.workspace import Workspace, make_packs
from harness.checks import bounded, check_numbers
from harness.errors import ConfigError
from harness.formats import open_dataset, open_writer
from harness.loader import Loader, LoaderConfig, RankBatch
from harness.megatron import MegatronStep, RowTensors, to_device
from harness.megatron.data import Feed
from harness.megatron.job import join, runtime
from harness.megatron.model import RowSelfAttention
from harness.plan import ModelConfig, ParallelConfig, TrainerConfig, sequence_cost
from harness.records import SequenceView
from harness.schedule import ScheduleConfig, SequenceCost
from harness.thd import ThdBatch, build_thd_batch
from harness.train import StepRecord, train

VOCABULARY = 8192
_FEW_TOKENS = 256
# Above these shares of a step the loop slows the model down.
MOST_OVERHEAD = 1.03
MOST_WAIT = 0.01


@dataclass(frozen=True)
class StepSettings:
    """Sizes of the bench.

    Attributes:
        layers: layers of the model.
        hidden: width of the model, a multiple of 64; heads are 32 wide, the feed-forward is three times as wide.
        packs, pack_size: size of the dataset.
        global_batch: packs of a step.
        max_tokens_per_rank: tokens of a microbatch.
        workers: worker processes of the loader.
        steps: measured steps.
        warm_up: steps before them that are not measured.
        device: auto, cpu or cuda; bfloat16 on GPUs.
        peak_tflops: of the device, dense, in the model's dtype (H100 SXM in bfloat16: 989); 0 leaves MFU out.
    """

    layers: int = bounded(4, lowest=1, highest=10_000)
    hidden: int = bounded(128, lowest=32, highest=1_000_000)
    packs: int = bounded(96, lowest=1)
    pack_size: int = bounded(1024, lowest=2)
    global_batch: int = bounded(8, lowest=1)
    max_tokens_per_rank: int = bounded(2048, lowest=1)
    workers: int = bounded(2, highest=1024)
    steps: int = bounded(20, lowest=1)
    warm_up: int = bounded(4)
    device: str = "auto"
    peak_tflops: float = bounded(0.0, lowest=0, highest=1_000_000_000)

    def __post_init__(self) -> None:
        check_numbers(self, "")


QUICK = StepSettings(layers=2, hidden=64, packs=16, pack_size=256, max_tokens_per_rank=512, steps=4, warm_up=1)


def step_flops(cost: SequenceCost, batch: RankBatch) -> float:
    """Count the FLOPs of one training step on the model tokens of a batch's rows, without padding.

    A sequence of L tokens costs `linear * L + quadratic * L^2` forward (`harness.plan.model.sequence_cost`: 2 FLOPs
    a weight and token; causal attention counts half of the L x L square), and the backward pass costs twice that:
    3 * sum over sequences. MFU is this over seconds times the device's peak. Recomputation is not counted.
    """
    total = 0.0
    for row in batch.rows:
        lengths = np.diff(row.cu_seqlens).astype(np.float64)
        total += float((cost.linear * lengths + cost.quadratic * lengths**2).sum())
    return 3.0 * total


def bench_step(settings: StepSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure in one process: the loop and Megatron's bare step take turns on the same batches."""
    report = BenchReport("step", asdict(settings))
    progress("writing the data")
    path = write_rows(workspace, settings.packs, settings.pack_size, VOCABULARY)
    with ExitStack() as stack:
        job = stack.enter_context(runtime.start(settings.device))
        parallel = ParallelConfig()
        layout = join(parallel, job.world_size)
        on_gpu = job.device.type == "cuda"
        model = ModelConfig(
            num_layers=settings.layers,
            hidden_size=settings.hidden,
            ffn_hidden_size=3 * settings.hidden,
            num_attention_heads=max(1, settings.hidden // 32),
            num_query_groups=max(1, settings.hidden // 64),
            vocab_size=VOCABULARY,
            dtype="bfloat16" if on_gpu else "float32",
        )
        step = MegatronStep.build(model, parallel, layout, device=job.device, vocab_size=VOCABULARY)

        def make() -> Loader:
            return Loader(
                open_dataset(str(path)),
                LoaderConfig(global_batch_size=settings.global_batch, num_workers=settings.workers),
                schedule=ScheduleConfig(max_tokens_per_rank=settings.max_tokens_per_rank),
                cost=sequence_cost(model),
            )

        feed = stack.enter_context(Feed(make, layout, device=job.device))
        batches = iter(feed)
        progress("the loop and the bare step, in turns")
        loop, bare = in_turns(batches, step, settings, job.device)
        progress("the loop alone")
        alone: list[StepRecord] = []
        run_loop(batches, step, settings, alone.append)
        del alone[: settings.warm_up]

    report.add_samples("loop, a step", [1e3 * seconds for seconds in loop], "ms")
    report.add_samples("bare Megatron, a step", [1e3 * seconds for seconds in bare], "ms")
    # Pairs share the same batch and the same seconds, so a busy machine moves both.
    ratios = [ours / theirs for ours, theirs in zip(loop, bare, strict=True)]
    report.add(Figure("loop over bare, the same batch", statistics.median(ratios), "x", None, MOST_OVERHEAD))
    seconds = sum(record.step_s for record in alone)
    waited = sum(record.data_wait_s for record in alone)
    report.add(Figure("waiting for data, share of step time", waited / seconds, "", None, MOST_WAIT))
    report.add(Figure("tokens", sum(record.batch.num_tokens for record in alone) / seconds, "tok/s"))
    flops = sum(step_flops(sequence_cost(model), record.batch) for record in alone) / seconds
    report.add(Figure("model FLOPs", flops / 1e9, "GFLOP/s"))
    if settings.peak_tflops:
        report.add(Figure("MFU", flops / (settings.peak_tflops * 1e12), ""))
    name = torch.cuda.get_device_name(job.device) if on_gpu else "CPU"
    report.notes.append(f"device: {name}, model in {model.dtype}")
    return report


def in_turns(
    batches: Iterator[RankBatch], step: MegatronStep, settings: StepSettings, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the seconds of every measured step of the loop, and of a bare step on the same batch next to it."""
    loop: list[float] = []
    bare: list[float] = []

    def run_bare(batch: RankBatch) -> None:
        rows = [to_device(row, device) for row in batch.rows]
        bare.append(bare_step(step, rows, max(map(len, batch.rows)), device))

    def bare_before_every_other() -> Iterator[RankBatch]:
        for number, batch in enumerate(batches, start=1):
            if number % 2:
                run_bare(batch)
            yield batch

    def record(step_record: StepRecord) -> None:
        # The wait for data is measured separately: here it includes bare steps, while workers read ahead.
        loop.append(step_record.step_s - step_record.data_wait_s)
        if not step_record.step % 2:
            run_bare(step_record.batch)

    run_loop(bare_before_every_other(), step, settings, record)
    return loop[settings.warm_up :], bare[settings.warm_up :]


def run_loop(
    batches: Iterator[RankBatch], step: MegatronStep, settings: StepSettings, record: Callable[[StepRecord], None]
) -> None:
    config = TrainerConfig(steps=settings.warm_up + settings.steps, eval_interval=0, checkpoint_interval=0)
    train(batches, step, config, validation={}, save=lambda number, state: None, record=record)


def bare_step(
    step: MegatronStep, rows: list[RowTensors], seq_length: int, device: torch.device, *, updates: bool = True
) -> float:
    """Return the seconds of a step as a Megatron training script makes it, on tensors that are ready.

    Args:
        updates: take the optimizer's step; False for forward and backward alone.
    """

    def forward(ready: Iterator[RowTensors], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
        row = next(ready)
        output = model(
            input_ids=row.tokens,
            position_ids=row.position_ids,
            attention_mask=None,
            labels=row.labels,
            packed_seq_params=row.packed_seq_params,
        )

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total = (losses.float() * row.loss_mask).sum()
            return total, row.loss_mask.sum().to(torch.int), {"loss": total.detach()}

        return output, loss

    wait_for(device)
    start = time.perf_counter()
    for chunk in step.chunks:
        chunk.zero_grad_buffer()
    step.optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(rows),
        model=step.chunks[0],
        num_microbatches=len(rows),
        seq_length=seq_length,
        micro_batch_size=rows[0].tokens.shape[0],
        forward_only=False,
    )
    if updates:
        step.optimizer.step()
        step.scheduler.step(increment=1)
    sum(float(losses["loss"]) for losses in reports)  # a script logs its loss, which waits for the device
    wait_for(device)
    return time.perf_counter() - start


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


@dataclass(frozen=True)
class KernelsSettings:
    """Sizes of the counted microbatch.

    Attributes:
        sequences: numbers of sequences in a row; each is counted.
        tokens: tokens of a row, the same for every number of sequences.
        hidden: width of the model, a multiple of 64; kernels do not depend on it.
        depth: layers of the model that totals are given for.
    """

    sequences: tuple[int, ...] = bounded((8, 32, 64), lowest=1, highest=1_000_000)
    tokens: int = bounded(1024, lowest=2)
    hidden: int = bounded(64, lowest=64, highest=1_000_000)
    depth: int = bounded(32, lowest=1, highest=10_000)

    def __post_init__(self) -> None:
        check_numbers(self, "")
        if not self.sequences or min(self.sequences) < 1 or 2 * max(self.sequences) > self.tokens:
            raise ConfigError(
                f"{self.tokens} tokens do not hold {self.sequences} sequences of two tokens or more",
                where="sequences",
                fix="list numbers from 1 to half of `tokens`",
            )


QUICK_KERNELS = KernelsSettings(sequences=(2, 8), tokens=64)
# Operations that launch nothing, and calls that make the host wait for a GPU.
_VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "slice",
    "split",
    "split_with_sizes",
    "unsqueeze",
    "squeeze",
}
_VIEWS |= {"expand", "detach", "alias", "select", "as_strided", "unbind", "lift_fresh", "_reshape_alias"}
_WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__"}


class _Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels that PyTorch dispatches: every operation but those that return a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += func.overloadpacket.__name__ not in _VIEWS
        return func(*args, **(kwargs or {}))


class _Waits(TorchFunctionMode):
    """Counts calls that wait for a GPU, by the package that makes them, and the bytes copied to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.others, self.copied_bytes = 0, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITS:
            is_ours = sys._getframe(1).f_globals.get("__name__", "").startswith("harness.")
            self.ours, self.others = self.ours + is_ours, self.others + (not is_ours)
        elif name == "to" and len(args) > 1 and isinstance(args[1], torch.device):
            self.copied_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


class _OneKernel(torch.nn.Module):
    """A core attention of one kernel a row, as Transformer Engine's is; it attends to nothing."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return _Copy.apply(query, key, value)  # type: ignore[no-untyped-call,no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.shapes = query.shape, key.shape[1]
        return query.clone().flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        shape, num_groups = ctx.shapes
        gradient = gradients[0].view(shape)
        return gradient, gradient[:, :num_groups], gradient[:, :num_groups]


class _Unrotated(SelfAttention):  # type: ignore[misc]
    """Self-attention without a rotary embedding."""

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **options: Any) -> Any:
        return super().forward(*args, rotary_pos_emb=None, **options)


def bench_kernels(settings: KernelsSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Count one microbatch, forward and backward, on a CPU: counts are exact, and the same on every machine.

    Core attention is one kernel, as with Transformer Engine. The kernels of a layer are those that a second layer adds.
    """
    report = BenchReport("kernels", asdict(settings))
    with runtime.start("cpu") as job:
        parallel = ParallelConfig()
        layout = join(parallel, job.world_size)

        def build(layers: int) -> MegatronStep:
            model = ModelConfig(
                num_layers=layers,
                hidden_size=settings.hidden,
                ffn_hidden_size=settings.hidden,
                num_attention_heads=settings.hidden // 32,
                num_query_groups=settings.hidden // 64,
                vocab_size=_FEW_TOKENS,
            )
            step = MegatronStep.build(model, parallel, layout, device=job.device, vocab_size=_FEW_TOKENS)
            for layer in step.chunks[0].module.decoder.layers:
                layer.self_attention.core_attention = _OneKernel()
            return step

        one, two = build(1), build(2)

        def count(step: MegatronStep, row: ThdBatch, attention: type | None = None) -> tuple[int, _Waits]:
            for layer in step.chunks[0].module.decoder.layers:
                layer.self_attention.__class__ = attention or RowSelfAttention
            with _Waits() as waits, _Counts() as counts:
                step.run_rows([row], step.forward_row, forward_only=False)
            return counts.kernels, waits

        for number in settings.sequences:
            progress(f"{number} sequences")
            row = _row_of(number, settings.tokens)
            of_one, _ = count(one, row)
            of_two, waits = count(two, row)
            a_layer = of_two - of_one
            # Angles are made once a row, whatever the depth: they are counted outside layers.
            unrotated = count(two, row, _Unrotated)[0] - count(one, row, _Unrotated)[0]
            megatrons = count(two, row, SelfAttention)[0] - count(one, row, SelfAttention)[0]
            name = f"{number} sequences"
            for title, value, most in (
                ("a layer", a_layer, None),
                ("outside layers", of_one - a_layer, None),
                (f"{settings.depth} layers", of_one + (settings.depth - 1) * a_layer, None),
                (f"rotary embedding of {settings.depth} layers", (a_layer - unrotated) * settings.depth, 1300),
                (
                    f"Megatron's rotary embedding of {settings.depth} layers",
                    (megatrons - unrotated) * settings.depth,
                    None,
                ),
            ):
                report.add(Figure(f"{name}, {title}", float(value), "kernels", None, most))
            report.add(Figure(f"{name}, waits for the device, ours", float(waits.ours), "calls", None, 0))
            report.add(Figure(f"{name}, waits for the device, Megatron's and PyTorch's", float(waits.others), "calls"))
            report.add(Figure(f"{name}, copied to the device", waits.copied_bytes / len(row), "bytes a token"))
    report.notes.append("one microbatch, forward and backward, of a dense model; no optimizer step")
    return report


def _row_of(number: int, tokens: int) -> ThdBatch:
    """Return a row of `tokens` tokens in `number` sequences of nearly equal length."""
    ends = np.linspace(0, tokens, number + 1).astype(int)
    return build_thd_batch(
        [
            SequenceView(np.arange(length + 1, dtype=np.int32) % _FEW_TOKENS, np.r_[np.ones(length, np.uint8), [0]])
            for length in np.diff(ends)
        ]
    )
