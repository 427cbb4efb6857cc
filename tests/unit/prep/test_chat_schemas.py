"""Each schema of chat records becomes the conversation that its author meant, or is refused by name."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from typing import Any

import pytest

from harness.errors import ConfigError, PrepError
from harness.prep.chat import (
    BadReason,
    BadRecord,
    Conversation,
    Message,
    RecordReader,
    ToolCall,
    detect_schema,
    parse_line,
    parse_record,
    record_of_row,
)
from harness.prep.media import MediaLimits

ASK = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
PLAIN = (Message("user", "Hi"), Message("assistant", "Hello"))
FUNCTION = {"name": "f", "description": "does it", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = ToolCall("f", {"x": 1})


def turns_of(record: object, **settings: object) -> tuple[Message, ...]:
    parsed = parse_record(record, "line 1", **settings)
    assert isinstance(parsed, Conversation), parsed
    return parsed.messages


def refusal(record: object, **settings: object) -> tuple[BadReason, str]:
    parsed = parse_record(record, "line 1", **settings)
    assert isinstance(parsed, BadRecord), parsed
    return parsed.reason, parsed.detail


def answer_with(**fields: object) -> dict[str, object]:
    return {"messages": [ASK, {**ANSWER, **fields}]}


# Messages


def answered(content: Any = "Hello", **fields: Any) -> tuple[Message, ...]:
    return PLAIN[0], Message("assistant", content, **fields)


def calling(calls: object) -> dict[str, object]:
    return {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": calls}]}


F = {"name": "f", "arguments": {"x": 1}}
LISTED = {"who": ["human", "gpt"], "value": ["Hi", "Hello"], "weight": [None, 1]}
READ: list[tuple[dict[str, Any], dict[str, Any], tuple[Message, ...]]] = [
    # The list of turns has several names, may be JSON text, or one list a field.
    *(({name: [ASK, ANSWER]}, {}, PLAIN) for name in ("messages", "conversation", "conversations")),
    *(({name: json.dumps([ASK, ANSWER])}, {}, PLAIN) for name in ("messages", "conversation", "conversations")),
    ({"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}}, {}, PLAIN),
    ({"conversations": LISTED}, {"columns": {"from": "who"}}, answered(weight=100)),
    # Arguments of calls stay as they are.
    *(
        (calling(calls), {}, answered(None, tool_calls=(CALL,)))
        for calls in ([{"type": "function", "function": F}], [F], json.dumps([F]), [json.dumps(F)])
    ),
    (
        *(calling([{"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}]), {}),
        answered(None, tool_calls=(ToolCall("f", '{"x": 1}', "c1"),)),
    ),
    *(
        (calling([call]), {}, answered(None, tool_calls=(ToolCall("f", {}),)))
        for call in ({"name": "f", "arguments": None}, {"name": "f", "arguments": ""}, {"name": "f"})
    ),
    # Reasoning has several names, of which two have to agree.
    *(
        (answer_with(**{name: "I greet."}), {}, answered(reasoning="I greet."))
        for name in ("reasoning_content", "thinking", "reasoning")
    ),
    (answer_with(reasoning="a", reasoning_content="a", thinking=""), {}, answered(reasoning="a")),
    # Content may be parts of text.
    (
        answer_with(content=[{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]),
        {},
        answered(("Hel", "lo")),
    ),
    (answer_with(content=["Hello"]), {}, answered(("Hello",))),
    (answer_with(content=[{"type": "text", "text": "Hello", "image_url": None}]), {}, answered(("Hello",))),
    # A turn is trained by its weight.
    *(
        (answer_with(**fields), {}, answered(weight=weight))
        for fields, weight in (
            *(({}, None), ({"weight": None}, None), ({"weight": 1}, 100), ({"weight": 0.0}, 0), ({"weight": 0.29}, 29)),
            *(({"train": True}, 100), ({"trainable": False}, 0), ({"weight": 0.5, "train": True}, 50)),
        )
    ),
    # Roles of ShareGPT have several names, and are read in other records when asked.
    *(
        ({name: [{"from": user, "value": "Hi"}, {"from": assistant, "value": "Hello"}]}, {}, PLAIN)
        for user, assistant in (("human", "gpt"), ("user", "assistant"), ("human", "chatgpt"))
        for name in ("conversations", "messages")
    ),
    ({"messages": [{**ASK, "role": "human"}, {**ANSWER, "role": "gpt"}]}, {"schema": "sharegpt"}, PLAIN),
    # The chosen answer may hold its prompt.
    *(
        ({"prompt": prompt, "chosen": chosen, "rejected": "no"}, {"schema": "preference"}, answered(weight=100))
        for prompt in ("Hi", [ASK])
        for chosen in ("Hello", [ANSWER], [ASK, ANSWER])
    ),
]


@pytest.mark.parametrize(("record", "settings", "messages"), READ)
def test_turns_of_every_form_are_the_same_messages(record, settings, messages):
    made = turns_of(record, **settings)
    assert made == messages
    assert made[1].text in ("Hello", "")


def test_turns_of_two_reasonings_of_lists_of_other_lengths_and_of_other_roles_are_refused():
    assert refusal(answer_with(reasoning="a", reasoning_content="b")) == (
        BadReason.BAD_TURN,
        "turn 2 (assistant) has different texts in reasoning_content and reasoning",
    )
    for uneven in ({"role": ["user"], "content": []}, {"role": "user", "content": "Hi"}, {}):
        reason, detail = refusal({"messages": uneven})
        assert (reason, detail) == (BadReason.NO_MESSAGES, "`messages` contains a dict, expected a list of turns")
    reason, detail = refusal({"messages": [{**ASK, "role": "human"}, {**ANSWER, "role": "gpt"}]})
    assert (reason, "source.schema=sharegpt" in detail) == (BadReason.UNKNOWN_ROLE, True)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        *(
            (tools, (TOOL,))
            for tools in (
                *([TOOL], [FUNCTION], [{"type": "function", **FUNCTION}], [{"function": FUNCTION}]),
                *(json.dumps([FUNCTION]), [json.dumps(FUNCTION)]),
            )
        ),
        *((tools, ()) for tools in (None, [], "", "[]", "null")),
    ],
)
def test_tools_of_every_form_are_those_that_templates_take(tools, expected):
    assert parse_record({"messages": [ASK, ANSWER], "tools": tools}, "").tools == expected


def test_two_lists_of_turns_are_a_question_to_the_user():
    record = {"messages": [ASK, ANSWER], "conversation": [ASK, ANSWER]}
    assert refusal(record) == (
        BadReason.UNKNOWN_SCHEMA,
        "`messages` and `conversation` contain turns; to leave one out: source.ignore_fields=[conversation]",
    )
    assert turns_of(record, ignore_fields=["conversation"]) == PLAIN


STRING, NUMBER = {"type": "string"}, {"type": "number"}


@pytest.mark.parametrize(
    ("spelled", "schema"),
    [
        ("str", STRING),
        ("List[int]", {"type": "array", "items": {"type": "integer"}}),
        ("Tuple[float, float]", {"type": "array", "items": NUMBER}),
        ("List[List[str]]", {"type": "array", "items": {"type": "array", "items": STRING}}),
        ("Dict[str, float]", {"type": "object", "additionalProperties": NUMBER}),
        ("dict", {"type": "object"}),
        ("Union[str, float]", {"anyOf": [STRING, NUMBER]}),
        ("bool | None", {"type": "boolean"}),
        ("Callable[[float], float]", {}),
        ("List[" * 100_000, {}),
        ("integer", {"type": "integer"}),
    ],
)
def test_types_of_python_become_those_of_json_schema(spelled, schema):
    tools = [{"name": "f", "parameters": {"type": {"description": "d", "type": spelled}}}]
    (tool,) = parse_record({"messages": [ASK, ANSWER], "tools": tools}, "").tools
    properties = {"type": {"description": "d", **schema}}
    assert tool["function"]["parameters"] == {"type": "object", "properties": properties, "required": ["type"]}


def test_parameters_of_xlam_and_anthropic_become_json_schema():
    city, days = {"type": "str", "description": "of what"}, {"type": "str, optional", "default": ""}
    xlam = {"name": "f", "parameters": {"city": city, "days": days, "zip": {"type": "int", "default": 0}, "none": None}}
    schema = {"type": "object", "properties": {"city": {**city, "type": "string"}}, "required": ["city"]}
    more = {"days": {"type": "string", "default": ""}, "zip": {"type": "integer", "default": 0}}
    wanted = {**schema, "properties": schema["properties"] | more}
    as_json = {"name": "f", "parameters": json.dumps(xlam["parameters"])}
    anthropic = {"type": "custom", "name": "f", "input_schema": schema}
    for tool, parameters in ((xlam, wanted), (as_json, wanted), (anthropic, schema)):
        made = parse_record({"messages": [ASK, ANSWER], "tools": [tool]}, "").tools
        assert made == ({"type": "function", "function": {"name": "f", "parameters": parameters}},)
    for key in ("inputSchema", "parametersJsonSchema", "parameters_json_schema", "parameter_definitions"):
        made = parse_record({"messages": [ASK, ANSWER], "tools": [{"name": "f", key: schema}]}, "").tools
        assert made[0]["function"] == {"name": "f", "parameters": schema}
    of_bfcl = {"name": "f", "parameters": {"type": "dict", "properties": {"city": city}, "required": ["city"]}}
    made = parse_record({"messages": [ASK, ANSWER], "tools": [of_bfcl]}, "").tools
    assert made[0]["function"]["parameters"] == schema


@pytest.mark.parametrize(
    "described",
    [
        *({"inputs": {"city": {"type": "string"}}}, {"args": {"city": {"type": "str"}}}),
        {"required_parameters": [{"name": "city", "type": "STRING"}]},
        {"parameters": {"type": "object", "properties": {}}, "input_schema": {"properties": {"city": {}}}},
        {"parameters": {"type": "object", "properties": None, "required": ["city"]}},
    ],
)
def test_a_call_with_arguments_of_a_tool_whose_parameters_no_template_would_write_is_refused(described):
    def record(arguments: object) -> dict[str, object]:
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        turns = [ASK, {"role": "assistant", "tool_calls": calls}]
        return {"messages": turns, "tools": [{"name": "f", **described}]}

    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        reason, detail = refusal(record(arguments))
        assert reason == BadReason.BAD_TOOLS
        assert "'city', but the tool describes no parameter" in detail
        assert isinstance(parse_record(record(arguments), "", ignore_fields=["tools"]), Conversation)
    for arguments in ({}, "{}"):
        assert isinstance(parse_record(record(arguments), ""), Conversation)


def test_any_parameters_are_those_of_a_tool_that_describes_them_in_another_way_than_by_name():
    calls = [{"function": {"name": "f", "arguments": {"city": "Paris"}}}]
    for schema in ({}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}, {"additionalProperties": True}, {"anyOf": [{}]}):
        tools = [{"name": "f", "parameters": {"type": "object", **schema}}]
        turns = [ASK, {"role": "assistant", "tool_calls": calls}]
        assert isinstance(parse_record({"messages": turns, "tools": tools}, ""), Conversation)
    for more in ({}, {"parameters": None, "description": "Anything."}):  # nothing that could be lost
        assert isinstance(parse_record({"messages": turns, "tools": [{"name": "f", **more}]}, ""), Conversation)


def test_types_of_python_become_those_of_json_schema_wherever_a_schema_is():
    given, wanted = {"city": {"type": "str"}}, {"city": {"type": "string"}}
    by_name = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
    one = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
    several = ("anyOf", "oneOf", "allOf", "prefixItems", "items")

    def schema(inner: dict[str, Any], kind: str) -> dict[str, Any]:
        part = {"type": kind, "properties": inner}
        parts = {key: {**part, **{name: {"a": part} for name in by_name}} for key in one}
        return {"type": "object", **parts, **{key: [part] for key in several if key != "items"}, "enum": [given]}

    for place in ({"items": [given["city"]]}, {"additionalProperties": False}, {"default": given}):
        tools = [{"name": "f", "parameters": {**schema(given, "dict"), **place}}]
        (tool,) = parse_record({"messages": [ASK, ANSWER], "tools": tools}, "").tools
        expected = {"items": [wanted["city"]]} if "items" in place else place
        assert tool["function"]["parameters"] == {**schema(wanted, "object"), **expected}


def test_a_function_call_of_old_records_is_a_tool_call_and_its_result_a_tool_turn():
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    result = {"role": "function", "name": "f", "content": "2"}
    assert turns_of({"messages": [ASK, call, result, ANSWER]})[1:3] == (
        Message("assistant", None, tool_calls=(ToolCall("f", '{"x": 1}'),)),
        Message("tool", "2", name="f"),
    )
    both = {**call, "tool_calls": [{"name": "f"}]}
    assert refusal({"messages": [ASK, both]})[0] == BadReason.BAD_TURN


def test_parts_of_an_answer_have_weights_and_a_record_that_is_written_keeps_them():
    parts = [{"type": "text", "text": "Hel", "weight": 0.5}, {"type": "text", "text": "lo"}]
    record = {"messages": [ASK, {"role": "assistant", "content": parts, "weight": 0.25}]}
    conversation = parse_record(record, "")
    answer = conversation.messages[1]
    assert (answer.text, answer.weight, answer.part_weights) == ("Hello", 25, (50, None))
    assert conversation.as_record() == record


def test_template_variables_come_from_the_record_but_none_that_are_not_its_own():
    record = {"messages": [ASK, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}
    assert parse_record(record, "").template_kwargs == {"enable_thinking": False}
    as_text = {**record, "chat_template_kwargs": '{"enable_thinking": false}'}
    assert parse_record(as_text, "") == parse_record(record, "")
    for empty in (None, {}, "{}", "null", {"enable_thinking": None}):
        assert parse_record({**record, "chat_template_kwargs": empty}, "").template_kwargs == {}
    for kwargs in ({"messages": []}, {"add_generation_prompt": True}, {"not a name": 1}, [1], "on"):
        assert refusal({**record, "chat_template_kwargs": kwargs})[0] == BadReason.BAD_TEMPLATE_KWARGS


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_prompt_of_the_record_comes_first(name):
    system = {"role": "system", "content": "Be short."}
    for turns in ([ASK, ANSWER], [system, ASK, ANSWER]):
        assert turns_of({"messages": turns, name: "Be short."}) == (Message("system", "Be short."), *PLAIN)
    assert turns_of({"messages": [ASK, ANSWER], name: ""}) == PLAIN
    assert turns_of({"messages": [system, ASK, ANSWER], name: "Be short.\n"})[0] == Message("system", "Be short.")
    assert refusal({"messages": [system, ASK, ANSWER], name: "Be long."}) == (
        BadReason.BAD_TURN,
        f"`{name}` and the first turn differ; to leave it out: source.ignore_fields=[{name}]",
    )
    assert refusal({"messages": [ASK, ANSWER], "system": "Be short.", "system_prompt": "x"})[0] == BadReason.BAD_TURN


@pytest.mark.parametrize("name", ["audio", "audios", "image", "images", "video", "videos"])
def test_media_are_refused_by_name_and_cannot_be_ignored(name):
    assert refusal({"messages": [ASK, ANSWER], name: ["x"]}) == (
        BadReason.MEDIA,
        f"the record has `{name}`; only text can be trained on (source.drop_media=true)",
    )
    assert refusal(answer_with(**{name: "x"}))[0] == BadReason.MEDIA
    assert turns_of({"messages": [ASK, ANSWER], name: []}) == PLAIN
    with pytest.raises(ConfigError, match=f"{name} cannot be ignored"):
        RecordReader(ignore_fields=[name])


def test_functions_of_a_record_are_refused_unless_they_are_mapped_or_ignored():
    record = {"messages": [ASK, ANSWER], "functions": [FUNCTION]}
    reason, detail = refusal(record)
    assert (reason, "source.columns.tools=functions" in detail) == (BadReason.UNKNOWN_FIELD, True)
    assert "`functions`" in detail
    assert parse_record(record, "", columns={"tools": "functions"}).tools == (TOOL,)
    assert parse_record(record, "", ignore_fields=["functions"]).tools == ()


def test_an_unknown_field_of_a_turn_is_refused_unless_it_is_ignored():
    record = answer_with(refusal="no", annotations=[], audio=None)
    assert refusal(record) == (
        BadReason.UNKNOWN_FIELD,
        "turn 2 (assistant) has the field 'refusal', which no schema reads; "
        "to leave out: source.ignore_fields=[refusal]",
    )
    assert refusal(answer_with(toxic=False, language="en"))[1].endswith(": source.ignore_fields=[language,toxic]")
    assert turns_of(record, ignore_fields=["refusal"]) == PLAIN


def test_a_tool_may_return_nothing_and_an_assistant_may_only_think_or_call():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    thought = {"role": "assistant", "content": None, "thinking": "hm"}
    messages = turns_of({"messages": [ASK, call, {"role": "tool", "content": None}, thought]})
    assert [message.content for message in messages] == ["Hi", "", "", None]
    assert refusal({"messages": [ASK, {**call, "tool_calls": []}]})[0] == BadReason.EMPTY_TURN


# Alpaca, prompts with completions, xLAM, text, preferences; ShareGPT with tools: tests/integration/test_prepare_schemas


def test_alpaca_joins_instruction_and_input_after_system_and_history():
    record = {"instruction": "Add", "input": "1 + 1", "output": "2", "history": [["Hi", "Hello"]]}
    record |= {"system": "Be short.", "text": "### Instruction: Add"}
    asked = (Message("user", "Add\n1 + 1"), Message("assistant", "2"))
    assert turns_of(record) == (Message("system", "Be short."), *PLAIN, *asked)
    assert RecordReader().unused_keys(record) == {"text"}
    assert turns_of({"instruction": "Hi", "input": "", "output": "Hello", "history": None}) == PLAIN


@pytest.mark.parametrize("question", ["question", "query"])
def test_a_pair_follows_its_history(question):
    answer = "answer" if question == "question" else "response"
    record = {question: "And 1?", answer: "3", "history": [["Hi", "Hello"], ["Add 1", "2"]]}

    assert turns_of(record) == turns_of({"messages": ["Hi", "Hello", "Add 1", "2", "And 1?", "3"]})
    assert turns_of({question: "Hi", answer: "Hello", "history": []}) == PLAIN


def test_only_the_completion_of_a_prompt_is_trained():
    turns = [ASK, ANSWER, {"role": "user", "content": "More"}]
    assert turns_of({"prompt": "Hi", "completion": "Hello"}) == (PLAIN[0], Message("assistant", "Hello", weight=100))
    for completion in ("Yes", [{"role": "assistant", "content": "Yes"}]):
        found = [(one.text, one.weight) for one in turns_of({"prompt": turns, "completion": completion})]
        assert found == [("Hi", None), ("Hello", 0), ("More", None), ("Yes", 100)]
    own_weight = {"prompt": [ASK], "completion": [{**ANSWER, "weight": 0}, ASK, ANSWER]}
    assert [message.weight for message in turns_of(own_weight)] == [None, 0, None, 100]


@pytest.mark.parametrize("record", [{"prompt": "Hi", "completion": "Hello"}, {"instruction": "Hi", "output": "Hello"}])
def test_an_answer_may_have_its_reasoning_beside_it(record):
    for name in ("reasoning_content", "thinking"):
        assert turns_of({**record, name: "I greet.", "reasoning": "on"})[1].reasoning == "I greet."
    mapped = turns_of({**record, "cot": "I greet."}, columns={"reasoning_content": "cot"})
    assert mapped[1].reasoning == "I greet."
    assert RecordReader().unused_keys({**record, "thinking": "I greet.", "reasoning": "on"}) == {"reasoning"}


def test_a_completion_that_its_label_calls_bad_is_left_out():
    record = {"prompt": "Hi", "completion": "Go away", "label": False}
    assert refusal(record)[0] == BadReason.UNWANTED
    assert turns_of({**record, "label": True}) == turns_of({**record, "label": 0})


def test_xlam_answers_are_the_calls_of_one_turn():
    record = {"query": "Hi", "tools": [FUNCTION], "answers": '[{"name": "f", "arguments": {"x": 1}}]'}
    assert parse_record(record, "line 1") == Conversation(
        (Message("user", "Hi"), Message("assistant", None, tool_calls=(CALL,))), "line 1", (TOOL,)
    )
    assert refusal({**record, "answers": "[]"})[0] == BadReason.EMPTY_TURN


def test_text_is_trained_as_it_is():
    assert parse_record({"text": " Once upon", "id": 1}, "line 1") == Conversation((), "line 1", text=" Once upon")
    assert refusal({"text": " "}) == (BadReason.EMPTY_TURN, "`text` is empty")
    assert refusal({"text": "See", "images": ["x"]})[0] == BadReason.MEDIA


def test_preferences_are_read_only_when_asked():
    record = {"chosen": [ASK, ANSWER], "rejected": [ASK, {**ANSWER, "content": "Go away"}]}
    reason, detail = refusal(record)
    assert reason == BadReason.UNKNOWN_SCHEMA
    assert "source.schema=preference" in detail
    assert turns_of(record, schema="preference") == PLAIN


# Columns, detection and readers


def test_columns_give_fields_of_records_and_turns_another_name():
    record = {"chat": [{"speaker": "user", "says": "Hi"}, {"speaker": "assistant", "says": "Hello"}], "messages": "old"}
    for prefix in ("", "messages."):
        columns = {"messages": "chat", f"{prefix}role": "speaker", f"{prefix}content": "says"}
        assert turns_of(record, columns=columns) == PLAIN
        assert RecordReader("messages", columns).unused_keys(record) == {"messages"}
    shared = {"dialog": [{"who": "human", "what": "Hi"}, {"who": "gpt", "what": "Hello"}]}
    columns = {"conversations": "dialog", "conversations.from": "who", "conversations.value": "what"}
    assert turns_of(shared, columns=columns) == PLAIN
    assert turns_of({"question": "Hi", "response": "Hello"}, columns={"instruction": "question", "output": "response"})


@pytest.mark.parametrize(
    ("record", "schema"),
    [
        ({"messages": [ASK, ANSWER], "prompt": "Hi", "text": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"conversations": [ASK, ANSWER]}, "messages"),
        ({"conversations": [{"from": "human", "value": "Hi"}], "text": "x"}, "sharegpt"),
        ({"instruction": "", "input": "", "output": "", "text": "x"}, "alpaca"),
        ({"prompt": "Hi", "completion": "Hello"}, "prompt_completion"),
        ({"query": "Hi", "tools": "[]", "answers": "[]"}, "xlam"),
        ({"text": "x", "messages": None}, "text"),
    ],
)
def test_the_schema_is_detected_from_the_first_records(record, schema):
    assert detect_schema([7, {}, record, record]) == schema


def test_detection_uses_the_columns_and_stops_after_a_hundred_records():
    assert detect_schema([{"chat": [ASK, ANSWER]}], columns={"messages": "chat"}) == "messages"
    assert detect_schema([{"text": "x"}] * 100 + [{"messages": [ASK, ANSWER]}]) == "text"
    assert detect_schema([]) == detect_schema([7, None]) == ""


@pytest.mark.parametrize(
    ("records", "what", "fix"),
    [
        ([{"q": "Hi", "a": "Hello"}], "no schema matches the first records; fields: q, a", "MODULE:FUNCTION"),
        ([{"text": "x"}, {"messages": [ASK]}], "several schemas: 1 text, 1 messages", "separately"),
        ([{"prompt": "Hi", "chosen": "a", "rejected": "b"}], "form a preference record", "source.schema=preference"),
        ([{"messages": [ASK], "prompt": "a", "completion": "b"}], "messages, prompt_completion", "source.schema="),
        ([{"messages": [ASK], "chosen": [ASK], "rejected": [ASK]}], "messages, preference", "source.schema="),
    ],
)
def test_records_of_no_one_schema_are_refused_with_their_fields(records, what, fix):
    with pytest.raises(PrepError, match="fields: ") as caught:
        detect_schema(records, where="chats.jsonl")
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where == "chats.jsonl"


def test_a_reader_goes_to_workers_and_knows_its_columns():
    reader = RecordReader("messages", {"messages": "chat"}, ["score"])
    record = {"chat": [ASK, ANSWER], "score": 1, "id": 7, "note": None}
    copy = pickle.loads(pickle.dumps(reader))
    assert copy == reader
    assert copy.parse(record, "line 1") == Conversation(PLAIN, "line 1")
    assert copy.unused_keys(record) == {"id"}
    assert copy.columns_to_read(["chat", "score", "id", "images", "tools"]) == ["chat", "images", "tools"]


def test_rows_of_a_table_are_read_without_fields_that_only_other_rows_have():
    arguments = {"x": 1, "y": None}
    call = {"name": "f", "arguments": arguments}
    row = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}], "text": None}
    assert RecordReader().parse(record_of_row(row), "row 0").messages[1].tool_calls == (CALL,)
    assert parse_record(row, "row 0").messages[1].tool_calls == (ToolCall("f", arguments),)


def test_hashes_differ_where_the_model_sees_a_difference():
    fields = ({}, {"thinking": "hm"}, {"content": ["Hello"]}, {"content": ["Hel", "lo"]}, {"weight": 0})
    records = [*(answer_with(**one) for one in (*fields, {"tool_calls": [{"name": "f"}]})), {"text": "Hello"}]
    records += [{**answer_with(), "tools": [FUNCTION]}]
    records += [{**answer_with(), "chat_template_kwargs": {"enable_thinking": True}}]
    assert len({parse_record(record, "").hash() for record in records}) == len(records)


# Refusals


def nested(depth: int) -> object:
    value: object = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def with_part(part: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": ["See", part]}, ANSWER]}


def with_turn(turn: object) -> dict[str, object]:
    return {"messages": [turn, ANSWER]}


def with_tools(tools: object) -> dict[str, object]:
    return {"messages": [ASK, ANSWER], "tools": tools}


def with_calls(*calls: object) -> dict[str, object]:
    return answer_with(tool_calls=list(calls))


def with_arguments(arguments: object) -> dict[str, object]:
    return with_calls({"name": "f", "arguments": arguments})


def of_sharegpt(turn: object) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": "Hi"}, turn]}


def of_alpaca(**change: object) -> dict[str, object]:
    return {"instruction": "Hi", "output": "Hello", **change}


REFUSED = {
    "bad_tools": [
        (with_tools({"f": 1}), "`tools` is of type dict"),
        (with_tools("get_weather"), "`tools`: a str that is not JSON"),
        (with_tools([{}]), "tool 1 has no name"),
        (with_tools([TOOL, {"type": "web_search"}]), "tool 2 is of type 'web_search'"),
        (with_tools([{"type": "function", "function": {"name": 7}}]), "tool 1 has no name"),
        (with_tools([{**FUNCTION, "strict": float("nan")}]), "in tool 1 there is the number nan"),
        (with_tools([{"name": "f", "parameters": {"city": "string"}}]), "'city' has no type"),
        (with_arguments(nested(70)), "call 1 of the tool_calls of turn 2 (assistant) there is a value more"),
        (with_arguments({"x": "\ud800"}), "half a surrogate pair"),
        (with_arguments({"x": float("inf")}), "the number inf"),
        (with_arguments({"x": 10**5000}), "an integer of 16,610 bits"),
        (with_arguments({"x": b"1"}), "a value of type bytes"),
        (with_arguments("x=1"), "call 1 of the tool_calls of turn 2"),
        (with_arguments([1]), "of type list, expected an object"),
        (with_calls({"arguments": {}}), "has the name None"),
        (with_calls({"name": "f", "id": 7}), "has the id 7"),
        (with_calls({"type": "custom", "name": "f"}), "is of type 'custom'"),
        (answer_with(tool_calls={"name": "f"}), "of type dict, expected a list"),
        (of_sharegpt({"from": "function_call", "value": "f(1)"}), "turn 2 (function_call): a str that is not"),
    ],
    "unknown_field": [
        (with_calls({"name": "f", "arguments": {}, "index": 3}), "ignore_fields=[index]"),
        (with_part({"type": "text", "text": "x", "citations": [1]}), "ignore_fields=[citations]"),
        (with_turn({**ASK, "tool_calls": [{"name": "f"}]}), "'tool_calls', which belongs to turns of role 'assistant'"),
        (with_turn({**ASK, "tool_call_id": "x"}), "'tool_call_id', which belongs to turns of role 'tool'"),
        (of_sharegpt({"from": "gpt", "value": "x", "content": "y"}), "'content beside from'"),
        (of_sharegpt({"from": "gpt", "value": "x", "loss": 1}), "'loss'"),
    ],
    "media": [
        (with_part({"type": "image_url", "image_url": {"url": "x"}}), "part 2 of turn 1 (user) is of type 'image"),
        (with_part({"type": "input_audio", "input_audio": "x"}), "'input_audio'"),
        (with_part({"type": "text", "text": "x", "image": "x"}), "has the field 'image'"),
    ],
    "not_text": [
        (with_part({"type": "document", "id": "x"}), "is of type 'document', expected 'text'"),
        (with_part({"type": "text"}), "NoneType"),
        (with_part(7), "of type int"),
        (with_turn({"role": "user", "content": {"x": 1}}), "type dict"),
        (with_turn({"role": "user", "content": "\ud800"}), "surrogate"),
        (of_alpaca(output=["a", "b"]), "`output` is of type list"),
        (of_alpaca(history=[["Hi", 3]]), "turn 2 (assistant) has content of type int"),
    ],
    "bad_weight": [
        (answer_with(weight=0.555), "has the weight 0.555, expected a number from 0 to 1 with at most two decimals"),
        (with_part({"type": "text", "text": "Hi", "weight": 1}), "a part of turn 1 (user) has a weight"),
        (answer_with(weight=Decimal(0)), "has the weight Decimal('0')"),  # a number of a table, and not nothing
        (answer_with(weight="1"), "has the weight '1'"),
        (answer_with(weight=float("nan")), "has the weight nan"),
        (answer_with(train=1), "has the train 1, expected true or false"),
        (answer_with(weight=1, train=False), "has contradictory weights"),
        ({"prompt": [ASK, {**ANSWER, "weight": 1}, ASK], "completion": "Yes"}, "a turn of the prompt"),
    ],
    "unknown_role": [
        (of_sharegpt({"from": "alien", "value": "x"}), "turn 2 is from 'alien', expected one of"),
        (with_turn({"role": "human", "content": "x"}), "turn 1 has role 'human'"),
        (with_turn({"content": "x"}), "role None"),
        (with_turn({"role": ["user"], "content": "x"}), "role ['user']"),
    ],
    "empty_turn": [
        (of_sharegpt({"from": "gpt", "value": None}), "turn 2 (assistant) has no content"),
        (with_turn({"role": "user", "content": " \n"}), "turn 1 (user) is empty"),
        (of_alpaca(output=""), "`output` is empty"),
        (of_alpaca(instruction=" "), "`instruction` is empty"),
    ],
    "bad_turn": [
        (with_turn("hi"), "turn 1 is a str"),
        (of_alpaca(history=[["Hi"]]), "`history` is not a list of question"),
        ({"prompt": "Hi", "completion": [ANSWER], "thinking": "I greet."}, "`thinking` is set in addition to"),
        ({"prompt": "Bye", "chosen": [ASK, ANSWER], "rejected": "no"}, "`chosen` begins with a prompt that differs"),
    ],
    "no_messages": [
        ({"turns": "hi"}, "no schema matches the fields ('turns')"),
        ({"messages": []}, "an empty list"),
        ({"messages": "hi"}, "a str"),
        ({"chosen": "Human: Hi", "rejected": "no"}, "`chosen` is a text, but there is no `prompt`"),
    ],
    "not_an_object": [([1, 2], "a JSON list"), (None, "a JSON NoneType")],
    "no_assistant_turn": [({"messages": [ASK]}, "no assistant turn in a conversation of 1 turn")],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_record_that_cannot_be_trained_on_is_refused_with_its_reason_and_place(reason):
    for record, words in REFUSED[reason]:
        schema = "preference" if isinstance(record, dict) and "chosen" in record else ""
        found, detail = refusal(record, schema=schema)
        assert (found, words in detail) == (reason, True), (record, detail)


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b"not json", BadReason.NOT_JSON, "Expecting value"),
        (b"{\n", BadReason.NOT_JSON, "; a record is one line, as `jq -c .` writes it"),
        (b"[" * 100_000, BadReason.NOT_JSON, "nested too deeply"),
        (b'{"messages": [{"role": "user", "role": "b"}]}', BadReason.NOT_JSON, "the key 'role' occurs twice"),
        (b'{"messages": "\xff"}', BadReason.NOT_UTF8, "byte 14"),
    ],
)
def test_a_line_that_is_no_json_is_refused(line, reason, words):
    bad = parse_line(line, "f.jsonl, line 1")
    assert isinstance(bad, BadRecord)
    assert (bad.reason, bad.where, words in bad.detail) == (reason, "f.jsonl, line 1", True)


def test_a_refusal_names_the_column_that_a_field_was_read_from():
    reason, detail = refusal({"chat": []}, columns={"messages": "chat"})
    assert reason == BadReason.NO_MESSAGES
    assert detail == "`messages` contains an empty list, expected a list of turns (`messages` is the column `chat`)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schema": "chatml"}, "'chatml' is not known"),
        ({"columns": {"dialog": "chat"}}, "field 'dialog' does not exist"),
        ({"columns": {"messages.speaker": "who"}}, "field 'messages.speaker' does not exist"),
        ({"columns": {"messages": ""}}, "the column name is ''"),
        ({"columns": {"chat": "messages"}}, "source.columns.messages=chat, or use one of: "),
        ({"schema": "alpaca", "columns": {"messages": "chat"}}, "field 'messages' does not exist in the schema alpaca"),
    ],
)
def test_settings_that_name_nothing_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        RecordReader(**settings)


# Lines, columns and hashes


def test_a_line_becomes_a_conversation_with_its_place_without_byte_order_mark_and_null_fields():
    line = b'\xef\xbb\xbf{"id": 7, "messages": [{"role": "user", "content": "Hi", "tool_calls": null}, '
    line += b'{"role": "assistant", "content": "Hello"}]}\n'
    assert parse_line(line, "chat.jsonl, line 3") == Conversation(PLAIN, "chat.jsonl, line 3")


def test_the_hash_depends_on_roles_and_texts_and_not_on_the_place():
    def hash_of(*turns: tuple[str, str], where: str = "") -> int:
        return Conversation(tuple(Message(*turn) for turn in turns), where).hash()

    assert hash_of(("user", "ab"), ("assistant", "c")) == hash_of(("user", "ab"), ("assistant", "c"), where="x")
    assert hash_of(("user", "ab"), ("assistant", "c")) != hash_of(("user", "a"), ("assistant", "bc"))
    assert hash_of(("user", "ab"), ("assistant", "c")) != hash_of(("assistant", "ab"), ("user", "c"))
    # Stored splits depend on this number: it must never change.
    assert hash_of(("user", "Hi"), ("assistant", "Hello")) == 17707387282723869345


def test_a_column_that_is_media_by_its_name_is_refused_unless_it_is_empty_or_ignored():
    for name, value in (("image_path", "a.png"), ("imageUrls", ["a"]), ("audio_url", "b"), ("files", ["c"])):
        reason, detail = refusal({"messages": [ASK, ANSWER], name: value})
        assert (reason, f"source.ignore_fields=[{name}]" in detail) == (BadReason.MEDIA, True)
        assert turns_of({"messages": [ASK, ANSWER], name: value}, ignore_fields=[name]) == PLAIN
    for name, value in (("image_path", None), ("image_path", ""), ("num_images", 2), ("has_video", True)):
        assert turns_of({"messages": [ASK, ANSWER], name: value}) == PLAIN


CALL_TEXT = '{"name": "f", "arguments": {"a": 1}, "trace": 3}'


@pytest.mark.parametrize(
    "record", [of_sharegpt({"from": "function_call", "value": CALL_TEXT}), answer_with(tool_calls=f"[{CALL_TEXT}]")]
)
def test_a_field_of_a_call_in_json_text_can_be_ignored(record):
    assert "source.ignore_fields=[trace]" in refusal(record)[1]
    assert turns_of(record, ignore_fields=["trace"])[1].tool_calls[0].arguments == {"a": 1}


@pytest.mark.parametrize("field", ["prompt", "completion"])
@pytest.mark.parametrize("nothing", [None, "", " "])
def test_a_prompt_or_completion_with_nothing_in_it_is_named_as_empty(field, nothing):
    record = {"prompt": "Hi", "completion": "Hello", field: nothing}
    bad = parse_record(record, "line 1", schema="prompt_completion")
    assert isinstance(bad, BadRecord)
    assert (bad.reason, bad.detail) == (BadReason.EMPTY_TURN, f"`{field}` is empty")


@pytest.mark.parametrize("turn", [{"from": "system", "text": "Be brief."}, {"from": "observation", "id": "c"}])
def test_a_turn_of_two_fields_without_a_value_has_no_field_that_is_passed_over(turn):
    reason, detail = refusal(of_sharegpt(turn))
    assert reason == BadReason.UNKNOWN_FIELD
    assert f"source.ignore_fields=[{list(turn)[1]}]" in detail
    called = of_sharegpt({"from": "gpt", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]})
    assert turns_of(called, schema="sharegpt")[1].tool_calls == (CALL,)


@pytest.mark.parametrize("inside", ['{"x": NaN}', '"\\ud800"', "[" * 70 + "1" + "]" * 70])
def test_parameters_of_a_tool_in_json_text_are_checked_like_others(inside):
    parameters = f'{{"type": "object", "properties": {{"x": {{"type": "string", "default": {inside}}}}}}}'
    record = {"messages": [ASK, ANSWER], "tools": [{"name": "f", "parameters": parameters}]}
    assert refusal(record)[0] == BadReason.BAD_TOOLS


KEYS = ",".join(f'"{number}":0' for number in range(200_000))
IMAGE = "data:image/gif;base64,R0lGODdhAQABAIAAAP///////ywAAAAAAQABAAACAkQBADs="


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("line", "settings", "words"),
    [
        (f'{{{KEYS},"x":1,"x":2}}', {}, "the key 'x' occurs twice"),
        (json.dumps(answer_with(content="</tool_call>" * 200_000 + "<tool_call>" * 200_000)),
         {"tool_calls": "hermes"}, "has an unclosed or nested <tool_call>"),
        (json.dumps({"messages": [{**ASK, "content": "<image>x" * 200_000}, ANSWER], "image": IMAGE}),
         {"media": MediaLimits()}, "the turns have 200,000 <image> placeholders, and the record has 1 for them"),
        (json.dumps({"messages": [{**ASK, "content": [{"type": "image"}] * 200_000}, ANSWER]}),
         {"drop_media": True}, "turn 1 (user) is empty")
    ],
    ids=["keys", "calls", "placeholders", "parts"]
)  # fmt: skip
def test_a_hostile_record_of_megabytes_is_refused_in_time_that_grows_with_its_length(line, settings, words):
    """Each takes seconds, and hours where the time grows with the square."""
    bad = parse_line(line.encode(), "here", **settings)
    assert isinstance(bad, BadRecord)
    assert words in bad.detail


@pytest.mark.timeout(60)
def test_a_type_of_megabytes_is_read_in_time_that_grows_with_its_length():
    parameters = {"x": {"type": "x" * 2_000_000, "description": "d"}}
    made = parse_record({"messages": [ASK, ANSWER], "tools": [{"name": "f", "parameters": parameters}]}, "here")
    assert isinstance(made, Conversation)
    assert made.tools[0]["function"]["parameters"]["properties"] == {"x": {"description": "d"}}


@pytest.mark.parametrize("text", ["[1, 2]", '["a"]', json.dumps([ASK]), '{"a": 1}'])
@pytest.mark.parametrize("other", [{"ignore_fields": ["id"]}, {"drop_media": True}, {"columns": {"role": "speaker"}}])
def test_a_prompt_or_an_answer_that_looks_like_json_is_a_text_whatever_else_is_set(text, other):
    for record, settings in (
        ({"prompt": text, "completion": text}, {}),
        ({"prompt": text, "chosen": text, "rejected": "No"}, {"schema": "preference"}),
        ({"instruction": "Do", "input": text, "output": text}, {}),
    ):
        expected = turns_of(record, **settings)
        assert expected[1].content == text
        assert turns_of(record, **settings, **other) == expected
