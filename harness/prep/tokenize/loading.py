"""Load a tokenizer from a folder or from the Hugging Face hub; a name that is neither is refused at once.

transformers retries for many seconds where a hub does not answer, so the hub is asked once before it is loaded from.
HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count as for Hugging Face's own tools.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, reason_of_memory
from harness.paths import near_paths
from harness.storage.inputs import NO_MODEL, ask_hub

_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"{_PART}(/{_PART})?")
_FILES = ("tokenizer.json", "tokenizer_config.json")
_OF_CODE = "its Python code is never run: remove auto_map from tokenizer_config.json if tokenizer.json is complete"
_FIX = "set tokenizer.name to a folder with tokenizer.json, or a hub id"


def load_tokenizer(name: str) -> Any:
    try:
        with _without_advice():
            from transformers import AutoTokenizer
    except ImportError as error:
        what, fix = f"tokenizing requires `transformers`: {error}", "pip install 'megatron-sft-harness[tokenize]'"
        raise ConfigError(what, where=sys.executable, fix=fix) from error
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(re.search("token|vocab|piece|tekken", path.name) for path in folder.iterdir()):
        fix = f"copy tokenizer.json and tokenizer_config.json of its model into it, or {_FIX}"
        raise ConfigError("the folder has no tokenizer", where=name, fix=fix)
    source = str(folder) if folder.is_dir() else _hub_source(name, folder)
    try:
        # A folder's own code is never run. Left unset, the library would ask on standard input.
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the library raises almost anything for a damaged folder
        if reason_of_memory(error) is not None:
            raise MemoryError(f"the tokenizer {name} cannot be loaded") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = _OF_CODE if "trust_remote_code" in str(error) else _FIX
        raise ConfigError(f"the tokenizer cannot be loaded: {reason}", where=name, fix=fix) from error
    if not getattr(tokenizer, "is_fast", False):
        what = "it is not a fast tokenizer, so its tokens cannot be mapped to characters of the text"
        raise ConfigError(what, where=name, fix="use a tokenizer with a tokenizer.json")
    if not len(tokenizer):
        raise ConfigError("the tokenizer has no tokens", where=name, fix=_FIX)
    return tokenizer


def _hub_source(name: str, folder: Path) -> str:
    """Return a hub id, or its folder in the hub's cache where the hub does not answer; refuse any other name."""
    if folder.exists():
        fix = f"set tokenizer.name={folder.parent}" if "token" in folder.name else _FIX
        raise ConfigError("the tokenizer's name is a file, not a folder", where=name, fix=fix)
    if not _HUB_ID.fullmatch(name) or name.endswith(".json"):
        raise ConfigError("the tokenizer folder does not exist", where=name, fix=_fix(folder))
    from huggingface_hub import constants, try_to_load_from_cache

    files = [file for file in (try_to_load_from_cache(name, file) for file in _FILES) if isinstance(file, str)]
    cached = str(Path(files[0]).parent) if files else ""
    if constants.HF_HUB_OFFLINE:
        if cached:
            return cached
        what = "the tokenizer folder does not exist, and HF_HUB_OFFLINE disables hub ids"
        raise ConfigError(what, where=name, fix=_fix(folder))
    if not (problem := ask_hub(name)):
        return name
    if cached and problem != NO_MODEL:
        return cached
    fix = "a private one requires HF_TOKEN"
    if problem != NO_MODEL:
        fix = f"for a hub id, `hf download {name}` where there is a network, and use that folder"
    raise ConfigError(f"the tokenizer folder does not exist, and {problem}", where=name, fix=f"{_fix(folder)}; {fix}")


def _fix(folder: Path) -> str:
    """Return what to do, with the folder whose name is nearest if one is near."""
    return f"check tokenizer.name: {near_paths(folder) or _FIX}"


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Import transformers without its advice to install PyTorch, which tokenizing does not need."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
