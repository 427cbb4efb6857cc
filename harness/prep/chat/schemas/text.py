"""Plain `text` for continued training: all of it is trained, without a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import Conversation, Schema
from harness.prep.chat.values import text_field


def _parse(record: Mapping[str, Any], where: str) -> Conversation:
    return Conversation((), where, text=text_field(record, "text"))


TEXT = Schema(
    fields=frozenset(("text",)), fits=lambda record: isinstance(record.get("text"), str), parse=_parse, use="last"
)
