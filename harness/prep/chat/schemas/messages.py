"""Records of OpenAI and Hugging Face: `{"messages": [{"role": "user", "content": "Hi"}, ...], "tools": [...]}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason, Conversation, Schema
from harness.prep.chat.turns import CHAT_FIELDS, as_list, chat, first_turn, list_of_turns
from harness.prep.chat.values import BadRecordError, is_empty

# The list has one of these names.
LIST_FIELDS = ("messages", "conversations", "conversation")


def list_field(record: Mapping[str, Any]) -> str:
    """Return the name under which a record holds its turns."""
    held = [name for name in LIST_FIELDS if not is_empty(record.get(name))]
    if len(held) > 1:
        detail = f"`{held[0]}` and `{held[1]}` hold turns; to leave one out: source.ignore_fields=[{held[1]}]"
        raise BadRecordError(BadReason.UNKNOWN_SCHEMA, detail)
    return held[0] if held else next((name for name in LIST_FIELDS if name in record), LIST_FIELDS[0])


def holds_turns(record: Mapping[str, Any], *, kind: str) -> bool:
    """Tell if a record holds turns with the field `kind`; `role` is assumed where its `messages` show nothing."""
    for name in LIST_FIELDS:
        value = record.get(name)
        is_list = isinstance(as_list(value), list) or (isinstance(value, str) and value.lstrip().startswith("["))
        if is_list or (name == "messages" and value is not None):
            found = "from" if first_turn(record, name).get("from") is not None else "role"
            return kind == found
    return False


def _parse(record: Mapping[str, Any], where: str) -> Conversation:
    return chat(record, list_of_turns(record, list_field(record)), where)


MESSAGES = Schema(
    fields=frozenset(LIST_FIELDS) | CHAT_FIELDS, fits=lambda record: holds_turns(record, kind="role"), parse=_parse
)
