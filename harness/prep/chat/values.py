"""Check the values in a chat record: functions return a value in the form of `records`, or raise with the problem."""

from __future__ import annotations

import json
import math
import re
import reprlib
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from harness.prep.chat.records import BadReason, ToolCall

MEDIA_FIELDS = frozenset(("audio", "audios", "image", "images", "video", "videos"))
SYSTEM_FIELDS = frozenset(("system", "system_prompt", "systemInstruction", "system_instruction"))
# JSON can spell half a surrogate pair, which is not a character and cannot be encoded.
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MAX_DEPTH = 64
# Python converts integers of up to 4,300 digits to text.
_MAX_BITS = 14_000
JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)
# Variables that a chat template gets from elsewhere, or that control how it is run.
_RESERVED_KWARGS = {"messages", "conversation", "conversations", "tools", "chat_template", "tokenize", "return_dict"}
_RESERVED_KWARGS |= {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"}

_CALL_FIELDS, _FUNCTION_FIELDS = frozenset(("id", "type", "function")), frozenset(("name", "arguments"))


class BadRecordError(Exception):
    """Raised to stop parsing or rendering a record; its reason and detail become those of a BadRecord."""

    def __init__(self, reason: BadReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def show(value: object) -> str:
    """Return a short form of any value for messages."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"a {type(value).__name__}"


def is_empty(value: object) -> bool:
    """Return True for null and for an empty text, list or object; Parquet gives all rows the same fields."""
    return value is None or (isinstance(value, (str, list, dict, bytes, tuple, Mapping)) and not value)


def first_name(names: Iterable[object]) -> str:
    """Return the first of several field names in order, as messages show it."""
    return show(min(map(str, names)))


def check_text(value: object, what: str) -> str:
    """Return a text that can be encoded; raise BadRecordError (`not_text`) for anything else."""
    if not isinstance(value, str):
        raise BadRecordError(BadReason.NOT_TEXT, f"{what} is of type {type(value).__name__}, expected text")
    if not value.isascii() and _SURROGATE.search(value):
        raise BadRecordError(BadReason.NOT_TEXT, f"{what} contains half a surrogate pair")
    return value


def optional_text(value: object, what: str) -> str:
    return "" if value is None else check_text(value, what)


def text_field(record: Mapping[str, Any], name: str) -> str:
    """Return a record field that must contain text; raise BadRecordError if it is blank or not text."""
    text = optional_text(record.get(name), f"`{name}`")
    if not text.strip():
        raise BadRecordError(BadReason.EMPTY_TURN, f"`{name}` is empty")
    return text


def load_json(text: str) -> Any:
    """Decode JSON; raise ValueError for text that is not JSON, or if an object contains a key twice."""
    return _DECODER.decode(text)


def json_or(text: str | bytes, default: Any) -> Any:
    """Decode JSON, allowing duplicate keys; return `default` for text that is not JSON."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return default


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} occurs twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def decoded(value: object, what: str, reason: BadReason) -> object:
    """Return a value, decoded if it is JSON text; blank text becomes None."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return load_json(value)
    except RecursionError:
        raise BadRecordError(reason, f"{what}: nested too deeply") from None
    except ValueError as error:
        raise BadRecordError(reason, f"{what}: a str that is not JSON: {error}") from None


def decoded_object(value: object, what: str, reason: BadReason) -> Mapping[str, Any]:
    """Return an object, decoded if it is JSON text; raise BadRecordError for anything else."""
    item = decoded(value, what, reason)
    if not isinstance(item, Mapping):
        raise BadRecordError(reason, f"{what}: a value of type {type(item).__name__}, expected an object")
    return item


def decoded_list(value: object, what: str) -> list[Any]:
    """Return a list of tools or calls, which may be given as JSON text or omitted."""
    items = decoded(value, what, BadReason.BAD_TOOLS)
    if not is_empty(items) and not isinstance(items, list):
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} is of type {type(items).__name__}, expected a list")
    return items if isinstance(items, list) else []


def check_json(value: object, what: str, reason: BadReason) -> None:
    """Raise BadRecordError for a value that JSON cannot represent, or that is nested more than 64 levels deep."""
    if problem := _problem_of(value, 0):
        raise BadRecordError(reason, f"in {what} there is {problem}")


def _problem_of(value: object, depth: int) -> str:
    """Describe the part of a value that JSON cannot represent; empty if there is none."""
    if isinstance(value, str):
        return "half a surrogate pair" if not value.isascii() and _SURROGATE.search(value) else ""
    if isinstance(value, (Mapping, list)):
        if depth == _MAX_DEPTH:
            return f"a value more than {_MAX_DEPTH} levels deep"
        inside = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        return next((problem for item in inside if (problem := _problem_of(item, depth + 1))), "")
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"the number {value}, which JSON does not support"
    if isinstance(value, int):
        return "" if value.bit_length() <= _MAX_BITS else f"an integer of {value.bit_length():,} bits"
    return "" if value is None else f"a value of type {type(value).__name__}"


def parse_calls(value: object, what: str) -> tuple[ToolCall, ...]:
    """Return the calls in a list, or in its JSON text.

    Each call is `{"function": {"name", "arguments"}}`, or the same without `function`, or JSON text of either.
    """
    items = decoded_list(value, what)
    return tuple(parse_call(item, f"call {number} of {what}") for number, item in enumerate(items, start=1))


def parse_call(value: object, what: str) -> ToolCall:
    """Return one tool call, given in the form of an element in the list of `parse_calls`."""
    call = decoded_object(value, what, BadReason.BAD_TOOLS)
    function = call.get("function")
    is_flat = function is None
    if is_flat:
        function = {key: item for key, item in call.items() if key not in ("id", "type")}
        call = {key: call.get(key) for key in ("id", "type")}
    if not isinstance(function, Mapping):
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has a function of type {type(function).__name__}")
    refuse_others(call, _CALL_FIELDS, what, can_be_ignored=True)
    refuse_others(function, _FUNCTION_FIELDS, what, can_be_ignored=is_flat)
    if call.get("type") not in (None, "", "function"):
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} is of type {show(call['type'])}, expected 'function'")
    name, id_ = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name or not isinstance(id_, str | None):
        wrong = "name" if not isinstance(name, str) or not name else "id"
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has the {wrong} {show(name if wrong == 'name' else id_)}")
    check_text(name, f"the name of {what}")
    arguments, place = function.get("arguments"), f"the arguments of {what}"
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    check_json(decoded_object(arguments, place, BadReason.BAD_TOOLS), place, BadReason.BAD_TOOLS)
    return ToolCall(name, arguments, check_text(id_ or "", f"the id of {what}"))


def ignoring(*names: str) -> str:
    """Return the setting that leaves out fields, quoted for a shell and Hydra."""
    if all(re.fullmatch(r"[A-Za-z_][\w.-]*", name) for name in names):
        return f"source.ignore_fields=[{','.join(names)}]"
    return shlex.quote(f"source.ignore_fields=[{','.join(json.dumps(name, ensure_ascii=False) for name in names)}]")


def refuse_others(item: Mapping[str, Any], known: frozenset[str], what: str, *, can_be_ignored: bool) -> None:
    if item.keys() <= known:
        return
    if unknown := [key for key, value in item.items() if key not in known and not is_empty(value)]:
        name = min(map(str, unknown))
        fix = f"; to leave out: {ignoring(name)}" if can_be_ignored and name not in MEDIA_FIELDS else ""
        raise BadRecordError(BadReason.UNKNOWN_FIELD, f"{what} has the field {show(name)}{fix}")


def parse_template_kwargs(value: object) -> Mapping[str, Any]:
    """Return variables for the chat template, given as an object or its JSON text."""
    what = "`chat_template_kwargs`"
    if is_empty(decoded(value, what, BadReason.BAD_TEMPLATE_KWARGS)):
        return {}
    kwargs = decoded_object(value, what, BadReason.BAD_TEMPLATE_KWARGS)
    check_json(kwargs, what, BadReason.BAD_TEMPLATE_KWARGS)
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED_KWARGS:
            raise BadRecordError(BadReason.BAD_TEMPLATE_KWARGS, f"{what} sets {show(name)}, which a record cannot set")
    # A record that sets a variable to null leaves it to the template.
    return {name: value for name, value in kwargs.items() if value is not None}
