"""gpt-oss: attention with sinks, and windows in every other layer; experts with biases and clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import ExpertNames, Family, Refuse, read_softmax, require_known, write_softmax

_LIMIT, _ALPHA = 7.0, 1.702
# Default of transformers for a config.json without rotary embedding values.
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _kinds(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    layers = int(values["num_hidden_layers"])
    if (values.get("layer_types") or _kinds(layers)) != _kinds(layers):
        raise refuse("layer_types of windows other than every second one, the first included, are not supported")
    require_known(values, {"swiglu_limit": _LIMIT, "swiglu_alpha": _ALPHA, "attention_bias": True}, refuse)
    return {"sliding_window": int(values["sliding_window"]), **read_softmax(values, normalize=True)}


def _write(model: Any) -> dict[str, Any]:
    return {
        "attention_bias": True,
        "sliding_window": model.sliding_window,
        "layer_types": _kinds(model.num_layers),
        "swiglu_limit": _LIMIT,
        "rope_scaling": {"rope_type": "default"},  # without it, transformers scales positions by yarn
        **write_softmax(model, number="num_local_experts"),
    }


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    has_qkv_bias=True,
    has_biases=True,
    has_sinks=True,
    has_windows=True,
    swiglu_limit=_LIMIT,
    yarn_truncates=False,
    has_experts_everywhere=True,
    experts=ExpertNames(
        router="mlp.router.weight",
        gate="mlp.experts.gate_up_proj",
        up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        are_stacked=True,
    ),
    standard=lambda values: {**values, "rope_parameters": _YARN} if values.get("rope_parameters") is None else values,
    read=_read,
    write=_write,
)
