"""The text model of a dense Qwen3.5: the layers of Qwen3-Next with MLPs, and its rows of the delta rule apart."""

from __future__ import annotations

from harness.plan.families.base import Family
from harness.plan.families.qwen3_next import LAYERS, read_layers, write_layers

FAMILY = Family("qwen3_5_text", "Qwen3_5ForCausalLM", **LAYERS, read=read_layers, write=write_layers)
