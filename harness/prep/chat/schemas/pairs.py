"""Question-answer records: lists of pairs, as in Capybara, `{"conversation": [{"input": ..., "output": ...}]}`.

A record may also be one pair, `{"question": ..., "answer": ...}`, with earlier pairs in `history`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.schemas.messages import LIST_FIELDS, PAIR_FIELDS, holds_turns, list_field, pair_fields
from harness.prep.chat.turns import ANSWER_FIELDS, CHAT_FIELDS, answer_turn, chat, history_turns, list_of_turns
from harness.prep.chat.values import BadRecordError, is_empty, refuse_others, text_field

# Next to a single question, these fields belong to it, but nothing defines how.
_CONTEXT = ("context", "input", "passage", "choices", "options")


def _parse(record: Record, where: str) -> Conversation:
    if _is_pair(record):
        if held := [name for name in _CONTEXT if not is_empty(record.get(name))]:
            fix = f"merge it into the question, or ignore it: source.ignore_fields=[{held[0]}]"
            raise BadRecordError(BadReason.UNKNOWN_FIELD, f"the record has `{held[0]}` as well as a question; {fix}")
        names = pair_fields(record) or ("", "")
        if others := sorted(name for pair in PAIR_FIELDS for name in pair if record.get(name) and name not in names):
            fix = f"to leave out `{others[0]}`: source.ignore_fields=[{others[0]}]"
            raise BadRecordError(BadReason.UNKNOWN_FIELD, f"`{names[1]}` answers `{names[0]}`; {fix}")
        return chat(record, [*history_turns(record), *_turns(record, "")], where)
    turns = history_turns(record)
    for number, pair in enumerate(list_of_turns(record, list_field(record)), start=1):
        turns += _turns(pair, f"pair {number}")
    return chat(record, turns, where)


def _turns(pair: Any, what: str) -> list[dict[str, Any]]:
    names = pair_fields(pair) if isinstance(pair, Mapping) else None
    if names is None:
        raise BadRecordError(BadReason.BAD_TURN, f"{what} is not a question-answer pair, such as `input` and `output`")
    if not what:
        return [{"role": "user", "content": text_field(pair, names[0])}, answer_turn(pair, names[1])]
    refuse_others(pair, frozenset((*names, *ANSWER_FIELDS)), what, can_be_ignored=True)
    try:
        return _turns(pair, "")
    except BadRecordError as bad:
        raise BadRecordError(bad.reason, f"{what}: {bad.detail}") from None


def _is_pair(record: Record) -> bool:
    has_list = any(not is_empty(record.get(name)) for name in LIST_FIELDS)
    return not has_list and any(all(isinstance(record.get(name), str) for name in pair) for pair in PAIR_FIELDS)


PAIRS = Schema(
    fields=frozenset((*LIST_FIELDS, *ANSWER_FIELDS, *_CONTEXT, "history")).union(*PAIR_FIELDS) | CHAT_FIELDS,
    fits=lambda record: holds_turns(record, kind="pair") or _is_pair(record),
    parse=_parse,
    use="last",
)
