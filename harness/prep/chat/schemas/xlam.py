"""Records of single-turn function calling, as in xLAM: `query`, `tools`, and the correct calls as `answers`."""

from __future__ import annotations

from harness.prep.chat.records import Conversation, Record, Schema
from harness.prep.chat.turns import CHAT_FIELDS, chat
from harness.prep.chat.values import text_field

_FIELDS = ("query", "tools", "answers")


def _parse(record: Record, where: str) -> Conversation:
    question = {"role": "user", "content": text_field(record, "query")}
    return chat(record, [question, {"role": "assistant", "tool_calls": record.get("answers")}], where)


XLAM = Schema(
    fields=frozenset(_FIELDS) | CHAT_FIELDS,
    fits=lambda record: all(record.get(name) is not None for name in _FIELDS),
    parse=_parse,
)
