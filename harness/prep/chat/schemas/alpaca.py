"""Records of Alpaca: `{"instruction": ..., "input": ..., "output": ..., "history": [[question, answer], ...]}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason, Conversation, Schema
from harness.prep.chat.turns import ANSWER_FIELDS, CHAT_FIELDS, answer_turn, chat
from harness.prep.chat.values import BadRecordError, decoded, is_empty, optional_text


def _parse(record: Mapping[str, Any], where: str) -> Conversation:
    instruction, more = (optional_text(record.get(name), f"`{name}`") for name in ("instruction", "input"))
    asked = "\n".join(text for text in (instruction, more) if text.strip())
    if not asked:
        raise BadRecordError(BadReason.EMPTY_TURN, "`instruction` is empty")
    history = decoded(record.get("history"), "`history`", BadReason.BAD_TURN)
    pairs = [] if is_empty(history) else history
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRecordError(BadReason.BAD_TURN, "`history` is not a list of question and answer pairs")
    asked_before = (turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True))
    turns = [{"role": role, "content": text} for role, text in (*asked_before, ("user", asked))]
    return chat(record, [*turns, answer_turn(record, "output")], where)


ALPACA = Schema(
    fields=frozenset(("instruction", "input", "output", "history", *ANSWER_FIELDS)) | CHAT_FIELDS,
    fits=lambda record: record.get("instruction") is not None and record.get("output") is not None,
    parse=_parse,
)
