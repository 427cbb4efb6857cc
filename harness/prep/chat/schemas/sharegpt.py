"""ShareGPT records: `{"conversations": [{"from": "human", "value": "Hi"}, ...], "system": ..., "tools": ...}`."""

from __future__ import annotations

from collections.abc import Mapping

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.schemas.messages import LIST_FIELDS, holds_turns, list_field
from harness.prep.chat.turns import CHAT_FIELDS, chat, list_of_turns
from harness.prep.chat.values import BadRecordError, decoded, show

CALL_ROLES = ("function_call", "tool_call")
_ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", *CALL_ROLES), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response"), "tool"),
}


def _parse(record: Record, where: str) -> Conversation:
    turns = list_of_turns(record, list_field(record))
    return chat(record, [_as_message(turn, number) for number, turn in enumerate(turns, start=1)], where)


def _as_message(turn: object, number: int) -> object:
    """Return a turn with the fields of OpenAI's turns; turns that already use them change only the role's name."""
    if not isinstance(turn, Mapping):
        return turn
    fields = ("from", "value") if turn.get("from") is not None else ("role", "content")
    speaker, value = (turn.get(field) for field in fields)
    if not isinstance(speaker, str) or speaker not in _ROLES:
        detail = f"turn {number} is from {show(speaker)}, expected one of {', '.join(_ROLES)}"
        raise BadRecordError(BadReason.UNKNOWN_ROLE, detail)
    message = {"role": _ROLES[speaker], "content": value}
    if speaker in CALL_ROLES:
        calls = decoded(value, f"turn {number} ({speaker})", BadReason.BAD_TOOLS)
        message |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    # An additional `role` or `content` is refused as unknown, like any other field.
    rest = {key: value for key, value in turn.items() if key not in fields}
    return message | {f"{key} beside {fields[0]}" if key in message else key: rest[key] for key in rest}


SHAREGPT = Schema(
    fields=frozenset(LIST_FIELDS) | CHAT_FIELDS, fits=lambda record: holds_turns(record, kind="from"), parse=_parse
)
