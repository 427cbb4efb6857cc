"""Settings that config.json files of models with latent attention and shared experts have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import ExpertNames, Refuse, count_experts

SHARED = ("gate_proj", "up_proj", "down_proj")


def expert_names(bias: str = "") -> ExpertNames:
    """Return the names of tensors of experts.

    Args:
        bias: name of the experts' bias; empty where there is none.
    """
    gate, up, down = (f"mlp.shared_experts.{name}.weight" for name in SHARED)
    return ExpertNames(bias=bias, shared=(gate, up, down))


def read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return settings of the attention, and the sizes of experts."""
    heads, groups = int(values["num_attention_heads"]), values.get("num_key_value_heads")
    if groups not in (None, heads):
        raise refuse(f"{groups} key-value heads and {heads} heads of latent attention are not supported")
    query = values.get("q_lora_rank")
    return {
        "num_query_groups": heads,
        "head_dim": None,
        "kv_lora_rank": int(values["kv_lora_rank"]),
        "q_lora_rank": None if query is None else int(query),
        "qk_nope_head_dim": int(values["qk_nope_head_dim"]),
        "qk_rope_head_dim": int(values["qk_rope_head_dim"]),
        "v_head_dim": int(values["v_head_dim"]),
        **read_experts(values, refuse),
    }


def read_experts(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return the sizes of experts, some of them shared, after some dense layers."""
    if values.get("moe_layer_freq", 1) != 1:
        raise refuse(f"experts in one of {values['moe_layer_freq']} layers are not supported")
    inner = int(values["moe_intermediate_size"])
    return {
        "num_experts": count_experts(values),
        "experts_per_token": int(values["num_experts_per_tok"]),
        "expert_ffn_hidden_size": inner,
        "shared_ffn_hidden_size": int(values.get("n_shared_experts") or 0) * inner,
        "dense_layers": int(values.get("first_k_dense_replace") or 0),
        "router_scale": float(values.get("routed_scaling_factor", 1.0)),
    }


def write(model: Any) -> dict[str, Any]:
    """Return the values that `read` reads."""
    return {
        "attention_bias": False,
        "head_dim": model.qk_rope_head_dim,
        "kv_lora_rank": model.kv_lora_rank,
        "q_lora_rank": model.q_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        **write_experts(model),
    }


def write_experts(model: Any) -> dict[str, Any]:
    """Return the values that `read_experts` reads."""
    inner = model.expert_size
    return {
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": inner,
        "n_shared_experts": model.shared_ffn_hidden_size // inner,
        "first_k_dense_replace": model.dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": model.router_scale,
    }
