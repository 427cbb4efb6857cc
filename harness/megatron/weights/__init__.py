"""Hugging Face weights: `mapping.py` converts them to Megatron's parameters and back, `pretrained.py` loads them."""

from __future__ import annotations

from harness.megatron.weights.mapping import ADAPTER, INDEX_FILE, Shard, global_parameters, to_hf
from harness.megatron.weights.pretrained import Pretrained, find_pretrained

__all__ = ["ADAPTER", "INDEX_FILE", "Pretrained", "Shard", "find_pretrained", "global_parameters", "to_hf"]
