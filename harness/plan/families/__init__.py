"""Published model families, one file per layer architecture.

A family is data: its differences from the Llama architecture, functions to read and write its config.json, and the
names of its tensors. Models of other families are refused, and the error names the missing feature.
"""

from __future__ import annotations

from harness.plan.families import gpt_oss, latent, llama, nemotron_h, qwen3_next
from harness.plan.families.base import Family

__all__ = ["FAMILIES", "MISSING"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (llama, latent, gpt_oss, nemotron_h, qwen3_next)
    for family in vars(module).values()
    if isinstance(family, Family)
}

_HYBRID = "layers with a recurrent state in other arrangements than in nemotron_h and qwen3_next"
# Missing feature of each refused family, by `model_type`.
MISSING = {
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2"), _HYBRID),
    **dict.fromkeys(("lfm2_moe", "mamba", "mamba2", "zamba", "zamba2"), _HYBRID),
    "qwen2_vl": "the encoder of Qwen2-VL, which differs from that of qwen2_5_vl",
    "qwen2_5_omni": "its encoders, and three-dimensional positions of audio",
    "deepseek_v32": "sparse attention over the tokens that an indexer selects",
    "kimi_k2": "a model class in transformers (its layers are those of deepseek_v3)",
    "llama4": "chunked attention, and layers without positional encoding",
    "llama4_text": "chunked attention, and layers without positional encoding",
    "qwen2_moe": "experts together with query, key and value biases",
    "phimoe": "layer norms with biases, and its router, which selects one expert at a time",
}
