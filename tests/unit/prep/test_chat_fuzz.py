"""No record, however broken, stops the parser with an exception; what passes can be hashed, stored and parsed again."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import PrepError
from harness.prep.chat import (
    SCHEMAS,
    BadRecord,
    Conversation,
    RecordReader,
    detect_schema,
    parse_line,
    parse_record,
    record_of_row,
)

FIELDS = sorted(
    {"role", "content", "from", "value", "name", "arguments", "function", "type", "id", "tool_calls", "tool_call_id"}
    | {"function_call", "reasoning_content", "thinking", "reasoning", "weight", "train", "trainable", "images", "x"}
    | {"functions", "parameters"}.union(*(schema.fields for schema in SCHEMAS.values()))
)
ROLES = ("user", "assistant", "system", "tool", "function", "human", "gpt", "function_call")
ODD_TEXTS = ("[]", "{}", "null", "[{", '[{"name": "f"}]', '{"name": "f", "arguments": "{}"}', "\ud800", "é", "😀", " ")
TEXTS = st.sampled_from([*ROLES, *ODD_TEXTS, "text", "image_url", "f"])
NUMBERS = st.sampled_from([0, 1, 1.0, 0.5, -1, float("nan"), float("inf"), 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=20,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": TEXTS | VALUES},
    optional=dict.fromkeys(("tool_calls", "reasoning_content", "weight", "train", "name", "tool_call_id"), VALUES),
)
SHARED_TURN = st.fixed_dictionaries({"from": TEXTS, "value": TEXTS | VALUES}, optional={"weight": VALUES})
TURNS = st.lists(TURN, max_size=4) | st.lists(SHARED_TURN, max_size=4) | VALUES
ANYTHING = st.dictionaries(st.sampled_from(FIELDS), TURNS, max_size=6) | VALUES

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, "there"], "name": "Ann"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL], "weight": 0},
    {"role": "tool", "content": "1", "tool_call_id": "c"},
    {"role": "assistant", "content": "Hello", "train": True, "function_call": {"name": "f", "arguments": "{}"}},
]
SHARED = [
    {"from": "human", "value": "Hi"},
    {"from": "function_call", "value": '[{"name": "f", "arguments": {}}]'},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "Hello", "weight": 1.0},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, {"name": "g"}]
EXTRAS = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}, "id": 1}
GOOD = [
    {"messages": CHAT, **EXTRAS},
    {"messages": json.dumps(CHAT), "tools": json.dumps(TOOLS)},
    {"conversations": SHARED, **EXTRAS, "system": "S"},
    {"instruction": "Do", "input": "it", "output": "done", "history": [["a", "b"]], **EXTRAS},
    {"prompt": CHAT[:3], "completion": CHAT[4:], **EXTRAS},
    {"prompt": "Hi", "completion": "Hello"},
    {"query": "Hi", "tools": TOOLS, "answers": [CALL]},
    {"prompt": "Hi", "chosen": [{"role": "user", "content": "Hi"}, *CHAT[4:]], "rejected": []},
    {"text": "Hi"},
]


def places_of(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the paths of all values in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places_of(item, (*path, key)))]


@st.composite
def broken_records(draw: st.DrawFn) -> object:
    """Return a good record with up to two values replaced, removed or added."""
    record: object = copy.deepcopy(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(0, 2))):
        path = draw(st.sampled_from(places_of(record)))
        if not path:
            continue
        inside: Any = record
        for key in path[:-1]:
            inside = inside[key]
        if draw(st.booleans()) and isinstance(inside, dict):
            inside[draw(st.sampled_from(FIELDS))] = draw(VALUES)
        elif draw(st.booleans()):
            del inside[path[-1]]
        else:
            inside[path[-1]] = draw(VALUES)
    return record


RECORDS = ANYTHING | broken_records()
NUM_EXAMPLES = (100, pytest.param(2_000, marks=pytest.mark.nightly))


COLUMNS = st.dictionaries(st.sampled_from(["messages", "role", "content", "prompt", "from"]), st.sampled_from(FIELDS))
IGNORED = st.lists(st.sampled_from(["weight", "tool_calls", "x", "tools", "name"]), max_size=3)


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
def test_no_record_raises_an_exception_and_a_good_one_survives_storage(num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(RECORDS, st.sampled_from(["", *SCHEMAS]), COLUMNS, IGNORED, st.binary(max_size=60))
    def check(record, schema, columns, ignore_fields, line):
        parsed = parse_record(record, "here", schema=schema)
        assert isinstance(parsed, Conversation | BadRecord)
        if isinstance(record, dict):
            assert isinstance(RecordReader(schema).parse(record_of_row(record), "here"), Conversation | BadRecord)
        assert RecordReader(schema).unused_keys(record) <= set(record if isinstance(record, dict) else ())
        assert isinstance(RecordReader("", columns, ignore_fields).parse(record, "here"), Conversation | BadRecord)
        assert isinstance(parse_line(line, "here"), BadRecord)
        if isinstance(parsed, BadRecord):
            assert parsed.detail.encode()
            return
        assert isinstance(parsed.hash(), int)
        assert parse_line(json.dumps(parsed.as_record()).encode(), "here") == parsed
        assert pickle.loads(pickle.dumps(parsed)) == parsed

    check()


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
def test_detection_gives_a_schema_or_an_error_in_words(num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(st.lists(RECORDS, max_size=4))
    def check(records):
        try:
            assert detect_schema(records) in ("", *SCHEMAS)
        except PrepError as error:
            problem = str(error)
        else:
            return
        assert "fields: " in problem
        assert "source.schema=" in problem

    check()


@pytest.mark.parametrize("depth", [70, 900])
def test_deep_nesting_anywhere_is_a_bad_record(depth):
    deep: object = "x"
    for _ in range(depth):
        deep = [deep]
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    for field in FIELDS:
        for record in (
            {"messages": [ask, answer], field: deep},
            {"messages": [ask, {**answer, field: deep}]},
            {"messages": [ask, answer], "tools": [{"name": "f", field: deep}]},
            {"messages": [ask, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {field: deep}}]}]},
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", field: deep}]},
            {"chosen": [ask, answer], "rejected": deep, "prompt": "Hi"},
        ):
            line = json.dumps(record).encode()
            for schema in ("", "messages", "sharegpt", "preference"):
                assert isinstance(parse_line(line, "here", schema=schema), Conversation | BadRecord)
