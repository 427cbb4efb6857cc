"""Small random models with a tokenizer and a chat template, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.prep.tokenize.bpe import train_bpe

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 3, "Pack my box with five dozen liquor jugs. " * 3]
VOCAB = 280
# Sizes of layers with the gated delta rule, every second of a model.
_DELTAS = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 4}
_DELTAS |= {"linear_value_head_dim": 16, "full_attention_interval": 2}


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
    return _save(folder, "qwen3", "Qwen3", texts, num_hidden_layers=2)


def save_nemotron3(folder: Path, *, texts: list[str]) -> Path:
    """Save a Nemotron 3 Nano of four layers with its published template and a tokenizer of these texts."""
    scans = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes = {**scans, **experts, "moe_shared_expert_intermediate_size": 64, "num_hidden_layers": None}
    return _save(folder, "nemotron_3_nano", "NemotronH", texts, hybrid_override_pattern="M*ME", **sizes)


def save_qwen3_5(folder: Path, *, texts: list[str]) -> Path:
    """Save the text model of a Qwen3.5 with its published template and a tokenizer of these texts."""
    return _save(folder, "qwen3_5_think", "Qwen3_5Text", texts, num_hidden_layers=2, **_DELTAS)


def save_qwen3_next(folder: Path, *, texts: list[str]) -> Path:
    """Save a Qwen3-Next of two layers and a tokenizer of these texts; its template is that of Qwen3.

    The published one of its thinking model opens the thought in the prompt, as that of Qwen3.5 does.
    """
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes = {**_DELTAS, **experts, "shared_expert_intermediate_size": 64}
    return _save(folder, "qwen3", "Qwen3Next", texts, num_hidden_layers=2, **sizes)


def _save(folder: Path, template: str, family: str, texts: list[str], **sizes: Any) -> Path:
    import transformers

    from tests.samples.stock_templates import stock_templates, tokenizer_for

    # The template's own words too, which are most of a chat with tools.
    text = stock_templates()[template]
    tokenizer_for(text, folder, texts=[*texts, text], size=900)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **sizes,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
