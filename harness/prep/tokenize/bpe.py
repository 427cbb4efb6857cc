"""Train a byte-level BPE with a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from harness.errors import ConfigError, PrepError
from harness.prep.tokenize.config import INSTALL_FIX

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The end of a turn is trained, so that the model learns to stop; the line break after it is not.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}"
    "{{- message['content'] + '<|im_end|>' }}"
    "{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)


def train_bpe(texts: Iterable[str], folder: Path, *, vocab_size: int) -> None:
    """Train a tokenizer and save it as a Hugging Face tokenizer folder; the same texts give the same tokenizer.

    Args:
        texts: training text.
        folder: receives tokenizer.json and tokenizer_config.json, which holds the chat template.
        vocab_size: number of tokens, including three special ones; a small text gives fewer.

    Raises:
        PrepError: there are no texts.
        ConfigError: the `tokenizers` library is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise ConfigError("training a tokenizer needs the `tokenizers` library", fix=INSTALL_FIX) from error
    remaining = iter(texts)
    first = next(remaining, None)
    if first is None:
        raise PrepError("there is no text to train a tokenizer on", fix="check source.path and the bad records")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain([first], remaining), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
