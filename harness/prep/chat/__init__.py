"""Convert chat records of any schema to conversations.

    parse_line(b'{"messages": [...]}', "chats.jsonl, line 1")      # Conversation or BadRecord
    RecordReader("alpaca", {"output": "answer"}).parse(record, "chats.jsonl, line 1")

`SCHEMAS` lists the schemas, each in its own file: read `schemas.alpaca` first.
"""

from harness.prep.chat.reader import (
    NUM_DETECTION_RECORDS,
    RecordReader,
    detect_schema,
    parse_line,
    parse_record,
    record_of_row,
)
from harness.prep.chat.records import ROLES, BadReason, BadRecord, Conversation, MediaPart, Message, ToolCall
from harness.prep.chat.schemas import SCHEMAS
from harness.prep.chat.turns import is_media_column
from harness.prep.chat.values import MEDIA_FIELDS, BadRecordError

__all__ = [
    "MEDIA_FIELDS",
    "NUM_DETECTION_RECORDS",
    "ROLES",
    "SCHEMAS",
    "BadReason",
    "BadRecord",
    "BadRecordError",
    "Conversation",
    "MediaPart",
    "Message",
    "RecordReader",
    "ToolCall",
    "detect_schema",
    "is_media_column",
    "parse_line",
    "parse_record",
    "record_of_row",
]
