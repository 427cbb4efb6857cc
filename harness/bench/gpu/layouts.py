"""Layouts that fit a number of ranks: the losses of one rank that trains everything, and isolation on each."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from harness.bench.figures import BenchReport, Figure
from harness.bench.sizes import Sizes
from harness.bench.step import give_state, open_feed, small_model, write_rows
from harness.bench.workspace import Workspace
from harness.config import compose_config
from harness.errors import ConfigError
from harness.formats import open_writer
from harness.loader import LoaderState, RankLayout
from harness.megatron.job import runtime
from harness.megatron.job.runtime import Runtime, on_rank_0
from harness.megatron.state.checkpoint import CheckpointWriter, load_checkpoint
from harness.megatron.step import MegatronStep
from harness.parity.isolation import IsolationCheck
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig, SftConfig
from harness.records import Pack
from harness.schedule import ScheduleConfig
from harness.train import Progress as RunPosition

# Presets of `configs/parallel` by the ranks that hold one copy of the model, or that show them best.
LAYOUTS = {
    1: ["data"],
    2: ["data", "data_distributed", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "ep2"],
    4: ["tp2_pp2", "tp2_cp2", "pp2_cp2", "cp4", "tp2_ep2"],
    8: ["tp2_pp2_cp2", "tp4_sp", "pp4_vpp2", "tp2_pp2_ep2", "data_distributed"],
}
_TINY_LAYOUTS = {2: ["data_distributed", "tp2_sp", "pp2", "cp2"]}
_VOCABULARY, _PACK, _PACKS, _STEPS = 256, 128, 16, 3
# Kernels and orders of addition differ between layouts.
_NEARNESS = {"float32": 1e-4, "bfloat16": 1e-2}


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
    if device == "cuda":
        presets["CUDA graphs"] = ParallelConfig(static_rows=True, cuda_graphs=True)
    for has_experts in sorted({preset.expert_parallel_size > 1 for preset in presets.values()}):
        chosen = {name: one for name, one in presets.items() if (one.expert_parallel_size > 1) == has_experts}
        # Kernels that add in another order each time would look like leaks; those of routers have no other ones.
        with runtime.start(sizes.device, deterministic=not has_experts) as job:
            _compare(report, chosen, workspace, job, "dp_balanced")
            if ranks == 2 and not has_experts:
                # Padding only at the end of a row, where Transformer Engine up to 2.17.1 does not look for it.
                single = {"one sequence a row, CP2": ParallelConfig(context_parallel_size=2)}
                _compare(report, single, workspace, job, "as_packed")
    return report


def _compare(
    report: BenchReport, presets: dict[str, ParallelConfig], workspace: Workspace, job: Runtime, schedule: str
) -> None:
    has_experts = any(one.expert_parallel_size > 1 for one in presets.values())
    data = on_rank_0(lambda: str(_write(workspace, is_single=schedule == "as_packed")))
    start = workspace.folder / f"{schedule}-{'experts' if has_experts else 'dense'}"
    model = _model(job.device, has_experts=has_experts)
    # Every rank trains the whole batch: sums and counts are all multiplied by the ranks.
    whole = _train(model, ParallelConfig(), job, data, start, schedule, saves=True)
    for name, parallel in presets.items():
        try:
            losses = _train(model, parallel, job, data, start, schedule, saves=False)
        except ConfigError as error:
            if not parallel.cuda_graphs:
                raise
            report.notes.append(f"{name}: {error.what}")
            continue
        differs = max(abs(loss / other - 1) for loss, other in zip(losses, whole, strict=True))
        title = f"{job.world_size} ranks, {name}"
        report.add(Figure(f"{title}: losses differ from one rank's", differs, "", at_most=_NEARNESS[model.dtype]))
        if (not parallel.static_rows or parallel.pipeline_parallel_size > 1) and not has_experts:
            parallel_state.destroy_model_parallel()
            findings = IsolationCheck.of_job(SftConfig(model=model, parallel=parallel), job).run()
            report.add(Figure(f"{title}: isolation findings", len(findings), "findings", at_most=0))
            report.notes += [f"{title}: {finding}" for finding in findings[:5]]


def _write(workspace: Workspace, *, is_single: bool) -> Path:
    if not is_single:
        return write_rows(workspace, _PACKS, _PACK, _VOCABULARY)
    path = workspace.folder / "single"
    with open_writer(path, format="memmap", pack_size=_PACK) as writer:
        for number in range(_PACKS):
            size = _PACK - 4 * number - 2  # one token more than is trained, which is no multiple of 4
            ids = np.random.default_rng(number).integers(0, _VOCABULARY, size)
            mask = (np.arange(size) < size - 1).astype(np.uint8)
            writer.append(Pack(ids.astype(np.int32), mask, np.zeros(1, np.int32)))
    return path


def _model(device: torch.device, *, has_experts: bool) -> ModelConfig:
    model = replace(small_model(8, 128, _VOCABULARY), ffn_hidden_size=256, num_attention_heads=8, num_query_groups=4)
    model = replace(model, dtype="bfloat16" if device.type == "cuda" else "float32")
    return replace(model, family="qwen3_moe", num_experts=4, experts_per_token=2) if has_experts else model


def _train(
    model: ModelConfig, parallel: ParallelConfig, job: Runtime, data: str, start: Path, schedule: str, saves: bool
) -> list[float]:
    """Return the losses of a few steps from the checkpoint in `start`, which is made first where it `saves` one."""
    parallel_state.destroy_model_parallel()
    layout = runtime.join(parallel, job.world_size)
    step = MegatronStep(
        model,
        parallel,
        layout,
        device=job.device,
        vocab_size=_VOCABULARY,
        optimizer=OptimizerConfig(warmup_steps=1),
        pad_rows_to=2 * _PACK if parallel.static_rows else None,
        max_sequences=2 * _PACK,
    )
    if saves:
        give_state(step)
        CheckpointWriter(start, step, keep=1, in_background=False).start(RunPosition(1, LoaderState(0)))
        layout = RankLayout()
    else:
        load_checkpoint(start / "step-00000001", step)
    capacity = 2 * _PACK // (1 if saves else layout.cp_size)
    with open_feed(Path(data), layout, job.device, ScheduleConfig(schedule, capacity), global_batch=8) as feed:
        return [step.train(batch).loss for batch in islice(feed, _STEPS)]
