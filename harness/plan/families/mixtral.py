"""Mixtral: Mistral's attention, and a few large experts chosen by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import ExpertNames, Family, Refuse, read_softmax


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    return read_softmax(values, normalize=True)


def _write(model: Any) -> dict[str, Any]:
    return {
        "sliding_window": None,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.aux_loss,
        "intermediate_size": model.expert_size,
    }


_PLACE = "block_sparse_moe"
FAMILY = Family(
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
    read=_read,
    write=_write,
)
