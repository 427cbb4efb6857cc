"""Qwen3 with experts: the dense Qwen3 whose layers choose some of many small experts by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import ExpertNames, Family, Refuse, read_softmax


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    if values.get("decoder_sparse_step", 1) != 1:
        raise refuse(f"experts in one of {values['decoder_sparse_step']} layers are not supported")
    dense = values.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise refuse(f"dense layers {dense} that are not the first ones are not supported")
    normalize, inner = bool(values.get("norm_topk_prob", False)), int(values["moe_intermediate_size"])
    return read_softmax(values, normalize=normalize, inner=inner, dense_layers=len(dense))


def _write(model: Any) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.router_normalize,
        "router_aux_loss_coef": model.aux_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.dense_layers)),
    }


FAMILY = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", has_head_norms=True, experts=ExpertNames(), read=_read, write=_write
)
