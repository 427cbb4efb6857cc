"""Plain `text` records for continued training: all of the text is trained, without a chat template."""

from __future__ import annotations

from harness.prep.chat.records import Conversation, Schema
from harness.prep.chat.values import text_field

TEXT = Schema(
    fields=frozenset(("text",)),
    fits=lambda record: isinstance(record.get("text"), str),
    parse=lambda record, where: Conversation((), where, text=text_field(record, "text")),
    use="last",
)
