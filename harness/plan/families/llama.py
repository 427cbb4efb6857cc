"""Llama 2 to 3.3: the shape that the others differ from."""

from __future__ import annotations

from harness.plan.families.base import Family

FAMILY = Family("llama", "LlamaForCausalLM")
