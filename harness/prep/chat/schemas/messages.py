"""OpenAI and Hugging Face records: `{"messages": [{"role": "user", "content": "Hi"}, ...], "tools": [...]}`.

Content may be Anthropic blocks. Turns that are plain text, as in LIMA, alternate between user and assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.schemas.blocks import without_blocks
from harness.prep.chat.turns import CHAT_FIELDS, as_list, chat, first_turn, list_of_turns
from harness.prep.chat.values import BadRecordError, is_empty

# Names of a question and its answer, in lists of pairs and in records that are one pair.
PAIR_FIELDS = (("question", "answer"), *((name, "response") for name in ("question", "query", "prompt", "instruction")))
LIST_FIELDS = ("messages", "conversations", "conversation")


def list_field(record: Record) -> str:
    """Return the name of the field that contains a record's turns."""
    held = [name for name in LIST_FIELDS if not is_empty(record.get(name))]
    if len(held) > 1:
        detail = f"`{held[0]}` and `{held[1]}` contain turns; to leave one out: source.ignore_fields=[{held[1]}]"
        raise BadRecordError(BadReason.UNKNOWN_SCHEMA, detail)
    return held[0] if held else next((name for name in LIST_FIELDS if name in record), LIST_FIELDS[0])


def pair_fields(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of the question and the answer in an item of a list of pairs; None if it is not a pair."""
    pairs = (*PAIR_FIELDS, ("input", "output"), ("prompt", "completion"))
    return next((pair for pair in pairs if all(item.get(name) is not None for name in pair)), None)


def holds_turns(record: Record, *, kind: str) -> bool:
    """Return True if a record contains turns of a kind: `role`, `from` or `pair`; unclear turns count as `role`."""
    for name in LIST_FIELDS:
        value = record.get(name)
        is_list = isinstance(as_list(value), list) or (isinstance(value, str) and value.lstrip().startswith("["))
        if is_list or (name == "messages" and value is not None):
            return kind == _kind_of(first_turn(record, name))
    return False


def _kind_of(turn: Mapping[str, Any]) -> str:
    if turn.get("from") is not None:
        return "from"
    return "pair" if turn.get("role") is None and pair_fields(turn) else "role"


def _parse(record: Record, where: str) -> Conversation:
    turns = list_of_turns(record, list_field(record))
    if all(isinstance(turn, str) for turn in turns):
        turns = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return chat(record, without_blocks(turns), where)


MESSAGES = Schema(
    fields=frozenset(LIST_FIELDS) | CHAT_FIELDS, fits=lambda record: holds_turns(record, kind="role"), parse=_parse
)
