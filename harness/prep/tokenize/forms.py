"""The forms in which a template may take a conversation, and the words that show which of them it understands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from harness.prep.chat import Conversation, Message

# Names under which templates read the reasoning of a turn.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Form:
    """One way to hand conversations to a template.

    Attributes:
        content: `given`, `text` (parts joined, nothing as empty text), `null` (empty content of tool calls as null) or
            `parts`.
        arguments: of tool calls: `given`, `object` or `text`.
    """

    content: str = "given"
    arguments: str = "given"

    def turn(self, message: Message) -> dict[str, Any]:
        turn = message.as_dict()
        if message.reasoning:
            turn |= dict.fromkeys(REASONING_KEYS, message.reasoning)
        if self.content == "text":
            turn["content"] = message.text
        elif self.content == "parts":
            given = message.content
            texts = given if isinstance(given, tuple) else [given] if given else []
            turn["content"] = [{"type": "text", "text": text} for text in texts]
        elif self.content == "null" and message.tool_calls and not message.text:
            turn["content"] = None
        if message.tool_calls and self.arguments != "given":
            convert = _as_object if self.arguments == "object" else _as_text
            turn["tool_calls"] = [
                replace(call, arguments=convert(call.arguments)).as_dict() for call in message.tool_calls
            ]
        return turn


FORMS = tuple(
    Form(content, arguments)
    for arguments, content in product(("given", "object", "text"), ("given", "text", "null", "parts"))
)


def _as_object(arguments: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments)
    except ValueError:
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _as_text(arguments: str | Mapping[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def pieces_of(text: str, tags: tuple[str, ...]) -> list[str]:
    """Split a content at the marks that a template looks for (`Template.tags`): text, mark, text, ..., text.

    For Qwen3, a user's `<tool_response>...</tool_response>` is the result of a tool.
    """
    for tag in tags:
        if tag in text:
            return _pattern(tags).split(text)
    return [text]


@lru_cache(maxsize=8)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    # Longest first: a mark may begin with another.
    return re.compile(f"({'|'.join(map(re.escape, sorted(tags, key=len, reverse=True)))})")


def _kinds(message: Message, tags: tuple[str, ...]) -> tuple[tuple[bool | str | None, ...], ...]:
    """Return what a template can tell of each part: its marks, and between them a text, white space or nothing."""
    content = message.content
    return tuple(
        tuple(
            piece if number % 2 else bool(piece.strip()) if piece else None
            for number, piece in enumerate(pieces_of(part, tags))
        )
        for part in (content if isinstance(content, tuple) else (content or "",))
    )


def shape_of(conversation: Conversation, tags: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return what a template's treatment of fields can depend on, without the texts; `tags` as in `pieces_of`."""
    turns = tuple(
        (
            turn.role,
            type(turn.content),
            _kinds(turn, tags),
            bool(turn.reasoning.strip()),
            tuple(isinstance(call.arguments, str) for call in turn.tool_calls),
            bool(turn.tool_call_id),
            bool(turn.name),
        )
        for turn in conversation.messages
    )
    kwargs = conversation.template_kwargs
    return turns, len(conversation.tools), json.dumps(dict(kwargs), sort_keys=True, default=str) if kwargs else ""


def with_unique_words(
    conversation: Conversation, tags: tuple[str, ...] = ()
) -> tuple[Conversation, list[tuple[int | None, str, str]]]:
    """Return a conversation of the same shape whose texts are unique words, between the same marks.

    Returns:
        the conversation, and of each word the number of its message (None for tools), the word and its field's name.
    """
    words: list[tuple[int | None, str, str]] = []

    def word(number: int | None, name: str) -> str:
        words.append((number, f"zq{len(words)}wz", name))
        return words[-1][1]

    def text(number: int, given: str) -> str:
        pieces = pieces_of(given, tags)
        is_answer = conversation.messages[number].role == "assistant"
        for place in range(0, len(pieces), 2):
            if pieces[place].strip():
                thought = is_answer and pieces[place + 1 : place + 2] == ["</think>"]
                pieces[place] = word(number, "reasoning inside <think>" if thought else "content")
        return "".join(pieces)

    def arguments(number: int, given: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
        if isinstance(given, str) and not isinstance(_as_object(given), dict):
            return given
        made = {word(number, "tool call's arguments"): word(number, "tool call's arguments")}
        return json.dumps(made) if isinstance(given, str) else made

    turns = []
    for number, message in enumerate(conversation.messages):
        content = message.content
        turns.append(
            replace(
                message,
                reasoning=word(number, "reasoning") if message.reasoning.strip() else message.reasoning,
                content=tuple(text(number, part) for part in content)
                if isinstance(content, tuple)
                else text(number, content)
                if content
                else content,
                tool_calls=tuple(
                    replace(call, name=word(number, "tool call's name"), arguments=arguments(number, call.arguments))
                    for call in message.tool_calls
                ),
            )
        )
    tools = tuple(_with_words(tool, lambda name: word(None, name)) for tool in conversation.tools)
    return replace(conversation, messages=tuple(turns), tools=tools), words


def _with_words(tool: Mapping[str, Any], word: Callable[[str], str]) -> Mapping[str, Any]:
    """Return a tool with unique words as its name and as the names of its parameters, nested ones too."""
    of = f"of the tool {tool['function']['name']!r}"
    function = {**tool["function"], "name": word("tools")}
    if "parameters" in function:
        function["parameters"] = _renamed(function["parameters"], lambda path: word(f"parameter {path!r} {of}"))
    return {**tool, "function": function}


def _renamed(schema: Any, word: Callable[[str], str], path: str = "") -> Any:
    """Return a JSON Schema with other names of its properties, of objects in these, and of items; `path` names them."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, Mapping):
        names = {name: word(f"{path}{name}") for name, value in properties.items() if value is not None}
        made["properties"] = {
            names.get(name, name): _renamed(value, word, f"{path}{name}.") for name, value in properties.items()
        }
        if isinstance(required, list):
            made["required"] = [names.get(str(name), name) for name in required]
    if "items" in schema:
        made["items"] = _renamed(schema["items"], word, path)
    return made
