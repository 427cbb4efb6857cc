"""GLM-4.7-Flash: the layers of DeepSeek-V3 under other names, without groups of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.plan.families import deepseek_v3
from harness.plan.families.base import Refuse


def _read(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    rope = values.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if part != 1:
        raise refuse(f"rotary positions in {part:g} of a head's rotary part are not supported")
    kinds = values.get("mlp_layer_types")
    dense = int(values.get("first_k_dense_replace", 1)) if kinds is None else list(kinds).count("dense")
    if kinds is not None and any(kind != "dense" for kind in kinds[:dense]):
        raise refuse("dense layers that are not the first ones are not supported")
    return deepseek_v3.FAMILY.read({**values, "first_k_dense_replace": dense}, refuse)


def _write(model: Any) -> dict[str, Any]:
    sparse = model.num_layers - model.dense_layers
    return {**deepseek_v3.FAMILY.write(model), "mlp_layer_types": ["dense"] * model.dense_layers + ["sparse"] * sparse}


FAMILY = replace(
    deepseek_v3.FAMILY, name="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", read=_read, write=_write
)
