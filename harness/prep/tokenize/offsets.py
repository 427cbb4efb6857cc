"""Compute token masks from character spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from harness.records import Int32Array, UInt8Array

# First and past-the-end character.
Span = tuple[int, int]

# A byte-level tokenizer spells a printing byte as its character, and all other bytes, in order, as characters from 256.
_PRINTING = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF = {
    **dict(zip(range(256, 512), sorted(set(range(256)) - set(_PRINTING)), strict=False)),
    **{byte: byte for byte in _PRINTING},
}


# A tokenizer that reproduces this text does not change ASCII text, except white space around added tokens.
_ASCII_PROBE = "a \n\t" + bytes(range(32, 127)).decode() + "  a\r\n B \n\n"


class TokenBytes:
    """Bytes of every token of a byte-level tokenizer, to compute masks without the tokenizer's offsets.

    The library takes a fifth less time if it does not compute offsets. The vocabulary maps each token, as the tokenizer
    spells it, to its id; added tokens are spelled in plain text.
    """

    def __init__(self, vocabulary: Mapping[str, int], added: Mapping[int, str]) -> None:
        self._bytes = [b""] * (1 + max(vocabulary.values()))
        for token, number in vocabulary.items():
            try:
                self._bytes[number] = token.translate(_BYTE_OF).encode("latin-1")
            except UnicodeEncodeError:
                self._bytes[number] = token.encode()
        for number, text in added.items():
            self._bytes[number] = text.encode()
        self._lengths = np.fromiter(map(len, self._bytes), np.int32, len(self._bytes))

    @classmethod
    def of(cls, tokenizer: Any, added: Mapping[int, str]) -> TokenBytes | None:
        """Return the token bytes of a tokenizer of the tokenizers library; None if its tokens are not bytes of text."""
        from tokenizers import decoders

        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            return None
        made = cls(tokenizer.get_vocab(), added)
        has_all_bytes = {bytes([byte]) for byte in range(256)} <= set(made._bytes)
        ids = tokenizer.encode(_ASCII_PROBE, add_special_tokens=False).ids
        return made if has_all_bytes and made._join(ids) == _ASCII_PROBE.encode() else None

    def mask(self, ids: Int32Array, text: str, spans: Sequence[Span], weights: Sequence[int] = ()) -> UInt8Array | None:
        """Return the `token_mask` of a text's token ids, or None if their bytes differ from the text.

        A tokenizer may normalize characters, or leave out the white space around an added token.
        """
        lengths = self._lengths[ids]
        ends = np.cumsum(lengths)
        is_ascii = text.isascii()
        if int(ends[-1]) != len(text) if is_ascii else self._join(ids.tolist()) != text.encode():
            return None
        starts = ends - lengths
        mask = np.zeros(len(ids), np.uint8)
        places = _byte_places(text, chain.from_iterable(spans))
        in_bytes = spans if is_ascii else zip(places, places, strict=True)
        for (start, end), weight in zip(in_bytes, weights or [1] * len(spans), strict=True):
            part = mask[np.searchsorted(ends, start, "right") : np.searchsorted(starts, end, "left")]
            np.maximum(part, weight, out=part)
        return mask

    def _join(self, ids: Sequence[int]) -> bytes:
        return b"".join([self._bytes[number] for number in ids])


def _byte_places(text: str, edges: Iterable[int]) -> Iterator[int]:
    """Yield the byte offsets of character offsets, encoding only the text between two edges."""
    at = place = 0
    for edge in edges:
        num_bytes = len(text[min(at, edge) : max(at, edge)].encode())
        at, place = edge, place + (num_bytes if edge > at else -num_bytes)
        yield place


def token_mask(offsets: Sequence[Span], spans: Sequence[Span], weights: Sequence[int] = ()) -> UInt8Array:
    """Mask the tokens with characters inside the spans; a token in several spans gets the largest of their weights.

    A token covers everything since the previous token, even if its own offsets leave out white space. `offsets` [L]
    contains the first and past-the-end character of each token, and `weights` the mask value for each span; if empty,
    all are 1. Returns uint8 [L], token-aligned.
    """
    # Twice as fast as building an array from pairs.
    starts, ends = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2).T
    starts = np.minimum(starts, np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(ends)])[: len(starts)])
    mask = np.zeros(len(starts), np.uint8)
    for (start, end), weight in zip(spans, weights or [1] * len(spans), strict=True):
        np.maximum(mask, weight, out=mask, where=(starts < end) & (ends > start))
    return mask
