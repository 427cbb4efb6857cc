"""Chat records as datasets of each schema have them, by the thousand and always the same ones.

Every 100th record is broken in a way that is usual for its schema. Each generator gives the records and the reasons
why some are left out; `BREAKS` records in `COUNT` are broken.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.prep.chat import BadReason

COUNT = 2000
BREAKS = COUNT // 100
_TOOLS = [
    {
        "name": f"get_{what}",
        "description": f"Return the {what} of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    }
    for what in ("weather", "population", "time")
]
_PLACES = ("Rome", "Zürich", "東京", "São Paulo", "Reykjavík")
_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "and",
    "12",
    "hens",
    "—",
    "naïve",
    "🙂",
    "白い",
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """Records of one kind of dataset.

    Attributes:
        schema: that is detected.
        make: makes record `number`.
        broken: makes the broken record in its place.
        reason: for leaving a broken one out.
        unused: columns that no schema reads.
        settings: of the `RecordReader`, for records that need any.
    """

    schema: str
    make: Callable[[random.Random, int], Record]
    broken: Callable[[Record], Record]
    reason: BadReason
    unused: frozenset[str] = frozenset()
    settings: dict[str, Any] = field(default_factory=dict)

    def records(self, count: int = COUNT) -> list[Record]:
        """Return the first `count` records, every 100th of them broken."""
        chance = random.Random(17)
        made = [self.make(chance, number) for number in range(count)]
        return [self.broken(record) if number % 100 == 99 else record for number, record in enumerate(made)]


def _text(chance: random.Random, most: int = 20) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(1, most)))


def _call(chance: random.Random) -> Record:
    return {"name": chance.choice(_TOOLS)["name"], "arguments": {"place": chance.choice(_PLACES)}}


def _openai_tools(chance: random.Random, number: int) -> Record:
    turns: list[Record] = [{"role": "system", "content": "Use the tools."}] if number % 2 else []
    for turn in range(chance.randint(1, 3)):
        call = _call(chance)
        arguments = json.dumps(call["arguments"], ensure_ascii=False) if number % 3 else call["arguments"]
        call_id = f"call_{number}_{turn}"
        turns += [
            {"role": "user", "content": _text(chance)},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": {**call, "arguments": arguments}}],
            },
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": call["name"],
                "content": json.dumps({"is": _text(chance)}),
            },
            {"role": "assistant", "content": _text(chance)},
        ]
    tools = [{"type": "function", "function": tool} for tool in _TOOLS]
    return {"messages": turns, "tools": json.dumps(tools) if number % 5 == 0 else tools, "parallel_tool_calls": False}


def _without_answer(record: Record) -> Record:
    return {**record, "messages": [turn for turn in record["messages"] if turn["role"] in ("system", "user")]}


def _sharegpt_tools(chance: random.Random, number: int) -> Record:
    turns = []
    for _ in range(chance.randint(1, 3)):
        turns += [
            {"from": "human", "value": _text(chance)},
            {"from": "function_call", "value": json.dumps(_call(chance))},
            {"from": "observation", "value": json.dumps({"is": _text(chance)})},
            {"from": "gpt", "value": _text(chance)},
        ]
    return {"id": f"tools-{number}", "conversations": turns, "system": "Use the tools.", "tools": json.dumps(_TOOLS)}


def _with_bad_call(record: Record) -> Record:
    turns = [{**turn, "value": "get_weather(Rome)"} if turn["from"] == "function_call" else turn
             for turn in record["conversations"]]  # fmt: skip
    return {**record, "conversations": turns}


def _sharegpt_weights(chance: random.Random, number: int) -> Record:
    turns: list[Record] = [{"from": "system", "value": "You answer.", "weight": None}]
    for _ in range(chance.randint(1, 4)):
        turns.append({"from": "human", "value": _text(chance), "weight": 0.0})
        turns.append({"from": "gpt", "value": _text(chance), "weight": float(chance.randint(0, 1))})
    return {"conversations": turns, "source": "sum", "score": number / COUNT}


def _with_half_weight(record: Record) -> Record:
    return {**record, "conversations": [{**turn, "weight": 0.5} for turn in record["conversations"]]}


def _xlam(chance: random.Random, number: int) -> Record:
    tools = [{**tool, "parameters": {"place": {"type": "str", "description": "its name"}}} for tool in _TOOLS]
    calls = [_call(chance) for _ in range(chance.randint(1, 3))]
    return {"id": number, "query": _text(chance), "answers": json.dumps(calls), "tools": json.dumps(tools)}


def _nemotron(chance: random.Random, number: int) -> Record:
    is_on = number % 2 == 0
    turns: list[Record] = [{"role": "system", "content": f"detailed thinking {'on' if is_on else 'off'}"}]
    for _ in range(chance.randint(1, 2)):
        answer = {"role": "assistant", "content": _text(chance), "reasoning_content": _text(chance) if is_on else None}
        turns += [{"role": "user", "content": _text(chance)}, answer]
    return {
        "uuid": f"{number:032x}",
        "license": "cc-by-4.0",
        "category": "chat",
        "reasoning": "on" if is_on else "off",
        "messages": turns,
        "chat_template_kwargs": {"enable_thinking": is_on},
    }


def _with_empty_question(record: Record) -> Record:
    system, question, *rest = record["messages"]
    return {**record, "messages": [system, {**question, "content": ""}, *rest]}


def _nemotron_input_output(chance: random.Random, number: int) -> Record:
    switch = "on" if number % 2 == 0 else "off"
    return {
        "input": [{"role": "user", "content": _text(chance)}],
        "output": (f"<think>\n{_text(chance)}\n</think>\n\n" if switch == "on" else "") + _text(chance),
        "reasoning": switch,
        "system_prompt": f"detailed thinking {switch}",
        "used_in_training": "yes",
    }


def _alpaca(chance: random.Random, number: int) -> Record:
    pairs = [[_text(chance), _text(chance)] for _ in range(number % 4)]
    record = {"instruction": _text(chance), "input": _text(chance) if number % 2 else "", "output": _text(chance)}
    return {**record, "history": pairs, "system": "You answer." if number % 3 else "", "text": "### Instruction: ..."}


def _prompt_completion(chance: random.Random, number: int) -> Record:
    prompt, completion = _text(chance), _text(chance)
    if number % 2 == 0:
        return {"prompt": prompt, "completion": completion, "meta": {"n": number}}
    turns = [{"role": "user", "content": _text(chance)}, {"role": "assistant", "content": _text(chance)}]
    answer = {"role": "assistant", "content": completion}
    return {"prompt": [*turns, {"role": "user", "content": prompt}], "completion": [answer], "meta": {"n": number}}


def _plain_text(chance: random.Random, number: int) -> Record:
    return {"text": "\n\n".join(_text(chance) for _ in range(chance.randint(1, 5))), "url": f"https://x.org/{number}"}


def _preference(chance: random.Random, number: int) -> Record:
    prompt = _text(chance)
    asked = {"role": "user", "content": prompt}
    good, bad = ({"role": "assistant", "content": _text(chance)} for _ in range(2))
    record = {"prompt": prompt, "chosen": [asked, good], "rejected": [asked, bad], "score_chosen": 9.0}
    return record if number % 2 else {**record, "chosen": good["content"], "rejected": bad["content"]}


def _emptied(*names: str) -> Callable[[Record], Record]:
    return lambda record: {**record, **dict.fromkeys(names, "")}


SAMPLES = {
    "openai_tools": Sample(
        "messages", _openai_tools, _without_answer, BadReason.NO_ASSISTANT_TURN, frozenset(("parallel_tool_calls",))
    ),
    "sharegpt_tools": Sample("sharegpt", _sharegpt_tools, _with_bad_call, BadReason.BAD_TOOLS, frozenset(("id",))),
    "sharegpt_weights": Sample(
        "sharegpt", _sharegpt_weights, _with_half_weight, BadReason.BAD_WEIGHT, frozenset(("source", "score"))
    ),
    "xlam": Sample(
        "xlam", _xlam, lambda record: {**record, "answers": "none"}, BadReason.BAD_TOOLS, frozenset(("id",))
    ),
    "nemotron": Sample(
        "messages",
        _nemotron,
        _with_empty_question,
        BadReason.EMPTY_TURN,
        frozenset(("uuid", "license", "category", "reasoning")),
    ),
    "nemotron_input_output": Sample(
        "prompt_completion",
        _nemotron_input_output,
        _emptied("output"),
        BadReason.EMPTY_TURN,
        frozenset(("reasoning", "used_in_training")),
        {"columns": {"prompt": "input", "completion": "output"}},
    ),
    "alpaca": Sample("alpaca", _alpaca, _emptied("output"), BadReason.EMPTY_TURN, frozenset(("text",))),
    "prompt_completion": Sample(
        "prompt_completion",
        _prompt_completion,
        lambda record: {**record, "images": ["cat.png"]},
        BadReason.MEDIA,
        frozenset(("meta",)),
    ),
    "text": Sample("text", _plain_text, _emptied("text"), BadReason.EMPTY_TURN, frozenset(("url",))),
    "preference": Sample(
        "preference",
        _preference,
        lambda record: {**record, "chosen": []},
        BadReason.NO_MESSAGES,
        frozenset(("score_chosen",)),
        {"schema": "preference"},
    ),
}
