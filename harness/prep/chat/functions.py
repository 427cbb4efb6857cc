"""A user's own function as a schema: `module:function` makes a record of the schema `messages` from any other."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, PrepError
from harness.prep.chat.records import BadReason
from harness.prep.chat.values import BadRecordError, show

SCHEMA = "source.schema"


def call_function(name: str, digest: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record that a user's function makes; raise BadRecordError where it makes none.

    It takes a record and returns one with `messages`, or None to leave it out; PrepError if it is of another digest.
    """
    call, found = load_function(name)
    if found != digest:
        what = f"the source file of {name} changed after the preparation started"
        raise PrepError(what, where=SCHEMA, fix="start again with the same, unchanged copy on all machines")
    try:
        made = call(dict(record))
    except (Exception, SystemExit) as error:
        raise BadRecordError(BadReason.FUNCTION_FAILED, f"{name} raised {type(error).__name__}: {error}") from error
    if made is None:
        raise BadRecordError(BadReason.OMITTED, f"{name} returned None")
    if not isinstance(made, Mapping):
        detail = f'{name} returned {show(made)}, expected {{"messages": [...]}}'
        raise BadRecordError(BadReason.FUNCTION_FAILED, detail)
    return made


@lru_cache(maxsize=8)
def load_function(name: str) -> tuple[Callable[[dict[str, Any]], object], str]:
    """Import a function, once a process, also from the working folder; return it and the digest of its source file."""
    module_name, _, function = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # where a program that pip installs does not look
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module can raise anything, and be a script
        what = f"the module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        fix = "specify an importable module, such as chats:to_messages for chats.py in the working folder"
        raise ConfigError(what, where=SCHEMA, fix=fix) from error
    call: Any = getattr(module, function, None)
    if not callable(call):
        known = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ConfigError(f"{module_name} has no function {function!r}", where=SCHEMA, fix=f"its functions: {known}")
    file = getattr(module, "__file__", None)
    if not file or not os.path.isfile(file):  # noqa: PTH113 - a text of Python's
        what = f"{module_name} has no source file, whose hash identifies the function"
        raise ConfigError(what, where=SCHEMA, fix="write a module that calls the function")
    return call, hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
