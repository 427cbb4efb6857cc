"""Families with the Llama architecture: dense ones, each with at most one difference, and ones with experts.

Experts are chosen by a softmax router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import ExpertNames, Family, Refuse, read_softmax, require_known, write_softmax

# Llama 2 to 3.3.
LLAMA = Family("llama", "LlamaForCausalLM")
# Mistral models without a sliding window.
MISTRAL = Family("mistral", "MistralForCausalLM", window_setting="", write=lambda model: {"sliding_window": None})
# Qwen2 and Qwen2.5: biases of queries, keys and values.
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True, write=lambda model: {"use_sliding_window": False})
# Norms of queries and keys per head.
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", has_head_norms=True)


def _read_qwen3_moe(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    require_known(values, {"decoder_sparse_step": 1}, refuse)
    dense = values.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise refuse(f"dense layers {dense} that are not the first ones (mlp_only_layers) are not supported")
    normalize, inner = bool(values.get("norm_topk_prob", False)), int(values["moe_intermediate_size"])
    return read_softmax(values, normalize=normalize, inner=inner, dense_layers=len(dense))


def _write_qwen3_moe(model: Any) -> dict[str, Any]:
    return {
        "attention_bias": False,
        **write_softmax(model, inner="moe_intermediate_size"),
        "norm_topk_prob": model.router_normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.dense_layers)),
    }


# Qwen3 with many small experts instead of an MLP.
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    has_head_norms=True,
    experts=ExpertNames(),
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
)
_PLACE = "block_sparse_moe"
# Mistral's attention, and a few large experts.
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    window_setting="",
    has_experts_everywhere=True,
    experts=ExpertNames(
        router=f"{_PLACE}.gate.weight",
        gate=f"{_PLACE}.experts.{{}}.w1.weight",
        up=f"{_PLACE}.experts.{{}}.w3.weight",
        down=f"{_PLACE}.experts.{{}}.w2.weight",
    ),
    read=lambda values, refuse: read_softmax(values, normalize=True),
    write=lambda model: {"sliding_window": None, **write_softmax(model, number="num_local_experts")},
)
# One norm over the queries of all heads, and one over the keys of all heads.
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    has_head_norms=True,
    norms_span_heads=True,
    has_experts_everywhere=True,
    experts=ExpertNames(),
    read=lambda values, refuse: read_softmax(values, normalize=bool(values.get("norm_topk_prob", False))),
    write=lambda model: (
        {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": model.router_normalize} | write_softmax(model)
    ),
)
