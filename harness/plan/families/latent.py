"""The DeepSeek and GLM families: multi-latent attention, and routed and shared experts.

GLM-4.5 has only the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.plan.families.base import ExpertNames, Family, Refuse, count_experts, require_known, require_rotated

_EXPERTS = ExpertNames(
    shared=tuple(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),  # type: ignore[arg-type]
)
_BIASED_EXPERTS = replace(_EXPERTS, bias="mlp.gate.e_score_correction_bias")
# Settings of latent attention that have the same name in config.json.
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_latent(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return the settings of latent attention and of the experts."""
    heads, groups = int(values["num_attention_heads"]), values.get("num_key_value_heads")
    if groups not in (None, heads):
        raise refuse(f"{groups} key-value heads and {heads} heads of latent attention are not supported")
    query = values.get("q_lora_rank")
    return {
        "num_query_groups": heads,
        "head_dim": None,
        "q_lora_rank": None if query is None else int(query),
        **{name: int(values[name]) for name in _SIZES},
        **read_experts(values, refuse),
    }


def read_experts(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return the settings of routed and shared experts, and the number of leading dense layers."""
    require_known(values, {"moe_layer_freq": 1}, refuse)
    inner = int(values["moe_intermediate_size"])
    return {
        "num_experts": count_experts(values),
        "experts_per_token": int(values["num_experts_per_tok"]),
        "expert_ffn_hidden_size": inner,
        "shared_ffn_hidden_size": int(values.get("n_shared_experts") or 0) * inner,
        "dense_layers": int(values.get("first_k_dense_replace") or 0),
        "router_scale": float(values["routed_scaling_factor"]),
    }


def write_latent(model: Any) -> dict[str, Any]:
    """Return the values that `read_latent` reads."""
    return {
        "attention_bias": False,
        "head_dim": model.qk_rope_head_dim,
        "q_lora_rank": model.q_lora_rank,
        **{name: getattr(model, name) for name in _SIZES},
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


def _read_v2(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    if (method := values.get("topk_method") or "greedy") != "greedy":
        raise refuse(
            f"experts chosen by topk_method {method!r} are not supported: Megatron-Core ranks a group by the sum of "
            "its best experts, not by the best one"
        )
    require_known(values, {"norm_topk_prob": False}, refuse)  # transformers ignores it
    return {**read_latent(values, refuse), "router_score": "softmax", "router_normalize": False, "expert_bias": False}


# DeepSeek-V2 and V2-Lite: a softmax router without normalization.
_V2_ROUTER = {"topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    has_latents=True,
    experts=_EXPERTS,
    read=_read_v2,
    write=lambda model: write_latent(model) | _V2_ROUTER,
)


def read_router(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return the settings of a router with biased sigmoid scores and groups of experts."""
    # Megatron-Core always normalizes sigmoid scores.
    known = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True, "norm_topk_prob": True}
    require_known(values, known, refuse)
    groups, top = int(values.get("n_group") or 1), int(values.get("topk_group") or 1)
    chosen = int(values["num_experts_per_tok"])
    if chosen == 1:
        raise refuse("num_experts_per_tok 1 is not supported: Megatron-Core does not normalize a single score")
    if groups > top and chosen // top != DEEPSEEK_V3.ranks_groups_by:
        raise refuse(
            f"{chosen} experts per token of {top} of {groups} groups are not supported: the model ranks a group by the "
            f"sum of its best 2 experts, and Megatron-Core by that of its best {chosen // top}"
        )
    grouped = groups > top
    return {
        "router_score": "sigmoid",
        "router_normalize": True,
        "router_groups": groups if grouped else None,
        "router_top_groups": top if grouped else None,
        "expert_bias": True,
    }


def write_router(model: Any) -> dict[str, Any]:
    """Return the values that `read_router` reads, and the number of MTP layers."""
    return {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": model.router_groups or 1,
        "topk_group": model.router_top_groups or 1,
        "num_nextn_predict_layers": model.mtp_layers,
    }


# DeepSeek-V3, R1 and Moonlight: experts chosen by biased sigmoid scores in groups.
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    has_latents=True,
    ranks_groups_by=2,
    predicts_further=True,
    experts=_BIASED_EXPERTS,
    read=lambda values, refuse: read_latent(values, refuse) | read_router(values, refuse),
    write=lambda model: write_latent(model) | write_router(model),
)
_ROTATED = 0.5


def _read_glm(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    require_rotated(values, _ROTATED, refuse)
    require_known({"attention_bias": False, **values}, {"attention_bias": True}, refuse)
    qk_norm = bool(values.get("use_qk_norm", False))
    return {"qk_norm": qk_norm, **read_experts(values, refuse), **read_router(values, refuse)}


def _write_glm(model: Any) -> dict[str, Any]:
    return {
        **write_experts(model),
        **write_router(model),
        "attention_bias": True,
        "partial_rotary_factor": _ROTATED,
        "use_qk_norm": model.has_head_norms,
    }


# GLM-4.5 and GLM-4.6: biases of queries, keys and values, half of each head rotated, and the experts of DeepSeek-V3.
# The models with 355 billion weights have query and key norms; GLM-4.5-Air does not.
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    has_qkv_bias=True,
    chooses_head_norms=True,
    rotated_part=_ROTATED,
    ranks_groups_by=2,
    predicts_further=True,
    experts=_BIASED_EXPERTS,
    read=_read_glm,
    write=_write_glm,
)


def _read_lite(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    require_rotated(values, 1.0, refuse)
    kinds = values.get("mlp_layer_types")
    dense = int(values.get("first_k_dense_replace", 1)) if kinds is None else list(kinds).count("dense")
    if kinds is not None and any(kind != "dense" for kind in kinds[:dense]):
        raise refuse("dense layers that are not the first ones (mlp_layer_types) are not supported")
    return DEEPSEEK_V3.read(values, refuse) | {"dense_layers": dense}


def _write_lite(model: Any) -> dict[str, Any]:
    sparse = model.num_layers - model.dense_layers
    return {**DEEPSEEK_V3.write(model), "mlp_layer_types": ["dense"] * model.dense_layers + ["sparse"] * sparse}


# GLM-4.7-Flash: the layers of DeepSeek-V3 under other names, without groups of experts.
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3, name="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", read=_read_lite, write=_write_lite
)
