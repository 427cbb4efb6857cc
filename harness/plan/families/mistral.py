"""Mistral: Llama's shape without its sliding window."""

from __future__ import annotations

from harness.plan.families.base import Family

FAMILY = Family("mistral", "MistralForCausalLM", window_setting="", write=lambda model: {"sliding_window": None})
