"""TODO."""

from __future__ import annotations

from harness.megatron.model.gpt import build_chunks, build_model, use_transformer_engine
from harness.megatron.model.lora import check_same_adapters

__all__ = [
    "build_chunks",
    "build_model",
    "check_same_adapters",
    "use_transformer_engine",
]
