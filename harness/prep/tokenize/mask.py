"""Which tokens of a text are trained: those that stand for the characters of its trained parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from harness.records import UInt8Array

# First and past-the-end character.
Span = tuple[int, int]


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> UInt8Array:
    """Which tokens stand for characters inside the spans.

    A token stands for everything since the token before it, also where its own offsets leave white space out.

    Args:
        offsets: [L] first and past-the-end character of each token.
        spans: first and past-the-end character of each part.

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
    """`token_mask` of what the tokenizers library made of a text, most often without asking for every token's place,
    which costs as much as a third of tokenising.

    Args:
        encoding: with `num_tokens` tokens, of `text`.

    Returns:
        uint8 [num_tokens], token-aligned.
    """
    mask = np.zeros(num_tokens, np.uint8)
    for start, end in spans:
        found = _tokens_of(encoding, num_tokens, len(text), start, end)
        if found is None:
            return token_mask(encoding.offsets, spans)
        mask[found] = 1
    return mask


def _tokens_of(encoding: Any, num_tokens: int, num_characters: int, start: int, end: int) -> slice | None:
    """The tokens of a span that begins and ends where tokens do; None where it does not."""
    first = encoding.char_to_token(start)
    if start >= end or first is None:
        return None
    behind = num_tokens if end == num_characters else encoding.char_to_token(end)
    # Between the span and the token behind it no character may be left out: the token would stand for it.
    if behind is None or encoding.char_to_token(end - 1) is None:
        return None
    if behind < num_tokens and encoding.token_to_chars(behind)[0] != end:
        return None
    # Nor may there be a token of no characters.
    before = encoding.token_to_chars(behind - 1) if behind > first else None
    return slice(first, behind) if before is not None and before[0] < end else None
