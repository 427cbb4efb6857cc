"""Masks of earlier versions: a dataset that is prepared again trains the same tokens.

Chats of every shape are rendered by templates that need every rule of `Masker`, with each of its settings. A version
that trains other tokens on purpose records other digits here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from stock_templates import SHAPES, call, result, stock_templates, turn

from harness.conformance.chat_checks import control_tokens, end_token
from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecordError, Conversation, Message, parse_record
from harness.prep.tokenize import TokenizerConfig, masks
from harness.prep.tokenize.masks import Masker
from harness.prep.tokenize.rendering import Template
from harness.prep.tokenize.templates.builtin import load_template

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments }}</call>{% endfor %}"
NAMES = "{% for t in tools or [] %}{{ t.function.name }} {{ t.function.parameters | tojson }}{% endfor %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REASONING = "<think>{{ m.reasoning_content or '' }}</think>"
CONTENT, END = "{{ m.content or '' }}", "<|im_end|>\n"
# One way each in which templates are peculiar.
OWN = {
    "plain": NAMES + TURN + CONTENT + CALLS + END + PROMPT,
    "forgetful": f"{NAMES}{TURN}{{% if m.role == 'assistant' and (loop.last or preserve_thinking) %}}"
    f"{REASONING}{{% endif %}}{CONTENT}{CALLS}{END}{PROMPT}",
    "opened": f"{NAMES}{TURN}{{% if m.reasoning_content %}}<think>\n{{{{ m.reasoning_content }}}}\n</think>\n\n"
    f"{{% endif %}}{CONTENT}{CALLS}{END}" + PROMPT.replace("assistant\n", "assistant\n<think>\n"),
    "marked": f"{NAMES}{TURN}{{% if m.role == 'assistant' %}}{{% generation %}}"
    f"{{% if m.reasoning_content %}}{REASONING}{{% endif %}}{CONTENT}{CALLS}<|im_end|>{{% endgeneration %}}"
    f"{{% else %}}{CONTENT}<|im_end|>{{% endif %}}{{{{ '\n' }}}}{PROMPT}",
    "closed": f"{TURN}{CONTENT}{{{{ '<|endoftext|>' if loop.last else '<|im_end|>\n' }}}}{PROMPT}",
    "endless": f"{TURN}{CONTENT}\n{PROMPT}",
}
OWN["marked with a hint"] = OWN["marked"].replace(
    "{{ m.content or '' }}<|im_end|>{% endif %}",
    "{{ m.content or '' }}{{ ' /think' if loop.last and m.role == 'user' }}<|im_end|>{% endif %}",
)
OWN["marked, notes are not kept"] = OWN["marked"].replace(
    "m.content or ''", "(m.content or '') if loop.last else (m.content or '').split('<note>')[0]"
)
OWN["marked, two ends are not"] = OWN["marked"].replace(
    "<|im_end|>{% endgeneration %}", "{{ '\n' }}{% endgeneration %}<|endoftext|><|endoftext|>"
)
OWN["marked, a second end is not"] = OWN["marked"].replace(
    "<|im_end|>{% endgeneration %}", "<|im_end|>{% endgeneration %}<|endoftext|>"
)
OWN["a line after the last"] = OWN["plain"].replace("<|im_end|>\n", "<|im_end|>{{ '\n' if loop.last }}")
OWN["headless"] = "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}<|im_end|>{% endfor %}"
OWN["calls or a text"] = OWN["plain"].replace(
    "{{ m.content or '' }}" + CALLS + "<|im_end|>",
    "{% if m.tool_calls %}{{ tools[0].function.name }}"
    + CALLS
    + "<|endoftext|>{% else %}{{ m.content + '' }}<|im_end|>{% endif %}",
)
OWN["forgetful by name"] = OWN["forgetful"].replace("preserve_thinking", "false")
PUBLISHED = ("deepseekv3", "diffusion_gemma", "glm4moe", "gptoss", "qwen3", "qwen3_5_think", "lfm2_2_5", "phi3")
BUILT_IN = ("llama3", "mistral", "qwen3", "deepseek")

SETTINGS: tuple[dict[str, Any], ...] = (
    *({}, {"history": "kept"}, {"train_reasoning": False}, {"train_tool_calls": False}, {"train_end_of_turn": False}),
    *({"train_on": name} for name in ("last_turn", "marked", "weighted")),
    {"train_on": "weighted", "history": "kept"},
    {"train_reasoning": False, "train_tool_calls": False, "train_end_of_turn": False},
    *({"mask": "assistant_turns"}, {"mask": "assistant_turns", "train_on": "weighted"}, {"mask": "all"}),
    {"end_of_last_turn": "<|endoftext|>"},
)
_ANSWERED, _ASKED = [turn("user", "a"), turn("assistant", "b")], [turn("user", "d")]
PARTS = [{"type": "text", "text": " The quick", "weight": 0.2}, {"type": "text", "text": " brown fox "}]
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    **{
        name: SHAPES[name]
        for name in (
            *("system_two_turns", "ends_with_user", "white_space", "tool_call", "tool_call_of_null_content"),
            *("parallel_calls", "tool_result_two_turns", "reasoning_two_turns", "reasoning_in_the_first_turn"),
            *("reasoning_in_the_content_two_turns", "reasoning_and_tools_two_turns"),
        )
    },
    "weights": (
        [
            *(turn("user", "a"), turn("assistant", "Hello", weight=0.5, reasoning_content="Hm")),
            *(turn("user", "b"), turn("assistant", "Bye", weight=0)),
            *(turn("user", "The quick brown fox"), turn("assistant", PARTS, weight=0.75)),
        ],
        [],
    ),
    "marks": ([turn("user", "a"), turn("assistant", "b", weight=0), *_ASKED, turn("assistant", "d", weight=1)], []),
    "in_a_row": ([*_ANSWERED, turn("assistant", "c"), *_ASKED, turn("assistant", "e")], []),
    "thought_in_a_row": ([*_ANSWERED, turn("assistant", "c"), turn("assistant", "e", reasoning_content="Hm")], []),
    "greeting_of_parts": ([turn("assistant", [{"type": "text", "text": "b", "weight": 0.2}]), *_ANSWERED], []),
    "greeting": ([turn("assistant", "Hi"), *_ANSWERED], []),
    "late_system": ([*_ANSWERED, turn("system", "c"), *_ASKED, turn("assistant", "e")], []),
    "notes": ([turn("user", "a"), turn("assistant", "b <note> c"), *_ASKED, turn("assistant", "e")], []),
    "call_with_text": (
        [
            *(turn("user", "a"), turn("assistant", "Well.", tool_calls=[call("get_weather", {"city": "Paris"})])),
            *(result("21"), turn("assistant", "b")),
        ],
        SHAPES["tool_call"][1],
    ),
}


def conversation(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Conversation:
    parsed = parse_record({"messages": messages} | ({"tools": tools} if tools else {}), "line 1")
    assert isinstance(parsed, Conversation), parsed
    return parsed


CONVERSATIONS = {name: conversation(*chat) for name, chat in CHATS.items()}
# No record has a turn of nothing.
CONVERSATIONS["nothing"] = Conversation(
    tuple(Message(("user", "assistant")[number % 2], text) for number, text in enumerate(("a", "", "b", "c"))), "line 1"
)


STOCK = stock_templates()
TEXTS = OWN | {f"published {name}": STOCK[name] for name in PUBLISHED}
TEXTS |= {f"built in {name}": load_template(name) for name in BUILT_IN}


def found(template: Template) -> Iterator[str]:
    """Yield each setting and chat with what is trained of it: texts, and spans with their weights."""
    special = control_tokens(template.text)
    special += [one for one in ("<|im_end|>", "<|endoftext|>", end_token(template.text, "</s>")) if one not in special]
    for settings in SETTINGS:
        masker = Masker(template, TokenizerConfig(**settings), special, where="here")
        yield f"{settings} {masker.rule} {masker.end_tokens}"
        for name, conversation in CONVERSATIONS.items():
            try:
                shown: list[Any] = [(one.text, one.spans, list(one.weights)) for one in masker.sequences(conversation)]
            except BadRecordError as refused:
                shown = [refused.reason]
            yield f"{name}: {shown}"


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_trained_is_what_earlier_versions_trained(name: str) -> None:
    specials = {"bos_token": "<s>", "eos_token": end_token(TEXTS[name], "</s>")}
    lines = list(found(Template(TEXTS[name], specials, today=date(2026, 11, 26))))
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == EARLIER.get(name), "\n".join(lines)


EARLIER = dict(
    [
        *(("plain", "e9a8cca3666d4354"), ("forgetful", "2013d0790bc7d54c"), ("opened", "fbd5b19cd65aa089")),
        *(("marked", "cb44686ca58adc26"), ("closed", "89712bbeab0861e4"), ("endless", "5d0f61ba0dc84ce9")),
        *(("marked with a hint", "bbe44e7798649561"), ("marked, notes are not kept", "788b28d79ad4a2ca")),
        *(("marked, two ends are not", "023478adf08259d3"), ("marked, a second end is not", "c15066161dd55f3e")),
        *(("a line after the last", "66567bce06d6d310"), ("headless", "7cb5e9e1a057e522")),
        *(("calls or a text", "49b4752306adfe04"), ("forgetful by name", "a0b5378909857417")),
        *(("published deepseekv3", "d3227453fd5eb33d"), ("published diffusion_gemma", "63609bbebf0b66a2")),
        *(("published glm4moe", "6d4092713e68cdb0"), ("published gptoss", "54848ba5a4a1bd35")),
        *(("published qwen3", "c54c9c4996a3fbbf"), ("published qwen3_5_think", "04639a7aface5789")),
        *(("published lfm2_2_5", "e6b65b230e172b12"), ("published phi3", "164db592acff7356")),
        *(("built in llama3", "98885e370c603323"), ("built in mistral", "161ab24465973665")),
        *(("built in qwen3", "6ad01cc971989384"), ("built in deepseek", "daf627d4aefd7075")),
    ]
)


def masker(template: str, *special: str, **settings: Any) -> Masker:
    return Masker(Template(template, {"eos_token": "</s>"}), TokenizerConfig(**settings), special, where="t.jinja")


def talk(*texts: str, **answers: Any) -> Conversation:
    turns = [turn(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]
    return conversation([one if one["role"] == "user" else one | answers for one in turns], [])


def refusal(made: Masker, chat: Conversation) -> tuple[str, str]:
    with pytest.raises(BadRecordError) as refused:
        made.sequences(chat)
    return refused.value.reason, refused.value.detail


TWICE = talk("Hi", "Hello", "Bye", "So long")
FROM_THE_PROMPT = "each turn is trained from the generation prompt that a server renders for it"


@pytest.mark.parametrize(
    ("template", "settings", "rule", "why"),
    [
        (OWN["marked"], {"mask": "all"}, "all", "tokenizer.mask=all"),
        (OWN["marked"], {"mask": "assistant_turns"}, "assistant_turns", "tokenizer.mask=assistant_turns"),
        (OWN["marked"], {}, "marks", "the chat template marks what the model writes with {% generation %}"),
        (STOCK["qwen3_5_think"], {}, "stock", "the chat template is the published one of Qwen3.5, thinking"),
        (STOCK["qwen3"], {}, "served", f"the chat template is the published one of Qwen3: {FROM_THE_PROMPT}"),
        (OWN["plain"], {}, "served", f"the chat template has no marks and is not a known one: {FROM_THE_PROMPT}"),
    ],
)
def test_the_rule_of_a_template_is_named_with_its_reason(
    template: str, settings: dict[str, str], rule: str, why: str
) -> None:
    made = masker(template, "<|im_end|>", **settings)
    assert (made.rule, made.why) == (rule, why)
    assert len(made.sequences(talk("Hi", "Hello", weight=1))) == 1


def trained_of(made: Masker, chat: Conversation) -> list[list[str]]:
    return [[one.text[start:end] for start, end in one.spans] for one in made.sequences(chat)]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_marked_turns_are_not_trained_after_a_prompt_that_follows_them(role: str) -> None:
    prompts_first = "{% for m in messages | selectattr('role', 'eq', '" + role + "') %}{{ m.content }}{% endfor %}"
    turns = OWN["marked"].replace("in messages %}", "in messages if m.role in ('user', 'assistant') %}")
    made = masker(prompts_first + turns, "<|im_end|>")
    chat = conversation([*_ANSWERED, turn(role, "c"), *_ASKED, turn("assistant", "e")], [])
    assert trained_of(made, chat) == [["b<|im_end|>"], ["e<|im_end|>"]]


def test_marked_reasoning_is_trained_where_the_template_drops_it_later_and_every_message_writes_its_end() -> None:
    template = OWN["marked"].replace(
        CONTENT + CALLS, "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    )
    chat = talk("What is </think>?", "<think>Hm</think>Hello", "And </think>?", "<think>So</think>Bye")
    found = trained_of(masker(template, "<|im_end|>"), chat)
    assert found == [["<think>Hm</think>Hello<|im_end|>"], ["<think>So</think>Bye<|im_end|>"]]


def test_marks_that_are_asked_for_and_missing_are_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError) as refused:
        masker(OWN["plain"], mask="generation")
    assert refused.value.what == "the chat template has no {% generation %} that marks the assistant's tokens"
    assert refused.value.where == "t.jinja"
    assert refused.value.fix == "set tokenizer.mask=auto, or set tokenizer.chat_template to a template with the tag"


@pytest.mark.parametrize("mask", ["auto", "assistant_turns", "all"])
def test_a_template_with_marks_is_used_as_it_is_and_another_has_to_write_words_of_any_length(mask: str) -> None:
    short = OWN["marked"].replace("m.content or ''", "m.content[:4]")
    assert len(masker(short, "<|im_end|>", mask=mask).sequences(talk("Hi", "Yes"))) == 1
    unmarked = OWN["plain"].replace("m.content or ''", "m.content[:4]")
    assert refusal(masker(unmarked, "<|im_end|>"), talk("Hi", "Yes"))[0] == BadReason.NOT_WRITTEN


def test_where_no_token_is_special_no_end_of_a_turn_is_found() -> None:
    silent = {"train_end_of_turn": False}
    (one,) = masker(OWN["plain"], **silent).sequences(TWICE)
    assert [one.text[slice(*span)] for span in one.spans] == ["Hello<|im_end|>", "So long<|im_end|>"]
    reason, detail = refusal(masker(OWN["forgetful by name"], history="kept", **silent), TWICE)
    assert (reason, "writes turn 2 differently" in detail) == (BadReason.NOT_AS_SERVED, True)


NO_END = "turn 2 is trained without an end token ... set tokenizer.end_of_last_turn="


@pytest.mark.parametrize(
    ("template", "settings", "chat", "reason", "detail"),
    [
        (*(OWN["plain"], {}, talk("Hi", "Hello", weight=0.5), BadReason.BAD_WEIGHT), "turn 2 ... train_on=weighted"),
        (
            *(OWN["plain"], {"mask": "all"}, talk("Hi", "Hello", weight=0), BadReason.BAD_WEIGHT),
            "turn 2 is not to be trained ... tokenizer.mask=auto",
        ),
        (OWN["plain"], {}, talk("Hi", "Hello", weight=0), BadReason.NOTHING_TRAINED, "no turn is marked as trained"),
        (*(OWN["plain"], {"train_on": "marked"}, talk("Hi", "Hello"), BadReason.NOTHING_TRAINED), "train_on=marked"),
        (*(OWN["closed"], {"mask": "assistant_turns"}, TWICE, BadReason.TEMPLATE_FAILED), "turn 2 ... mask=auto"),
        (
            OWN["plain"].replace("assistant\n{%", "assistant\n<an answer to {{ messages[-1].content }}>{%"),
            *({}, talk("Hi", "Hello", "What is your name?", "Joe"), BadReason.NOT_AS_SERVED),
            "turn 4 does not begin with the chat template's generation prompt (which ends in "
            "'r to What is your name?>') ... tokenizer.chat_template",
        ),
        (*(OWN["closed"], {"history": "kept"}, TWICE, BadReason.NOT_AS_SERVED), "turn 2 ... =as_served"),
        (*(OWN["endless"], {}, talk("Hi", "Hello"), BadReason.NO_END), NO_END + "\"'</s>'\""),
        (
            OWN["marked"].replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
            *({}, talk("Hi", "Hello"), BadReason.NO_END),
            NO_END + "\"'<|im_end|>'\"",
        ),
        *(
            (
                *(template, {"train_on": "weighted", "train_end_of_turn": False}),
                talk("Hi", "", reasoning_content="b a", content=[{"type": "text", "text": "a", "weight": 0.5}]),
                BadReason.BAD_WEIGHT,
                "the chat template does not write the parts of turn 2, which have weights, exactly once",
            )
            for template in (
                *(OWN["headless"], OWN["forgetful"]),
                OWN["forgetful"].replace("<think>", "{% generation %}<think>{% endgeneration %}"),
            )
        ),
    ],
)
def test_a_chat_that_cannot_be_trained_is_refused_with_its_turn_and_what_to_set(
    template: str, settings: dict[str, Any], chat: Conversation, reason: BadReason, detail: str
) -> None:
    found, words = refusal(masker(template, "<|im_end|>", "<|endoftext|>", **settings), chat)
    assert (found, [part for part in detail.split(" ... ") if part not in words]) == (reason, []), words


@pytest.mark.parametrize("name", ["qwen3", "built in qwen3"])
def test_a_record_of_many_turns_that_each_have_a_sequence_is_refused_early_with_what_to_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All renderings of n turns have n * n characters."""
    template = load_template("qwen3") if name.startswith("built") else STOCK[name]
    chat, ends = talk(*(str(number) for number in range(80))), ("<|im_end|>", "<|im_start|>")
    whole = masker(template, *ends).sequences(chat)
    assert len(whole) == 40
    monkeypatch.setattr(masks, "_MAX_IN_ALL", sum(len(one.text) for one in whole[:-1]))
    assert masker(template, *ends).sequences(chat) == whole
    monkeypatch.setattr(masks, "_MAX_IN_ALL", len(whole[-1].text) * 3)
    rendered: list[int] = []
    render = Template.render
    monkeypatch.setattr(Template, "render", lambda *given, **named: rendered.append(1) or render(*given, **named))
    reason, detail = refusal(masker(template, *ends), chat)
    assert reason == BadReason.TEMPLATE_FAILED
    assert detail.startswith(f"its 40 trained turns have more than {len(whole[-1].text) * 3:,} characters: the chat")
    assert detail.endswith("; set tokenizer.history=kept or tokenizer.train_on=last_turn, or divide the record")
    assert len(rendered) < 20
    for settings in ({"history": "kept"}, {"train_on": "last_turn"}):
        assert len(masker(template, *ends, **settings).sequences(chat)) == 1


def test_a_template_that_needs_tools_shows_its_end_after_a_call() -> None:
    made = masker("{{ tools[0].function.name }}" + OWN["plain"], "<|im_end|>")
    assert made.end_tokens == ("<|im_end|>",)


def test_white_space_that_is_marked_after_the_last_turn_alone_trains_nothing_of_the_next_one() -> None:
    template = OWN["marked"].replace(
        "<|im_end|>{% endgeneration %}", "<|im_end|>{{ '\n' if loop.last }}{% endgeneration %}"
    )
    assert template != OWN["marked"]
    (sequence,) = masker(template, "<|im_end|>").sequences(talk("Hi", "Hello", "And", "Bye"))
    trained = [sequence.text[start:end] for start, end in sequence.spans]
    assert trained == ["Hello<|im_end|>", "Bye<|im_end|>\n"]


@pytest.mark.parametrize("weights", [[], [50, 20, 20]])
def test_white_space_that_has_marks_of_its_own_after_the_last_turn_alone_leaves_each_turn_its_weight(
    weights: list[int],
) -> None:
    end = "<|im_end|>{% endgeneration %}"
    template = OWN["marked"].replace(end, end + "{% generation %}{{ '\n' if loop.last }}{% endgeneration %}")
    answers = [turn("assistant", "Hello", weight=0.5), turn("assistant", "Bye", weight=0.2)]
    chat = conversation([turn("user", "a"), answers[0], turn("user", "b"), answers[1]], [])
    made = masker(template, "<|im_end|>", **({"train_on": "weighted"} if weights else {}))
    (sequence,) = made.sequences(chat if weights else talk("Hi", "Hello", "And", "Bye"))
    trained = [sequence.text[start:end] for start, end in sequence.spans]
    assert trained == ["Hello<|im_end|>", "Bye<|im_end|>", "\n"]
    assert list(sequence.weights) == weights
