"""Lengths of global batches from chats alone to documents of a million tokens."""

from __future__ import annotations

import numpy as np

from harness.records import Int64Array
from harness.schedule import SequenceCost

# Llama 3 8B in bfloat16 on H100s whose keys and values cross the network: a token costs 16 GFLOP.
COST = SequenceCost(linear=1.0, quadratic=262_144 / 16e9, exchange=1 / 16)
TOKENS = 16_384
KINDS = ("chats", "chats and 1% documents", "a tail to 1M tokens", "chats and documents")


def lengths_of(kind: str, num: int, longest: int) -> Int64Array:
    """Return model tokens of sequences, int64 [num], none above `longest`."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(900), 1.0, num), 8, TOKENS)
    if kind == "chats and 1% documents":
        lengths[: num // 100] = rng.integers(32_768, 131_072, num // 100)
    elif kind == "a tail to 1M tokens":
        lengths = np.clip(rng.lognormal(np.log(4000), 1.7, num), 16, 1 << 20)
    elif kind == "chats and documents":
        long = np.clip(rng.lognormal(np.log(40_000), 0.5, num), 8000, 262_144)
        lengths = np.where(rng.random(num) < 0.5, lengths, long)
    return np.minimum(lengths, longest).astype(np.int64)


def fewest_ranks(lengths: Int64Array, max_tokens: int = TOKENS) -> Int64Array:
    """Return the smallest power of two of ranks that hold each sequence, int64 [sequences]."""
    powers = 2 ** np.arange(20)
    return powers[np.searchsorted(max_tokens * powers, lengths)]
