"""A small random Llama with a tokenizer and a chat template, as transformers saves one."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.prep.tokenize.bpe import train_bpe

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 3, "Pack my box with five dozen liquor jugs. " * 3]
VOCAB = 280


def save_chat_model(folder: Path, *, layers: int, positions: int, spread: float) -> Path:
    """Save a model whose weights have this standard deviation."""
    import transformers

    train_bpe(TEXTS, vocab_size=VOCAB, folder=folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=positions,
        initializer_range=spread,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
