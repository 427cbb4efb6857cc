"""Keys, explanations and values of settings dataclasses, without Hydra and torch.

A settings dataclass explains its fields in the `Attributes:` section of its docstring and declares bounds of numbers
with `harness.checks.bounded`. `--cfg` of every command, the generated reference of all settings and nearest-name hints
are derived from these.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from harness.checks import BOUNDS, CHOICES, KEY, Bounds, CheckedSettings, Rule
from harness.errors import FormatError, HarnessError
from harness.printing import redact_all

_PACKAGE = Path(__file__).resolve().parent
# A wheel contains the folder inside the package, a checkout next to the package.
CONFIGS = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), _PACKAGE)
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")
REQUIRED = "required"
T = TypeVar("T")


class Setting(NamedTuple):
    """One setting of a schema.

    Attributes:
        key: dotted name; `data.blend[].path` is a field of the records in the list `data.blend`.
        type: type as shown to users, such as `int`, `list of str` or `float or null`.
        default: plain value, or the text `required`.
        text: explanation from the docstring of the dataclass; may be empty.
        bounds: bounds of a number, or of each number in a list.
        choices: allowed strings; empty for any.
    """

    key: str
    type: str
    default: Any
    text: str
    bounds: Bounds | None = None
    choices: tuple[str, ...] = ()


def explain_settings(schema: type[Any], *, prefix: str = "") -> list[Setting]:
    """List all settings of a dataclass and its nested dataclasses, in field order."""
    texts, hints, settings = attribute_texts(schema), typing.get_type_hints(schema), []
    for field in dataclasses.fields(schema):
        key, hint = prefix + (field.metadata.get(KEY) or field.name), hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            settings += explain_settings(hint, prefix=f"{key}.")
            continue
        default = REQUIRED
        if field.default is not dataclasses.MISSING:
            default = to_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = to_plain(field.default_factory())
        bounds, choices = field.metadata.get(BOUNDS), tuple(field.metadata.get(CHOICES) or ())
        settings.append(Setting(key, _type_name(hint), default, texts.get(field.name, ""), bounds, choices))
        for inner in typing.get_args(hint):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                settings += explain_settings(inner, prefix=f"{key}[].")
    return settings


def list_rules(schema: type[Any]) -> list[Rule]:
    """List the rules of a settings dataclass and its nested dataclasses."""
    rules = [*schema.rules, *schema.job_rules] if issubclass(schema, CheckedSettings) else []
    hints = _hints(cast(Hashable, schema)).values()
    inner = [hint for hint in hints if dataclasses.is_dataclass(hint) and isinstance(hint, type)]
    return rules + [rule for each in inner for rule in list_rules(each)]


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
    """Return the known name closest to a misspelled one, by the whole key or by its last part."""
    names, part = list(known), name.rpartition(".")[2]
    same = [key for key in names if key.rpartition(".")[2] == part]
    if same:
        return difflib.get_close_matches(name, same, n=1, cutoff=0)[0]
    begun = [key for key in names if key.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if not close:
        last = {key.rpartition(".")[2]: key for key in reversed(names)}
        close = [last[near] for near in difflib.get_close_matches(part, last, n=1, cutoff=0.75)]
    return close[0] if close else None


def load(
    schema: type[T],
    text: str | bytes,
    *,
    where: object,
    fix: str = "",
    what: str = "cannot be read",
    error: type[HarnessError] = FormatError,
    lenient: bool = False,
) -> T:
    """Parse JSON text as a dataclass or another plain type; see `from_plain`.

    Args:
        where, fix, what, error: parts and class of the error for invalid text; the reason is appended to `what`.
        lenient: ignore unknown keys.
    """
    try:
        return from_plain(schema, json.loads(text), lenient=lenient)
    except (ValueError, RecursionError) as odd:
        raise error(f"{what}: {odd}", where=str(where), fix=fix) from None


def from_plain(schema: type[T], values: Any, *, lenient: bool = False) -> T:
    """Build a dataclass, including nested ones, from plain values; raise ValueError for wrong keys or types.

    A null becomes NaN in a float field that cannot be None. With `lenient`, unknown keys are ignored.
    """
    if lenient and isinstance(values, dict):
        known: Any = schema
        values = {name: value for name, value in values.items() if name in _hints(known)}
    record: T = _build(values, schema, "")
    return record


def find_odd(values: Any, schema: type[Any]) -> str | None:
    """Return the first problem of plain values as settings of a dataclass, or None; bounds are not checked.

    Missing settings are valid, because files of earlier versions lack newer settings.
    """
    try:
        _build(values, schema, "", is_whole=False)
    except ValueError as odd:
        return str(odd)
    return None


@functools.cache
def _hints(schema: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def _build(value: Any, hint: Any, key: str, *, is_whole: bool = True) -> Any:
    """Convert plain values to a type; raise ValueError if they do not match. Without `is_whole`, only check."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build_record(value, hint, key, is_whole=is_whole)
    if origin in (types.UnionType, typing.Union):
        for kind in sorted(inner, key=lambda kind: kind is not type(None)):
            with suppress(ValueError):
                return _build(value, kind, key, is_whole=is_whole)
    elif origin in (dict, Counter) and isinstance(value, dict):
        kind = inner[1] if origin is dict else int
        return origin({name: _build(one, kind, f"{key}[]", is_whole=is_whole) for name, one in value.items()})
    elif origin in (list, tuple) and isinstance(value, list):
        kinds = inner if origin is tuple and Ellipsis not in inner else inner[:1] * len(value)
        if len(kinds) == len(value):
            pairs = zip(value, kinds, strict=True)
            return origin(_build(one, kind, f"{key}[]", is_whole=is_whole) for one, kind in pairs)
    elif hint is float and value is None and is_whole:
        return math.nan
    elif hint is Any or (origin is None and isinstance(value, bool) == (hint is bool) and _is_plain(value, hint)):
        return Path(value) if hint is Path else value
    raise ValueError(f"{key} is {str(value)[:40]!r}, not of type {_type_name(hint)}")


def _build_record(values: Any, schema: Any, key: str, *, is_whole: bool) -> Any:
    place, prefix, hints = key or "the file", f"{key}." if key else "", _hints(schema)
    if not isinstance(values, dict):
        raise ValueError(f"{place} contains {str(values)[:40]!r} instead of settings")
    if (unknown := next((name for name in values if name not in hints), None)) is not None:
        raise ValueError(f"there is no setting {(prefix + str(unknown))[:80]!r}")
    built = {name: _build(one, hints[name], prefix + name, is_whole=is_whole) for name, one in values.items()}
    if not is_whole:
        return built
    try:
        return schema(**built)
    except TypeError as error:  # a required field is missing
        raise ValueError(f"{place} is incomplete: {error}") from None


def _is_plain(value: Any, hint: Any) -> bool:
    kinds: dict[Any, Any] = {bool: bool, int: int, float: (int, float), type(None): type(None)}
    return isinstance(value, kinds.get(hint, str))


def render_settings(config: Any, indent: str = "") -> str:
    """Render a dataclass as YAML, with a comment above each setting that explains it."""
    texts, lines = attribute_texts(type(config)), list[str]()
    for field in dataclasses.fields(config):
        value, text = getattr(config, field.name), texts.get(field.name)
        if dataclasses.is_dataclass(value):  # the first paragraph of its docstring
            text = inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0]
        if text:
            lines += textwrap.wrap(text, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if dataclasses.is_dataclass(value):
            lines += [f"{indent}{field.name}:", render_settings(value, f"{indent}  ").removesuffix("\n")]
        else:
            lines += [indent + line for line in to_yaml({field.name: value}).splitlines()]
    return "\n".join(lines) + "\n"


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return `{"model": {"seed": 1}}` as `{"model.seed": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {f"{above}{key}": value}
    return flat


def to_plain(config: Any) -> Any:
    """Convert dataclasses to dicts, lists and scalars for YAML and JSON."""
    return json.loads(json.dumps(config, default=lambda value: str(value) if isinstance(value, Path) else vars(value)))


def to_yaml(config: Any) -> str:
    """Render a dataclass as YAML in field order, without credentials."""
    import yaml

    return yaml.safe_dump(redact_all(to_plain(config)), sort_keys=False, allow_unicode=True)


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
