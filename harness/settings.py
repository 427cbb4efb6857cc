"""Settings as dataclasses: their keys, explanations and values, without Hydra and without torch.

A settings dataclass explains its fields in the `Attributes:` section of its docstring. From there come `--cfg` of every
command, the generated reference of all settings and the nearest-name hints; `parse_settings` fills a dataclass from
`key=value` arguments for commands that do not compose YAML files.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.errors import ConfigError

T = TypeVar("T")
_PACKAGE = Path(__file__).resolve().parent
# A wheel carries the folder inside the package; a checkout has it beside the package.
CONFIGS = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), _PACKAGE)
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_REQUIRED = "required"


class Setting(NamedTuple):
    """One setting of a schema.

    Attributes:
        key: dotted name; `data.blend[].path` is a field of the records in the list `data.blend`.
        type: as users read it, such as `int`, `list of str` or `float or null`.
        default: plain value, or the text `required`.
        text: explanation from the docstring of the dataclass; empty if it has none.
    """

    key: str
    type: str
    default: Any
    text: str


def explain_settings(schema: type[Any], *, prefix: str = "") -> list[Setting]:
    """List every setting of a dataclass and of the dataclasses in it, in the order of the fields."""
    texts, hints, settings = attribute_texts(schema), typing.get_type_hints(schema), []
    for field in dataclasses.fields(schema):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            settings += explain_settings(hint, prefix=f"{key}.")
            continue
        default = _REQUIRED
        if field.default is not dataclasses.MISSING:
            default = to_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = to_plain(field.default_factory())
        settings.append(Setting(key, _type_name(hint), default, texts.get(field.name, "")))
        for inner in typing.get_args(hint):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                settings += explain_settings(inner, prefix=f"{key}[].")
    return settings


def attribute_texts(schema: type[Any]) -> dict[str, str]:
    """Read the `Attributes:` sections of a dataclass and its bases: field name to explanation, on one line."""
    texts: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        _, _, section = inspect.cleandoc(vars(kind).get("__doc__") or "").partition("Attributes:\n")
        names: list[str] = []
        for line in inspect.cleandoc("\n" + re.split(r"\n(?=\S)", section, maxsplit=1)[0]).splitlines():
            entry = _ENTRY.fullmatch(line)
            if entry:
                names = entry[1].split(", ")
                texts |= dict.fromkeys(names, entry[2])
            elif line.strip():
                texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that a misspelled one was meant to be, by the whole key or by its last part."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if not close:
        last = {key.rpartition(".")[2]: key for key in reversed(names)}
        close = [last[part] for part in difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.75)]
    return close[0] if close else None


def is_assignment(argument: str) -> bool:
    """Return True if an argument has the form `key=value`."""
    return _ASSIGNMENT.fullmatch(argument) is not None


def parse_settings(schema: type[T], arguments: Sequence[str], *, command: str, base: T | None = None) -> T:
    """Fill a dataclass from `key=value` arguments; of a key that is given twice the last one counts.

    Lists are `[a, b]` or `a,b`, records of a map are `key.name=value`, and `null` empties an optional setting.

    Args:
        command: printed in errors, such as `harness repack`.
        base: values of the settings that are not given; omit for the defaults of the dataclass.

    Raises:
        ConfigError: an argument is not `key=value`, a key is unknown, a value has another type, a required setting is
            missing, or the dataclass refuses a value.
    """
    keys = {setting.key: setting for setting in explain_settings(schema)}
    maps = [setting.key for setting in keys.values() if setting.type.startswith("map of")]
    tree: dict[str, Any] = {}
    for argument in arguments:
        match = _ASSIGNMENT.fullmatch(argument)
        if match is None:
            raise ConfigError(f"{argument!r} is not a setting", where=command, fix="write settings as key=value")
        key, value = match[1], match[2]
        if key not in keys and not any(key.startswith(f"{name}.") for name in maps):
            raise unknown_key(key, keys, command=command)
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    filled: T = _build(schema, tree, base, prefix="", command=command)
    return filled


def unknown_key(key: str, known: Iterable[str], *, command: str) -> ConfigError:
    """Make the error for a key that no setting has, with the nearest name."""
    near = nearest_name(key, known)
    return ConfigError(
        f"unknown setting {key!r}",
        where=command,
        fix=(f"did you mean {near}? " if near else "") + f"`{command} --cfg` prints every setting",
    )


def render_settings(config: Any) -> str:
    """Write a dataclass as YAML, with the explanation of every setting in a comment above it."""
    return "\n".join(_render(config, "")) + "\n"


def to_plain(config: Any) -> Any:
    """Convert dataclasses to dicts, lists and scalars, as YAML and JSON hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    is_record = dataclasses.is_dataclass(config) and not isinstance(config, type)
    return plain(dataclasses.asdict(config) if is_record else config)


def to_yaml(config: Any) -> str:
    """Write a dataclass as YAML, keys in the order of the fields."""
    import yaml

    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def _render(config: Any, indent: str) -> list[str]:
    texts, lines = attribute_texts(type(config)), []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        text = _summary(type(value)) if dataclasses.is_dataclass(value) else texts.get(field.name)
        if text:
            lines += textwrap.wrap(text, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if dataclasses.is_dataclass(value):
            lines += [f"{indent}{field.name}:", *_render(value, f"{indent}  ")]
        else:
            lines += [indent + line for line in to_yaml({field.name: value}).splitlines()]
    return lines


def _summary(schema: type[Any]) -> str:
    """Return the first paragraph of a dataclass's docstring."""
    return inspect.cleandoc(schema.__doc__ or "").partition("\n\n")[0]


def _build(schema: Any, tree: Mapping[str, Any], base: Any, *, prefix: str, command: str) -> Any:
    hints, values = typing.get_type_hints(schema), {}
    for field in dataclasses.fields(schema):
        key, hint = prefix + field.name, hints[field.name]
        default = None if base is None else getattr(base, field.name)
        if dataclasses.is_dataclass(hint):
            inner = tree.get(field.name, {})
            values[field.name] = _build(hint, inner, default, prefix=f"{key}.", command=command)
        elif field.name in tree:
            values[field.name] = _convert(hint, tree[field.name], key)
        elif base is not None:
            values[field.name] = default
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key} is not set", where=command, fix=f"add {key}={_type_name(hint).upper()}")
    return schema(**values)


def _convert(hint: Any, text: Any, key: str) -> Any:
    """Convert the text of a value to the type of its field."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in inner if kind is not type(None)]
        return None if text == "null" and len(kinds) < len(inner) else _convert(kinds[0], text, key)
    if origin is dict:
        if isinstance(text, str):
            raise ConfigError(f"{text!r} has no names", where=key, fix=f"{key}.NAME={_type_name(inner[1]).upper()}")
        return {name: _convert(inner[1], value, f"{key}.{name}") for name, value in text.items()}
    if origin in (list, tuple):
        between = text[1:-1] if text[:1] in "[(" and text[-1:] in "])" else text
        items = [item.strip() for row in csv.reader([between], skipinitialspace=True) for item in row]
        return origin(_convert(inner[0], item, key) for item in items)
    if hint is bool and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if hint in (int, float, Path):
        try:
            return hint(text)
        except ValueError:
            pass
    elif hint is str:
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    raise ConfigError(f"{text!r} is not of type {_type_name(hint)}", where=key, fix=f"{key}={_type_name(hint).upper()}")


def _type_name(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if kind is type(None) else _type_name(kind) for kind in inner)
    if origin in (list, tuple):
        return f"list of {_type_name(inner[0])}"
    if origin is dict:
        return f"map of {_type_name(inner[1])}"
    if dataclasses.is_dataclass(hint):
        return "records"
    return "path" if hint is Path else str(getattr(hint, "__name__", hint))
