"""Train a byte-level BPE with a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from harness.errors import PrepError
from harness.prep.tokenize.templates.builtin import BUILT_IN, load_template, spelled_tokens

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = load_template("chatml")


def train_bpe(texts: Iterable[str], folder: Path, *, vocab_size: int, chat_template: str = "chatml") -> None:
    """Train a tokenizer and save it as a Hugging Face tokenizer folder; the same texts give the same tokenizer.

    The tokenizer has `vocab_size` tokens, including special tokens, or fewer for a small text. Special tokens come from
    a built-in chat template, or from the text of a Jinja file that spells them, such as `<|user|>`, or else from
    `chatml`. Raises PrepError if there are no texts.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    template = load_template(chat_template)
    tokens = BUILT_IN.get(chat_template) or spelled_tokens(template, end_of_text=END_OF_TEXT)
    special = list(dict.fromkeys([END_OF_TEXT, *([tokens.begin] if tokens.begin else []), *tokens.marks, *tokens.ends]))
    remaining = iter(texts)
    first = next(remaining, None)
    if first is None:
        what = "there is no text to train a tokenizer on"
        raise PrepError(what, where="source.path", fix="check source.path and the bad records")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain([first], remaining), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"bos_token": tokens.begin} if tokens.begin else {}),
        "eos_token": tokens.ends[-1],
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [*tokens.marks, *tokens.ends[:-1]],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
