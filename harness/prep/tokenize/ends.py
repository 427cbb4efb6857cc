"""The tokens that end an answer: as the preparation recorded them, or read off a tokenizer and its template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.errors import ConfigError
from harness.prep.tokenize.config import TokenizerConfig
from harness.prep.tokenize.renderer import Renderer

# Ends of published templates, for a template that cannot be asked because it refuses a plain question.
_KNOWN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>", "</s>")


def end_tokens(tokenizer: Any, mask: Mapping[str, str] | None = None) -> list[int]:
    """Return the ids that end an answer, ascending; empty if none is known.

    These are the end token of the tokenizer, and the tokens that end a turn in the chat template.

    Args:
        tokenizer: of transformers.
        mask: `Provenance.mask` of the data, whose `end_tokens` are taken if there are any; otherwise the template is
            asked what it writes after an answer. (Data that records none was made without tools.)

    Raises:
        ConfigError: a recorded token is not one token of this tokenizer.
    """
    texts = _read_list((mask or {}).get("end_tokens", "[]")) or _template_ends(tokenizer)
    ids = {_token_id(tokenizer, text) for text in texts}
    return sorted(ids | ({tokenizer.eos_token_id} - {None}))


def _read_list(recorded: str) -> list[str]:
    try:
        texts = json.loads(recorded)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"the dataset records the end tokens {recorded[:100]!r}, expected a JSON list of texts",
            where="manifest.json, provenance.mask.end_tokens",
            fix="copy the dataset again, or write it again with `harness prepare`",
        )
    return texts


def _token_id(tokenizer: Any, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    known = tokenizer.get_added_vocab().get(text, ids[0] if len(ids) == 1 else None)
    if known is None:
        what = f"the end token {text!r} is {len(ids)} tokens of this tokenizer"
        raise ConfigError(what, where=str(tokenizer.name_or_path), fix="name the tokenizer that made the dataset")
    return int(known)


def _template_ends(tokenizer: Any) -> list[str]:
    """Return the special token that the template writes after an answer, or else before the question after it."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return []
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    settings, where = TokenizerConfig(mask="all"), str(tokenizer.name_or_path)
    renderer = Renderer(template, tokenizer.special_tokens_map, settings, sorted(special), where=where)
    has_written, token = renderer.token_after_answer()
    if has_written:
        return [token] if token else []
    return [token for token in _KNOWN_ENDS if token in template and token in special]
