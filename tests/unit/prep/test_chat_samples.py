"""Records of each schema, 2,000 as datasets have them, are read without loss, and broken ones are counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from chat_records import BREAKS, COUNT, SAMPLES

from harness.prep.chat import BadRecord, Conversation, RecordReader, detect_schema, parse_record


def texts_in(value: Any) -> list[str]:
    """Return the longer texts of a record, those inside JSON text too, without the white space."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in texts_in(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts_in(item)]
    if not isinstance(value, str):
        return []
    try:
        inner = json.loads(value)
    except ValueError:
        return ["".join(value.split())]
    return texts_in(inner) if isinstance(inner, (dict, list)) else ["".join(value.split())]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_record_is_a_conversation_or_is_counted(name: str) -> None:
    sample = SAMPLES[name]
    records = sample.records()
    schema = sample.settings.get("schema") or detect_schema(records, **sample.settings)
    assert schema == sample.schema

    reader = RecordReader(**{**sample.settings, "schema": schema})
    parsed = [reader.parse_line(json.dumps(record).encode(), f"line {n}") for n, record in enumerate(records, start=1)]

    good = [item for item in parsed if isinstance(item, Conversation)]
    bad = [item for item in parsed if isinstance(item, BadRecord)]
    assert (len(good), Counter(item.reason for item in bad)) == (COUNT - BREAKS, {sample.reason: BREAKS})
    assert bad[0].where == "line 100"
    assert set().union(*map(reader.unused_keys, records)) == sample.unused


@pytest.mark.parametrize("name", SAMPLES)
def test_every_text_of_a_used_column_is_in_the_conversation(name: str) -> None:
    sample = SAMPLES[name]
    reader = RecordReader(**{"schema": sample.schema, **sample.settings})
    for record in sample.records(99):
        conversation = reader.parse(record, "")
        assert isinstance(conversation, Conversation)
        there = "\n".join(texts_in(conversation.as_record()))
        left_out = {*reader.unused_keys(record), "rejected"}
        used = {name: value for name, value in record.items() if name not in left_out}
        roles = {"human", "gpt", "function_call", "observation"}
        assert [text for text in texts_in(used) if text not in there and text not in roles] == []


@pytest.mark.parametrize("name", SAMPLES)
def test_a_conversation_is_read_again_from_its_own_record(name: str) -> None:
    sample = SAMPLES[name]
    reader = RecordReader(**{"schema": sample.schema, **sample.settings})
    for record in sample.records(50):
        conversation = reader.parse(record, "here")
        assert parse_record(json.loads(json.dumps(conversation.as_record())), "here") == conversation


def test_conversations_of_one_sample_differ() -> None:
    for sample in SAMPLES.values():
        reader = RecordReader(**{"schema": sample.schema, **sample.settings})
        hashes = {replace(reader.parse(record, ""), where="").hash() for record in sample.records(99)}
        assert len(hashes) >= 95


def test_turns_of_tools_reasoning_and_weights_come_out_as_they_went_in() -> None:
    def parsed(name: str, number: int) -> Conversation:
        sample = SAMPLES[name]
        reader = RecordReader(**{"schema": sample.schema, **sample.settings})
        return reader.parse(sample.records(99)[number], "")

    tools = parsed("sharegpt_tools", 0)
    assert [message.role for message in tools.messages][:5] == ["system", "user", "assistant", "tool", "assistant"]
    assert len(tools.tools) == 3
    assert tools.messages[2].tool_calls[0].name.startswith("get_")
    assert [len(parsed("xlam", n).messages[1].tool_calls) for n in range(5)] == [
        len(json.loads(record["answers"])) for record in SAMPLES["xlam"].records(5)
    ]
    assert [bool(parsed("nemotron", n).messages[2].reasoning) for n in range(4)] == [True, False, True, False]
    assert parsed("nemotron", 1).template_kwargs == {"enable_thinking": False}
    assert parsed("nemotron_input_output", 1).messages[0].text == "detailed thinking off"
    assert [len(parsed("alpaca", n).messages) for n in range(4)] == [2, 5, 7, 8]
    weights = parsed("sharegpt_weights", 0)
    assert {message.trained for message in weights.messages if message.role == "user"} == {False}
    assert [message.trained for message in parsed("prompt_completion", 1).messages] == [None, False, None, True]
    assert [message.text for message in parsed("preference", 0).messages] == [
        SAMPLES["preference"].records(1)[0]["prompt"],
        SAMPLES["preference"].records(1)[0]["chosen"],
    ]
