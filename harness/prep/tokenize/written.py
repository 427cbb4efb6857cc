"""Check that a rendered conversation holds the texts of its messages.

`known_forms` tries a template with the shape of a conversation, which a few texts can still change: a template may look
for a word, cut at a length, or leave a value of one type out. So each conversation is checked, too.
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


def unwritten_text(
    text: str, messages: Sequence[Message], upto: Callable[[int], str], *, is_ordered: bool = False
) -> str:
    """Return what a rendered conversation leaves out, in words; empty if it holds every text.

    Texts have to be written one after another, each with its white space or other, also as JSON spells it; a short one
    that is missing is thus not found inside another. The reasoning of a turn is checked where the turn is trained
    (`unwritten_reasoning`).

    Args:
        upto: renders the conversation up to and with a turn, in which an answer may say what it says no more later.
        is_ordered: the template writes all texts in the order of the turns, not questions and answers alone.
    """
    place = 0
    for number, message in enumerate(messages):
        is_answer = message.role == "assistant"
        in_order = is_ordered or is_answer or message.role == "user"
        for piece in _contents(message):
            found = _find(text, piece, place if in_order else 0)
            if found < 0 and not (is_answer and _is_only_then(text, upto(number), piece)):
                # It may stand where the search for an earlier text, which is missing, has found that.
                turns = f"turns 1 to {number + 1}" if _find(text, piece, 0) >= 0 else f"turn {number + 1}"
                return f"all of the content of {turns} ({message.role}): {_shown(piece)}"
            if in_order:
                place = max(place, found)
        end = place
        for call in message.tool_calls:
            found, missing = _find_arguments(text, call.arguments, place if is_ordered else 0)
            if missing and not _is_only_then(text, upto(number), call.arguments):
                return f"all of the tool call's arguments of turn {number + 1} ({message.role}): {_shown(missing)}"
            end = max(end, found)
        place = end if is_ordered else place
    return ""


def _is_only_then(text: str, own: str, wanted: Any) -> bool:
    """Return whether a turn has a content or arguments at the end of a conversation (`own`) and no more in `text`."""
    if text.startswith(own.rstrip()):
        return False
    return _find(own, wanted, 0) >= 0 if isinstance(wanted, str) else not _find_arguments(own, wanted, 0)[1]


def unwritten_reasoning(text: str, turn: int, message: Message) -> str:
    """Return which reasoning of a turn the text up to it leaves out, in words; empty if it holds all of it."""
    inside = [part for part in message.texts if "</think>" in part]
    pieces = [message.reasoning, *(piece for part in inside for piece in _THINK_TAGS.split(part))]
    for piece in pieces:
        if _find(text, piece.strip(), 0) < 0:
            return f"all of the reasoning of turn {turn + 1} ({message.role}): {_shown(piece.strip())}"
    return ""


def _contents(message: Message) -> Iterator[str]:
    """Yield the pieces of a content that a template has to write, of an answer without the reasoning inside it."""
    for part in message.texts or ("",):
        if message.role == "assistant" and "</think>" in part:
            yield from (piece.strip() for piece in _THINK_TAGS.split(part.partition("</think>")[2]))
        else:
            yield part.strip()


def _find(text: str, piece: str, start: int) -> int:
    """Return the first end of a piece in a text, from `start` on; -1 if it is not there."""
    plain = json.dumps(piece)[1:-1]
    # Nearly every text is spelled in one way.
    spelled = {piece} if plain == piece else {piece, plain, json.dumps(piece, ensure_ascii=False)[1:-1]}
    if ends := [found + len(form) for form in spelled if (found := text.find(form, start)) >= 0]:
        return min(ends)
    for word in piece.split():
        found = text.find(word, start)
        if found < 0:
            return -1
        start = found + len(word)
    return start


def _find_arguments(text: str, arguments: Any, start: int) -> tuple[int, str]:
    """Return the end of a call's arguments in a text, from `start` on, and the first of them that is not there."""
    if isinstance(arguments, str):
        if (found := text.find(arguments, start)) >= 0:
            return found + len(arguments), ""
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    end = start
    for leaf in _leaves(arguments):
        found = _find(text, leaf.strip(), start)
        if found < 0:
            return start, leaf
        end = max(end, found)
    return end, ""


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
