"""Check that a rendered conversation holds the texts of its messages.

`forms` tries a template with the shape of a conversation, which a few texts can still change: a template may look for a
word, cut at a length, or leave a value of one type out. So each conversation is checked, too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.prep.chat import Message

_THINK_TAGS = re.compile(r"</?think>")
_SHOWN_CHARACTERS = 40


def unwritten_text(text: str, messages: Sequence[Message], upto: Callable[[int], str]) -> str:
    """Return what a rendered conversation leaves out, in words; empty if it holds every text.

    Questions and answers have to be written in order, other turns anywhere, and each with its white space or other,
    also as JSON spells it. The reasoning of a turn is checked where the turn is trained (`unwritten_reasoning`).

    Args:
        text: of the whole conversation.
        messages: of the conversation.
        upto: renders the conversation up to and with a turn, in which an answer may say what it says no more later.
    """
    place = 0
    for number, message in enumerate(messages):
        is_answer = message.role == "assistant"
        in_order = is_answer or message.role == "user"
        for piece in _contents(message):
            found = _find(text, piece, place if in_order else 0)
            if found < 0 and (not is_answer or _find(upto(number), piece, 0) < 0):
                return f"all of the content of turn {number + 1} ({message.role}): {_shown(piece)}"
            if in_order:
                place = max(place, found)
        for call in message.tool_calls:
            missing = _unwritten_argument(text, call.arguments)
            if missing and _unwritten_argument(upto(number), call.arguments):
                return f"all of the tool call's arguments of turn {number + 1} ({message.role}): {_shown(missing)}"
    return ""


def unwritten_reasoning(text: str, turn: int, message: Message) -> str:
    """Return which reasoning of an answer its text leaves out, in words; empty if it holds all of it.

    Args:
        text: of the conversation up to and with the answer.
        turn: its number, from 0.
    """
    inside = [part for part in _parts(message) if "</think>" in part]
    pieces = [message.reasoning, *(piece for part in inside for piece in _THINK_TAGS.split(part))]
    for piece in pieces:
        if _find(text, piece.strip(), 0) < 0:
            return f"all of the reasoning of turn {turn + 1} ({message.role}): {_shown(piece.strip())}"
    return ""


def _parts(message: Message) -> Sequence[str]:
    content = message.content
    return content if isinstance(content, tuple) else (content or "",)


def _contents(message: Message) -> Iterator[str]:
    """Yield the pieces of a content that a template has to write, of an answer without the reasoning inside it."""
    for part in _parts(message):
        if message.role == "assistant" and "</think>" in part:
            yield from (piece.strip() for piece in _THINK_TAGS.split(part.partition("</think>")[2]))
        else:
            yield part.strip()


def _find(text: str, piece: str, start: int) -> int:
    """Return the end of a piece in a text, from `start` on; -1 if it is not there."""
    found = text.find(piece, start)
    if found >= 0:
        return found + len(piece)
    for escaped in (json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]):
        found = text.find(escaped, start)
        if found >= 0:
            return found + len(escaped)
    for word in piece.split():
        found = text.find(word, start)
        if found < 0:
            return -1
        start = found + len(word)
    return start


def _unwritten_argument(text: str, arguments: Any) -> str:
    if isinstance(arguments, str):
        if arguments in text:
            return ""
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return next((leaf for leaf in _leaves(arguments) if _find(text, leaf.strip(), 0) < 0), "")


def _leaves(value: Any) -> Iterator[str]:
    """Yield the names, texts and numbers inside a value of JSON; templates spell the other values in several ways."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)


def _shown(piece: str) -> str:
    return repr(piece if len(piece) <= _SHOWN_CHARACTERS else piece[:_SHOWN_CHARACTERS] + "...")
