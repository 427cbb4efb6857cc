"""Chats as users have them, in each schema: what comes in, what comes out, and exactly what is trained.

Each source has 600 records. Its `expected` restates, from the record's number alone, the texts that are trained in
each of its sequences, or the reason why the record is left out.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from harness.formats import open_dataset
from harness.prep import PrepareConfig, TokenizerConfig, prepare
from harness.prep.packing import PackingConfig
from harness.prep.sources.config import SourceConfig

# The rarest branch is one record of 500.
NUM_RECORDS = 600
CITIES = ("Paris", "Zürich", "東京", "São Paulo", "القاهرة")
Sequences = list[list[str]]


def city(number: int) -> str:
    return f"{CITIES[number % len(CITIES)]} {number}"


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def weather_tool(*, wrapped: bool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Weather of a city.", "parameters": parameters}
    return {"type": "function", "function": function} if wrapped else function


# ShareGPT with tools, as LLaMA-Factory and its data sets write them: every text of a call is JSON.


def sharegpt(number: int) -> dict[str, Any]:
    call = {"name": "get_weather", "arguments": {"city": city(number)}}
    turns = [
        {"from": "human", "value": f"How warm is it in {city(number)}?"},
        {"from": "function_call", "value": dumps(call)},
        {"from": "observation", "value": dumps({"degrees": number % 40})},
        {"from": "gpt", "value": f"{number % 40} degrees in {city(number)}."},
    ]
    if number % 3 == 0:
        turns += [{"from": "human", "value": "Thanks"}, {"from": "gpt", "value": f"Any time ({number})."}]
    record = {"conversations": turns, "tools": dumps([weather_tool(wrapped=False)]), "id": f"chat-{number}"}
    if number % 2:
        record["system"] = f"You are assistant {number}."
    if number % 100 == 7:
        turns[0]["from"] = "narrator"
    elif number % 100 == 8:
        record["images"] = ["map.png"]
    elif number % 100 == 9:
        turns[1]["value"] = "get_weather(Paris)"
    return record


def sharegpt_expected(number: int) -> Sequences | str:
    if number % 100 in (7, 8, 9):
        return {7: "unknown_role", 8: "media", 9: "bad_tools"}[number % 100]
    answers = [f"[TOOL_CALLS]get_weather[ARGS]{dumps({'city': city(number)})}</s>"]
    answers.append(f"{number % 40} degrees in {city(number)}.</s>")
    return [answers + ([f"Any time ({number}).</s>"] if number % 3 == 0 else [])]


# Reasoning on and off, as in Nemotron's data: thoughts in the content, an empty system turn, and other columns beside.


def nemotron(number: int) -> dict[str, Any]:
    on = number % 2 == 0
    thought = f"<think>\nTwo numbers: {number} and 1.\nAdd them.\n</think>\n\n" if on else ""
    record = {
        "uuid": f"{number:08d}",
        "messages": [
            {"role": "system", "content": "" if number % 4 < 2 else "Be exact."},
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": f"{thought}It is {number + 1}."},
        ],
        "category": "math",
        "reasoning": "on" if on else "off",
        "metadata": {"generator": "model"},
    }
    if not on:
        record["chat_template_kwargs"] = {"enable_thinking": False}
    if number % 200 == 3:
        record["messages"][2]["content"] = " "
    return record


def nemotron_expected(number: int) -> Sequences | str:
    if number % 200 == 3:
        return "empty_turn"
    thought = f"<think>\nTwo numbers: {number} and 1.\nAdd them.\n</think>\n\n" if number % 2 == 0 else ""
    return [[f"{thought}It is {number + 1}.<|im_end|>"]]


# Nemotron's post-training data, where a system prompt switches thinking and other names hold the turns and the answer.


def post_training(number: int) -> dict[str, Any]:
    on = number % 2 == 0
    turns = [{"role": "user", "content": f"Is {number} even?"}]
    if number % 3 == 0:
        turns += [{"role": "assistant", "content": "Which base?"}, {"role": "user", "content": f"Ten ({number})."}]
    thought = f"<think>\nThe last digit of {number} is {number % 10}.\n</think>\n\n" if on else ""
    record = {
        "input": turns,
        "output": f"{thought}{'Yes' if on else 'No'}, {number}.",
        "category": "math",
        "reasoning": "on" if on else "off",
        "system_prompt": f"detailed thinking {'on' if on else 'off'}",
        "used_in_training": "yes",
    }
    if number % 500 == 4:
        record["output"] = ""
    elif number % 500 == 5:
        record["input"] = []
    return record


def post_training_expected(number: int) -> Sequences | str:
    if number % 500 in (4, 5):
        return {4: "empty_turn", 5: "no_messages"}[number % 500]
    thought = f"<think>\nThe last digit of {number} is {number % 10}.\n</think>\n\n" if number % 2 == 0 else ""
    # The answer in the prompt is not trained.
    return [[f"{thought}{'No' if number % 2 else 'Yes'}, {number}.<|eot_id|>"]]


# OpenAI's messages with tools, arguments as text, and reasoning, over one question or two.


def openai(number: int) -> dict[str, Any]:
    arguments = dumps({"city": city(number)})
    function = {"name": "get_weather", "arguments": arguments if number % 2 else json.loads(arguments)}
    turns = [
        {"role": "developer" if number % 4 == 0 else "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": f"How warm is it in {city(number)}?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": f"I need the weather of {number}.",
            "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{number % 40} C"},
        {"role": "assistant", "content": f"It has {number % 40} degrees.", "thinking": "The tool has answered."},
    ]
    if number % 5 == 0:
        turns += [
            {"role": "user", "content": "Is that warm?"},
            {"role": "assistant", "content": f"It is ({number}).", "reasoning_content": "Warm is above 20."},
        ]
    record = {"messages": turns, "tools": [weather_tool(wrapped=True)]}
    if number % 250 == 11:
        turns[2]["audio"] = {"id": "speech"}
    elif number % 250 == 12:
        turns[2]["refusal"] = "I may not say."
    elif number % 250 == 13:
        record["functions"] = [weather_tool(wrapped=False)]
    return record


def openai_expected(number: int) -> Sequences | str:
    if number % 250 in (11, 12, 13):
        return {11: "media", 12: "unknown_field", 13: "unknown_field"}[number % 250]
    call = f'{{"name": "get_weather", "arguments": {dumps({"city": city(number)})}}}'
    first = [
        f"<think>\nI need the weather of {number}.\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>",
        f"<think>\nThe tool has answered.\n</think>\n\nIt has {number % 40} degrees.<|im_end|>",
    ]
    # A server writes the reasoning that follows the last question alone, so the answer to the second is on its own.
    second = [f"<think>\nWarm is above 20.\n</think>\n\nIt is ({number}).<|im_end|>"]
    return [first, second] if number % 5 == 0 else [first]


@dataclass(frozen=True)
class Fixture:
    """One source: its records, what is expected of them, and the template that holds them."""

    record: Callable[[int], dict[str, Any]]
    expected: Callable[[int], Sequences | str]
    template: str
    untrained: tuple[str, ...]
    schema: str
    unused: frozenset[str] = frozenset()
    columns: dict[str, str] = field(default_factory=dict)


FIXTURES = {
    "sharegpt": Fixture(
        sharegpt,
        sharegpt_expected,
        "mistral",
        untrained=("[AVAILABLE_TOOLS]", '[TOOL_RESULTS]{"degrees": 21}', "assistant 21."),
        schema="sharegpt",
        unused=frozenset(("id",)),
    ),
    "nemotron": Fixture(
        nemotron,
        nemotron_expected,
        "qwen3",
        untrained=("<think>\n\n</think>\n\n", "Be exact."),
        schema="messages",
        unused=frozenset(("uuid", "category", "reasoning", "metadata")),
    ),
    "post_training": Fixture(
        post_training,
        post_training_expected,
        "llama3",
        untrained=("detailed thinking on", "Which base?"),
        schema="prompt_completion",
        unused=frozenset(("category", "reasoning", "used_in_training")),
        columns={"prompt": "input", "completion": "output"},
    ),
    "openai": Fixture(
        openai,
        openai_expected,
        "qwen3",
        untrained=("<tools>", "<tool_response>\n21 C\n</tool_response>"),
        schema="messages",
    ),
}


def written_sequences(path) -> tuple[list[list[str]], str]:
    """Trained runs of every stored sequence, and all text that is not trained."""
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(path / "tokenizer").backend_tokenizer.decode
    sequences, untrained = [], []
    for split in ("train", "validation"):
        for pack in open_dataset(path / split):
            for one in pack.sequences():
                # The stored mask is that of each token's label.
                trained = np.r_[0, one.loss_mask[:-1]]
                texts = []
                for is_trained, run in groupby(zip(trained, one.input_ids, strict=True), key=lambda pair: pair[0]):
                    text = decode([int(token) for _, token in run], skip_special_tokens=False)
                    (texts if is_trained else untrained).append(text)
                sequences.append(texts)
    return sequences, "".join(untrained)


@pytest.mark.parametrize("name", FIXTURES)
def test_records_of_every_kind_are_trained_or_left_out_as_they_should_be(tmp_path, name):
    fixture = FIXTURES[name]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(dumps(fixture.record(number)) + "\n" for number in range(NUM_RECORDS)), encoding="utf-8")
    config = PrepareConfig(
        source=SourceConfig(path=str(source), columns=fixture.columns, on_bad="skip"),
        tokenizer=TokenizerConfig(vocab_size=600, chat_template=fixture.template),
        data=PackingConfig(path=str(tmp_path / "data"), pack_size=4096, validation_fraction=0.1, num_workers=0),
    )
    output = io.StringIO()
    report = prepare(config, console=Console(file=output, width=120))

    expected = [fixture.expected(number) for number in range(NUM_RECORDS)]
    bad = Counter(outcome for outcome in expected if isinstance(outcome, str))
    assert report.records == NUM_RECORDS
    assert Counter(report.bad) == bad
    assert report.dropped.total() == 0
    assert report.schema == fixture.schema
    assert set(report.unused) == fixture.unused
    assert report.mask["rule"] == "marks"

    sequences, untrained = written_sequences(tmp_path / "data")
    kept = [texts for outcome in expected if not isinstance(outcome, str) for texts in outcome]
    assert Counter(map(tuple, sequences)) == Counter(map(tuple, kept))
    assert [text for text in fixture.untrained if text not in untrained] == []
    assert sum(split.sequences for split in report.splits.values()) == len(kept)
    assert sum(split.conversations for split in report.splits.values()) == NUM_RECORDS - bad.total()

    # Each record that was left out is kept whole beside its place and reason.
    left_out = [json.loads(line) for line in (tmp_path / "data" / "bad_records.jsonl").read_text().splitlines()]
    places = {int(one["where"].rpartition("line ")[2]) - 1: (one["reason"], one["record"]) for one in left_out}
    assert places == {
        number: (outcome, fixture.record(number)) for number, outcome in enumerate(expected) if isinstance(outcome, str)
    }
