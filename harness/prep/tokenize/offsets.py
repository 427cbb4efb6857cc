"""Masks of tokens from spans of characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from harness.records import UInt8Array

# First and past-the-end character.
Span = tuple[int, int]


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> UInt8Array:
    """Mask the tokens with characters inside the spans.

    A token covers everything since the token before it, even if its own offsets leave white space out.

    Args:
        offsets: [L] first and past-the-end character of each token.
        spans: first and past-the-end character of each trained part.

    Returns:
        uint8 [L], token-aligned.
    """
    # Twice as fast as an array made of pairs.
    starts, ends = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2).T
    starts = np.minimum(starts, np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(ends)])[: len(starts)])
    mask = np.zeros(len(starts), np.uint8)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask


def mask_of_encoding(encoding: Any, num_tokens: int, text: str, spans: Sequence[Span]) -> UInt8Array:
    """Compute `token_mask` of an encoding by the tokenizers library, mostly without reading every token's offsets.

    Reading all offsets costs up to a third of tokenizing.

    Args:
        encoding: of `text`, with `num_tokens` tokens.

    Returns:
        uint8 [num_tokens], token-aligned.
    """
    mask = np.zeros(num_tokens, np.uint8)
    for start, end in spans:
        tokens = _tokens_of(encoding, num_tokens, len(text), start, end)
        if tokens is None:
            return token_mask(encoding.offsets, spans)
        mask[tokens] = 1
    return mask


def _tokens_of(encoding: Any, num_tokens: int, num_characters: int, start: int, end: int) -> slice | None:
    """Return the tokens of a span that begins and ends at token boundaries; None if it does not."""
    first = encoding.char_to_token(start)
    if start >= end or first is None:
        return None
    following = num_tokens if end == num_characters else encoding.char_to_token(end)
    # No character may be left out between the span and the next token: that token would cover it.
    if following is None or encoding.char_to_token(end - 1) is None:
        return None
    if following < num_tokens and encoding.token_to_chars(following)[0] != end:
        return None
    # Nor may there be a token without characters.
    last = encoding.token_to_chars(following - 1) if following > first else None
    return slice(first, following) if last is not None and last[0] < end else None
