"""Build Megatron-Core's GPTModel from a `ModelConfig`: `gpt.py`, with packed attention, RMSNorm, a router and LoRA."""

from __future__ import annotations

from harness.megatron.model import lora
from harness.megatron.model.fusions import slow_parts
from harness.megatron.model.gpt import build_chunks, build_model, engine_layers, use_transformer_engine
from harness.megatron.model.lora import check_same_adapters
from harness.megatron.model.mtp import decoder_layers, predicted_losses, reset_predictions
from harness.megatron.model.rotary import RowSelfAttention
from harness.megatron.model.router import expert_metrics, routers, show_sources, source_loads, weigh_tokens
from harness.megatron.model.user_buffers import open_user_buffers

__all__ = [
    "RowSelfAttention",
    "build_chunks",
    "build_model",
    "check_same_adapters",
    "decoder_layers",
    "engine_layers",
    "expert_metrics",
    "lora",
    "open_user_buffers",
    "predicted_losses",
    "reset_predictions",
    "routers",
    "show_sources",
    "slow_parts",
    "source_loads",
    "use_transformer_engine",
    "weigh_tokens",
]
