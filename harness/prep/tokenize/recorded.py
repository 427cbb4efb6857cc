"""End-of-answer tokens and mask settings that a dataset records for its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, FormatError, HarnessError
from harness.prep.tokenize.config import TokenizerConfig
from harness.prep.tokenize.renderer import Renderer
from harness.settings import load

# End tokens of published templates, for a template that cannot be tried because it refuses a plain question.
_KNOWN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>", "</s>")
_ANSWER = "qzjxkw"
# Value of `tokenizer.mask` for each recorded rule that does not follow from the template.
_RULES = {"marks": "generation", "assistant_turns": "assistant_turns", "all": "all"}
PARTS = ("reasoning", "tool_calls", "end_of_turn")
_TEXTS = ("history", "train_on", "end_of_last_turn")
_MASKING = ("mask", *_TEXTS, *(f"train_{part}" for part in PARTS))


def end_tokens(tokenizer: Any, mask: Mapping[str, str] | None = None) -> list[int]:
    """Return the ids that end an answer, ascending; empty if none is known.

    These are the tokenizer's end-of-sequence token and the tokens that end a turn, as recorded in a `Provenance.mask`,
    or else as the chat template writes them after an answer. (Data that records none was made without tools.)
    """
    recorded, where = (mask or {}).get("end_tokens", "[]"), "manifest.json, provenance.mask.end_tokens"
    what, fix = "the dataset records no list of end tokens", "copy the dataset again, or prepare it again"
    texts = load(list[str], recorded, where=where, fix=fix, what=what, error=ConfigError) or _template_ends(tokenizer)
    found = {tokenizer.eos_token_id} - {None}
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        known = tokenizer.get_added_vocab().get(text, ids[0] if len(ids) == 1 else None)
        if known is None:
            what = f"the end token {text!r} is {len(ids)} tokens of this tokenizer"
            raise ConfigError(what, where=str(tokenizer.name_or_path), fix="use the tokenizer of the dataset")
        found.add(int(known))
    return sorted(found)


def _template_ends(tokenizer: Any) -> list[str]:
    """Return the special tokens that end a turn in the template, or else the token that starts the next question."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return []
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = sorted(known | set(tokenizer.all_special_tokens), key=len, reverse=True)
    settings, where = TokenizerConfig(mask="all"), str(tokenizer.name_or_path)
    renderer = Renderer(template, tokenizer.special_tokens_map, settings, special, where=where)
    if renderer.end_tokens:
        return list(renderer.end_tokens)
    question = {"role": "user", "content": "?"}
    with suppress(ConfigError):  # some templates refuse a plain question
        text = renderer.prompt([question, {"role": "assistant", "content": _ANSWER}, question])
        _, is_written, after = text.rpartition(_ANSWER)
        if is_written:
            return [token for token in special if after.lstrip().startswith(token)][:1]
    return [token for token in _KNOWN_ENDS if token in template and token in special]


def as_prepared(config: TokenizerConfig, folder: str = "") -> tuple[TokenizerConfig, Path | None]:
    """Return settings that mask conversations in the same way as the dataset next to a tokenizer.

    Returns the given settings if they select a mask or a template other than the default, if the tokenizer is not in
    the folder of a prepared dataset, or if that dataset does not record its mask. Also returns the dataset, or None.
    Raises FormatError if the recorded mask is unknown.
    """
    # Imported here because it takes time that a tokenizer without a dataset does not need.
    from harness.formats import load_manifest

    tokenizer = Path(folder or config.name)
    defaults = {field.name: field.default for field in fields(TokenizerConfig)}
    asked = [name for name in ("chat_template", *_MASKING) if getattr(config, name) != defaults[name]]
    if not (folder or config.name) or asked or not tokenizer.is_dir():
        return config, None
    for dataset in sorted(path.parent for path in tokenizer.resolve().parent.glob("*/manifest.json")):
        manifest = load_manifest(dataset)
        origin = manifest.provenance if manifest is not None else None
        if origin is not None and origin.mask and (dataset / origin.tokenizer).resolve() == tokenizer.resolve():
            mask = origin.mask
            settings: dict[str, Any] = {name: mask[name] for name in _TEXTS if name in mask}
            settings |= {"mask": _RULES[mask["rule"]]} if mask.get("rule") in _RULES else {}
            try:
                untrained = json.loads(mask.get("untrained", "[]"))
                settings |= {f"train_{part}": part not in untrained for part in PARTS}
                return replace(config, **settings), dataset
            except (ValueError, TypeError, RecursionError, HarnessError) as error:
                what, fix = f"the dataset uses an unknown mask: {error}", "use the version of the program that wrote it"
                raise FormatError(what, where=str(dataset), fix=fix) from None
    return config, None
