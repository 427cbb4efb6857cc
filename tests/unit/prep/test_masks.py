"""A chat template decides what is trained: exactly what a model that is served with it has to generate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecord, Conversation, MediaPart, Message, ToolCall, parse_record
from harness.prep.tokenize import ChatTokenizer, Encoded, TokenizerConfig, train_bpe
from harness.prep.tokenize.masks import _without_reasoning

TURN = "<|im_start|>{{ m.role }}\n"
# Writes the reasoning of the last turn only, and a block for it in every prompt's place.
FORGETFUL = (
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' and loop.last %}"
    "<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As the one before, with a variable that keeps the reasoning of all turns.
SWITCHED = FORGETFUL.replace("and loop.last", "and (loop.last or preserve_thinking)")
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


def test_a_template_without_marks_trains_what_follows_the_prompt_of_each_turn(tokenizer: Any) -> None:
    plain = tokenizer(TOOLS)

    (sequence,) = encode(plain, chat("Hi", "Hello", "Bye", "So long"))

    assert trained(sequence) == ["Hello<|im_end|>", "So long<|im_end|>"]
    assert plain.mask_rule == "served"
    ids = sequence.view.input_ids
    assert plain.decode(ids[1:][sequence.view.loss_mask[:-1] == 1]) == "Hello<|im_end|>So long<|im_end|>"


def test_a_turn_that_is_served_differently_gets_a_sequence_of_its_own(tokenizer: Any) -> None:
    made = encode(tokenizer(FORGETFUL), chat("Hi", "Hello", "Bye", "So long", reasoning_content="Hm"))

    assert [trained(sequence) for sequence in made] == [
        ["<think>Hm</think>Hello<|im_end|>"],
        ["<think>Hm</think>So long<|im_end|>"],
    ]
    assert made[0].text.endswith("Hello<|im_end|>\n")
    assert made[1].text.count("Hm") == 1


def test_a_turn_that_ends_differently_once_others_follow_gets_a_sequence_of_its_own(tokenizer: Any) -> None:
    end = "{{ '<|im_start|>' if m.role == 'assistant' and not loop.last else '<|im_end|>' }}\n{% endfor %}"

    made = encode(tokenizer(TOOLS.replace("<|im_end|>\n{% endfor %}", end)), chat("Hi", "Hello", "Bye", "So long"))

    assert [trained(sequence) for sequence in made] == [["Hello<|im_end|>"], ["So long<|im_end|>"]]


def test_turns_that_are_served_alike_share_a_sequence(tokenizer: Any) -> None:
    template = FORGETFUL.replace("loop.last", "(loop.last or m.content == 'Wait')")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait", "reasoning_content": "one"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Five", "reasoning_content": "two"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long", "reasoning_content": "three"},
    ]

    made = encode(tokenizer(template), parsed(messages))

    assert [trained(sequence) for sequence in made] == [
        ["<think>one</think>Wait<|im_end|>", "<think>two</think>Five<|im_end|>"],
        ["<think>three</think>So long<|im_end|>"],
    ]


def test_kept_history_without_a_switch_is_what_the_switch_would_write(tokenizer: Any) -> None:
    talk = chat("Hi", "Hello", "Bye", "So long", "Well", "Yes", reasoning_content="Hm")
    (by_switch,) = encode(tokenizer(SWITCHED, history="kept"), talk)

    (sequence,) = encode(tokenizer(FORGETFUL, history="kept"), talk)

    assert (sequence.text, sequence.spans) == (by_switch.text, by_switch.spans)
    assert sequence.view.loss_mask.tolist() == by_switch.view.loss_mask.tolist()


def test_kept_history_writes_every_call_as_it_is_generated(tmp_path: Path) -> None:
    train_bpe(["The quick brown fox\n"] * 20, tmp_path, vocab_size=300, chat_template="qwen3")
    call = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    turns = [{"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "5"}]
    messages = [{"role": "user", "content": "Hi"}, *turns, *turns, {"role": "assistant", "content": "Five"}]
    record = parse_record({"messages": messages, "tools": [{"function": {"name": "f"}}]}, "")
    assert isinstance(record, Conversation)
    (as_served, *others) = encode(ChatTokenizer(TokenizerConfig(name=str(tmp_path))), record)

    (sequence,) = encode(ChatTokenizer(TokenizerConfig(name=str(tmp_path), history="kept")), record)

    thought = "<think>\n\n</think>\n\n"
    called = thought + '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert trained(sequence) == [called, called, thought + "Five<|im_end|>"]
    assert trained(as_served) == [called]
    assert len(others) == 2
    assert sequence.text.startswith(as_served.text.rstrip())


def test_kept_history_trains_the_turns_that_are_marked_and_leaves_the_others_as_they_are_served(tokenizer: Any) -> None:
    talk = chat("Hi", "Hello", "Bye", "So long", "Well", "Yes", reasoning_content="Hm")
    messages = tuple(replace(one, weight=100 * (number != 3)) for number, one in enumerate(talk.messages))

    (sequence,) = encode(tokenizer(FORGETFUL, history="kept"), replace(talk, messages=messages))

    assert trained(sequence) == ["<think>Hm</think>Hello<|im_end|>", "<think>Hm</think>Yes<|im_end|>"]
    assert "assistant\nSo long<|im_end|>" in sequence.text


def test_kept_history_is_refused_where_the_end_of_a_turn_is_not_found(tokenizer: Any) -> None:
    end = "{{ '<|im_start|>' if m.role == 'assistant' and not loop.last else '<|im_end|>' }}\n{% endfor %}"
    template = TOOLS.replace("<|im_end|>\n{% endfor %}", end)

    (bad,) = tokenizer(template, history="kept").encode([chat("Hi", "Hello", "Bye", "So long")])

    assert isinstance(bad, BadRecord)
    assert bad.reason == BadReason.NOT_AS_SERVED
    assert "use tokenizer.history=as_served" in bad.detail


def test_a_turn_that_does_not_begin_with_its_prompt_is_refused_by_name(tokenizer: Any) -> None:
    bad = refused(tokenizer(OPENED.replace("<think>", "<answer>")), chat("Hi", "Hello"))

    assert bad.reason == BadReason.NOT_AS_SERVED
    assert "turn 2 does not begin with the chat template's generation prompt" in bad.detail
    assert "<answer>" in bad.detail


@pytest.mark.parametrize(("opened", "closed"), [("<think>\n", "\n</think>\n\n"), ("<think>", "</think>")])
def test_a_prompt_that_opens_the_reasoning_is_closed_for_a_turn_that_has_none(
    tokenizer: Any, opened: str, closed: str
) -> None:
    template = OPENED.replace("<think>\n", opened)

    first, second = encode(tokenizer(template), chat("Hi", "Hello", "Bye", "So long"))

    assert (trained(first), trained(second)) == ([f"{closed}Hello<|im_end|>"], [f"{closed}So long<|im_end|>"])
    assert first.text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{opened}{closed}Hello<|im_end|>\n"
    # Earlier turns stay as the template shows them.
    assert "<|im_start|>assistant\nHello<|im_end|>\n" in second.text


def test_reasoning_in_some_turns_only_fits_a_prompt_that_opens_it(tokenizer: Any) -> None:
    written = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    thought = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"}
    plain = [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]

    made = encode(
        tokenizer(OPENED.replace("{{ m.content }}", written)),
        parsed([{"role": "user", "content": "Hi"}, thought, *plain]),
    )

    assert [trained(sequence) for sequence in made] == [
        ["Hm\n</think>\n\nHello<|im_end|>", "\n</think>\n\nSo long<|im_end|>"]
    ]


def test_a_prompt_with_thinking_switched_off_counts_as_served(tokenizer: Any) -> None:
    template = OPENED.replace("<think>\n", "{{ '' if enable_thinking is false else '<think>\n' }}")

    (sequence,) = encode(tokenizer(template), chat("Hi", "Hello"))

    assert trained(sequence) == ["Hello<|im_end|>"]


def test_only_the_last_turn_is_trained_on_request(tokenizer: Any) -> None:
    (sequence,) = encode(tokenizer(TOOLS, train_on="last_turn"), chat("Hi", "Hello", "Bye", "So long"))

    assert trained(sequence) == ["So long<|im_end|>"]


@pytest.mark.parametrize("train_on", ["marked", "all_assistant"])
def test_a_weight_of_0_is_never_trained_and_marked_turns_are_those_with_a_weight_of_1(
    tokenizer: Any, train_on: str
) -> None:
    marked = tokenizer(TOOLS, train_on=train_on)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "weight": 0},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long", **({"weight": 1} if train_on == "marked" else {})},
    ]

    (sequence,) = encode(marked, parsed(messages))

    assert trained(sequence) == ["So long<|im_end|>"]
    if train_on == "marked":
        assert refused(marked, chat("Hi", "Hello")).reason == BadReason.NOTHING_TRAINED


def test_a_weight_of_0_is_refused_where_every_token_is_trained(tokenizer: Any) -> None:
    bad = refused(tokenizer(FORGETFUL, mask="all"), chat("a", "b", weight=0))
    assert bad.reason == BadReason.BAD_WEIGHT
    assert "turn 2 is not to be trained" in bad.detail
    assert len(encode(tokenizer(FORGETFUL, mask="all"), chat("a", "b", weight=1))) == 1


def weights(tokenizer: ChatTokenizer, sequence: Encoded) -> list[tuple[str, int]]:
    """Return the text of each run of tokens with one weight, for those that are trained."""
    ids, mask = sequence.view.input_ids[1:], sequence.view.loss_mask[:-1]
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    runs = [(tokenizer.decode(ids[start:end]), int(mask[start])) for start, end in pairwise(edges)]
    return [run for run in runs if run[1]]


@pytest.mark.parametrize("history", ["as_served", "kept"])
@pytest.mark.parametrize("template", [TOOLS, FORGETFUL], ids=["plain", "forgetful"])
def test_tokens_have_the_weight_of_their_part_or_else_of_their_message(
    tokenizer: Any, template: str, history: str
) -> None:
    weighted = tokenizer(template, train_on="weighted", history=history)
    parts = [{"type": "text", "text": "The quick", "weight": 0.2}, {"type": "text", "text": " brown fox"}]
    thought = {} if template == TOOLS else {"reasoning_content": "The quick"}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "weight": 0.5, **thought},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long", "weight": 0, **thought},
        {"role": "user", "content": "Yes"},
        {"role": "assistant", "content": "Dog", **thought},
        {"role": "user", "content": "No"},
        {"role": "assistant", "content": parts, "weight": 0.75},
    ]

    found = [run for sequence in encode(weighted, parsed(messages)) for run in weights(weighted, sequence)]

    before = "" if template == TOOLS else "<think>The quick</think>"
    empty = "" if template == TOOLS else "<think></think>"
    assert found == [
        (before + "Hello<|im_end|>", 50),
        (before + "Dog<|im_end|>", 100),
        *([(empty, 75)] if empty else []),
        ("The quick", 20),
        (" brown fox<|im_end|>", 75),
    ]


@pytest.mark.parametrize("rule", ["generation", "assistant_turns"])
def test_weights_reach_the_tokens_by_every_rule(tokenizer: Any, rule: str) -> None:
    marked = (
        "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    weighted = tokenizer(marked, train_on="weighted", mask=rule)
    talk = chat("Hi", "Hello", "Bye", "So long")
    messages = tuple(replace(one, weight={1: 50, 3: 100}.get(number)) for number, one in enumerate(talk.messages))

    (sequence,) = encode(weighted, replace(talk, messages=messages))

    assert weights(weighted, sequence) == [("Hello<|im_end|>", 50), ("So long<|im_end|>", 100)]
    assert weighted.mask_facts()["weights"] == "hundredths"


@pytest.mark.parametrize("train_on", ["all_assistant", "marked", "last_turn"])
def test_a_fraction_is_refused_where_weights_are_not_trained(tokenizer: Any, train_on: str) -> None:
    bad = refused(tokenizer(TOOLS, train_on=train_on), chat("Hi", "Hello", weight=0.5))
    assert bad.reason == BadReason.BAD_WEIGHT
    assert "turn 2 has a weight between 0 and 1" in bad.detail


def test_parts_with_weights_are_refused_where_their_text_is_also_elsewhere_in_the_turn(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a", "weight": 0.5}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts, "reasoning_content": "a b"}]
    bad = refused(tokenizer(FORGETFUL, train_on="weighted"), parsed(messages))
    assert bad.reason == BadReason.BAD_WEIGHT
    assert "exactly once" in bad.detail


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


# Each leaves out what its shape alone does not show.
@pytest.mark.parametrize(
    ("template", "conversation", "words"),
    [
        (
            TOOLS.replace("m.content or ''", "(m.content or '')[:20]"),
            chat("Hi", "The quick brown fox jumps over the lazy dog."),
            "all of the content of turn 2 (assistant): 'The quick brown fox jumps over the lazy ...'",
        ),
        (
            TOOLS.replace("m.content or ''", "(m.content or '').split('</quote>')[-1]"),
            chat("<quote>Hello</quote>Again", "Hello"),
            "the content of turn 1 (user)",
        ),
        (
            FORGETFUL.replace("m.reasoning_content or ''", "(m.reasoning_content or '')[:20]"),
            chat("Hi", "Hello", reasoning_content="The quick brown fox jumps over the lazy dog."),
            "all of the reasoning of turn 2 (assistant): 'The quick brown fox jumps over the lazy ...'",
        ),
        (
            TOOLS.replace("c.function.arguments | tojson", "c.function.arguments.values() | select('string') | join"),
            chat("Hi", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}]),
            "the tool call's arguments of turn 2 (assistant)",
        ),
        (
            TOOLS.replace(
                "c.function.arguments | tojson", "c.function.arguments.items() | selectattr(1, 'string') | list"
            ),
            chat("Hi", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": 517}}}]),
            "all of the tool call's arguments of turn 2 (assistant): '517'",
        ),
    ],
)
def test_a_text_that_a_template_loses_is_refused_by_name(
    tokenizer: Any, template: str, conversation: Conversation, words: str
) -> None:
    made = tokenizer(template)
    encode(made, chat("Hi", "Hello"))

    bad = refused(made, conversation)

    assert bad.reason == BadReason.NOT_WRITTEN
    assert f"the chat template does not write {words}" in bad.detail


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "fox"}}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    "place", [CITY, {"type": "array", "items": CITY}, {"type": "object", "properties": {"x": CITY}}]
)
def test_a_parameter_inside_another_that_a_template_loses_is_refused_by_name(
    tokenizer: Any, place: dict[str, Any]
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": place}}}]
    named, whole = "{{ t.function.name }}", "{{ t.function.parameters | tojson }}"
    encode(tokenizer(TOOLS.replace(named, named + whole)), parsed(turns, tools=tools))

    names = "{% for name in t.function.parameters.properties %}{{ name }}{% endfor %}"
    bad = refused(tokenizer(TOOLS.replace(named, named + names)), parsed(turns, tools=tools))

    path = "a.x" if "x" in place.get("properties", {}) else "a.city"
    assert f"does not write the parameter '{path}' of the tool 'f'" in bad.detail
    assert "source.ignore_fields=[tools]" in bad.detail


# What is lost stands elsewhere, too: a short result in the answer, an argument in the question.
@pytest.mark.parametrize(
    ("lost", "messages", "words"),
    [
        (
            "{{ m.content if m.content != 'ok' else '' }}",
            [("user", "Is it ok?"), ("assistant", None), ("tool", "ok"), ("assistant", "It is ok.")],
            "turns 1 to 4 (assistant): 'It is ok.'",
        ),
        (
            "{{ m.content if m.content != 'ok' else '' }}",
            [("user", "Is it ok?"), ("assistant", None), ("tool", "ok"), ("assistant", "It is.")],
            "turns 1 to 3 (tool): 'ok'",
        ),
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


def test_a_second_answer_in_a_row_is_trained_after_the_prompt_that_a_server_writes(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "content": "Welcome", "reasoning_content": "Hm"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long"},
    ]
    # A line break after a tag is not written.
    marked = FORGETFUL.replace(
        "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n",
        "{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}",
    )
    for template, rule in ((FORGETFUL, "served"), (marked, "marks")):
        made = tokenizer(template)
        first, second = encode(made, parsed(messages))
        assert made.mask_rule == rule
        # `apply_chat_template` of all three turns has no <think> in the first answer; the prompt of the second has.
        assert first.text == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>Hello<|im_end|>\n"
            "<|im_start|>assistant\n<think>Hm</think>Welcome<|im_end|>\n"
        )
        assert trained(first) == ["<think></think>Hello<|im_end|>", "<think>Hm</think>Welcome<|im_end|>"]
        assert trained(second) == ["<think></think>So long<|im_end|>"]
        (without,) = encode(tokenizer(template, train_reasoning=False), parsed(messages[:3]))
        assert "Hm" not in "".join(trained(without))
        assert trained(without)[-1].endswith("Welcome<|im_end|>")


@pytest.mark.parametrize(
    ("template", "conversation", "words"),
    [
        (TOOLS, chat("Hi", "Hello", reasoning_content="Hm"), "does not write the reasoning of turn 2 (assistant)"),
        (
            FORGETFUL,
            Conversation(
                (Message("user", "Hi"), Message("assistant", "Wait", tool_calls=(ToolCall("f", {"a": "b"}),))), "x"
            ),
            "does not write the tool call's name of turn 2 (assistant)",
        ),
        (
            FORGETFUL,
            parsed(
                [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
                tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
            ),
            "does not write the tools",
        ),
        (
            TOOLS,
            parsed(
                [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
                chat_template_kwargs={"enable_thinking": False},
            ),
            "does not read `enable_thinking`",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}",
            parsed(
                [
                    {"role": "user", "content": "Hi"},
                    {"role": "tool", "content": "5"},
                    {"role": "assistant", "content": "Five"},
                ]
            ),
            "does not write the content of turn 2 (tool)",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused_by_name(
    tokenizer: Any, template: str, conversation: Conversation, words: str
) -> None:
    bad = refused(tokenizer(template), conversation)

    assert bad.reason == BadReason.NOT_WRITTEN
    assert words in bad.detail


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


def test_reasoning_inside_the_text_is_taken_out_of_every_part_of_it() -> None:
    assert _without_reasoning("<think>Hm</think>\n\nHello") == "Hello"
    assert _without_reasoning(("<think>Hm</think> Hello", "", " you<think>So</think>")) == ("Hello", "", " you")
    assert (_without_reasoning(""), _without_reasoning(None)) == ("", None)
    image = MediaPart("image", b"png")
    assert _without_reasoning((image, "<think>Hm</think> Hello")) == (image, "Hello")
