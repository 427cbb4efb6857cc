"""A chat template decides what is trained: exactly what a model that is served with it has to generate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecord, Conversation, Message, ToolCall, parse_record
from harness.prep.tokenize import ChatTokenizer, Encoded, TokenizerConfig, train_bpe
from harness.prep.tokenize.chats import Form

TURN = "<|im_start|>{{ m.role }}\n"
# Writes the reasoning of the last turn only, and a block for it in every prompt's place.
FORGETFUL = (
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' and loop.last %}"
    "<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens the reasoning in the prompt and never writes it in a turn.
OPENED = (
    "{% for m in messages %}" + TURN + "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
    + TURN
    + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["The quick brown fox jumps over the lazy dog.\n"] * 20, path, vocab_size=300)
    return path


@pytest.fixture
def tokenizer(folder: Path, tmp_path: Path) -> Any:
    def make(template: str, today: date | None = None, **settings: Any) -> ChatTokenizer:
        file = tmp_path / "template.jinja"
        file.write_text(template)
        return ChatTokenizer(TokenizerConfig(name=str(folder), chat_template=str(file), **settings), today=today)

    return make


def chat(*texts: str, **assistant: Any) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text, **(assistant if n % 2 else {})} for n, text in enumerate(texts)]
    return parsed(messages)


def parsed(messages: list[dict[str, Any]], **record: Any) -> Conversation:
    conversation = parse_record({"messages": messages, **record}, "chats.jsonl, line 1")
    assert isinstance(conversation, Conversation), conversation
    return conversation


def encode(tokenizer: ChatTokenizer, conversation: Conversation) -> list[Encoded]:
    (made,) = tokenizer.encode_each([conversation])
    assert not isinstance(made, BadRecord), made
    return made


def refused(tokenizer: ChatTokenizer, conversation: Conversation) -> BadRecord:
    (made,) = tokenizer.encode_each([conversation])
    assert isinstance(made, BadRecord), made
    return made


def trained(sequence: Encoded) -> list[str]:
    return [sequence.text[start:end] for start, end in sequence.spans]


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("switch", [True, False])
def test_a_prompt_with_thinking_switched_on_or_off_counts_as_served(tokenizer: Any, name: str, switch: bool) -> None:
    # The turns are those of one position of the switch, and prompts are of the other one by themselves.
    opening = f"{{{{ '' if {name} is {str(switch).lower()} else '<think>\n' }}}}"
    (sequence,) = encode(tokenizer(OPENED.replace("<think>\n", opening)), chat("Hi", "Hello"))
    assert trained(sequence) == ["Hello<|im_end|>"]


def weights(tokenizer: ChatTokenizer, sequence: Encoded) -> list[tuple[str, int]]:
    """Return the text of each run of tokens with one weight, for those that are trained."""
    ids, mask = sequence.view.input_ids[1:], sequence.view.loss_mask[:-1]
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    runs = [(tokenizer.decode(ids[start:end]), int(mask[start])) for start, end in pairwise(edges)]
    return [run for run in runs if run[1]]


@pytest.mark.parametrize("history", ["as_served", "kept"])
def test_tokens_have_the_weight_of_their_part_or_else_of_their_message(tokenizer: Any, history: str) -> None:
    weighted = tokenizer(FORGETFUL, train_on="weighted", history=history)
    parts = [{"type": "text", "text": "The quick", "weight": 0.2}, {"type": "text", "text": " brown fox"}]
    answers = [
        {"content": "Hello", "weight": 0.5, "reasoning_content": "The quick"},
        {"content": "So long", "weight": 0},
        {"content": "Dog"},
        {"content": parts, "weight": 0.75},
    ]
    turns = [
        turn for answer in answers for turn in ({"role": "user", "content": "Hi"}, {"role": "assistant", **answer})
    ]
    found = [run for sequence in encode(weighted, parsed(turns)) for run in weights(weighted, sequence)]
    assert found == [
        ("<think>The quick</think>Hello<|im_end|>", 50),
        ("<think></think>Dog<|im_end|>", 100),
        ("<think></think>", 75),
        ("The quick", 20),
        (" brown fox<|im_end|>", 75),
    ]
    assert weighted.mask_facts()["weights"] == "hundredths"


# Leaves out what a user quotes as the result of a tool, unless it follows a call.
QUOTING = FORGETFUL.replace(
    "{{ m.content }}",
    "{% if m.content.startswith('<result>') and m.content.endswith('</result>') %}a result{% else %}"
    "{{ m.content }}{% endif %}",
)


def test_a_template_that_tells_contents_apart_is_tried_with_the_same_kind_of_content(tokenizer: Any) -> None:
    made = tokenizer(QUOTING)
    encode(made, chat("a", "b"))
    bad = refused(made, chat("<result>\n12\n</result>", "b"))
    assert (bad.reason, "does not write the content of turn 1 (user)" in bad.detail) == (BadReason.NOT_WRITTEN, True)
    encode(made, chat("see <result> 12 </result>!", "b"))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "fox"}}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


# Every place of a name in JSON Schema.
NESTED = {
    "properties": {"x": CITY},
    "patternProperties": {"^x-": CITY},
    **{name: {"Place": CITY} for name in ("$defs", "definitions", "dependentSchemas")},
    **dict.fromkeys(("items", "additionalProperties", "not", "if", "then", "else", "contains"), CITY),
    **{name: [{"type": "null"}, CITY] for name in ("anyOf", "oneOf", "allOf", "prefixItems")},
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("keyword", [*NESTED, ""])
def test_a_parameter_inside_another_that_a_template_loses_is_refused_by_name(
    tokenizer: Any, keyword: str, deep: bool
) -> None:
    place = {"type": "object", keyword: NESTED[keyword], "$ref": "#"} if keyword else CITY
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    place = {"anyOf": [{"items": place}], "$ref": "#/properties/a"} if deep else place
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": place}}}]
    named, whole = "{{ t.function.name }}", "{{ t.function.parameters | tojson }}"
    encode(tokenizer(TOOLS.replace(named, named + whole)), parsed(turns, tools=tools))
    names = "{% for name in t.function.parameters.properties %}{{ name }}{% endfor %}"
    made = tokenizer(TOOLS.replace(named, named + names))
    bad = refused(made, parsed(turns, tools=tools))
    paths = dict.fromkeys(("$defs", "definitions", "dependentSchemas"), "a.Place.city")
    path = {"properties": "a.x.city", "patternProperties": "a.^x-.city", **paths}.get(keyword, "a.city")
    assert f"does not write the parameter '{path}' of the tool 'f'" in bad.detail
    assert "source.ignore_fields=[tools]" in bad.detail
    # Of these tools alone: a conversation of the same shape with others is written whole.
    others = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]
    encode(made, parsed(turns, tools=others))


@pytest.mark.parametrize(("inside", "lost"), [("if", ""), ("allOf", ""), ("properties", "b.a"), ("$defs", "a.a")])
def test_a_condition_that_repeats_the_name_of_a_parameter_is_not_a_parameter_of_its_own(
    tokenizer: Any, inside: str, lost: str
) -> None:
    again = {"properties": {"a": {"const": "fox"}}}
    more = {"if": again, "allOf": [again], "properties": {"b": again}, "$defs": {"a": again}}[inside]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    properties = {"a": {"type": "string"}, **(more if inside == "properties" else {})}
    tools = [{"name": "f", "parameters": {"type": "object", inside: more, "properties": properties}}]
    names = "{{ t.function.name }}{% for name in t.function.parameters.properties %}{{ name }}{% endfor %}"
    made = tokenizer(TOOLS.replace("{{ t.function.name }}", names))
    if lost:
        assert f"the parameter '{lost}'" in refused(made, parsed(turns, tools=tools)).detail
    else:
        encode(made, parsed(turns, tools=tools))


LOSES_OK = "{{ m.content if m.content != 'ok' else '' }}"
ASKED = [("user", "Is it ok?"), ("assistant", None), ("tool", "ok")]


# What is lost stands elsewhere, too: a short result in the answer, an argument in the question.
@pytest.mark.parametrize(
    ("lost", "messages", "words"),
    [
        (LOSES_OK, [*ASKED, ("assistant", "It is ok.")], "turns 1 to 4 (assistant): 'It is ok.'"),
        (LOSES_OK, [*ASKED, ("assistant", "It is.")], "turns 1 to 3 (tool): 'ok'"),
        (
            "{{ m.content if m.role != 'system' or 'w' in m.content else '' }}",
            [("system", "yes"), ("user", "Say"), ("assistant", "yes")],
            "turns 1 to 2 (user): 'Say'",
        ),
    ],
)
def test_a_short_text_that_is_lost_is_not_taken_for_the_same_words_elsewhere(
    tokenizer: Any, lost: str, messages: list[tuple[str, str | None]], words: str
) -> None:
    made = tokenizer(TOOLS.replace("{{ m.content or '' }}", lost.replace("m.content", "(m.content or '')")))
    calls = {"tool_calls": [CALL]}
    turns = [{"role": role, "content": text, **({} if text is not None else calls)} for role, text in messages]
    named = [{**turn, "content": turn["content"] and "The wall " * (number + 1)} for number, turn in enumerate(turns)]
    encode(made, parsed(named))
    bad = refused(made, parsed(turns))
    assert bad.reason == BadReason.NOT_WRITTEN
    assert words in bad.detail


def test_texts_that_are_written_in_other_words_are_taken(tokenizer: Any) -> None:
    template = TOOLS.replace(
        "{{ m.content or '' }}",
        "{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ (m.content or '').split() | join(' ') }}{% endif %}",
    )
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": {"a": 'b\n"c"', "d": [None, True, 2.5]}},
    }
    messages = [
        {"role": "user", "content": "The  lazy\ndog "},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": 'Grüße\n"fox"', "tool_call_id": "1"},
        {"role": "assistant", "content": " so\tlong"},
    ]
    (sequence,) = encode(tokenizer(template), parsed(messages))
    assert trained(sequence)[1] == "so long<|im_end|>"


HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
FOX = "The quick brown fox jumps over the lazy dog."
CUT = "'The quick brown fox jumps over the lazy ...'"
ARGUMENTS = "c.function.arguments | tojson"


def test_arguments_of_calls_are_handed_over_as_objects_or_as_text_and_text_is_not_quoted_again() -> None:
    calls = tuple(ToolCall("f", arguments) for arguments in ({"a": "ü"}, '{"a": 1}', "[1]", "{"))
    message = Message("assistant", "", tool_calls=calls)

    def handed(arguments: str) -> list[Any]:
        return [call["function"]["arguments"] for call in Form("given", arguments).turn(message)["tool_calls"]]

    assert handed("text") == ['{"a": "ü"}', '{"a": 1}', "[1]", "{"]
    assert handed("object") == [{"a": "ü"}, {"a": 1}, "[1]", "{"]


def calling(arguments: dict[str, Any]) -> Conversation:
    return chat("Hi", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


# By its shape, or by a text that the shape alone does not show.
@pytest.mark.parametrize(
    ("template", "conversation", "words"),
    [
        (TOOLS, chat("Hi", "Hello", reasoning_content="Hm"), "write the reasoning of turn 2 (assistant)"),
        (FORGETFUL, calling({"a": "b"}), "write the tool call's name of turn 2 (assistant)"),
        (FORGETFUL, parsed(HELLO, tools=[{"name": "f", "parameters": {}}]), "write the tools"),
        (TOOLS, parsed(HELLO, chat_template_kwargs={"enable_thinking": False}), "read `enable_thinking`"),
        (
            TOOLS.replace("m in messages", "m in messages if m.role != 'tool'"),
            parsed([HELLO[0], {"role": "tool", "content": "5"}, HELLO[1]]),
            "write the content of turn 2 (tool)",
        ),
        (
            *(TOOLS.replace("m.content or ''", "(m.content or '')[:20]"), chat("Hi", FOX)),
            f"write all of the content of turn 2 (assistant): {CUT}",
        ),
        (
            TOOLS.replace("m.content or ''", "(m.content or '').split('</quote>')[-1]"),
            chat("<quote>Hello</quote>Again", "Hello"),
            "write the content of turn 1 (user)",
        ),
        (
            FORGETFUL.replace("m.reasoning_content or ''", "(m.reasoning_content or '')[:20]"),
            chat("Hi", "Hello", reasoning_content=FOX),
            f"write all of the reasoning of turn 2 (assistant): {CUT}",
        ),
        (
            *(TOOLS.replace(ARGUMENTS, "c.function.arguments.values() | join"), calling({"a": "b"})),
            "write the tool call's arg",
        ),
        (
            TOOLS.replace(ARGUMENTS, "c.function.arguments.items() | selectattr(1, 'string') | list"),
            calling({"a": 517}),
            "write all of the tool call's arguments of turn 2 (assistant): '517'",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused_by_name(
    tokenizer: Any, template: str, conversation: Conversation, words: str
) -> None:
    made = tokenizer(template)
    encode(made, chat("Hi", "Hello"))
    bad = refused(made, conversation)
    assert bad.reason == BadReason.NOT_WRITTEN
    assert f"the chat template does not {words}" in bad.detail


def test_an_answer_before_any_question_needs_a_prompt_of_the_template(tokenizer: Any) -> None:
    greeting = {"role": "assistant", "content": "Hello"}
    rest = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}]
    strict = tokenizer("{{ '' if messages[0].role else '' }}" + TOOLS)
    bad = refused(strict, parsed([greeting, *rest]))
    assert (bad.reason, "weight of 0" in bad.detail) == (BadReason.NOT_AS_SERVED, True)
    (made,) = encode(strict, parsed([{**greeting, "weight": 0}, *rest]))
    assert trained(made) == ["Bye<|im_end|>"]


def test_plain_text_is_trained_in_full_without_the_template(tokenizer: Any) -> None:
    (sequence,) = encode(tokenizer(TOOLS), Conversation((), "x", text="The lazy dog."))
    assert trained(sequence) == ["The lazy dog.<|im_end|>"]


def test_a_template_writes_the_date_that_it_is_given(tokenizer: Any) -> None:
    dated = tokenizer("{{ strftime_now('%d %b %Y') }}" + TOOLS, today=date(2025, 3, 9))
    assert dated.uses_date
    assert encode(dated, chat("Hi", "Hello"))[0].text.startswith("09 Mar 2025")
    assert not tokenizer(TOOLS).uses_date


@pytest.mark.parametrize(
    ("mask", "setting", "value"),
    [("all", "train_on", "last_turn"), ("all", "history", "kept"), ("assistant_turns", "train_reasoning", False)],
)
def test_a_setting_that_a_rule_does_not_use_is_refused(mask: str, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.{setting}={value} has no effect") as caught:
        TokenizerConfig(mask=mask, **{setting: value})
    assert caught.value.where == f"tokenizer.{setting}"


def test_threads_render_one_template_at_once(folder: Path) -> None:
    marked = ChatTokenizer(TokenizerConfig(name=str(folder)))
    chats = [chat("Hi", "Hello " * number, "Bye", "So long") for number in range(1, 60)]
    expected = [encode(marked, conversation)[0].spans for conversation in chats]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda conversation: encode(marked, conversation)[0].spans, chats * 4))
    assert made == expected * 4


def test_marks_inside_text_that_moves_are_refused(tokenizer: Any) -> None:
    moved = "{% macro say(m) %}{{ m.role }} {% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    bad = refused(tokenizer(moved + "{% for m in messages %}{{ say(m) }}{% endfor %}"), chat("Hi", "Hello"))
    assert bad.reason == BadReason.TEMPLATE_FAILED
    assert "inside a block whose text is moved" in bad.detail
