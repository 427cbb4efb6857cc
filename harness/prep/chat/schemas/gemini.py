"""Gemini records: `{"contents": [{"role": "user", "parts": [{"text": "Hi"}]}, ...], "systemInstruction": ...}`.

Fields may be written as in JSON (`functionCall`) or as in Python (`function_call`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.schemas.blocks import without_blocks
from harness.prep.chat.turns import CHAT_FIELDS, chat, list_of_turns
from harness.prep.chat.values import BadRecordError, check_json, decoded, first_name, is_empty, refuse_others, show

_ROLES = {"model": "assistant", "user": "user", "function": "user", "system": "system"}
_SPELLINGS = {
    "systemInstruction": "system_instruction",
    "functionCall": "function_call",
    "functionResponse": "function_response",
    "functionDeclarations": "function_declarations",
    "parametersJsonSchema": "parameters",
    "parameters_json_schema": "parameters",
}
# Fields of a part that contain an opaque signature of the model's thoughts.
_UNSEEN = ("thoughtSignature", "thought_signature")


def _plain(item: object, what: str) -> dict[str, Any]:
    """Return an object with Python's spelling of field names and without empty fields."""
    if not isinstance(item, Mapping):
        raise BadRecordError(BadReason.BAD_TURN, f"{what} is a {type(item).__name__}, expected an object")
    return {_SPELLINGS.get(str(key), str(key)): value for key, value in item.items() if not is_empty(value)}


def _parse(record: Record, where: str) -> Conversation:
    fields = _plain(record, "the record")
    turns = [_turn(item, f"turn {number}") for number, item in enumerate(list_of_turns(fields, "contents"), start=1)]
    if system := fields.get("system_instruction"):
        is_object = isinstance(system, str) and system.lstrip().startswith("{")
        system = decoded(system, "", BadReason.BAD_TURN) if is_object else system
        fixed, what = {"role": "system"}, "`systemInstruction`"
        is_text = isinstance(system, str)
        turns.insert(0, {**fixed, "content": system} if is_text else _turn({**_plain(system, what), **fixed}, what))
    if tools := decoded(fields.get("tools"), "`tools`", BadReason.BAD_TOOLS):
        fields["tools"] = _functions(tools)
    return chat(fields, without_blocks(turns), where)


def _turn(item: object, what: str) -> dict[str, Any]:
    fields = _plain(item, what)
    role, parts = fields.pop("role", "user"), fields.pop("parts", None)
    if not isinstance(role, str) or role not in _ROLES:
        detail = f"{what} has role {show(role)}, expected one of {', '.join(_ROLES)}"
        raise BadRecordError(BadReason.UNKNOWN_ROLE, detail)
    parts = [parts] if isinstance(parts, Mapping) else parts
    if not isinstance(parts, list):
        raise BadRecordError(BadReason.EMPTY_TURN, f"{what} ({role}) has no `parts`")
    blocks = [_block(part, f"part {number} of {what} ({role})") for number, part in enumerate(parts, start=1)]
    return {"role": _ROLES[role], "content": blocks, **fields}


def _block(part: object, what: str) -> dict[str, Any]:
    """Return a part as an Anthropic block; a part of another kind keeps its name, under which it is refused."""
    fields = {key: value for key, value in _plain(part, what).items() if key not in _UNSEEN}
    is_thought = fields.pop("thought", False)
    kinds = [key for key in fields if key in ("text", "function_call", "function_response")]
    kind = kinds[0] if kinds else next(iter(fields), "text")
    if kind == "text":
        text = fields.pop("text", "")
        kind = "thinking" if is_thought else "text"
        return {"type": kind, kind: text, **fields}
    if len(fields) > 1:
        detail = f"{what} has both {show(kind)} and {first_name(fields.keys() - {kind})}"
        raise BadRecordError(BadReason.BAD_TURN, detail)
    if not kinds:
        return {"type": kind}
    value = _plain(fields[kind], f"the {kind} of {what}")
    known = ("id", "name", "args" if kind == "function_call" else "response")
    refuse_others(value, frozenset(known), f"the {kind} of {what}", can_be_ignored=False)
    if kind == "function_call":
        return {"type": "tool_use", "id": value.get("id"), "name": value.get("name"), "input": value.get("args")}
    answer = value.get("response")
    check_json(answer, f"the {kind} of {what}", BadReason.BAD_TOOLS)
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False) if answer else ""
    return {"type": "tool_result", "tool_use_id": value.get("id"), "name": value.get("name"), "content": text}


def _functions(tools: object) -> list[Any]:
    functions: list[Any] = []
    for number, item in enumerate(tools if isinstance(tools, list) else [tools], start=1):
        tool = _plain(item, f"tool {number}")
        refuse_others(tool, frozenset(("function_declarations",)), f"tool {number}", can_be_ignored=False)
        declared = tool.get("function_declarations", [])
        if not isinstance(declared, list):
            detail = f"the functionDeclarations of tool {number} are of type {type(declared).__name__}, expected a list"
            raise BadRecordError(BadReason.BAD_TOOLS, detail)
        functions += map(_plain, declared, [f"a function of tool {number}"] * len(declared))
    return functions


GEMINI = Schema(
    fields=frozenset(("contents", "systemInstruction", "system_instruction")) | CHAT_FIELDS,
    fits=lambda record: isinstance(record.get("contents"), (list, str)),
    parse=_parse,
)
