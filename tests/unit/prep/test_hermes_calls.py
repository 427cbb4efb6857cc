"""Calls and results that Hermes writes inside texts are lifted when asked; those that cannot be read are refused."""

from __future__ import annotations

import tracemalloc

import pytest

from harness.prep.chat import BadReason, BadRecord, Conversation, Message, RecordReader, ToolCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", {"a": 1})


def parse(*turns: tuple[str, str], tool_calls: str = "hermes", **fields: object) -> Conversation | BadRecord:
    record = {"conversations": [{"from": role, "value": text} for role, text in turns], **fields}
    return RecordReader(tool_calls=tool_calls).parse(record, "a.jsonl, line 1")


THOUGHT = "<think>I could write <tool_call>.</think>"


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        (
            [
                ("gpt", f"I add.\n{CALL}\n{CALL}"),
                ("tool", "<tool_response>\n3\n</tool_response>\n<tool_response>4</tool_response>"),
                ("gpt", "7"),
            ],
            [
                Message("assistant", "I add.", tool_calls=(ADD, ADD)),
                *(Message("tool", "3"), Message("tool", "4"), Message("assistant", "7")),
            ],
        ),
        # Results in a turn of the user are the tool's.
        (
            [("gpt", CALL), ("human", "<tool_response>3</tool_response>"), ("gpt", "3")],
            [Message("assistant", None, tool_calls=(ADD,)), Message("tool", "3"), Message("assistant", "3")],
        ),
        # A call may be written by Python or in the form of OpenAI.
        *(
            ([("gpt", f"<tool_call>{call}</tool_call>")], [Message("assistant", None, tool_calls=(ADD,))])
            for call in (
                "{'name': 'add', 'arguments': {'a': 1}}",
                '{"arguments": {"a": 1}, "name": "add"}',
                '{"function": {"name": "add", "arguments": {"a": 1}}}',
            )
        ),
        # Tags in the reasoning are text.
        ([("gpt", THOUGHT + CALL)], [Message("assistant", THOUGHT, tool_calls=(ADD,))]),
    ],
)
def test_calls_and_results_become_calls_and_turns_of_tools(turns, messages):
    made = parse(("human", "Add."), *turns)
    assert isinstance(made, Conversation)
    assert made.messages == (Message("user", "Add."), *messages)


def test_tags_without_the_setting_are_text():
    plain = parse(("human", "Add."), ("gpt", CALL), tool_calls="given")
    assert isinstance(plain, Conversation)
    assert plain.messages[1] == Message("assistant", CALL)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (("gpt", '<tool_call>{"name": "add", "arguments": {</tool_call>'), "<tool_call> 1 of turn 2 (assistant)"),
        (("gpt", "<tool_call>__import__('os')</tool_call>"), "is not JSON"),
        # As a template of Python's that was not filled in leaves it.
        (("gpt", '<tool_call>{{"name": "add", "arguments": {}}}</tool_call>'), "is not JSON"),
        (("gpt", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'), "of type list, expected an object"),
        (("gpt", '<tool_call>{"name": "add"}'), "has an unclosed or nested <tool_call>"),
        (("gpt", f"<tool_call>{CALL}</tool_call>"), "nested <tool_call>"),
        (("gpt", f"{CALL} Done."), "turn 2 (assistant) has text after <tool_call>"),
        (("tool", "Here: <tool_response>3</tool_response>"), "has text before <tool_response>"),
        (("human", "<tool_response>3</tool_response> Go on."), "has text after <tool_response>"),
    ],
)
def test_what_cannot_be_read_is_a_bad_record_and_not_text(turn, words):
    bad = parse(("human", "Add."), turn, ("gpt", "Yes"))
    assert isinstance(bad, BadRecord)
    assert bad.reason == BadReason.BAD_TOOLS
    assert words in bad.detail


@pytest.mark.parametrize("opening", ["'", "["])
def test_a_call_as_python_writes_it_of_megabytes_is_refused_before_its_syntax_tree_is_built(opening: str) -> None:
    """Of 1 MiB, a list of numbers takes 0.5 GB."""

    def call(length: int) -> str:
        filled = "x" * length + "'" if opening == "'" else "1," * (length // 2) + "]"
        return f"<tool_call>{{'name': 'f', 'arguments': {{'a': {opening}{filled}}}}}</tool_call>"

    made = parse(("user", "Hi"), ("assistant", call(1 << 17)))
    assert isinstance(made, Conversation)
    tracemalloc.start()
    bad = parse(("user", "Hi"), ("assistant", call(1 << 21)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(bad, BadRecord)
    assert bad.reason == BadReason.BAD_TOOLS
    assert "of turn 2 (assistant) is not JSON" in bad.detail
    assert peak < 32 << 20


def test_calls_in_the_fields_and_in_the_text_are_refused():
    call = {"function": {"name": "add", "arguments": "{}"}}
    turns = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": CALL, "tool_calls": [call]}]
    bad = RecordReader(tool_calls="hermes").parse({"messages": turns}, "a.jsonl, line 1")
    assert isinstance(bad, BadRecord)
    assert "has tool_calls and <tool_call>" in bad.detail
