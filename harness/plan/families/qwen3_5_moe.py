"""The text model of a Qwen3.5 with experts: that of Qwen3-Next, and its rows of the delta rule apart."""

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
    # transformers and the published models give an MLP no size, and every layer experts.
    return read_layers(values, refuse) | read_experts(values, normalize=True)


def _write(model: Any) -> dict[str, Any]:
    return write_layers(model) | write_experts(model)


FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    **LAYERS,
    has_experts_everywhere=True,
    experts=EXPERTS,
    standard=lambda values: {"intermediate_size": values["moe_intermediate_size"], **values},
    unwritten=("intermediate_size",),
    read=_read,
    write=_write,
)
