"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from __future__ import annotations

from harness.plan.families.base import Family

FAMILY = Family("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True, write=lambda model: {"use_sliding_window": False})
