"""Types of chat records: conversations with all that a template may write, or reasons for leaving records out."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import xxhash

from harness.records import HUNDREDTHS

# A decoded record of any schema.
Record = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


class BadReason(StrEnum):
    """Reason for leaving a record out; the value is its name in reports."""

    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    BAD_ROW = "bad_row"
    UNKNOWN_SCHEMA = "unknown_schema"
    NO_MESSAGES = "no_messages"
    BAD_TURN = "bad_turn"
    UNKNOWN_ROLE = "unknown_role"
    UNKNOWN_FIELD = "unknown_field"
    MEDIA = "media"
    EMPTY_TURN = "empty_turn"
    NOT_TEXT = "not_text"
    BAD_TOOLS = "bad_tools"
    BAD_TEMPLATE_KWARGS = "bad_template_kwargs"
    BAD_WEIGHT = "bad_weight"
    UNWANTED = "unwanted"
    OMITTED = "omitted"  # by a user's function: not bad, and never refused
    FUNCTION_FAILED = "function_failed"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    CONTROL_TOKEN = "control_token"
    TEMPLATE_FAILED = "template_failed"
    NOT_WRITTEN = "not_written"
    NOT_AS_SERVED = "not_as_served"
    NO_END = "no_end"
    NOTHING_TRAINED = "nothing_trained"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call by the assistant; its arguments are JSON text or the decoded object, as in the record."""

    name: str
    arguments: str | Mapping[str, Any]
    id: str = ""

    def as_dict(self) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"id": self.id, **call} if self.id else call


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or a sound in the content of a turn: its kind (one of `MEDIA_KINDS`) and the bytes of its file."""

    kind: str
    data: bytes = field(repr=False)

    def as_record(self) -> dict[str, str]:
        """Return a record part that parses back into this part."""
        return {"type": self.kind, self.kind: "data:;base64," + base64.b64encode(self.data).decode()}


def part_for_template(part: str | MediaPart) -> dict[str, str]:
    """Return a content part in the form that chat templates expect."""
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: one of `ROLES`.
        content: text, several parts (text and media), or None (an assistant turn with only tool calls).
        reasoning: text that the assistant thinks before its content; empty if there is none.
        tool_call_id: id of the call that a tool message answers; empty if the record does not specify it.
        name: name of the tool or speaker; empty if the record does not specify it.
        weight: loss weight of the turn, in hundredths, 0 to 100; None if the record does not specify one.
        part_weights: loss weights of the text parts of `content`, in hundredths; None for a part with the turn's
            weight. Empty if no part has its own weight.
    """

    role: str
    content: str | tuple[str | MediaPart, ...] | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    weight: int | None = None
    part_weights: tuple[int | None, ...] = ()

    @property
    def text(self) -> str:
        """The content as one text; parts are joined without separators."""
        return "".join(self.texts) if isinstance(self.content, tuple) else self.content or ""

    @property
    def parts(self) -> tuple[str | MediaPart, ...]:
        return self.content if isinstance(self.content, tuple) else (self.content,) if self.content else ()

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[MediaPart, ...]:
        return tuple(part for part in self.parts if isinstance(part, MediaPart))

    def with_texts(self, change: Callable[[str], str]) -> Message:
        """Return the turn with `change` applied to each text of its content; empty content stays."""
        if isinstance(self.content, tuple):
            return replace(self, content=tuple(change(one) if isinstance(one, str) else one for one in self.content))
        return replace(self, content=change(self.content)) if self.content else self

    def as_dict(self) -> dict[str, Any]:
        """Return the turn in the form that chat templates expect."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if isinstance(self.content, tuple):
            turn["content"] = [part_for_template(part) for part in self.content]
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        if self.name:
            turn["name"] = self.name
        return turn


def as_share(hundredths: int) -> float:
    """Return a weight as records write it: 0, 1, or a fraction."""
    return hundredths // HUNDREDTHS if hundredths % HUNDREDTHS == 0 else hundredths / HUNDREDTHS


def _weighted_turn(message: Message) -> dict[str, Any]:
    """Return `Message.as_dict` with media data and weights, which are not passed to chat templates."""
    turn = message.as_dict()
    if message.media:
        parts = zip(message.parts, turn["content"], strict=True)
        turn["content"] = [given if isinstance(part, str) else part.as_record() for part, given in parts]
    if message.weight is not None:
        turn["weight"] = as_share(message.weight)
    if message.part_weights:
        weights = [{} if weight is None else {"weight": as_share(weight)} for weight in message.part_weights]
        turn["content"] = [part | weight for part, weight in zip(turn["content"], weights, strict=True)]
    return turn


def _is_plain(turn: Message) -> bool:
    extras = turn.reasoning or turn.tool_calls or turn.tool_call_id or turn.name
    return isinstance(turn.content, str) and not extras and turn.weight is None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat that passed every check.

    Attributes:
        messages: the turns in order; at least one is the assistant's. Empty for plain text.
        tools: descriptions of the tools that the assistant may call, in the form that chat templates expect.
        template_kwargs: variables for the chat template, such as `enable_thinking`.
        text: plain text to continue training on, all of it trained, without a template; None for a chat.
        dropped_media: number of placeholders removed because the record's media are left out; None for a record
            without media.
    """

    messages: tuple[Message, ...]
    where: str
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    dropped_media: int | None = None

    @property
    def media(self) -> tuple[MediaPart, ...]:
        return tuple(part for message in self.messages for part in message.media)

    def without_data(self) -> Conversation:
        """Return the conversation with empty media data."""
        if not self.media:
            return self
        turns = []
        for turn in self.messages:
            parts = (part if isinstance(part, str) else MediaPart(part.kind, b"") for part in turn.parts)
            turns.append(replace(turn, content=tuple(parts)) if turn.media else turn)
        return replace(self, messages=tuple(turns))

    def as_record(self) -> dict[str, Any]:
        """Return a record in the `messages` (or `text`) schema that parses back into this conversation."""
        if self.text is not None:
            return {"text": self.text}
        record: dict[str, Any] = {"messages": [_weighted_turn(message) for message in self.messages]}
        if self.tools:
            record["tools"] = list(self.tools)
        if self.template_kwargs:
            record["chat_template_kwargs"] = dict(self.template_kwargs)
        return record

    def hash(self) -> int:
        """Return the 64-bit xxh3 hash of everything that the model may see; `where` does not count."""
        digest = xxhash.xxh3_64()
        for message in self.messages:
            content = message.text.encode()
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            digest.update(f"{message.role} {len(content)} ".encode())
            digest.update(content)
        # Only if there is more than that: a plain chat keeps its hash, and with it its split.
        if self.tools or self.template_kwargs or self.text is not None or not all(map(_is_plain, self.messages)):
            digest.update(json.dumps(self.without_data().as_record(), default=str).encode())
        for part in self.media:
            digest.update(f"{part.kind} {len(part.data)} ".encode())
            digest.update(part.data)
        return digest.intdigest()


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be trained on."""

    where: str
    reason: BadReason
    detail: str


@dataclass(frozen=True, slots=True)
class Schema:
    """One form of chat records; `parse` makes a conversation from a record and its place, or raises BadRecordError.

    `use` is `detected` (automatically), `last` (if no other schema fits) or `asked` (only if it is set by name).
    """

    fields: frozenset[str]
    fits: Callable[[Mapping[str, Any]], bool]
    parse: Callable[[Mapping[str, Any], str], Conversation]
    use: str = "detected"
