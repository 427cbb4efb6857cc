"""Alpaca records: `{"instruction": ..., "input": ..., "output": ..., "history": [[question, answer], ...]}`."""

from __future__ import annotations

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.turns import ANSWER_FIELDS, CHAT_FIELDS, answer_turn, chat, history_turns
from harness.prep.chat.values import BadRecordError, optional_text


def _parse(record: Record, where: str) -> Conversation:
    instruction, more = (optional_text(record.get(name), f"`{name}`") for name in ("instruction", "input"))
    asked = "\n".join(text for text in (instruction, more) if text.strip())
    if not asked:
        raise BadRecordError(BadReason.EMPTY_TURN, "`instruction` is empty")
    turns = [*history_turns(record), {"role": "user", "content": asked}, answer_turn(record, "output")]
    return chat(record, turns, where)


ALPACA = Schema(
    fields=frozenset(("instruction", "input", "output", "history", *ANSWER_FIELDS)) | CHAT_FIELDS,
    fits=lambda record: record.get("instruction") is not None and record.get("output") is not None,
    parse=_parse,
)
