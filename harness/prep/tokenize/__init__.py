"""TODO."""

from __future__ import annotations

from harness.prep.tokenize.bpe import train_bpe
from harness.prep.tokenize.tokenizer import ChatTokenizer, TokenizerConfig, end_tokens, fit_to_pack, tokenizer_hash

__all__ = [
    "ChatTokenizer",
    "TokenizerConfig",
    "end_tokens",
    "fit_to_pack",
    "tokenizer_hash",
    "train_bpe",
]
