"""Qwen3-Next: the gated delta rule in three of four layers, gated attention, and experts with a gated shared expert.

The text models of Qwen3.5, dense or with experts, have the same layers, but do not group the delta rule's rows.

Source: Qwen team, "Qwen3-Next: Towards Ultimate Training & Inference Efficiency", 2025; the names of its config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import ExpertNames, Family, Refuse, read_softmax, require_rotated, write_softmax

_ROTATED = 0.25
_WORDS = {"D": "linear_attention", "*": "full_attention"}
# Constants of Megatron-Core's layers; a model with other values is refused.
_CONSTANTS = {"linear_conv_kernel_dim": 4, "attn_output_gate": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_SIZES = {
    "scan_num_heads": "linear_num_value_heads",
    "scan_head_dim": "linear_value_head_dim",
    "scan_state_dim": "linear_key_head_dim",
    "scan_num_groups": "linear_num_key_heads",
}


def _read_layers(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return the settings of the layers that Qwen3-Next and Qwen3.5 share."""
    for name, known in _CONSTANTS.items():
        if values.get(name) not in (known, None):
            raise refuse(f"{name} {values[name]!r} is not supported ({known!r} is)")
    require_rotated(values, _ROTATED, refuse)
    every = int(values.get("full_attention_interval") or 4)
    layers = range(1, int(values["num_hidden_layers"]) + 1)
    kinds = values.get("layer_types") or [_WORDS["D" if number % every else "*"] for number in layers]
    letters = {word: letter for letter, word in _WORDS.items()}
    if odd := set(kinds) - set(letters):
        raise refuse(f"layers of type {', '.join(map(str, sorted(odd)))} are not supported ({', '.join(letters)} are)")
    sizes = {ours: int(values[theirs]) for ours, theirs in _SIZES.items()}
    return {"layer_pattern": "".join(letters[kind] for kind in kinds), **sizes}


def _write_layers(model: Any) -> dict[str, Any]:
    """Return the values that `_read_layers` reads."""
    return {
        "attention_bias": False,
        "linear_conv_kernel_dim": _CONSTANTS["linear_conv_kernel_dim"],
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "layer_types": [_WORDS[letter] for letter in model.layer_pattern],
        "partial_rotary_factor": _ROTATED,
    }


def _read_experts(values: Mapping[str, Any], *, normalize: bool) -> dict[str, Any]:
    """Return the settings of experts."""
    shared = int(values["shared_expert_intermediate_size"])
    inner = int(values["moe_intermediate_size"])
    return {**read_softmax(values, normalize=normalize, inner=inner), "shared_ffn_hidden_size": shared}


def _write_experts(model: Any) -> dict[str, Any]:
    """Return the values that `_read_experts` reads."""
    experts = write_softmax(model, inner="moe_intermediate_size")
    return {**experts, "shared_expert_intermediate_size": model.shared_ffn_hidden_size}


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    return _read_layers(values, refuse) | _read_experts(values, normalize=bool(values.get("norm_topk_prob", True)))


def _write(model: Any) -> dict[str, Any]:
    others = {name: _CONSTANTS[name] for name in ("decoder_sparse_step", "mlp_only_layers")}
    return _write_layers(model) | _write_experts(model) | others | {"norm_topk_prob": model.router_normalize}


_EXPERTS = ExpertNames(
    shared=tuple(f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")),  # type: ignore[arg-type]
    shared_gate="mlp.shared_expert_gate.weight",
)
# Features of a `Family` that models of Qwen3-Next and Qwen3.5 share.
_LAYERS: dict[str, Any] = {
    "has_head_norms": True,
    "rotated_part": _ROTATED,
    "pattern_letters": "D*",
    "has_output_gate": True,
    "norms_add_one": True,
    # MTP layers, which transformers also omits, and the image encoder.
    "left_out": ("mtp.", "model.visual."),
}
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    **_LAYERS,
    groups_scan_rows=True,
    has_experts_everywhere=True,
    experts=_EXPERTS,
    read=_read,
    write=_write,
)
QWEN3_5 = Family("qwen3_5_text", "Qwen3_5ForCausalLM", **_LAYERS, read=_read_layers, write=_write_layers)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    **_LAYERS,
    has_experts_everywhere=True,
    experts=_EXPERTS,
    # No layer has an MLP, so config.json has no size for one.
    standard=lambda values: {"intermediate_size": values["moe_intermediate_size"], **values},
    unwritten=("intermediate_size",),
    read=lambda values, refuse: _read_layers(values, refuse) | _read_experts(values, normalize=True),
    write=lambda model: _write_layers(model) | _write_experts(model),
)
