"""Sizes of the parts, and the shapes of models that they train."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from harness.bench.sizes import Sizes
from harness.config import compose_config
from harness.plan import ModelConfig, ParallelConfig, SftConfig, plan_memory

# Room for what the plan does not count: kernels' workspaces, the allocator's fragments, copies of logits.
_PLANNED_SHARE = 0.65
_PRESETS = {"1b": "llama3_2_1b", "8b": "llama3_8b"}
# A row is one pack; a step has `global_batch` rows of each data-parallel rank.
SIZES = {
    "full": Sizes(
        packs=96, pack_size=8192, max_tokens_per_rank=8192, global_batch=4, workers=(4,), steps=12, rounds=10
    ),
    "tiny": Sizes(
        size="tiny",
        packs=8,
        pack_size=256,
        max_tokens_per_rank=256,
        global_batch=2,
        workers=(0,),
        steps=3,
        rounds=2,
    ),
}
_TINY = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=2)
# Peaks of dense bfloat16 products, in TFLOP/s, by the first of these words in a GPU's name.
_PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "GH200": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
}


def allow_deterministic() -> None:
    """Let a later job of this process be deterministic: PyTorch reads this once, when it first multiplies."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def known_peak(name: str) -> float | None:
    """Return the bfloat16 TFLOP/s of a GPU by its name; None for one that is not in the table."""
    return next((peak for word, peak in _PEAKS.items() if word in name), None)


def shape_of(name: str, sizes: Sizes, device: torch.device, *, share: float = 1.0) -> ModelConfig:
    """Return a share of the layers of a model `1b` or `8b`, in the device's dtype; tiny sizes keep only its kind."""
    model = _TINY if sizes.is_tiny else compose_config("sft", SftConfig, [f"model={_PRESETS[name]}"]).model
    layers, dtype = int(share * model.num_layers), "bfloat16" if device.type == "cuda" else "float32"
    return replace(model, num_layers=layers, dtype=dtype, init_from=None)


def fit(
    model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int, ranks: int, row: int, device: torch.device
) -> ModelConfig:
    """Return the model with as many of its layers as a rank's GPU holds in training; on a CPU, the model."""
    if device.type != "cuda":
        return model
    room = _PLANNED_SHARE * torch.cuda.mem_get_info(device)[1]

    def needed(layers: int) -> int:
        of = replace(model, num_layers=layers)
        return plan_memory(of, parallel, vocab_size=vocab_size, dp_size=ranks, max_tokens_per_rank=row).total

    layers = max((n for n in range(1, model.num_layers + 1) if needed(n) <= room), default=1)
    return replace(model, num_layers=layers)
