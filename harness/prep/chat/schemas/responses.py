"""OpenAI Responses records: `input` and `output` as lists of items, or `input` as text, and `instructions`.

{"input": [{"role": "user", "content": "Hi"}], "output": [{"type": "message", "role": "assistant", "content": ...}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.schemas.blocks import without_blocks
from harness.prep.chat.turns import CHAT_FIELDS, chat, turns_or_text
from harness.prep.chat.values import BadRecordError, check_text, ignoring, is_empty, refuse_others, show

# Fields that an item may have: those that are read, and those that the model neither sees nor writes.
_READ = {
    "message": ("role", "content", "weight"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content"),
}
_KNOWN = {kind: frozenset(("type", "id", "status", *read)) for kind, read in _READ.items()}


def _parse(record: Record, where: str) -> Conversation:
    if record.get("status") == "incomplete":
        raise BadRecordError(BadReason.UNWANTED, "`status` is 'incomplete'")
    turns: list[dict[str, Any]] = []
    for name, role in (("instructions", "system"), ("input", "user"), ("output", "assistant")):
        items = [] if is_empty(record.get(name)) else turns_or_text(record, name, role)
        for number, item in enumerate(items, start=1):
            _add(turns, item, f"item {number} of `{name}`")
    return chat(record, without_blocks(turns), where)


def _add(turns: list[dict[str, Any]], item: object, what: str) -> None:
    """Add an item to the turns; the assistant's reasoning, text and calls, in this order, form one turn."""
    if not isinstance(item, Mapping):
        raise BadRecordError(BadReason.BAD_TURN, f"{what} is a {type(item).__name__}, expected an object")
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _READ:
        detail = f"{what} is of type {show(kind)}, expected one of {', '.join(_READ)}; "
        raise BadRecordError(BadReason.NOT_TEXT, f"{detail}to leave out: {ignoring(str(kind))}")
    what = f"{what} ({kind})"
    blocks = _blocks(item, kind, what)
    refuse_others(item, _KNOWN[kind], what, can_be_ignored=True)
    role = "user" if kind == "function_call_output" else item.get("role") if kind == "message" else "assistant"
    last = turns[-1] if turns else {}
    # A message joins the turn of the reasoning before it, and starts a new turn after anything else.
    kinds = [block.get("type") if isinstance(block, Mapping) else "" for block in last.get("content", ())]
    is_begun = kind == "message" and any(before != "thinking" for before in kinds)
    if role != "assistant" or last.get("role") != role or is_begun:
        turns.append({"role": role, "content": []})
    turns[-1]["content"] += blocks
    if item.get("weight") is not None:
        turns[-1]["weight"] = item["weight"]


def _blocks(item: Mapping[str, Any], kind: str, what: str) -> list[Any]:
    """Return the content of an item as Anthropic blocks."""
    if kind == "function_call":
        return [
            {"type": "tool_use", "id": item.get("call_id"), "name": item.get("name"), "input": item.get("arguments")}
        ]
    if kind == "function_call_output":
        return [{"type": "tool_result", "tool_use_id": item.get("call_id"), "content": item.get("output")}]
    if kind == "message":
        content = item.get("content")
        return content if isinstance(content, list) else [{"type": "text", "text": content}]
    # The summary is made from the reasoning, which is not always included.
    parts = item.get("content") or item.get("summary") or []
    parts = parts if isinstance(parts, list) else [parts]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not texts and not is_empty(item.get("encrypted_content")):
        detail = f"{what} has its text only in `encrypted_content`, which cannot be read"
        raise BadRecordError(BadReason.NOT_TEXT, detail + "; to leave out: source.ignore_fields=[encrypted_content]")
    return [{"type": "thinking", "thinking": check_text(text, f"the text of {what}")} for text in texts]


def _fits(record: Record) -> bool:
    lists = (items for name in ("output", "input") if isinstance(items := record.get(name), list) and items)
    first: Record = next((items[0] for items in lists if isinstance(items[0], Mapping)), {})
    return "type" in first or "role" in first


RESPONSES = Schema(
    fields=frozenset(("input", "output", "instructions", "status")) | CHAT_FIELDS, fits=_fits, parse=_parse
)
