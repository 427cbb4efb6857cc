"""Parse turns in the form of OpenAI and Hugging Face (`role`, `content`, ...) into a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from harness.prep.chat.records import ROLES, BadReason, Conversation, MediaPart, Message, ToolCall
from harness.prep.chat.tools import parse_tools, refuse_hidden_parameters
from harness.prep.chat.values import (
    MEDIA_FIELDS,
    BadRecordError,
    check_text,
    decoded,
    first_name,
    ignoring,
    is_empty,
    parse_call,
    parse_calls,
    parse_template_kwargs,
    show,
    text_field,
)
from harness.printing import count_of
from harness.records import HUNDREDTHS

# Record fields that every schema with turns reads in addition to the turns.
CHAT_FIELDS = frozenset(("system", "system_prompt", "tools", "chat_template_kwargs"))
# Fields next to a text answer; `reasoning` is not among them, because records contain `on` or `off` in it.
ANSWER_FIELDS = ("reasoning_content", "thinking")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
WEIGHT_FIELDS = ("weight", "train", "trainable")
TURN_FIELDS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", *REASONING_FIELDS, *WEIGHT_FIELDS)
)
# Fields with lists of turns or items, or with text instead, even text that looks like JSON.
LISTS_OR_TEXTS = ("prompt", "completion", "chosen", "input", "output")
LISTS_OF_TURNS = ("messages", "conversations", "conversation", "contents", *LISTS_OR_TEXTS)
TEXT_ALONE = "only text can be trained on (source.drop_media=true)"

# Columns next to turns that contain or name media, such as `image_path`, `audioUrl` and `files`; no counts or flags.
_MEDIA_COLUMN = re.compile(
    r"(?!(?:num|n|has|is|with|count)_)(?:[a-z0-9]+_)*(?:image|img|picture|photo|audio|video|media|attachment)s?"
    r"(?:_(?:path|url|uri|file|filename|name|id|bytes|b64|base64|data|list|token)s?)*|files"
)
_MEDIA_PART = re.compile(r"image|audio|video|file|media|inline_?data", re.IGNORECASE)
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_ROLES = frozenset(ROLES)
_SHAREGPT_ROLES = ("human", "gpt", "model", "function_call", "tool_call", "observation", "tool_response")
_REASONING, _CALLS, _WEIGHTS = map(frozenset, (REASONING_FIELDS, ("tool_calls", "function_call"), WEIGHT_FIELDS))
# Fields that only turns of one role may have.
_OWNED_FIELDS = (("assistant", _REASONING | _CALLS), ("tool", frozenset(("tool_call_id",))))


@lru_cache(maxsize=4096)
def is_media_column(name: str) -> bool:
    """Return True if a column's name indicates media or their location: `MEDIA_FIELDS` and similar names."""
    return _MEDIA_COLUMN.fullmatch(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", name).lower()) is not None


def is_media_part(part: Mapping[str, Any]) -> bool:
    """Return True if a part of a turn contains media: by its type, or by the fields of a part without text."""
    kind = part.get("type")
    if isinstance(kind, str) and _MEDIA_PART.search(kind):
        return True
    others = [key for key, value in part.items() if key not in ("type", "text") and not is_empty(value)]
    return is_empty(part.get("text")) and any(_MEDIA_PART.search(str(key)) for key in others)


def chat(record: Mapping[str, Any], turns: Sequence[object], where: str) -> Conversation:
    """Return the conversation made of turns, with the record's system prompt, tools and template variables."""
    messages = [parse_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    tools: tuple[Mapping[str, Any], ...] = ()
    kwargs: Mapping[str, Any] = {}
    if not CHAT_FIELDS.isdisjoint(record):
        # Anthropic system prompts may be text parts.
        contents = {name: _parse_content(record.get(name), f"`{name}`") for name in ("system", "system_prompt")}
        texts = {name: Message("system", content).text for name, content in contents.items()}
        held = {name: text for name, text in texts.items() if text.strip()}
        if len({text.strip() for text in held.values()}) > 1:
            detail = "`system` and `system_prompt` differ; to leave one out: source.ignore_fields=[system_prompt]"
            raise BadRecordError(BadReason.BAD_TURN, detail)
        if held:
            name, system = next(iter(held.items()))
            if not messages or messages[0].role not in ("system", "developer"):
                messages.insert(0, Message("system", system))
            elif messages[0].text.strip() != system.strip():
                detail = f"`{name}` and the first turn differ; to leave it out: source.ignore_fields=[{name}]"
                raise BadRecordError(BadReason.BAD_TURN, detail)
        tools = parse_tools(record.get("tools"))
        refuse_hidden_parameters(tools, messages)
        kwargs = parse_template_kwargs(record.get("chat_template_kwargs"))
    if not any(message.role == "assistant" for message in messages):
        detail = f"no assistant turn in a conversation of {count_of(len(messages), 'turn')}"
        raise BadRecordError(BadReason.NO_ASSISTANT_TURN, detail)
    return Conversation(tuple(messages), where, tools, kwargs)


def list_of_turns(record: Mapping[str, Any], name: str) -> list[Any]:
    """Return the turns in a field, given as a list or as its JSON text; raise BadRecordError if there are none."""
    turns = as_list(decoded(record.get(name), f"`{name}`", BadReason.NO_MESSAGES))
    if not isinstance(turns, list) or not turns:
        kind = "an empty list" if turns == [] else "nothing" if turns is None else f"a {type(turns).__name__}"
        raise BadRecordError(BadReason.NO_MESSAGES, f"`{name}` contains {kind}, expected a list of turns")
    return turns


def as_list(turns: object) -> object:
    """Return an object of equally long lists, as `datasets` stores a sequence, as a list of turns; else the value."""
    if isinstance(turns, list) or not isinstance(turns, Mapping):
        return turns
    if not all(isinstance(values, list) for values in turns.values()) or len(set(map(len, turns.values()))) != 1:
        return turns
    return [dict(zip(turns, values, strict=True)) for values in zip(*turns.values(), strict=True)]


def first_turn(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the first turn of a field, to recognize the schema; empty if there is none."""
    try:
        turn = list_of_turns(record, name)[0]
    except BadRecordError:
        return {}
    return turn if isinstance(turn, Mapping) else {}


def turns_or_text(record: Mapping[str, Any], name: str, role: str) -> list[Any]:
    """Return the turns in a field, or its text as one turn of the given role."""
    if isinstance(record.get(name), list):
        return list_of_turns(record, name)
    return [{"role": role, "content": text_field(record, name)}]


def answer_turn(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a text field as an assistant turn, with the record's reasoning."""
    reasoning = {field: record[field] for field in ANSWER_FIELDS if not is_empty(record.get(field))}
    return {"role": "assistant", "content": text_field(record, name), **reasoning}


def history_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of `history`, the earlier pairs of question and answer."""
    history = decoded(record.get("history"), "`history`", BadReason.BAD_TURN)
    pairs = [] if is_empty(history) else history
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRecordError(BadReason.BAD_TURN, "`history` is not a list of question and answer pairs")
    turns = (turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True))
    return [{"role": role, "content": text} for role, text in turns]


def train_only_answer(conversation: Conversation, num_answer: int) -> Conversation:
    """Return the conversation with assistant turns trained only if among the last `num_answer`; given weights stay."""
    first = len(conversation.messages) - num_answer
    if any(message.role == "assistant" and message.weight for message in conversation.messages[:first]):
        raise BadRecordError(BadReason.BAD_WEIGHT, "a turn of the prompt has a weight above 0")
    messages = (
        replace(message, weight=HUNDREDTHS * (place >= first))
        if message.role == "assistant" and message.weight is None
        else message
        for place, message in enumerate(conversation.messages)
    )
    return replace(conversation, messages=tuple(messages))


def parse_turn(turn: object, number: int) -> Message:
    """Parse and check one turn; raise BadRecordError with its number."""
    if not isinstance(turn, Mapping):
        raise BadRecordError(BadReason.BAD_TURN, f"turn {number} is a {type(turn).__name__}, expected an object")
    role, content = turn.get("role"), turn.get("content")
    # Fast path for nearly every turn of nearly every dataset.
    if len(turn) == 2 and type(content) is str and type(role) is str and role in _ROLES and content.strip():
        return Message(role, content if content.isascii() else check_text(content, f"turn {number} ({role})"))
    what = f"turn {number}"
    if role == "function":
        role = "tool"
    if not isinstance(role, str) or role not in _ROLES:
        detail = f"{what} has role {show(role)}, expected one of {', '.join(ROLES)}"
        if role in _SHAREGPT_ROLES:
            detail += "; source.schema=sharegpt supports such roles"
        raise BadRecordError(BadReason.UNKNOWN_ROLE, detail)
    what = f"{what} ({role})"
    held = {key: value for key, value in turn.items() if not is_empty(value) and key not in ("role", "content")}
    if not TURN_FIELDS.issuperset(held):
        _refuse_unknown(held, what)
    for owner, fields in _OWNED_FIELDS:
        if role != owner and not fields.isdisjoint(held):
            name = first_name(fields & held.keys())
            detail = f"{what} has the field {name}, which belongs to turns of role {owner!r}"
            raise BadRecordError(BadReason.UNKNOWN_FIELD, detail)
    part_weights: tuple[int | None, ...] = ()
    if isinstance(content, list):
        part_weights, content = _part_weights(content, role, what)
    message = Message(
        role,
        content if type(content) is str and content.isascii() else _parse_content(content, what),
        reasoning="" if _REASONING.isdisjoint(held) else _parse_reasoning(held, what),
        tool_calls=() if _CALLS.isdisjoint(held) else _parse_tool_calls(held, what),
        tool_call_id=check_text(held["tool_call_id"], f"the id of {what}") if "tool_call_id" in held else "",
        name=check_text(held["name"], f"the name of {what}") if "name" in held else "",
        weight=None if _WEIGHTS.isdisjoint(held) else _parse_weight(held, what),
        part_weights=part_weights,
    )
    if message.media and role == "assistant":
        detail = f"{what} has an {message.media[0].kind}, and only text that the assistant writes can be trained on"
        raise BadRecordError(BadReason.MEDIA, detail)
    # A tool may return nothing, and some sources write a system turn even if there is no system prompt.
    if role in ("tool", "system", "developer"):
        return message if message.content is not None else replace(message, content="")
    if message.text.strip() or message.tool_calls or message.reasoning.strip() or message.media:
        return message
    raise BadRecordError(BadReason.EMPTY_TURN, f"{what} {'has no content' if content is None else 'is empty'}")


def _refuse_unknown(held: Mapping[str, Any], what: str) -> None:
    if media := sorted(MEDIA_FIELDS.intersection(held)):
        raise BadRecordError(BadReason.MEDIA, f"{what} has `{media[0]}`; {TEXT_ALONE}")
    names = sorted(map(str, held.keys() - TURN_FIELDS))
    fields = ("the field " if len(names) == 1 else "the fields ") + ", ".join(map(show, names))
    ignored = ignoring(*(name.partition(" beside ")[0] for name in names))  # as `sharegpt` names a second content
    detail = f"{what} has {fields}, which no schema reads; to leave out: {ignored}"
    raise BadRecordError(BadReason.UNKNOWN_FIELD, detail)


def _parse_content(content: object, what: str) -> str | tuple[str | MediaPart, ...] | None:
    if content is None or isinstance(content, str):
        return None if content is None else check_text(content, what)
    if not isinstance(content, list):
        raise BadRecordError(BadReason.NOT_TEXT, f"{what} has content of type {type(content).__name__}")
    return tuple(_parse_part(part, f"part {number} of {what}") for number, part in enumerate(content, start=1)) or None


def _parse_part(part: object, what: str) -> str | MediaPart:
    if isinstance(part, MediaPart):
        return part
    if isinstance(part, str):
        return check_text(part, what)
    if not isinstance(part, Mapping):
        raise BadRecordError(BadReason.NOT_TEXT, f"{what} is of type {type(part).__name__}, expected text")
    kind = part.get("type")
    # `cache_control` does not affect what the model sees.
    others = [key for key in part if key not in ("type", "text", "cache_control") and not is_empty(part[key])]
    if isinstance(kind, str) and _MEDIA_PART.search(kind):
        raise BadRecordError(BadReason.MEDIA, f"{what} is of type {show(kind)}; {TEXT_ALONE}")
    if kind not in _TEXT_PARTS:
        fix = f"; to leave out: {ignoring(kind)}" if isinstance(kind, str) else ""
        raise BadRecordError(BadReason.NOT_TEXT, f"{what} is of type {show(kind)}, expected 'text'{fix}")
    if others:
        media = any(_MEDIA_PART.search(str(key)) for key in others)
        fix = "" if media else f"; to leave out: {ignoring(min(map(str, others)))}"
        reason = BadReason.MEDIA if media else BadReason.UNKNOWN_FIELD
        raise BadRecordError(reason, f"{what} has the field {first_name(others)}{fix}")
    return check_text(part.get("text"), what)


def _parse_reasoning(turn: Mapping[str, Any], what: str) -> str:
    found = {field: check_text(turn[field], f"the {field} of {what}") for field in REASONING_FIELDS if field in turn}
    if len(set(found.values())) > 1:
        raise BadRecordError(BadReason.BAD_TURN, f"{what} has different texts in {' and '.join(found)}")
    return next(iter(found.values()))


def _parse_tool_calls(turn: Mapping[str, Any], what: str) -> tuple[ToolCall, ...]:
    calls = parse_calls(turn.get("tool_calls"), f"the tool_calls of {what}")
    if "function_call" not in turn:
        return calls
    if calls:
        raise BadRecordError(BadReason.BAD_TURN, f"{what} has both tool_calls and function_call")
    return (parse_call(turn["function_call"], f"the function_call of {what}"),)


def _parse_weight(turn: Mapping[str, Any], what: str) -> int:
    """Return the weight of a turn in hundredths; its weight fields must agree on whether it is trained."""
    given = {field: turn[field] for field in WEIGHT_FIELDS if field in turn}
    for field, value in given.items():
        if field != "weight" and not isinstance(value, bool):
            raise BadRecordError(BadReason.BAD_WEIGHT, f"{what} has the {field} {show(value)}, expected true or false")
    weights = [_hundredths(value, what) for value in given.values()]
    if len(set(map(bool, weights))) > 1:
        raise BadRecordError(BadReason.BAD_WEIGHT, f"{what} has contradictory weights")
    return weights[0]


def _part_weights(content: list[Any], role: str, what: str) -> tuple[tuple[int | None, ...], list[Any]]:
    """Return the weights of a turn's parts in hundredths, empty if no part has one, and the parts without weights."""
    found = [part.get("weight") if isinstance(part, Mapping) else None for part in content]
    if all(weight is None for weight in found):
        return (), content
    if role != "assistant":
        detail = f"a part of {what} has a weight, and only assistant turns are trained"
        raise BadRecordError(BadReason.BAD_WEIGHT, detail)
    weights = tuple(
        None if weight is None else _hundredths(weight, f"part {number} of {what}")
        for number, weight in enumerate(found, start=1)
    )
    return weights, [{**part, "weight": None} if isinstance(part, Mapping) else part for part in content]


def _hundredths(value: object, what: str) -> int:
    if isinstance(value, (int, float)) and 0 <= value <= 1 and round(value, 2) == value:
        return round(value * HUNDREDTHS)
    detail = f"{what} has the weight {show(value)}, expected a number from 0 to 1 with at most two decimals"
    raise BadRecordError(BadReason.BAD_WEIGHT, detail)
