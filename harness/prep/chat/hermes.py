"""Tool calls and results that are written inside texts, as Hermes and Qwen write them, become calls and tool turns."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from harness.prep.chat.records import BadReason, Conversation, Message, ToolCall
from harness.prep.chat.values import BadRecordError, load_json, parse_call

# Characters of a call as Python writes it, whose syntax tree takes 500 bytes for each.
_MAX_LITERAL = 1 << 18


def lift_calls(conversation: Conversation) -> Conversation:
    """Return a conversation with `<tool_call>` of the assistant as calls, and `<tool_response>` as turns of tools.

    A call is `{"name": ..., "arguments": {...}}` in JSON or as Python writes it. Text before the first call stays the
    content of its turn, and tags inside the reasoning are text.
    """
    turns: list[Message] = []
    for number, message in enumerate(conversation.messages, start=1):
        what = f"turn {number} ({message.role})"
        if message.role == "assistant":
            turns.append(_with_calls(message, what))
        elif message.role in ("user", "tool"):
            turns += _results(message, what)
        else:
            turns.append(message)
    return replace(conversation, messages=tuple(turns))


def _with_calls(message: Message, what: str) -> Message:
    thought, end, answer = message.text.rpartition("</think>")
    before, calls = _divide(answer, "tool_call", what)
    if not calls:
        return message
    if message.part_weights:
        raise BadRecordError(BadReason.BAD_WEIGHT, f"{what} has weights of parts and <tool_call> in its text")
    if message.tool_calls:
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has tool_calls and <tool_call> in its text")
    lifted = tuple(_parse(call, f"<tool_call> {place} of {what}") for place, call in enumerate(calls, start=1))
    return replace(message, content=(thought + end + before.rstrip()) or None, tool_calls=lifted)


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


def _results(message: Message, what: str) -> Iterator[Message]:
    before, results = _divide(message.text, "tool_response", what) if not message.media else ("", [])
    if not results:
        yield message
        return
    if before.strip():
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has text before <tool_response>")
    if message.tool_call_id and len(results) > 1:
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has one tool_call_id and {len(results)} <tool_response>")
    for result in results:
        yield replace(message, role="tool", content=result.strip())


def _divide(text: str, tag: str, what: str) -> tuple[str, list[str]]:
    """Return the text before the first of some tags, and what is inside each of them."""
    if f"<{tag}>" not in text and f"</{tag}>" not in text:
        return text, []
    before, *opened = text.split(f"<{tag}>")
    parts = [one.split(f"</{tag}>") for one in opened]
    if f"</{tag}>" in before or any(len(part) != 2 for part in parts):
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has an unclosed or nested <{tag}>")
    if any(between.strip() for _, between in parts):
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has text after <{tag}>")
    return before, [inside for inside, _ in parts]
