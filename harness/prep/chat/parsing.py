"""Parse one chat record into a Conversation, or into a BadRecord with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from harness.prep.chat.records import ROLES, BadReason, BadRecord, Conversation, Message

# JSON can spell half a surrogate pair, which is not a character and cannot be encoded.
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class _BadRecordError(Exception):
    """Stops parsing; `parse_record` turns it, with its reason and detail, into a BadRecord."""


def parse_line(line: bytes, where: str) -> Conversation | BadRecord:
    """Parse one line of a JSONL file.

    Args:
        line: UTF-8 JSON of the form `{"messages": [{"role": ..., "content": ...}, ...]}`, with or without its newline.
        where: file and line, kept in the result.
    """
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecord(where, BadReason.NOT_UTF8, f"byte {error.start} of the line is not UTF-8")
    except RecursionError:
        return BadRecord(where, BadReason.NOT_JSON, "nested too deeply")
    except ValueError as error:
        return BadRecord(where, BadReason.NOT_JSON, str(error))
    return parse_record(record, where)


def parse_record(record: object, where: str) -> Conversation | BadRecord:
    """Check one decoded record: roles, texts, and at least one assistant turn to train on.

    Fields beside `messages` belong to the user and are ignored, with one exception: `tools` changes what a chat
    template writes, so a record with tools is bad rather than rendered without them. For the same reason a turn may
    hold only `role` and `content`; its other fields must be null or absent.
    """
    try:
        return Conversation(_parse_messages(record), where)
    except _BadRecordError as bad:
        return BadRecord(where, *bad.args)


def _parse_messages(record: object) -> tuple[Message, ...]:
    if not isinstance(record, Mapping):
        raise _BadRecordError(BadReason.NOT_AN_OBJECT, f"a JSON {type(record).__name__}, expected an object")
    turns = record.get("messages")
    if not isinstance(turns, list) or not turns:
        kind = "an empty list" if turns == [] else "nothing" if turns is None else f"a {type(turns).__name__}"
        raise _BadRecordError(BadReason.NO_MESSAGES, f"`messages` holds {kind}, expected a list of turns")
    if record.get("tools"):
        raise _BadRecordError(BadReason.UNKNOWN_FIELD, "`tools` is not supported; write the tools into a system turn")
    messages = tuple(_parse_turn(turn, number) for number, turn in enumerate(turns, start=1))
    if not any(message.role == "assistant" for message in messages):
        raise _BadRecordError(BadReason.NO_ASSISTANT_TURN, f"none of the {len(messages)} turns is the assistant's")
    return messages


def _parse_turn(turn: object, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise _BadRecordError(BadReason.BAD_TURN, f"turn {number} is a {type(turn).__name__}, expected an object")
    role, content = turn.get("role"), turn.get("content")
    extra = sorted(key for key, value in turn.items() if key not in ("role", "content") and value is not None)
    if role not in ROLES:
        reason, problem = BadReason.UNKNOWN_ROLE, f"has role {role!r}, expected one of {', '.join(ROLES)}"
    elif extra:
        reason, problem = BadReason.UNKNOWN_FIELD, f"has the field {extra[0]!r}, which templates would not see"
    elif content is None:
        reason, problem = BadReason.EMPTY_TURN, f"({role}) has no content"
    elif not isinstance(content, str):
        reason, problem = BadReason.NOT_TEXT, f"({role}) has content of type {type(content).__name__}"
    elif not content.strip():
        reason, problem = BadReason.EMPTY_TURN, f"({role}) is empty"
    elif not content.isascii() and _SURROGATE.search(content):
        reason, problem = BadReason.NOT_TEXT, f"({role}) holds half a surrogate pair"
    else:
        return Message(role, content)
    raise _BadRecordError(reason, f"turn {number} {problem}")
