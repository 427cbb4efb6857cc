"""Chat records: what a conversation is, and why a record is not one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import xxhash

ROLES = ("system", "user", "assistant", "tool")

_ROLE_LIST = ", ".join(ROLES)


class BadReason(StrEnum):
    """Why a record was not used; the value is the name under which it is counted."""

    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_MESSAGES = "no_messages"
    BAD_TURN = "bad_turn"
    UNKNOWN_ROLE = "unknown_role"
    UNKNOWN_FIELD = "unknown_field"
    EMPTY_TURN = "empty_turn"
    NOT_TEXT = "not_text"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    CONTROL_TOKEN = "control_token"
    TEMPLATE_FAILED = "template_failed"
    NOTHING_TRAINED = "nothing_trained"
    TOO_SHORT = "too_short"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: one of `ROLES`.
        content: text with at least one character that is not white space.
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat that passed every check.

    Attributes:
        messages: the turns in order; at least one is the assistant's.
        where: file and line, or file and row, that it came from.
    """

    messages: tuple[Message, ...]
    where: str

    def as_dicts(self) -> list[dict[str, str]]:
        """The turns as chat templates take them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]

    def hash(self) -> int:
        """64 bits of xxh3 over roles and texts: equal for equal conversations, wherever they were read."""
        digest = xxhash.xxh3_64()
        for message in self.messages:
            content = message.content.encode()
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            digest.update(f"{message.role} {len(content)} ".encode())
            digest.update(content)
        return digest.intdigest()


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be trained on.

    Attributes:
        where: file and line, or file and row.
        reason: the kind of fault, for counting.
        detail: the fault in words.
    """

    where: str
    reason: BadReason
    detail: str


def parse_line(line: bytes, where: str) -> Conversation | BadRecord:
    """Read one line of a JSONL file.

    Args:
        line: UTF-8 JSON of the shape `{"messages": [{"role": ..., "content": ...}, ...]}`, with or without its newline.
        where: file and line, kept in the result.
    """
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRecord(where, BadReason.NOT_UTF8, f"byte {error.start} of the line is not UTF-8")
    try:
        record = json.loads(text)
    except RecursionError:
        return BadRecord(where, BadReason.NOT_JSON, "nested too deeply")
    except ValueError as error:
        return BadRecord(where, BadReason.NOT_JSON, str(error))
    return parse_record(record, where)


def parse_record(record: object, where: str) -> Conversation | BadRecord:
    """Check one decoded record: roles, texts, and that there is something of the assistant's to train on.

    Fields beside `messages` are the user's own and are not read, with one exception: `tools` changes what a chat
    template writes, so a record that has it is bad rather than rendered without. For the same reason a turn may hold
    `role` and `content` only; other fields of it must be null or absent.
    """

    def bad(reason: BadReason, detail: str) -> BadRecord:
        return BadRecord(where, reason, detail)

    if not isinstance(record, Mapping):
        return bad(BadReason.NOT_AN_OBJECT, f"a JSON {type(record).__name__}, expected an object")
    turns = record.get("messages")
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else "nothing" if turns is None else f"a {type(turns).__name__}"
        return bad(BadReason.NO_MESSAGES, f"`messages` holds {found}, expected a list of turns")
    if record.get("tools"):
        return bad(BadReason.UNKNOWN_FIELD, "`tools` is not supported; write the tools into a system turn")

    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            return bad(BadReason.BAD_TURN, f"turn {number} is a {type(turn).__name__}, expected an object")
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            return bad(BadReason.UNKNOWN_ROLE, f"turn {number} has role {role!r}, expected one of {_ROLE_LIST}")
        others = sorted(key for key, value in turn.items() if key not in ("role", "content") and value is not None)
        if others:
            return bad(
                BadReason.UNKNOWN_FIELD, f"turn {number} has the field {others[0]!r}, which no template would see"
            )
        if content is None:
            return bad(BadReason.EMPTY_TURN, f"turn {number} ({role}) has no content")
        if not isinstance(content, str):
            return bad(BadReason.NOT_TEXT, f"turn {number} ({role}) has content of type {type(content).__name__}")
        if not content.strip():
            return bad(BadReason.EMPTY_TURN, f"turn {number} ({role}) is empty")
        # JSON can spell half a surrogate pair, which is no character and cannot be encoded.
        if not _encodes(content):
            return bad(BadReason.NOT_TEXT, f"turn {number} ({role}) holds half a surrogate pair")
        messages.append(Message(role, content))
    if not any(message.role == "assistant" for message in messages):
        return bad(BadReason.NO_ASSISTANT_TURN, f"none of the {len(messages)} turns is the assistant's")
    return Conversation(tuple(messages), where)


def _encodes(text: str) -> bool:
    if text.isascii():  # known without a look at the characters
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
