"""DeepSeek-V2 and V2-Lite: multi-latent attention, shared experts, and a softmax router without normalization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families import latent
from harness.plan.families.base import Family, Refuse


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    if (method := values.get("topk_method") or "greedy") != "greedy":
        raise refuse(
            f"experts chosen by topk_method {method!r} are not supported: Megatron-Core ranks a group by the sum of "
            "its best experts, not by the best one"
        )
    if values.get("norm_topk_prob"):
        raise refuse("norm_topk_prob is set, which DeepSeek-V2 in transformers ignores")
    return {**latent.read(values, refuse), "router_score": "softmax", "router_normalize": False, "expert_bias": False}


def _write(model: Any) -> dict[str, Any]:
    return {**latent.write(model), "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1}


FAMILY = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", has_latents=True, experts=latent.expert_names(), read=_read, write=_write
)
