"""Small random models with a tokenizer and a chat template, as transformers saves them."""

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


def save_qwen3(folder: Path, *, texts: list[str]) -> Path:
    """Save a Qwen3 with its published template and a tokenizer of these texts."""
    import transformers

    from tests.samples.stock_templates import stock_templates, tokenizer_for

    tokenizer_for(stock_templates()["qwen3"], folder, texts=texts)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=400,
        max_position_embeddings=1024,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
