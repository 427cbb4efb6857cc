"""`python -m tests.benchmarks kernels`: kernels, copies and waits of one microbatch, counted without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
_WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__"}


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
    report.notes.append("one microbatch, forward and backward, of a dense model; no optimizer step")
    return report


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
