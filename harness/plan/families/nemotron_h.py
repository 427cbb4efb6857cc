"""Nemotron-H and Nemotron 3: layers of one part each (Mamba-2, attention without positions, an MLP, or experts).

Source: NVIDIA, "Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models", 2025.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.plan.families import latent
from harness.plan.families.base import ExpertNames, Family, Refuse, require_known

# Letters of `model.layer_pattern` by the layer types of transformers 5.
_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
# Constants of Megatron-Core's layers; a model with other values is refused.
_CONSTANTS = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": 4, "layer_norm_epsilon": 1e-5}
_CONSTANTS |= {"use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False, "residual_in_fp32": False}
# Accepted time step limits; infinity may be an object. Published models have 0.001, which only transformers applies.
_LIMITS = {"time_step_limit": 0, "mamba_dt_limit": 0, "time_step_min": 0.001, "mamba_dt_min": 0.001}
_SIZES = {
    "scan_num_heads": "mamba_num_heads",
    "scan_head_dim": "mamba_head_dim",
    "scan_state_dim": "ssm_state_size",
    "scan_num_groups": "n_groups",
}
_EXPERT_SIZES = {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
}


def _standard(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json under the names of other families, with its layers as `layer_pattern`."""
    kinds = values.get("layers_block_type") or values.get("layer_types")
    pattern = "".join(_LETTERS.get(kind, "?") for kind in kinds) if kinds else str(values["hybrid_override_pattern"])
    return {
        **values,
        "layer_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "rms_norm_eps": values["layer_norm_epsilon"],
        **dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling")),  # no part of a head is rotated
        "num_nextn_predict_layers": 0,  # MTP layers are left out
    }


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    require_known(values, _CONSTANTS, refuse)
    for name, accepted in _LIMITS.items():
        limits = limit if isinstance(limit := values.get(name) or 0, list) else [limit]
        if any(isinstance(one, int | float) and accepted < one < float("inf") for one in limits):
            raise refuse(f"{name} {limit} is not supported: Megatron-Core has no limit")
    pattern = values["layer_pattern"]
    settings = {"layer_pattern": pattern, **{ours: int(values[theirs]) for ours, theirs in _SIZES.items()}}
    if "E" not in pattern:
        return settings | {"num_experts": 0}
    return settings | {
        **{ours: int(values[theirs]) for ours, theirs in _EXPERT_SIZES.items()},
        "expert_latent_size": int(values.get("moe_latent_size") or 0),
        "router_scale": float(values["routed_scaling_factor"]),
        **latent.read_router(values, refuse),
    }


def _write(model: Any) -> dict[str, Any]:
    words = {letter: word for word, letter in reversed(_LETTERS.items())}
    config = {
        **_CONSTANTS,
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "layers_block_type": [words[letter] for letter in model.layer_pattern],
        "hybrid_override_pattern": model.layer_pattern,
        "attention_bias": False,
        "mlp_bias": False,
        "chunk_size": 128,
        "time_step_min": 1e-9,  # without it, transformers applies a limit
        "num_nextn_predict_layers": 0,
    }
    if not model.num_experts:
        return config
    return config | {
        **{theirs: getattr(model, ours) for ours, theirs in _EXPERT_SIZES.items()},
        "moe_intermediate_size": model.expert_size,
        "moe_latent_size": model.expert_latent_size or None,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": model.router_scale,
        "n_group": model.router_groups or 1,
        "topk_group": model.router_top_groups or 1,
    }


def _stored_name(name: str) -> str:
    """Return the name of a tensor in published weights, where a layer has one norm and one mixer of any kind."""
    name = re.sub(r"^model\.", "backbone.", name)
    name = re.sub(r"\.(?:input|post_attention)_layernorm\.", ".norm.", name)
    name = re.sub(r"\.(?:self_attn|mlp)\.", ".mixer.", name)
    return name.replace("backbone.embed_tokens.", "backbone.embeddings.").replace("backbone.norm.", "backbone.norm_f.")


FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    pattern_letters="M*-E",
    is_gated=False,
    rotated_part=0.0,
    ranks_groups_by=2,
    experts=ExpertNames(
        bias="mlp.gate.e_score_correction_bias",
        gate="",
        shared=("", "mlp.shared_experts.up_proj.weight", "mlp.shared_experts.down_proj.weight"),
    ),
    standard=_standard,
    read=_read,
    write=_write,
    stored_name=_stored_name,
    left_out=("mtp.",),
    unwritten=("hidden_act", "num_hidden_layers", "rms_norm_eps", "rope_theta"),
)
