"""Records are parsed into conversations, or reported as bad with the reason."""

from __future__ import annotations

import json

import pytest

from harness.prep.chat import BadReason, BadRecord, Conversation, Message, parse_line, parse_record

ASK = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def test_a_valid_line_becomes_a_conversation_with_file_and_line():
    line = b'{"id": 7, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n'
    assert parse_line(line, "chat.jsonl, line 3") == Conversation(
        (Message("user", "Hi"), Message("assistant", "Hello")), "chat.jsonl, line 3"
    )


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_every_role_is_accepted(role):
    assert isinstance(parse_record({"messages": [{"role": role, "content": "x"}, ANSWER]}, ""), Conversation)


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b"not json", BadReason.NOT_JSON, "Expecting value"),
        (b'{"messages": [', BadReason.NOT_JSON, "Expecting value"),
        (b"[" * 100_000, BadReason.NOT_JSON, "nested too deeply"),
        (
            b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
            BadReason.NOT_JSON,
            "the key 'content' is given twice in one object",
        ),
        (b'{"messages": [], "messages": []}', BadReason.NOT_JSON, "the key 'messages' is given twice in one object"),
        (b'{"messages": "\xff"}', BadReason.NOT_UTF8, "byte 14"),
        (b"[1, 2]", BadReason.NOT_AN_OBJECT, "a JSON list"),
        (b"null", BadReason.NOT_AN_OBJECT, "a JSON NoneType"),
        (b'{"turns": "hi"}', BadReason.NO_MESSAGES, "no schema of chats fits the fields ('turns')"),
        (b'{"messages": []}', BadReason.NO_MESSAGES, "an empty list"),
        (b'{"messages": "hi"}', BadReason.NO_MESSAGES, "a str"),
        (b'{"messages": ["hi"]}', BadReason.BAD_TURN, "turn 1 is a str"),
        (b'{"messages": [{"role": "human", "content": "x"}]}', BadReason.UNKNOWN_ROLE, "turn 1 has role 'human'"),
        (b'{"messages": [{"content": "x"}]}', BadReason.UNKNOWN_ROLE, "role None"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', BadReason.UNKNOWN_ROLE, "role ['user']"),
        (b'{"messages": [{"role": "user", "content": " \\n"}]}', BadReason.EMPTY_TURN, "turn 1 (user) is empty"),
        (b'{"messages": [{"role": "user"}]}', BadReason.EMPTY_TURN, "no content"),
        (b'{"messages": [{"role": "user", "content": {"x": 1}}]}', BadReason.NOT_TEXT, "type dict"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', BadReason.NOT_TEXT, "surrogate"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', BadReason.NO_ASSISTANT_TURN, "none of the 1 turns"),
        (b'{"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}', BadReason.UNKNOWN_FIELD, "tool_calls"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', BadReason.BAD_TOOLS, "tool 1 has no name"),
    ],
)
def test_a_bad_line_reports_reason_and_detail(line, reason, words):
    bad = parse_line(line, "f.jsonl, line 1")
    assert isinstance(bad, BadRecord)
    assert (bad.reason, bad.where) == (reason, "f.jsonl, line 1")
    assert words in bad.detail


def test_a_null_field_counts_as_absent():
    # Parquet gives every turn of a column the same fields.
    assert isinstance(parse_record({"messages": [ASK, {**ANSWER, "tool_calls": None}]}, ""), Conversation)


def test_a_byte_order_mark_is_ignored():
    line = b"\xef\xbb\xbf" + json.dumps({"messages": [ASK, ANSWER]}).encode()
    assert isinstance(parse_line(line, ""), Conversation)


def test_the_hash_depends_on_roles_and_texts_and_not_on_the_place():
    def hash_of(*turns: tuple[str, str], where: str = "") -> int:
        return Conversation(tuple(Message(*turn) for turn in turns), where).hash()

    assert hash_of(("user", "ab"), ("assistant", "c")) == hash_of(("user", "ab"), ("assistant", "c"), where="x")
    assert hash_of(("user", "ab"), ("assistant", "c")) != hash_of(("user", "a"), ("assistant", "bc"))
    assert hash_of(("user", "ab"), ("assistant", "c")) != hash_of(("assistant", "ab"), ("user", "c"))
    # Stored splits depend on this number: it must never change.
    assert hash_of(("user", "Hi"), ("assistant", "Hello")) == 17707387282723869345


def test_a_system_turn_may_be_empty_as_records_without_a_system_prompt_have_it():
    turns = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "a"},
    ]
    conversation = parse_record({"messages": turns}, "line 1")
    assert [message.content for message in conversation.messages] == ["", "Hi", "a"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_path", "a.png"), ("imageUrls", ["a"]), ("audio_url", "b"), ("files", ["c"]), ("video_id", "d")],
)
def test_a_column_that_is_media_by_its_name_is_refused_unless_it_is_ignored(name, value):
    turns = [{"role": "user", "content": "What is shown?"}, {"role": "assistant", "content": "A cat."}]
    bad = parse_record({"messages": turns, name: value}, "line 1")
    assert (bad.reason, f"source.ignore_fields=[{name}]" in bad.detail) == (BadReason.MEDIA, True)
    assert isinstance(parse_record({"messages": turns, name: value}, "line 1", ignore_fields=[name]), Conversation)


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_path", None), ("image_path", ""), ("num_images", 2), ("has_video", True), ("image_id", 3)],
)
def test_a_count_a_flag_and_an_empty_column_are_no_media(name, value):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert isinstance(parse_record({"messages": turns, name: value}, "line 1"), Conversation)


@pytest.mark.parametrize(
    "record",
    [
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}, "trace": 3}'},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": '[{"name": "f", "arguments": {"a": 1}, "trace": 3}]'},
            ]
        },
    ],
)
def test_a_field_of_a_call_in_json_text_can_be_ignored(record):
    bad = parse_record(record, "line 1")
    assert "source.ignore_fields=[trace]" in bad.detail
    made = parse_record(record, "line 1", ignore_fields=["trace"])
    assert made.messages[1].tool_calls[0].arguments == {"a": 1}
