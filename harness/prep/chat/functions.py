"""A user's own function as a schema: `module:function` makes a record of the schema `messages` from any other."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.prep.chat.records import BadReason
from harness.prep.chat.values import BadRecordError, show

SCHEMA = "source.schema"


@dataclass(frozen=True)
class RecordFunction:
    """A user's function: takes a record and returns one with `messages`, or None to leave it out."""

    name: str
    digest: str
    call: Callable[[dict[str, Any]], object]

    def record_of(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the record that the function makes; raise BadRecordError where it fails or returns something else."""
        try:
            made = self.call(dict(record))
        except (Exception, SystemExit) as error:
            detail = f"{self.name} raised {type(error).__name__}: {error}"
            raise BadRecordError(BadReason.FUNCTION_FAILED, detail) from error
        if made is None:
            raise BadRecordError(BadReason.OMITTED, f"{self.name} returned None")
        if not isinstance(made, Mapping):
            detail = f'{self.name} returned {show(made)}, expected {{"messages": [...]}}'
            raise BadRecordError(BadReason.FUNCTION_FAILED, detail)
        return made


@lru_cache(maxsize=8)
def load_function(name: str) -> RecordFunction:
    """Import a function, once a process; modules in the working folder are found too."""
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
    return RecordFunction(name, hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16], call)
