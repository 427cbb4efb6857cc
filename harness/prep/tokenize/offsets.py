"""Masks of tokens from spans of characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from harness.records import UInt8Array

# First and past-the-end character.
Span = tuple[int, int]


def token_mask(offsets: Sequence[Span], spans: Sequence[Span], weights: Sequence[int] = ()) -> UInt8Array:
    """Mask the tokens with characters inside the spans; one in several has the largest of their weights.

    A token covers everything since the token before it, even if its own offsets leave white space out.

    Args:
        offsets: [L] first and past-the-end character of each token.
        spans: first and past-the-end character of each trained part.
        weights: entry of the mask for each part; empty for 1.

    Returns:
        uint8 [L], token-aligned.
    """
    # Twice as fast as an array made of pairs.
    starts, ends = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2).T
    starts = np.minimum(starts, np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(ends)])[: len(starts)])
    mask = np.zeros(len(starts), np.uint8)
    for (start, end), weight in zip(spans, weights or [1] * len(spans), strict=True):
        np.maximum(mask, weight, out=mask, where=(starts < end) & (ends > start))
    return mask
