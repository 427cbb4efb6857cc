"""OLMoE: experts in every layer, and one norm over the queries, and one over the keys, of all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import ExpertNames, Family, Refuse, read_softmax


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    if values.get("clip_qkv") is not None:
        raise refuse(f"queries, keys and values clipped to {values['clip_qkv']} are not supported")
    return read_softmax(values, normalize=bool(values.get("norm_topk_prob", False)))


def _write(model: Any) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "intermediate_size": model.expert_size,
        "norm_topk_prob": model.router_normalize,
        "router_aux_loss_coef": model.aux_loss,
    }


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    has_head_norms=True,
    norms_span_heads=True,
    norm_epsilon=1e-5,
    has_experts_everywhere=True,
    experts=ExpertNames(),
    read=_read,
    write=_write,
)
