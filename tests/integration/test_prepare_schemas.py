"""Chats as users have them, in each schema: what comes in, what comes out, and exactly what is trained.

Each record stands beside the texts that are trained in each of its sequences, or the reason why it is left out.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from harness.formats import open_dataset
from harness.prep import ChatTokenizer, TokenizerConfig, prepare
from harness.prep.sources.config import SourceConfig

Cases = list[tuple[dict[str, Any], list[list[str]] | str]]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather of a city.", "parameters": PARAMETERS}
ZURICH = '{"city": "Zürich"}'


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def sharegpt() -> Cases:
    """Return ShareGPT with tools, as LLaMA-Factory and its data sets write them: every text of a call is JSON."""
    asked = [
        {"from": "human", "value": "How warm is it in 東京?"},
        {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "東京"}}'},
        {"from": "observation", "value": '{"degrees": 21}'},
        {"from": "gpt", "value": "21 degrees in 東京."},
    ]
    thanked = [*asked, {"from": "human", "value": "Thanks"}, {"from": "gpt", "value": "Any time."}]
    tools = {"tools": dumps([FUNCTION]), "id": "chat-1"}
    trained = ['[TOOL_CALLS]get_weather[ARGS]{"city": "東京"}</s>', "21 degrees in 東京.</s>"]
    return [
        ({"conversations": asked, **tools}, [trained]),
        ({"conversations": thanked, **tools, "system": "You are assistant 21."}, [[*trained, "Any time.</s>"]]),
        ({"conversations": [{**asked[0], "from": "narrator"}, *asked[1:]], **tools}, "unknown_role"),
        ({"conversations": asked, **tools, "images": ["map.png"]}, "media"),
        ({"conversations": [asked[0], {**asked[1], "value": "get_weather(Rome)"}, *asked[2:]], **tools}, "bad_tools"),
    ]


def nemotron() -> Cases:
    """Return Nemotron's data: thoughts in the content or switched off, and an empty system turn."""

    def record(system: str, answer: str, **more: Any) -> dict[str, Any]:
        turns = [("system", system), ("user", "What is 1 + 1?"), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"uuid": "1", "messages": messages, "category": "math", "reasoning": "on", "metadata": {"a": 1}, **more}

    thought, off = "<think>\nTwo numbers.\nAdd them.\n</think>\n\nIt is 2.", {"enable_thinking": False}
    return [
        (record("", thought), [[thought + "<|im_end|>"]]),
        (record("Be exact.", thought), [[thought + "<|im_end|>"]]),
        (record("Be exact.", "It is 2.", chat_template_kwargs=off), [["It is 2.<|im_end|>"]]),
        (record("", " "), "empty_turn"),
    ]


def post_training() -> Cases:
    """Return Nemotron's post-training data: a system prompt of its own, and other names of the turns and the answer."""

    def record(turns: list[tuple[str, str]], answer: str, thinking: str) -> dict[str, Any]:
        asked = [{"role": role, "content": content} for role, content in turns]
        more = {"category": "math", "reasoning": thinking, "used_in_training": "yes"}
        return {"input": asked, "output": answer, "system_prompt": f"detailed thinking {thinking}", **more}

    ask, more = ("user", "Is 8 even?"), [("assistant", "Which base?"), ("user", "Ten.")]
    thought = "<think>\nThe last digit is 8.\n</think>\n\nYes."
    return [
        (record([ask], thought, "on"), [[thought + "<|eot_id|>"]]),
        # The answer in the prompt is not trained.
        (record([ask, *more], "Yes, 8.", "off"), [["Yes, 8.<|eot_id|>"]]),
        (record([ask], "", "on"), "empty_turn"),
        (record([], thought, "on"), "no_messages"),
    ]


def openai() -> Cases:
    """Return OpenAI's messages with tools, arguments as text and as objects, and reasoning."""

    def record(role: str, arguments: Any, *turns: dict[str, Any], call: Any = (), **more: Any) -> dict[str, Any]:
        function = {"name": "get_weather", "arguments": arguments}
        made = [{"id": "call_1", "type": "function", "function": function}]
        thought = {"role": "assistant", "content": None, "reasoning_content": "I need the weather.", "tool_calls": made}
        messages = [
            {"role": role, "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "How warm is it in Zürich?"}]},
            {**thought, **dict(call)},
            {"role": "tool", "tool_call_id": "call_1", "content": "21 C"},
            {"role": "assistant", "content": "It has 21 degrees.", "thinking": "The tool has answered."},
            *turns,
        ]
        return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}], **more}

    called = f'<tool_call>\n{{"name": "get_weather", "arguments": {ZURICH}}}\n</tool_call><|im_end|>'
    first = [
        f"<think>\nI need the weather.\n</think>\n\n{called}",
        "<think>\nThe tool has answered.\n</think>\n\nIt has 21 degrees.<|im_end|>",
    ]
    # A server writes the reasoning that follows the last question alone, so the answer to the second is on its own.
    second = {"role": "assistant", "content": "It is.", "reasoning_content": "Warm is above 20."}
    later = [{"role": "user", "content": "Is that warm?"}, second]
    return [
        (record("system", ZURICH), [first]),
        (record("developer", json.loads(ZURICH)), [first]),
        (record("system", ZURICH, *later), [first, ["<think>\nWarm is above 20.\n</think>\n\nIt is.<|im_end|>"]]),
        (record("system", ZURICH, call={"audio": {"id": "speech"}}), "media"),
        (record("system", ZURICH, call={"refusal": "I may not say."}), "unknown_field"),
        (record("system", ZURICH, functions=[FUNCTION]), "unknown_field"),
    ]


@pytest.mark.parametrize(
    ("cases", "template", "schema", "columns", "unused", "untrained"),
    [
        (sharegpt, "mistral", "sharegpt", {}, {"id"}, ["[AVAILABLE_TOOLS]", '{"degrees": 21}', "assistant 21."]),
        (
            *(nemotron, "qwen3", "messages", {}, {"uuid", "category", "reasoning", "metadata"}),
            ["<think>\n\n</think>\n\n", "Be exact."],
        ),
        (
            *(post_training, "llama3", "prompt_completion", {"prompt": "input", "completion": "output"}),
            *({"category", "reasoning", "used_in_training"}, ["detailed thinking on", "Which base?"]),
        ),
        (openai, "qwen3", "messages", {}, set(), ["<tools>", "<tool_response>\n21 C\n</tool_response>"]),
    ],
)
def test_records_of_every_kind_are_trained_or_left_out_as_they_should_be(
    tmp_path, cases, template, schema, columns, unused, untrained
):
    records = cases()
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(dumps(record) + "\n" for record, _ in records), encoding="utf-8")
    given = SourceConfig(path=str(source), columns=columns, on_bad="skip")
    trains, settings = TokenizerConfig(vocab_size=600, chat_template=template), {"validation_fraction": 0.0}
    report = prepare(given, trains, tmp_path / "data", num_workers=0, console=Console(quiet=True), **settings)

    kept = [texts for _, outcome in records if not isinstance(outcome, str) for texts in outcome]
    bad = {number: outcome for number, (_, outcome) in enumerate(records, start=1) if isinstance(outcome, str)}
    assert (report.records, Counter(report.bad), dict(report.dropped)) == (len(records), Counter(bad.values()), {})
    assert (report.schema, set(report.unused), report.mask["rule"]) == (schema, unused, "marks")
    train = report.splits["train"]
    assert (train.sequences, train.conversations) == (len(kept), len(records) - len(bad))

    tokenizer = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "data" / "tokenizer")))
    trained, rest = [], ""
    for pack in open_dataset(tmp_path / "data" / "train"):
        for one in pack.sequences():
            trained.append([])
            # The stored mask is that of each token's label.
            tokens = zip(np.r_[0, one.loss_mask[:-1]], one.input_ids, strict=True)
            for is_trained, run in groupby(tokens, key=lambda pair: pair[0]):
                text = tokenizer.decode([int(token) for _, token in run])
                trained[-1] += [text] if is_trained else []
                rest += "" if is_trained else text
    assert sorted(trained) == sorted(kept)
    assert [text for text in untrained if text not in rest] == []

    # Each record that was left out is kept whole beside its place and reason.
    left_out = [json.loads(line) for line in (tmp_path / "data" / "bad_records.jsonl").read_text().splitlines()]
    places = {int(one["where"].rpartition("line ")[2]): (one["reason"], one["record"]) for one in left_out}
    assert places == {number: (reason, records[number - 1][0]) for number, reason in bad.items()}
