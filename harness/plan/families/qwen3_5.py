"""The text models of Qwen3.5, dense and with experts: those of Qwen3-Next, whose rows of the delta rule are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families.base import Family, Refuse
from harness.plan.families.qwen3_next import (
    EXPERTS,
    LAYERS,
    read_experts,
    read_layers,
    write_experts,
    write_layers,
)


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    return read_layers(values, refuse) | read_experts(values, normalize=True)


FAMILY = Family("qwen3_5_text", "Qwen3_5ForCausalLM", **LAYERS, read=read_layers, write=write_layers)
FAMILY_WITH_EXPERTS = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    **LAYERS,
    has_experts_everywhere=True,
    experts=EXPERTS,
    # No layer has an MLP, and config.json no size of one.
    standard=lambda values: {"intermediate_size": values["moe_intermediate_size"], **values},
    unwritten=("intermediate_size",),
    read=_read,
    write=lambda model: write_layers(model) | write_experts(model),
)
