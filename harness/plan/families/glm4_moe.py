"""GLM-4.5 and GLM-4.6: biases of queries, keys and values, half of each head rotated, and the experts of DeepSeek-V3.

The models of 355 billion weights have norms of queries and keys, GLM-4.5-Air has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families import deepseek_v3, latent
from harness.plan.families.base import Family, Refuse

_ROTATED = 0.5


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    rope = values.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", _ROTATED))
    if part != _ROTATED:
        raise refuse(f"rotary positions in {part:g} of each head are not supported ({_ROTATED:g} is)")
    if not values.get("attention_bias", False):
        raise refuse("queries, keys and values without biases are not supported")
    return {
        "qk_norm": bool(values.get("use_qk_norm", False)),
        **latent.read_experts(values, refuse),
        **deepseek_v3.read_router(values, refuse),
    }


def _write(model: Any) -> dict[str, Any]:
    return {
        **latent.write_experts(model),
        **deepseek_v3.write_router(model),
        "attention_bias": True,
        "partial_rotary_factor": _ROTATED,
        "use_qk_norm": model.has_head_norms,
    }


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    has_qkv_bias=True,
    chooses_head_norms=True,
    rotated_part=_ROTATED,
    ranks_groups_by=2,
    predicts_further=True,
    experts=latent.expert_names(bias="mlp.gate.e_score_correction_bias"),
    read=_read,
    write=_write,
)
