"""Sizes of the parts, and the shapes of models that they train."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness.config import compose_config
from harness.plan import ModelConfig, ParallelConfig, SftConfig, plan_memory

# Room for what the plan does not count: kernels' workspaces, the allocator's fragments, copies of logits.
_PLANNED_SHARE = 0.65
_PRESETS = {"1b": "llama3_2_1b", "8b": "llama3_8b"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        is_tiny: shapes of models are shrunk to what a CPU trains in seconds.
        matrix: rows and columns of multiplied matrices.
        copied_bytes: of one copy and one all-reduce.
        row: tokens of a row, which is one pack.
        rows: rows of a step of each data-parallel rank.
        packs: of the dataset.
        steps, warm_up: measured steps, and those before them.
        workers: of the loader.
        checked: tokens of the row that backends are compared on.
        rounds: turns of the sides that take turns microbatch by microbatch, and of checkpoints.
    """

    is_tiny: bool
    matrix: int
    copied_bytes: int
    row: int
    rows: int
    packs: int
    steps: int
    warm_up: int
    workers: int
    checked: int
    rounds: int

    def aim(self, target: float) -> float | None:
        """Return the target of a speed; None for tiny sizes, whose speed means nothing."""
        return None if self.is_tiny else target


SIZES = {
    "full": Sizes(
        is_tiny=False,
        matrix=8192,
        copied_bytes=1 << 30,
        row=8192,
        rows=4,
        packs=96,
        steps=12,
        warm_up=3,
        workers=4,
        checked=2048,
        rounds=10,
    ),
    "tiny": Sizes(
        is_tiny=True,
        matrix=256,
        copied_bytes=1 << 20,
        row=256,
        rows=2,
        packs=8,
        steps=3,
        warm_up=1,
        workers=0,
        checked=96,
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


@dataclass(frozen=True)
class Place:
    """Device, sizes and folder of a part.

    Attributes:
        device: auto, cpu or cuda.
        sizes: of all parts.
        folder: the part's own, for data; removed once the part is done.
    """

    device: str
    sizes: Sizes
    folder: Path


def allow_deterministic() -> None:
    """Let a later job of this process be deterministic: PyTorch reads this once, when it first multiplies."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def known_peak(name: str) -> float | None:
    """Return the bfloat16 TFLOP/s of a GPU by its name; None for one that is not in the table."""
    return next((peak for word, peak in _PEAKS.items() if word in name), None)


def shape_of(name: str, sizes: Sizes, device: torch.device) -> ModelConfig:
    """Return a model of the shape `1b` or `8b`, in the dtype of the device; tiny sizes keep only its kind."""
    model = _TINY if sizes.is_tiny else compose_config("sft", SftConfig, [f"model={_PRESETS[name]}"]).model
    return replace(model, dtype="bfloat16" if device.type == "cuda" else "float32", init_from=None)


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
