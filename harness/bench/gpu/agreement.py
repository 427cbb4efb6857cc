"""Attention, scans and layouts of a whole model against plain ones and one rank, and isolation on each."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from harness.bench.figures import BenchReport, Figure
from harness.bench.sizes import Sizes
from harness.bench.step import give_state, open_feed, small_model, write_rows
from harness.bench.workspace import Workspace
from harness.config import compose_config
from harness.errors import ConfigError, HarnessError
from harness.formats import open_writer
from harness.loader import LoaderState, RankLayout
from harness.megatron import compat
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import Runtime, on_rank_0
from harness.megatron.model.gpt import build_model, use_transformer_engine
from harness.megatron.state.checkpoint import CheckpointWriter, load_checkpoint
from harness.megatron.step import MegatronStep
from harness.parity.isolation import IsolationCheck, run_rows
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig, SftConfig
from harness.records import Pack, SequenceView
from harness.schedule import DYNAMIC, ScheduleConfig
from harness.thd import ThdBatch, build_thd_batch, pad_row
from harness.train import Progress as RunPosition

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
# Presets of `configs/parallel` by the ranks that hold one copy of the model, or that show them best.
LAYOUTS = {
    1: ["data"],
    2: ["data", "data_distributed", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "ep2"],
    4: ["tp2_pp2", "tp2_cp2", "pp2_cp2", "cp4", "tp2_ep2"],
    8: ["tp2_pp2_cp2", "tp4_sp", "pp4_vpp2", "tp2_pp2_ep2", "data_distributed"],
}
_TINY_LAYOUTS = {2: ["data_distributed", "tp2_sp", "pp2", "cp2"]}
_PACK, _PACKS, _STEPS = 128, 16, 3
# Kernels and orders of addition differ between layouts.
_NEARNESS = {"float32": 1e-4, "bfloat16": 1e-2}
# Fusions of layers with experts, each on and off: its setting, and what the model has beside eight experts.
FUSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "router, softmax": ("fuse_router", {"aux_loss": 0.1, "z_loss": 0.01}),
    "router, softmax of all": ("fuse_router", {"router_normalize": False, "aux_loss": 0.1}),
    "router, sigmoid": ("fuse_router", {"router_score": "sigmoid", "expert_bias": True, "router_scale": 2.5}),
    "permutation": ("fuse_permutation", {}),
}


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
            row = pad_row(rows["with padding"], math.ceil(len(rows["with padding"]) / _BLOCK) * _BLOCK)
            with runtime.start(sizes.device) as job:
                runtime.join(ParallelConfig(), job.world_size)
                try:
                    _compare(report, f"8 bits {recipe}", model, row, job.device)
                except (RuntimeError, AssertionError, ValueError, HarnessError) as error:
                    # This Transformer Engine refuses the recipe.
                    report.add(Figure(f"8 bits {recipe}: refused", 1, "recipes", at_most=0))
                    report.notes.append(f"8 bits {recipe}: {str(error).splitlines()[0]}")
    if backend in _SCANS and (package := compat.missing_kernels(delta_rule=backend == "delta")):
        report.notes.append(f"{package} is not installed: the scan was compared with itself")
    # Kernels that add in another order each time would look like leaks.
    with runtime.start(sizes.device, deterministic=True) as job:
        model = _model(backend, "float32" if device.type == "cpu" else "bfloat16", sizes)
        findings = IsolationCheck(SftConfig(model=model), job).run()
    report.add(Figure("isolation: findings", len(findings), "findings", at_most=0))
    report.notes += [f"isolation: {finding}" for finding in findings[:10]]
    return report


def measure_fusions(sizes: Sizes, workspace: Workspace, word: str) -> BenchReport:
    """Compare losses and gradients of a model in float32 with a fusion and without it."""
    report, row = BenchReport("gpu"), _row(96 if sizes.is_tiny else 2048, _MULTIPLE)
    with runtime.start(sizes.device) as job:
        runtime.join(ParallelConfig(), job.world_size)
        for title, (name, others) in FUSIONS.items():
            model = replace(_model("torch", "float32", sizes), num_experts=8, **others)
            choices: list[dict[str, Any]] = [{name: "off"}, {name: "on"}]
            found: list[tuple[torch.Tensor, torch.Tensor]] = []
            weights: list[torch.Tensor] = []
            try:
                for choice in choices:
                    chosen = replace(model, **choice)
                    chunks = build_model(chosen, ParallelConfig(), vocab_size=_VOCABULARY, device=job.device)
                    own = [weight.detach() for weight in chunks[0].parameters()]
                    for weight, given in zip(own, weights or own, strict=True):
                        weight.copy_(given)
                    weights = own
                    found.append(run_once(chunks, to_device(row, job.device)))
            except ConfigError as error:
                report.notes.append(f"{title}: {error.what}")
                continue
            for what, off, on in zip(("losses", "gradients"), *found, strict=True):
                error_of = float((on - off).norm() / off.norm())
                at_most = _NEARNESS[model.dtype]
                report.add(Figure(f"{title}: {what} differ with {name}", error_of, "of their norm", at_most=at_most))
    return report


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
    tensors = to_device(row, device)
    own = run_once(chunks, tensors)
    # What a wrong mask does to the same figures: the second and third sequence are one, for attention alone.
    bounds = np.delete(row.cu_seqlens_padded, 2)
    joined = replace(row, cu_seqlens=bounds, cu_seqlens_padded=bounds, max_seqlen=int(np.diff(bounds).max()))
    broken = run_once(chunks, to_device(joined, device))
    _make_plain(chunks)
    plain = run_once(chunks, tensors)
    # The reference has the same weights, in float32.
    whole = replace(model, dtype="float32", fp8="off")
    exact = build_model(whole, ParallelConfig(), vocab_size=_VOCABULARY, device=device)
    with torch.no_grad():
        for weight, rounded in zip(exact[0].parameters(), chunks[0].parameters(), strict=True):
            weight.copy_(rounded)
    _make_plain(exact)
    reference = run_once(exact, tensors)
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


def run_once(chunks: list[DistributedDataParallel], row: RowTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of a row's tokens, float32 [T], and all gradients of one backward pass, float32 [weights]."""
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    (report,) = run_rows(chunks, [row], row.tokens.shape[1])
    losses = (report["losses"].float() * row.loss_mask).flatten()
    return losses, torch.cat([one.main_grad.float().flatten() for one in chunks[0].parameters()])


def measure_layouts(sizes: Sizes, workspace: Workspace, word: str) -> BenchReport:
    """Train a small model on each layout from one checkpoint; every rank of the job calls this."""
    # PyTorch reads it once, when it first multiplies; a later job of this process is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    report, ranks = BenchReport("gpu"), int(word)
    names = _TINY_LAYOUTS.get(ranks, LAYOUTS[ranks]) if sizes.is_tiny else LAYOUTS[ranks]
    device = runtime.choose_device(sizes.device).type
    presets = {name: compose_config("sft", SftConfig, [f"parallel={name}"]).parallel.on(device) for name in names}
    # Rows that never change in shape are padded at their end.
    presets["static rows"] = ParallelConfig(static_rows=True)
    presets |= {"CUDA graphs": ParallelConfig(static_rows=True, cuda_graphs=True)} if device == "cuda" else {}
    presets |= {"uneven stages": replace(presets["pp2"], pipeline_layout="Et*5|t*3L")} if ranks == 2 else {}
    if ranks == 2 and not sizes.is_tiny:
        presets["EP2, overlapped"] = combined = ParallelConfig(expert_parallel_size=2, overlap_experts=True)
        if use_transformer_engine("auto", torch.device(device)):
            presets["EP2, delayed"] = replace(combined, delay_weight_gradients=True)
    for has_experts in sorted({preset.expert_parallel_size > 1 for preset in presets.values()}):
        chosen = {name: one for name, one in presets.items() if (one.expert_parallel_size > 1) == has_experts}
        # Kernels that add in another order each time would look like leaks; those of routers have no other ones.
        with runtime.start(sizes.device, deterministic=not has_experts) as job:
            _compare_layouts(report, chosen, workspace, job, "dp_balanced")
            if ranks == 2 and not has_experts:
                # Padding only at the end of a row, where Transformer Engine up to 2.17.1 does not look for it.
                single = {"one sequence a row, CP2": ParallelConfig(context_parallel_size=2)}
                _compare_layouts(report, single, workspace, job, "as_packed")
            if ranks > 1 and not has_experts:
                # Long sequences on two ranks, whose attention takes the group of each row.
                shared = {"rows that ranks share": ParallelConfig()}
                _compare_layouts(report, shared, workspace, job, DYNAMIC)
    return report


def _compare_layouts(
    report: BenchReport, presets: dict[str, ParallelConfig], workspace: Workspace, job: Runtime, schedule: str
) -> None:
    has_experts = any(one.expert_parallel_size > 1 for one in presets.values())
    data = on_rank_0(lambda: str(_write(workspace, is_single=schedule in ("as_packed", DYNAMIC))))
    start = workspace.folder / f"{schedule}-{'experts' if has_experts else 'dense'}"
    dtype = "bfloat16" if job.device.type == "cuda" else "float32"
    model = replace(small_model(8, 128, _VOCABULARY, dtype=dtype), ffn_hidden_size=256, num_attention_heads=8)
    experts: dict[str, Any] = {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2} if has_experts else {}
    model = replace(model, num_query_groups=4, **experts)

    def train(parallel: ParallelConfig, *, saves: bool = False) -> list[float]:
        """Return the losses of a few steps from the checkpoint in `start`, which is made first where it `saves` one."""
        parallel_state.destroy_model_parallel()
        layout = runtime.join(parallel, job.world_size, shares_rows=schedule == DYNAMIC)
        of: dict[str, Any] = {"vocab_size": _VOCABULARY, "optimizer": OptimizerConfig(warmup_steps=1)}
        of |= {"pad_rows_to": 2 * _PACK if parallel.static_rows else None, "max_sequences": 2 * _PACK}
        step = MegatronStep(model, parallel, layout, device=job.device, **of)
        if saves:
            give_state(step)
            CheckpointWriter(start, step, keep=1, in_background=False).start(RunPosition(1, LoaderState(0)))
            layout = RankLayout(shares_rows=layout.shares_rows)
        else:
            load_checkpoint(start / "step-00000001", step)
        parts = 1 if saves else 4 if schedule == DYNAMIC else layout.cp_size  # half of the longest sequence, if shared
        settings = ScheduleConfig(schedule, 2 * _PACK // parts)
        with open_feed(Path(data), layout, job.device, settings, global_batch=8) as feed:
            return [step.train(batch).loss for batch in islice(feed, _STEPS)]

    # Every rank trains the whole batch: sums and counts are all multiplied by the ranks.
    whole = train(ParallelConfig(), saves=True)
    for name, parallel in presets.items():
        try:
            losses = train(parallel)
        except ConfigError as error:
            if not parallel.cuda_graphs:
                raise
            report.notes.append(f"{name}: {error.what}")
            continue
        differs = max(abs(loss / other - 1) for loss, other in zip(losses, whole, strict=True))
        title = f"{job.world_size} ranks, {name}"
        report.add(Figure(f"{title}: losses differ from one rank's", differs, "", at_most=_NEARNESS[model.dtype]))
        fits = not parallel.static_rows or parallel.pipeline_parallel_size > 1  # rows of any length
        if fits and not has_experts and schedule != DYNAMIC:
            parallel_state.destroy_model_parallel()
            findings = IsolationCheck(SftConfig(model=model, parallel=parallel), job).run()
            report.add(Figure(f"{title}: isolation findings", len(findings), "findings", at_most=0))
            report.notes += [f"{title}: {finding}" for finding in findings[:5]]


def _write(workspace: Workspace, *, is_single: bool) -> Path:
    if not is_single:
        return write_rows(workspace, _PACKS, _PACK, _VOCABULARY)
    path = workspace.folder / "single"
    with open_writer(path, format="memmap", pack_size=_PACK, overwrite=True) as writer:
        for number in range(_PACKS):
            size = _PACK - 4 * number - 2  # one token more than is trained, which is no multiple of 4
            ids = np.random.default_rng(number).integers(0, _VOCABULARY, size)
            mask = (np.arange(size) < size - 1).astype(np.uint8)
            writer.append(Pack(ids.astype(np.int32), mask, np.zeros(1, np.int32)))
    return path
