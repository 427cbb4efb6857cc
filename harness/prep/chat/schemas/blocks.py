"""Convert the content blocks of Anthropic's turns to the fields of OpenAI's turns.

`thinking` becomes `reasoning_content`, `tool_use` a tool call, and `tool_result` a tool turn. Gemini's parts and the
items of OpenAI's Responses are first converted to such blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.prep.chat.records import BadReason
from harness.prep.chat.values import BadRecordError, check_text, is_empty, refuse_others

# Fields of each kind of block: those that are read, and those that the model neither sees nor writes.
_BLOCKS = {
    "thinking": (("thinking",), ("signature",)),
    "tool_use": (("id", "name", "input"), ("caller",)),
    "tool_result": (("tool_use_id", "name", "content"), ()),
}
_KNOWN = {kind: frozenset(("type", "cache_control", *read, *unseen)) for kind, (read, unseen) in _BLOCKS.items()}
_OWNERS = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
# A turn is written as its reasoning, its text, then its calls.
_ORDER = ("reasoning_content", "content", "tool_calls")


def without_blocks(turns: Sequence[Any]) -> Sequence[Any]:
    """Return turns with their blocks as fields of OpenAI's turns; the same object if there are none.

    An assistant's blocks in an order other than reasoning, text, calls become several turns. Other parts, such as text
    and media, stay in the content.
    """
    if not any(_has_blocks(turn) for turn in turns):
        return turns
    made: list[Any] = []
    for number, turn in enumerate(turns, start=1):
        made += _divided(turn, f"turn {number} ({turn.get('role')})") if _has_blocks(turn) else [turn]
    return made


def _has_blocks(turn: object) -> bool:
    parts = turn.get("content") if isinstance(turn, Mapping) else None
    return isinstance(parts, list) and any(isinstance(part, Mapping) and _kind_of(part) in _BLOCKS for part in parts)


def _kind_of(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _divided(turn: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """Return the turns made from one turn's blocks, in order."""
    made: list[dict[str, Any]] = []
    # Other fields, such as a weight or a name, stay with the turns of the same role.
    rest = {key: value for key, value in turn.items() if key not in _ORDER}
    for number, part in enumerate(turn["content"], start=1):
        kind = _kind_of(part) if isinstance(part, Mapping) else ""
        if kind not in _BLOCKS:
            _add(made, rest, "content", part)
            continue
        block = f"block {number} of {what}"
        if turn.get("role") != _OWNERS[kind]:
            detail = f"{block} is of type {kind!r}, which belongs to turns of role {_OWNERS[kind]!r}"
            raise BadRecordError(BadReason.BAD_TURN, detail)
        seen = {key: value for key, value in part.items() if value is not False}
        refuse_others(seen, _KNOWN[kind], f"{block} ({kind})", can_be_ignored=True)
        if kind == "thinking":
            _add(made, rest, "reasoning_content", check_text(part.get("thinking"), f"the thinking of {block}"))
        elif kind == "tool_use":
            call = {"name": part.get("name"), "arguments": part.get("input")}
            _add(made, rest, "tool_calls", {"id": part.get("id"), "function": call})
        else:
            answer = {"tool_call_id": part.get("tool_use_id"), "name": part.get("name"), "content": part.get("content")}
            made.append({"role": "tool", **answer})
    for own in made:
        if "reasoning_content" in own:
            own["reasoning_content"] = "\n\n".join(own["reasoning_content"])
    # In the order of a turn: its reasoning comes first, and its calls last.
    for field, place in (("reasoning_content", 0), ("tool_calls", -1)):
        if not is_empty(turn.get(field)):
            if any(field in own for own in made):
                raise BadRecordError(BadReason.BAD_TURN, f"{what} has {field} as well as blocks of these")
            made[place][field] = turn[field]
    return made


def _add(made: list[dict[str, Any]], rest: Mapping[str, Any], field: str, value: object) -> None:
    """Add a block to the last turn, or start another turn if the block must come before parts of the last turn."""
    last = made[-1] if made else {}
    later = _ORDER[_ORDER.index(field) + 1 :]
    if last.get("role") != rest.get("role") or any(not is_empty(last.get(name)) for name in later):
        made.append(dict(rest))
    made[-1].setdefault(field, []).append(value)
