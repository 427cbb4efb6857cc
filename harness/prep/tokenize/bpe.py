"""A byte-level BPE tokenizer with a chat template, trained on the conversations themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from harness.errors import ConfigError, PrepError

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Every byte is a token of its own before anything is merged.
MIN_VOCAB_SIZE = 256 + 3

# A turn's end is trained with it, so that the model learns to stop; the line break after it is not.
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
        texts: what to learn from.
        folder: receives tokenizer.json and tokenizer_config.json, which holds the chat template.
        vocab_size: tokens, the three special ones included; a small text gives fewer.

    Raises:
        PrepError: there are no texts.
        ConfigError: the `tokenizers` library is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise ConfigError("training a tokenizer takes the `tokenizers` library", fix=INSTALL_FIX) from error
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
    seen = _Seen(texts)
    tokenizer.train_from_iterator(seen, trainer)
    if not seen.count:
        raise PrepError("there is no text to train a tokenizer on", fix="check source.path and the bad records")
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


INSTALL_FIX = "pip install 'megatron-sft-harness[tokenize]'"


class _Seen:
    """Counts what passes through."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.count = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        for text in self._texts:
            self.count += 1
            yield text
