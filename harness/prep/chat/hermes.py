"""Convert tool calls and results inside text, as Hermes and Qwen write them, to calls and tool turns."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from harness.prep.chat.records import BadReason, Conversation, Message, ToolCall
from harness.prep.chat.values import BadRecordError, load_json, parse_call

# Maximum length of a call as a Python literal, whose syntax tree takes 500 bytes per character.
_MAX_LITERAL = 1 << 18


def lift_calls(conversation: Conversation) -> Conversation:
    """Return a conversation with `<tool_call>` tags of the assistant as calls, and `<tool_response>` as tool turns.

    A call is `{"name": ..., "arguments": {...}}` in JSON or as a Python literal. Text before the first call remains the
    content of its turn, and tags inside the reasoning remain text.
    """
    numbered = enumerate(conversation.messages, start=1)
    turns = [_lifted(message, f"turn {number} ({message.role})") for number, message in numbered]
    return replace(conversation, messages=tuple(chain.from_iterable(turns)))


def _lifted(message: Message, what: str) -> Iterator[Message]:
    is_answer = message.role == "assistant"
    is_result = message.role in ("user", "tool") and not message.media
    thought, end, text = message.text.rpartition("</think>") if is_answer else ("", "", message.text)
    tag = "tool_call" if is_answer else "tool_response"
    before, found = _divide(text, tag, what) if is_answer or is_result else ("", [])
    if not found:
        yield message
    elif is_answer:
        if message.part_weights:
            raise BadRecordError(BadReason.BAD_WEIGHT, f"{what} has weights of parts and <tool_call> in its text")
        if message.tool_calls:
            raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has tool_calls and <tool_call> in its text")
        lifted = tuple(_parse(call, f"<tool_call> {place} of {what}") for place, call in enumerate(found, start=1))
        yield replace(message, content=(thought + end + before.rstrip()) or None, tool_calls=lifted)
    else:
        if before.strip():
            raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has text before <tool_response>")
        if message.tool_call_id and len(found) > 1:
            raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has one tool_call_id and {len(found)} <tool_response>")
        for result in found:
            yield replace(message, role="tool", content=result.strip())


def _parse(text: str, what: str) -> ToolCall:
    try:
        call = load_json(text)
    except (ValueError, RecursionError) as error:
        try:
            if len(text) > _MAX_LITERAL:
                raise ValueError from None
            call = ast.literal_eval(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise BadRecordError(BadReason.BAD_TOOLS, f"{what} is not JSON: {error}") from None
    return parse_call(call, what)


def _divide(text: str, tag: str, what: str) -> tuple[str, list[str]]:
    """Return the text before the first tag, and the text inside each tag."""
    if f"<{tag}>" not in text and f"</{tag}>" not in text:
        return text, []
    before, *opened = text.split(f"<{tag}>")
    parts = [one.split(f"</{tag}>") for one in opened]
    if f"</{tag}>" in before or any(len(part) != 2 for part in parts):
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has an unclosed or nested <{tag}>")
    if any(between.strip() for _, between in parts):
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has text after <{tag}>")
    return before, [inside for inside, _ in parts]
