"""Settings of a mask as the manifest of a dataset records them, for more data of the same kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from harness.errors import FormatError, HarnessError
from harness.prep.tokenize.config import TokenizerConfig

# Setting of each recorded rule that a template does not decide by itself.
_RULES = {"marks": "generation", "assistant_turns": "assistant_turns", "all": "all"}
_PARTS = ("reasoning", "tool_calls", "end_of_turn")
_TEXTS = ("history", "train_on", "end_of_last_turn")
_MASKING = ("mask", *_TEXTS, *(f"train_{part}" for part in _PARTS))


def as_prepared(config: TokenizerConfig, folder: str = "") -> tuple[TokenizerConfig, Path | None]:
    """Return settings that mask more conversations as those of the dataset beside a tokenizer were masked.

    They stay as they are if one of them asks for another mask than the default or for another template, if the
    tokenizer is not the one in the folder of a prepared dataset, or if that dataset does not record its mask.

    Args:
        folder: of the tokenizer; `config.name` if empty.

    Returns:
        the settings, and the dataset that they were read from; None if there is none.

    Raises:
        FormatError: the manifest of that dataset is damaged.
    """
    # Takes a while, which a tokenizer without a dataset does not need.
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
            return replace(config, **_settings(origin.mask, dataset)), dataset
    return config, None


def _settings(mask: Mapping[str, str], dataset: Path) -> dict[str, Any]:
    """Return the settings that make a mask with these facts."""
    settings: dict[str, Any] = {name: mask[name] for name in _TEXTS if name in mask}
    if mask.get("rule") in _RULES:
        settings["mask"] = _RULES[mask["rule"]]
    try:
        untrained = json.loads(mask.get("untrained", "[]"))
        settings |= {f"train_{part}": part not in untrained for part in _PARTS}
        TokenizerConfig(**settings)
    except (ValueError, TypeError, HarnessError) as error:
        what = f"the dataset records a mask that is not known: {error}"
        raise FormatError(what, where=str(dataset), fix="use the program's version that wrote it") from None
    return settings
