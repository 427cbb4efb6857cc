"""Chat records of any schema, turned into conversations.

parse_line(b'{"messages": [...]}', "chats.jsonl, line 1")      # Conversation or BadRecord
"""

from __future__ import annotations

from harness.prep.chat.parsing import parse_line, parse_record
from harness.prep.chat.records import ROLES, BadReason, BadRecord, Conversation, Message, ToolCall

__all__ = ["ROLES", "BadReason", "BadRecord", "Conversation", "Message", "ToolCall", "parse_line", "parse_record"]
