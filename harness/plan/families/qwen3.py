"""Qwen3, dense: norms of the queries and keys of each head."""

from __future__ import annotations

from harness.plan.families.base import Family

FAMILY = Family("qwen3", "Qwen3ForCausalLM", has_head_norms=True)
