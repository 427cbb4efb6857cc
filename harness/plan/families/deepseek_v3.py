"""DeepSeek-V3 and R1, and Moonlight: multi-latent attention, and experts chosen by biased sigmoid scores in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan.families import latent
from harness.plan.families.base import Family, Refuse


def read_router(values: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return settings of a router by biased sigmoid scores in groups."""
    for name, known in {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}.items():
        if values.get(name, known) != known:
            raise refuse(f"{name} {values[name]!r} is not supported ({known!r} is)")
    if not values.get("norm_topk_prob", True):
        raise refuse("sigmoid scores that are not normalized are not supported: Megatron-Core always normalizes them")
    groups, top = int(values.get("n_group") or 1), int(values.get("topk_group") or 1)
    chosen = int(values["num_experts_per_tok"])
    if groups > top and chosen // top != FAMILY.ranks_groups_by:
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
    """Return the values that `read_router` reads, and the number of layers that predict further tokens."""
    return {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": model.router_groups or 1,
        "topk_group": model.router_top_groups or 1,
        "num_nextn_predict_layers": model.mtp_layers,
    }


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    has_latents=True,
    ranks_groups_by=2,
    predicts_further=True,
    experts=latent.expert_names(bias="mlp.gate.e_score_correction_bias"),
    read=lambda values, refuse: latent.read(values, refuse) | read_router(values, refuse),
    write=lambda model: latent.write(model) | write_router(model),
)
