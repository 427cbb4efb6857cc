"""Backends of attention and scans in a whole model, forward and backward, against plain ones; and isolation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel

from harness.bench.figures import BenchReport, Figure
from harness.bench.sizes import Sizes
from harness.bench.step import run_bare
from harness.bench.workspace import Workspace
from harness.errors import HarnessError
from harness.megatron import compat
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.job import runtime
from harness.megatron.model.gpt import build_model
from harness.parity.isolation import IsolationCheck
from harness.plan import ModelConfig, ParallelConfig, SftConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch, pad_row

_VOCABULARY = 256
# Padded to this, so that rows with padding are compared too.
_MULTIPLE = 16
# Errors below these are those of a few additions in another order, whatever plain attention has.
_FLOORS = {"float32": 2e-6, "bfloat16": 1e-3}
# Recipes of products in 8 bits that GPUs of a compute capability have, the newest first; rows have whole blocks.
_RECIPES = {(10, 0): ("tensorwise", "mxfp8"), (9, 0): ("tensorwise", "blockwise"), (8, 9): ("tensorwise",)}
_BLOCK = 128
# A backend may round this many times as much as plain attention does in the same dtype.
_MOST_OVER_PLAIN = 3.0
# A wrong mask is beyond this many times; products in 8 bits round so much themselves that it stands out less.
_LEAST_OF_DEFECT, _LEAST_OF_DEFECT_IN_8_BITS = 10.0, 2.0


class PlainAttention(torch.nn.Module):
    """Softmax over whole rows of scores in float32, with a mask made from the bounds: slow, and easy to trust."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        """Attend within sequences; query [T, heads, d], key and value [T, groups, d], result [T, heads * d]."""
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = packed_seq_params.cu_seqlens_q if bounds is None else bounds
        places = torch.arange(query.shape[0], device=query.device)
        owners = torch.bucketize(places, bounds[1:-1], right=True)
        allowed = (owners.unsqueeze(1) == owners) & (places.unsqueeze(1) >= places)
        key, value = (part.float().repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1).to(query.dtype)


# Layers with a scan beside one of PyTorch's attention, by the word of the part.
_SCANS = {
    "mamba2": {"family": "nemotron_h", "layer_pattern": "M*", "scan_num_groups": 2},
    "delta": {"family": "qwen3_5_text", "layer_pattern": "D*", "scan_num_groups": 2},
}


def measure_attention(sizes: Sizes, workspace: Workspace, backend: str) -> BenchReport:
    """Compare losses and gradients of a model with this backend or scan, and check that documents are isolated."""
    # PyTorch reads it once, when it first multiplies; a later job of this process is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    report = BenchReport("gpu")
    device = runtime.choose_device(sizes.device)
    tokens = 96 if sizes.is_tiny else 2048
    rows = {"without padding": _row(tokens, 1), "with padding": _row(tokens, _MULTIPLE)}
    for dtype in ("float32", "bfloat16"):
        for title, row in rows.items():
            # Transformer Engine has no float32 attention for rows with padding.
            if dtype == "float32" and backend not in ("torch", *_SCANS) and title == "with padding":
                continue
            with runtime.start(sizes.device) as job:
                runtime.join(ParallelConfig(), job.world_size)
                _compare(report, f"{dtype}, {title}", _model(backend, dtype, sizes), row, job.device)
    if backend not in ("torch", *_SCANS):
        there = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        for recipe in next((recipes for since, recipes in _RECIPES.items() if there >= since), ()):
            model = replace(_model(backend, "bfloat16", sizes), fp8=recipe)
            _compare_in_8_bits(report, model, rows["with padding"], sizes.device)
    if backend in _SCANS and (package := compat.missing_kernels(delta_rule=backend == "delta")):
        report.notes.append(f"{package} is not installed: the scan was compared with itself")
    # Kernels that add in another order each time would look like leaks.
    with runtime.start(sizes.device, deterministic=True) as job:
        model = _model(backend, "float32" if device.type == "cpu" else "bfloat16", sizes)
        findings = IsolationCheck.of_job(SftConfig(model=model), job).run()
    report.add(Figure("isolation: findings", len(findings), "findings", at_most=0))
    report.notes += [f"isolation: {finding}" for finding in findings[:10]]
    return report


def _compare_in_8_bits(report: BenchReport, model: ModelConfig, row: ThdBatch, device: str) -> None:
    """Compare a model that multiplies in 8 bits; a recipe that this Transformer Engine refuses is reported."""
    row = pad_row(row, math.ceil(len(row) / _BLOCK) * _BLOCK)
    with runtime.start(device) as job:
        runtime.join(ParallelConfig(), job.world_size)
        try:
            _compare(report, f"8 bits {model.fp8}", model, row, job.device)
        except (RuntimeError, AssertionError, ValueError, HarnessError) as error:
            report.add(Figure(f"8 bits {model.fp8}: refused", 1, "recipes", at_most=0))
            report.notes.append(f"8 bits {model.fp8}: {str(error).splitlines()[0]}")


def _model(backend: str, dtype: str, sizes: Sizes) -> ModelConfig:
    head = 32 if sizes.is_tiny else 128
    scans: dict[str, Any] = _SCANS.get(backend, {})
    if scans:
        scans = {**scans, "scan_num_heads": 4, "scan_head_dim": head // 2, "scan_state_dim": head}
    return ModelConfig(
        **scans,
        num_layers=2,
        hidden_size=4 * head,
        ffn_hidden_size=8 * head,
        num_attention_heads=4,
        num_query_groups=2,
        dtype=dtype,
        attention="torch" if scans else backend,
        tie_embeddings=False,
        init_std=0.05,  # larger than in training, so that attention is not nearly even
    )


def _row(tokens: int, multiple: int) -> ThdBatch:
    """Return a row of about that many tokens in sequences of very different length, one of two tokens included."""
    random = np.random.default_rng(1)
    shares = np.array([0.02, 0.4, 0.08, 0.27, 0.01, 0.2])
    lengths = [2, *np.maximum(shares * (tokens - 2 * multiple), 2).astype(int).tolist()]
    ids = (random.integers(0, _VOCABULARY, n + 1).astype(np.int32) for n in lengths)
    views = [SequenceView(one, np.r_[np.ones(len(one) - 1, np.uint8), [0]]) for one in ids]
    return build_thd_batch(views, pad_to_multiple=multiple)


def _compare(report: BenchReport, title: str, model: ModelConfig, row: ThdBatch, device: torch.device) -> None:
    chunks = build_model(model, ParallelConfig(), vocab_size=_VOCABULARY, device=device)
    own = run_once(chunks, row, device)
    # What a wrong mask does to the same figures.
    broken = run_once(chunks, row, device, prepare=_one_sequence)
    _make_plain(chunks)
    plain = run_once(chunks, row, device)
    # The reference has the same weights, in float32.
    whole = replace(model, dtype="float32", fp8="off")
    exact = build_model(whole, ParallelConfig(), vocab_size=_VOCABULARY, device=device)
    with torch.no_grad():
        for weight, rounded in zip(exact[0].parameters(), chunks[0].parameters(), strict=True):
            weight.copy_(rounded)
    _make_plain(exact)
    reference = run_once(exact, row, device)
    least = _LEAST_OF_DEFECT if model.fp8 == "off" else _LEAST_OF_DEFECT_IN_8_BITS
    for name, index in (("losses", 0), ("gradients", 1)):
        of = reference[index]
        error, of_plain, of_broken = (float((side[index] - of).norm() / of.norm()) for side in (own, plain, broken))
        floor = max(of_plain, _FLOORS[model.dtype])
        report.add(Figure(f"{title}: error of {name}", error, "of their norm"))
        report.add(Figure(f"{title}: error of {name}, of plain attention", of_plain, "of their norm"))
        over = f"{title}: error of {name} over plain attention's"
        report.add(Figure(over, error / floor, "x", at_most=_MOST_OVER_PLAIN))
        report.add(Figure(f"{over}, bounds dropped", of_broken / floor, "x", at_least=least))


def _make_plain(chunks: list[DistributedDataParallel]) -> None:
    """Give all layers plain attention, and the reference of their scan."""
    for layer in chunks[0].module.decoder.layers:
        mixer = layer.self_attention
        if hasattr(mixer, "use_plain_scan"):
            mixer.use_plain_scan()
        else:
            mixer.core_attention = PlainAttention()


def run_once(
    chunks: list[DistributedDataParallel],
    row: ThdBatch,
    device: torch.device,
    prepare: Callable[..., RowTensors] = to_device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of a row's tokens, float32 [T], and all gradients of one backward pass, float32 [weights]."""
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    (report,) = run_bare(chunks[0], [prepare(row, device)], len(row))
    return report["losses"].flatten(), torch.cat([one.main_grad.float().flatten() for one in chunks[0].parameters()])


def _one_sequence(row: ThdBatch, device: torch.device, **slices: Any) -> RowTensors:
    """Return the row with its second and third sequence made one for attention alone."""
    bounds = np.delete(row.cu_seqlens_padded, 2)
    joined = replace(row, cu_seqlens=bounds, cu_seqlens_padded=bounds, max_seqlen=int(np.diff(bounds).max()))
    return to_device(joined, device, **slices)
