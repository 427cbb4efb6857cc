"""Build Megatron-Core's GPTModel from a `ModelConfig`: `gpt.py` builds it, with packed attention, RMSNorm and LoRA."""

from __future__ import annotations

from harness.megatron.model import lora
from harness.megatron.model.gpt import build_chunks, build_model, use_transformer_engine
from harness.megatron.model.lora import check_same_adapters

__all__ = ["build_chunks", "build_model", "check_same_adapters", "lora", "use_transformer_engine"]
