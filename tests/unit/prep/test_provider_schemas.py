"""Records of Anthropic, Gemini, OpenAI's Responses and batches, and pairs become the same conversations."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.errors import PrepError
from harness.prep.chat import BadReason, BadRecord, Conversation, Message, RecordReader, ToolCall, detect_schema
from harness.prep.chat import parse_record as parse
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, train_bpe

CALL = ToolCall("weather", {"city": "Oslo"}, "c1")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASKED = {"role": "user", "content": "Oslo?"}
# The same conversation of every provider.
WANTED = (
    Message("system", ("Be brief.",)),
    Message("user", "Oslo?"),
    Message("assistant", ("I look.",), reasoning="A tool knows.", tool_calls=(CALL,)),
    Message("tool", "3 C", tool_call_id="c1"),
    Message("assistant", ("Cold.",)),
)


def text(words: str, kind: str = "text") -> dict[str, object]:
    return {"type": kind, "text": words}


THINKING = {"type": "thinking", "thinking": "A tool knows.", "signature": "abc"}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}
ANTHROPIC = {
    "system": [{**text("Be brief."), "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "messages": [
        ASKED,
        {"role": "assistant", "content": [THINKING, text("I look."), USE]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3 C", "is_error": False}],
        },
        {"role": "assistant", "content": [text("Cold.")]},
    ],
}
ITEM = {"type": "message", "role": "assistant"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": {"city": "Oslo"}}
RESPONSES = {
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    "input": [
        ASKED,
        {"type": "reasoning", "id": "r", "summary": [text("A tool knows.", "summary_text")]},
        {**ITEM, "content": [text("I look.", "output_text")]},
        {**CALLED, "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "3 C"},
    ],
    "output": [{**ITEM, "content": [{**text("Cold.", "output_text"), "annotations": []}]}],
}
CALLS = {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Oslo"}}, "thoughtSignature": "abc"}
GEMINI = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "tools": [{"functionDeclarations": [{"name": "weather", "parameters": SCHEMA}]}],
    "contents": [
        {"role": "user", "parts": [{"text": "Oslo?"}]},
        {"role": "model", "parts": [{"text": "A tool knows.", "thought": True}, {"text": "I look."}, CALLS]},
        {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "weather", "response": {"t": 3}}}]},
        {"role": "model", "parts": [{"text": "Cold."}]},
    ],
}


def refusal(record: object, **settings: object) -> tuple[BadReason, str]:
    parsed = parse(record, "line 1", **settings)
    assert isinstance(parsed, BadRecord), parsed
    return parsed.reason, parsed.detail


def texts(messages: tuple[Message, ...]) -> list[tuple[object, ...]]:
    return [(turn.role, turn.text, turn.reasoning, turn.tool_calls, turn.tool_call_id) for turn in messages]


@pytest.mark.parametrize(("schema", "record"), [("messages", ANTHROPIC), ("responses", RESPONSES), ("gemini", GEMINI)])
def test_the_same_chat_of_each_provider_is_detected_and_becomes_the_same_conversation(schema, record):
    assert detect_schema([record]) == schema
    made = parse(record, "line 1")
    assert isinstance(made, Conversation), made
    assert made.tools == (TOOL,)
    wanted = list(WANTED)
    if schema == "gemini":
        wanted[3] = Message("tool", '{"t": 3}', tool_call_id="c1", name="weather")
        assert made.messages[3].name == "weather"
    assert texts(made.messages) == texts(tuple(wanted))
    assert RecordReader().unused_keys(record) == set()


def test_blocks_in_another_order_become_turns_in_that_order():
    blocks = [
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        {"type": "text", "text": "Then"},
        {"type": "thinking", "thinking": "one"},
        {"type": "thinking", "thinking": "two"},
        {"type": "text", "text": "Last"},
    ]
    made = parse({"messages": [ASKED, {"role": "assistant", "content": blocks, "weight": 0}]}, "").messages[1:]
    assert [(turn.text, turn.reasoning, len(turn.tool_calls), turn.weight) for turn in made] == [
        ("", "", 1, 0),
        ("Then", "", 0, 0),
        ("Last", "one\n\ntwo", 0, 0),
    ]
    results = [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "Go on"}]
    record = {"messages": [{"role": "user", "content": results}, {"role": "assistant", "content": "Yes"}]}
    assert [(turn.role, turn.text) for turn in parse(record, "").messages][:2] == [("tool", ""), ("user", "Go on")]


@pytest.mark.parametrize(
    ("block", "reason", "words"),
    [
        ({"type": "redacted_thinking", "data": "x"}, "not_text", "ignore_fields=[redacted_thinking]"),
        ({"type": "server_tool_use", "name": "x"}, "not_text", "'server_tool_use'"),
        ({"type": "image", "source": {}}, "media", "source.drop_media=true"),
        ({"type": "tool_use", "name": "f", "input": "x"}, "bad_tools", "not JSON"),
        ({"type": "tool_use", "input": {}}, "bad_tools", "the name None"),
        ({"type": "tool_use", "name": "f", "more": 1}, "unknown_field", "ignore_fields=[more]"),
        ({"type": "tool_result", "content": "x"}, "bad_turn", "role 'user'"),
        ({"type": "thinking", "thinking": 3}, "not_text", "the thinking of block 2 of turn 2 (assistant)"),
    ],
)
def test_a_block_that_is_not_read_is_refused_by_its_name(block, reason, words):
    known = {"type": "thinking", "thinking": "I see"}
    record = {"messages": [ASKED, {"role": "assistant", "content": [known, block]}]}
    found, detail = refusal(record)
    assert (found, words in detail) == (reason, True), detail


def test_blocks_and_items_are_left_out_by_their_types():
    hidden = {"type": "redacted_thinking", "data": "x"}
    record = {"messages": [ASKED, {"role": "assistant", "content": [hidden, text("Cold.")]}]}
    assert parse(record, "", ignore_fields=["redacted_thinking"]).messages[1].text == "Cold."
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    record = {"input": "Oslo?", "output": [search, *RESPONSES["output"]]}
    assert refusal(record)[0] == "not_text"
    assert parse(record, "", ignore_fields=["web_search_call"]).messages[1].text == "Cold."
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}
    assert refusal(image, ignore_fields=["image_url"])[0] == "media"


def test_a_failed_tool_and_hidden_reasoning_are_refused_unless_ignored():
    failed = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": True}]}
    assert "ignore_fields=[is_error]" in refusal({"messages": [failed, {"role": "assistant", "content": "a"}]})[1]
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    record = {"input": "Oslo?", "output": [hidden, *RESPONSES["output"]]}
    assert "ignore_fields=[encrypted_content]" in refusal(record)[1]
    assert len(parse(record, "", ignore_fields=["encrypted_content"]).messages) == 2


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"contents": [{"role": "bot", "parts": []}]}, "role 'bot'"),
        ({"contents": [{"role": "user"}]}, "has no `parts`"),
        ({"contents": ["Hi"]}, "turn 1 is a str"),
        ({"contents": [{"role": "user", "parts": [{"inlineData": {"data": "x"}}]}]}, "only text can be trained on"),
        ({"contents": [{"role": "model", "parts": [{"executableCode": {"code": "x"}}]}]}, "'executableCode'"),
        ({**GEMINI, "tools": [{"googleSearch": {"a": 1}}]}, "'googleSearch'"),
        ({**GEMINI, "tools": [{"functionDeclarations": "x"}]}, "expected a list"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "x": 1}}]}]}, "'x'"),
        ({"input": [{"type": ["a"]}]}, "['a']"),
        ({"input": [{"type": "message", "role": "user", "content": "a", "x": 1}]}, "ignore_fields=[x]"),
        ({**RESPONSES, "status": "incomplete"}, "is 'incomplete'"),
        ({"input": [3, {"role": "user"}]}, "no schema"),
        ({"conversation": [{"input": "a", "output": "b"}, {"input": "c"}]}, "pair 2 is not a question"),
        ({"conversation": [{"input": "a", "output": ""}]}, "pair 1: `output` is empty"),
        ({"conversation": [{"input": "a", "output": "b", "image": "c"}]}, "'image'"),
        ({"question": "a", "context": "b", "answer": "c"}, "ignore_fields=[context]"),
        ({"question": "a", "text": "b", "answer": "c"}, "pairs, text"),
        ({"question": "a", "answer": "b", "response": "c"}, "`answer` answers `question`; to leave out `response`: "),
        ({"custom_id": "1", "response": {"body": {"choices": []}}}, "add the `body` of the request"),
    ],
)
def test_a_record_that_cannot_be_read_names_what_is_wrong(record, words):
    assert words in refusal(record)[1], refusal(record)


def test_pairs_of_questions_and_answers_become_turns():
    plain = [("user", "Hi"), ("assistant", "Hello")]
    for record in (
        {"conversation": [{"input": "Hi", "output": "Hello"}]},
        {"conversations": [{"question": "Hi", "answer": "Hello"}], "source": "x"},
        {"question": "Hi", "answer": "Hello"},
        {"system_prompt": "", "question": "Hi", "response": "Hello"},
        {"prompt": "Hi", "response": "Hello", "system": ""},
    ):
        assert detect_schema([record]) == "pairs"
        assert [(turn.role, turn.text) for turn in parse(record, "").messages] == plain
    # A schema of turns is read, whatever questions stand beside it.
    assert detect_schema([{"messages": [ASKED], "question": "a", "answer": "b"}]) == "messages"


BODY = {"model": "m", "messages": [ASKED], "tools": [TOOL]}
CHOICE = {"finish_reason": "stop", "message": {"role": "assistant", "content": "Cold.", "refusal": None}}
BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}


PARAMS = {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": [ASKED]}
ASKED_OF = {"custom_id": "1", "params": PARAMS}
ANSWER = {**ITEM, "content": [text("Cold.")], "id": "x"}
SUCCEEDED = {"type": "succeeded", "message": {**ANSWER, "stop_reason": "end_turn", "usage": {"output_tokens": 3}}}
VERTEX = {"contents": [{"role": "user", "parts": [{"text": "Oslo?"}]}], "generationConfig": {"temperature": 0}}
CANDIDATE = {"content": {"role": "model", "parts": [{"text": "Cold."}]}, "finishReason": "STOP"}


STOPPED = {**SUCCEEDED, "message": {**ANSWER, "stop_reason": "max_tokens"}}
CUT = {**CANDIDATE, "finishReason": "MAX_TOKENS"}


OF_OPENAI = {**BATCH, "response": {"status_code": 200, "body": {"choices": [CHOICE]}}, "error": None}
ITEMS = {**BATCH, "body": {"input": "Oslo?"}, "response": {"body": {"output": RESPONSES["output"]}}}


@pytest.mark.parametrize(
    ("line", "schema"),
    [
        (OF_OPENAI, "messages"),
        (ITEMS, "responses"),
        ({**ASKED_OF, "result": SUCCEEDED}, "messages"),
        ({"request": VERTEX, "status": "", "response": {"candidates": [CANDIDATE], "modelVersion": "m"}}, "gemini"),
        ({"key": "1", "request": VERTEX, "response": {"candidates": [CANDIDATE]}}, "gemini"),
        ({"custom_id": "1", "request": PARAMS, "response": {**ANSWER, "stop_reason": "end_turn"}}, "messages"),
    ],
)
def test_a_line_of_a_batch_is_its_request_with_the_answer(line, schema):
    assert detect_schema([line]) == schema
    made = parse(line, "line 1")
    assert [turn.text for turn in made.messages if turn.role != "system"] == ["Oslo?", "Cold."]
    assert made.tools == ((TOOL,) if line is OF_OPENAI else ())
    assert set(RecordReader().columns_to_read(line)) >= line.keys() - {"id", "method", "url"}
    assert line is not OF_OPENAI or RecordReader().unused_keys(line) == {"model"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (BATCH, "no assistant turn in a conversation of 1 turn"),
        ({**BATCH, "body": "{"}, "not JSON"),
        ({**BATCH, "body": []}, "expected an object"),
        ({**BATCH, "error": {"code": "x"}}, "the request failed"),
        ({**BATCH, "response": {"status_code": 429}}, "status 429"),
        ({**BATCH, "response": {"body": {"choices": [CHOICE, CHOICE]}}}, "2 choices"),
        ({**BATCH, "response": {"body": {"choices": [{**CHOICE, "finish_reason": "length"}]}}}, "is incomplete"),
        ({**ASKED_OF, "result": {"type": "errored", "error": {}}}, "its result is 'errored'"),
        ({**ASKED_OF, "result": {"type": "succeeded"}}, "the `message` of `result`"),
        ({**ASKED_OF, "result": STOPPED}, "its stop_reason is 'max_tokens'"),
        ({"custom_id": "1", "result": SUCCEEDED}, "add the `params` of the request"),
        ({"request": VERTEX, "status": "Quota exceeded", "response": {}}, "the request failed: 'Quota exceeded'"),
        ({"request": VERTEX, "response": {"candidates": []}}, "0 candidates"),
        ({"request": VERTEX, "response": {"candidates": [CUT]}}, "its finishReason is 'MAX_TOKENS'"),
    ],
)
def test_a_line_of_a_batch_without_one_whole_answer_is_refused(line, words):
    assert words in refusal(line)[1]


def test_texts_without_roles_are_turns_of_user_and_assistant():
    for name in ("conversations", "messages"):
        record = {name: ["Hi", "Hello", "Bye", "See you"], "source": "x"}
        assert detect_schema([record]) == "messages"
        turns = [(turn.role, turn.text) for turn in parse(record, "").messages]
        assert turns == [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
    assert parse({"data": ["Hi", "Hello"]}, "", columns={"messages": "data"}).messages[1].role == "assistant"
    assert "no assistant turn in a conversation of 1 turn" in refusal({"conversations": ["Hi"]})[1]
    assert "turn 2" in refusal({"conversations": ["Hi", " "]})[1]
    assert "turn 1" in refusal({"conversations": ["Hi", {"role": "assistant", "content": "Hello"}]})[1]


def test_what_is_wrong_with_the_first_records_comes_with_its_own_fix():
    for record, what, fix in (
        ({"custom_id": "1", "response": {}}, "a batch response without its request", "add the `body` of the request"),
        ({"chosen": "a", "rejected": "b"}, "form a preference record", "source.schema=preference trains on `chosen`"),
        (*({"input_ids": [1], "loss_mask": [0]}, "tokens instead of chats"), "to train on packs: data.path"),
    ):
        with pytest.raises(PrepError, match=what) as error:
            detect_schema([record])
        assert error.value.fix.startswith(fix)


def test_template_variables_that_are_null_are_none():
    chat = [ASKED, {"role": "assistant", "content": "Cold."}]
    for empty in (None, {}, "{}", "null", {"enable_thinking": None}):
        assert parse({"messages": chat, "chat_template_kwargs": empty}, "").template_kwargs == {}
    assert parse({"messages": chat, "chat_template_kwargs": {"a": 1}}, "").template_kwargs == {"a": 1}


def objects_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects_of(inner)


CALLING = {"from": "function_call", "value": {"name": "weather", "arguments": {"city": "Oslo"}}}
# One record of each schema with turns, parts and calls.
WHOLE = {
    "anthropic": ANTHROPIC,
    "responses": RESPONSES,
    "gemini": GEMINI,
    "one part": {"contents": [{"parts": {"text": "Hi"}}, {"role": "model", "parts": {"text": "Hello"}}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, CALLING, {"from": "gpt", "value": "Hello"}]},
    "batch": {**BATCH, "response": {"body": {"choices": [CHOICE]}}},
    "vertex": {"request": VERTEX, "response": {"candidates": [CANDIDATE]}},
    "pairs": {"conversation": [{"input": "Hi", "output": "Hello", "thinking": "I greet."}]},
    "pair": {"question": "Hi", "answer": "Hello"},
    "prompt": {"prompt": [ASKED], "completion": [{"role": "assistant", "content": "Cold."}]},
}
ADDED = [("more", 1), ("a b", 1), ("x-y", 1), ("image", "x"), ("type", "other"), ("thought", True), ("content", "x")]
ADDED += [("functions", [1]), ("context", "x"), ("reasoning", "why"), ("system_prompt", "Else.")]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["Oslo is cold."], folder, vocab_size=300, chat_template="chatml")
    return ChatTokenizer(TokenizerConfig(kind="huggingface", name=str(folder)))


def why_refused(record: object, settings: dict[str, Any], tokenizer: ChatTokenizer) -> str:
    made = RecordReader(**settings).parse(record, "line 1")
    if isinstance(made, Conversation):
        (made,) = tokenizer.encode_each([made])
    return made.detail if isinstance(made, BadRecord) else ""


def with_advice(settings: dict[str, Any], detail: str) -> dict[str, Any]:
    """Return the settings with the first one that a text advises, as the shell and Hydra read it."""
    advised = re.search(r"'?source\.[\w.]+=(\[.*?\]|\w+)'?", detail)
    if advised is None:
        return settings
    (override,) = OverridesParser.create().parse_overrides(shlex.split(advised[0]))
    name, _, column = override.key_or_group.removeprefix("source.").partition(".")
    value = {column: override.value()} if column else override.value()
    return settings | {name: [*settings.get(name, ()), *value] if isinstance(value, list) else value}


@pytest.mark.parametrize("name", WHOLE)
def test_a_refusal_does_not_return_once_its_advice_is_followed(chatml, name):
    num_followed = 0
    for number in range(len(list(objects_of(WHOLE[name])))):
        for field, value in ADDED:
            record = copy.deepcopy(WHOLE[name])
            list(objects_of(record))[number][field] = value
            settings: dict[str, Any] = {}
            refusals: list[str] = []
            while detail := why_refused(record, settings, chatml):
                assert detail not in refusals, (record, settings)
                refusals.append(detail)
                before, settings = settings, with_advice(settings, detail)
                if settings == before:
                    break
                num_followed += 1
    assert num_followed


OPENAI_CALL = {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


@pytest.mark.parametrize(
    ("turn", "wanted"),
    [
        # The reasoning is the turn's, before its first block.
        (
            {"content": [text("I look."), USE], "reasoning_content": "A tool knows."},
            [("I look.", "A tool knows.", (CALL,))],
        ),
        # The calls are the turn's, after its last block, and once.
        ({"content": [THINKING, text("I look.")], "tool_calls": [OPENAI_CALL]},
         [("I look.", "A tool knows.", (CALL,))]),
        ({"content": [THINKING, text("I"), text(" look.")], "tool_calls": [OPENAI_CALL]},
         [("I look.", "A tool knows.", (CALL,))]),
        # Fields that hold nothing are as good as none.
        *(
            ({"content": [THINKING, USE], "reasoning_content": nothing, "tool_calls": nothing},
             [("", "A tool knows.", (CALL,))])
            for nothing in (None, "", [])
        ),
    ],
)  # fmt: skip
def test_blocks_beside_fields_of_openai_are_one_turn(turn, wanted):
    made = parse({"messages": [ASKED, {"role": "assistant", **turn}]}, "")
    assert isinstance(made, Conversation), made
    assert [(turn.text, turn.reasoning, turn.tool_calls) for turn in made.messages[1:]] == wanted


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"content": [USE], "tool_calls": [OPENAI_CALL]}, "has tool_calls as well as blocks of these"),
        ({"content": [USE], "tool_calls": "[]x"}, "has tool_calls as well as blocks of these"),
        ({"content": [THINKING], "reasoning_content": "I know."}, "has reasoning_content as well as blocks of these"),
    ],
)
def test_what_a_turn_has_both_in_blocks_and_in_a_field_is_refused(turn, words):
    reason, detail = refusal({"messages": [ASKED, {"role": "assistant", **turn}]})
    assert (reason, detail) == ("bad_turn", f"turn 2 (assistant) {words}")


@pytest.mark.parametrize(
    ("content", "reasoning"),
    [
        ("A tool knows.", "A tool knows."),
        (text("A tool knows."), "A tool knows."),
        ([text("One"), "two"], "One\n\ntwo"),
    ],
)
def test_reasoning_of_responses_may_be_a_text_or_one_part(content, reasoning):
    items = [{"type": "reasoning", "content": content}, *RESPONSES["output"]]
    assert parse({"input": "Oslo?", "output": items}, "").messages[1].reasoning == reasoning
    for wrong in (7, [7], {"x": 1}):
        assert refusal({"input": "Oslo?", "output": [{"type": "reasoning", "content": wrong}]})[0] == "not_text"


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), b"x", Decimal(1), float("nan"), "\ud800", {1, 2}])
def test_a_result_that_json_cannot_hold_is_refused(value):
    """Tables hold values of more types than JSON."""
    contents = copy.deepcopy(GEMINI["contents"])
    contents[2]["parts"][0]["functionResponse"]["response"] = {"t": value}
    assert refusal({"contents": contents})[0] == "bad_tools"


def test_a_line_with_several_requests_gives_the_same_conversation_in_every_process():
    """Names in a set come in another order in each process."""
    line = {"custom_id": "1", "body": {"messages": [ASKED, {"role": "assistant", "content": "body"}]}}
    line["params"] = {"messages": [ASKED, {"role": "assistant", "content": "params"}]}
    script = "import json, sys; from harness.prep.chat import parse_line"
    script += "; print(parse_line(sys.argv[1].encode(), '').messages[1].text)"
    printed = {
        subprocess.run(
            [sys.executable, "-c", script, json.dumps(line)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert printed == {b"body\n"}
