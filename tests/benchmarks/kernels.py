"""`python -m tests.benchmarks kernels`: kernels, copies and waits of microbatches and steps, counted without a GPU.

A kernel is an operation that PyTorch dispatches and that returns no view, in this project's layers on a CPU. On a GPU,
Transformer Engine's layers, grouped products and optimizer launch fewer. A wait is a call that reads a tensor's values
on the host, masks that select rows included; those of PyTorch's optimizer are of numbers on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.attention import SelfAttention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.step import small_model
from harness.bench.workspace import Workspace
from harness.errors import ConfigError
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.rotary import RowSelfAttention
from harness.megatron.step import MegatronStep
from harness.plan import ParallelConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch

_VOCABULARY = 256
# Layers of the model that totals are given for, and the kernels that rotary embedding may launch in them.
_DEPTH, _MOST_ROTARY = 32, 1300
# Operations that launch nothing, and calls that make the host wait for a GPU.
_VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "slice", "split", "split_with_sizes", "unsqueeze"}
_VIEWS |= {"squeeze", "expand", "detach", "alias", "select", "as_strided", "unbind", "lift_fresh", "_reshape_alias"}
_WAITS = {"item", "tolist", "cpu", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__"}
_WAITS |= {"masked_select", "unique", "bincount"}
# Models whose steps are counted, each with the most waits of its own: for the sums of the loss, and for its experts.
_EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64, "aux_loss": 0.01}
_STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "dense": ({}, 1),
    "qwen3_moe": ({"family": "qwen3_moe", **_EXPERTS}, 2),
    "gpt_oss": ({"family": "gpt_oss", "sliding_window": 8, "tie_embeddings": False, **_EXPERTS}, 2),
}


class _Counts(TorchDispatchMode):
    """Counts kernels that PyTorch dispatches: every operation but those that return a view."""

    def __init__(self) -> None:
        super().__init__()
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
        name, caller = getattr(func, "__name__", ""), sys._getframe(1).f_globals.get("__name__", "")
        if name in _WAITS or _selects(name, *args[1:]):
            is_ours = caller.startswith("harness.")
            self.ours += is_ours
            self.others += not is_ours and not caller.startswith("torch.optim.")
        elif name == "to" and len(args) > 1 and isinstance(args[1], torch.device):
            self.copied_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def _selects(name: str, index: Any = None, value: Any = None, *_: Any) -> bool:
    """Return True if an operation selects by a mask, whose true places are counted; one value fills any number."""
    if name not in ("__getitem__", "__setitem__") or (name == "__setitem__" and torch.as_tensor(value).numel() == 1):
        return False
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


class _OneKernel(torch.nn.Module):
    """A core attention of one kernel a row, as Transformer Engine's is; it attends to nothing."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return _Copy.apply(query, key, value)


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


class _Unrotated(SelfAttention):
    """Self-attention without a rotary embedding."""

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **options: Any) -> Any:
        return super().forward(*args, rotary_pos_emb=None, **options)


def bench_kernels(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Count one microbatch, forward and backward, on a CPU: counts are exact, and the same on every machine.

    Core attention is one kernel, as with Transformer Engine. The kernels of a layer are those that a second layer adds.

    Raises:
        ConfigError: a row does not hold a number of sequences of two tokens.
    """
    sizes.first("sequences", 1)
    if 2 * max(sizes.sequences) > sizes.pack_size:
        what = f"{sizes.pack_size} tokens do not hold {sizes.sequences} sequences of two tokens or more"
        raise ConfigError(what, where="sequences", fix="list numbers from 1 to half of `pack_size`")
    report = BenchReport("kernels")
    with runtime.start("cpu") as job:
        layout = join(ParallelConfig(), job.world_size)
        steps = []
        for layers in (1, 2):
            model = small_model(layers, sizes.hidden, _VOCABULARY)
            step = MegatronStep(model, ParallelConfig(), layout, device=job.device, vocab_size=_VOCABULARY)
            for layer in step.chunks[0].module.decoder.layers:
                layer.self_attention.core_attention = _OneKernel()
            steps.append(step)
        for number in sizes.sequences:
            progress(f"{number} sequences")
            _add_counts(report, f"{number} sequences", steps, _row_of(number, sizes.pack_size))
    for name in _STEPS:
        progress(f"steps, {name}")
        for stages in (1, 2):
            _add_steps(report, name, ParallelConfig(pipeline_parallel_size=stages, static_rows=stages > 1), sizes)
    report.notes += [
        "by sequences: one microbatch, forward and backward, of a dense model; no optimizer step",
        "steps: of two layers, on the last pipeline stage; experts one after another, as a CPU has no grouped ones",
    ]
    return report


def _add_steps(report: BenchReport, name: str, parallel: ParallelConfig, sizes: Sizes) -> None:
    """Add counts of steps of two and four microbatches of the last stage's rank, whose partners do not exist."""
    (settings, most), stages = _STEPS[name], parallel.pipeline_parallel_size
    model = replace(small_model(2 * stages, sizes.hidden, _VOCABULARY), **settings)
    row, counted = _row_of(2, sizes.pack_size), []
    with runtime.start("cpu") if stages == 1 else runtime.alone(stages - 1, stages) as job:
        layout, of = join(parallel, stages), dict[str, Any](vocab_size=_VOCABULARY, pad_rows_to=sizes.pack_size)
        step = MegatronStep(model, parallel, layout, device=job.device, **of)
        step.train([row] * 4)  # makes the optimizer's state
        for number in (2, 4):
            with _Waits() as waits, _Counts() as counts:
                step.train([row] * number)
            counted.append((counts.kernels, waits.ours, waits.others))
        with _Counts() as counts:
            step.optimizer.step()
    (kernels, ours, others), more = counted[0], [(four - two) / 2 for two, four in zip(*counted, strict=True)]
    name, theirs = f"{name}, {stages} stage{'s' * (stages > 1)}", "Megatron's and PyTorch's"
    figures: list[tuple[str, float, str, int | None]] = [
        ("waits of a step, ours", ours, "calls", most),
        ("waits that a microbatch adds, ours", more[1], "calls", 0),
        (f"waits of a step, {theirs}", others, "calls", None),
        # Megatron's dispatcher tells the host how many tokens each expert has.
        (f"waits that a microbatch adds, {theirs}", more[2], "calls", None if model.num_experts else 0),
    ]
    if stages == 1:  # without pipelines no rank receives hidden states, which would route tokens
        figures += [
            ("a microbatch", more[0], "kernels", None),
            ("a step without microbatches", kernels - 2 * more[0], "kernels", None),
            ("the optimizer's step", counts.kernels, "kernels", None),
        ]
    for title, count, unit, limit in figures:
        report.add(Figure(f"{name}, {title}", float(count), unit, None, limit))


def _add_counts(report: BenchReport, name: str, steps: Sequence[MegatronStep], row: ThdBatch) -> None:
    of_one, of_two = (_count(step, row, RowSelfAttention) for step in steps)
    waits = of_two[1]
    a_layer = of_two[0] - of_one[0]
    # Angles are made once a row, whatever the depth: they are counted outside layers.
    unrotated, megatrons = (
        _count(steps[1], row, attention)[0] - _count(steps[0], row, attention)[0]
        for attention in (_Unrotated, SelfAttention)
    )
    rotary = f"rotary embedding of {_DEPTH} layers"
    for title, count, most in (
        ("a layer", a_layer, None),
        ("outside layers", of_one[0] - a_layer, None),
        (f"{_DEPTH} layers", of_one[0] + (_DEPTH - 1) * a_layer, None),
        (rotary, (a_layer - unrotated) * _DEPTH, _MOST_ROTARY),
        (f"Megatron's {rotary}", (megatrons - unrotated) * _DEPTH, None),
    ):
        report.add(Figure(f"{name}, {title}", float(count), "kernels", None, most))
    report.add(Figure(f"{name}, waits for the device, ours", float(waits.ours), "calls", None, 0))
    report.add(Figure(f"{name}, waits for the device, Megatron's and PyTorch's", float(waits.others), "calls"))
    report.add(Figure(f"{name}, copied to the device", waits.copied_bytes / len(row), "bytes a token"))


def _count(step: MegatronStep, row: ThdBatch, attention: type) -> tuple[int, _Waits]:
    for layer in step.chunks[0].module.decoder.layers:
        layer.self_attention.__class__ = attention
    with _Waits() as waits, _Counts() as counts:
        step.run_rows([row], step.forward_row, forward_only=False)
    return counts.kernels, waits


def _row_of(number: int, tokens: int) -> ThdBatch:
    """Return a row of `tokens` tokens in `number` sequences of nearly equal length."""
    ends = np.linspace(0, tokens, number + 1).astype(int)
    return build_thd_batch(
        [
            SequenceView(np.arange(length + 1, dtype=np.int32) % _VOCABULARY, np.r_[np.ones(length, np.uint8), [0]])
            for length in np.diff(ends)
        ]
    )
