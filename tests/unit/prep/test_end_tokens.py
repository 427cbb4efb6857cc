"""An answer ends at every token that ends a turn: as recorded, or as the template writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stock_templates import stock_templates, tokenizer_for

from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecord, Conversation, parse_record
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig
from harness.prep.tokenize.recorded import end_tokens

LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TURNS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{# <|user|> <|assistant|> #}"
PARTS = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}<|end_of_part|>{% endfor %}"
WORDS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
REFUSES = "{{ raise_exception('no') }}{# <|im_end|> #}"


@pytest.fixture
def load(tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    def load(template: str) -> Any:
        return AutoTokenizer.from_pretrained(tokenizer_for(template, tmp_path / "tokenizer"))

    return load


def ends(tokenizer: Any, *recorded: str) -> set[str]:
    mask = {"rule": "generation", "end_tokens": json.dumps(recorded)} if recorded else None
    return set(tokenizer.convert_ids_to_tokens(end_tokens(tokenizer, mask)))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAMA3.replace("<|eot_id|>", "<|eom_id|>"), {"<|eom_id|>", "</s>"}),
        (TURNS, {"<|user|>", "</s>"}),
        (PARTS, {"<|end_of_part|>", "</s>"}),
        (WORDS, {"</s>"}),
        (REFUSES, {"<|im_end|>"}),
    ],
)
def test_a_template_shows_which_token_it_writes_after_an_answer(load: Any, template: str, expected: set[str]) -> None:
    assert ends(load(template)) == expected


def test_recorded_tokens_are_taken_with_the_end_token_of_the_tokenizer(load: Any) -> None:
    tokenizer = load(LLAMA3 + "{# <|eom_id|> <|end_of_text|> #}")
    tokenizer.eos_token = "<|end_of_text|>"
    assert ends(tokenizer) == {"<|eot_id|>", "<|end_of_text|>"}
    assert ends(tokenizer, "<|eot_id|>", "<|eom_id|>") == {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}
    # A line break is a token of its own, under another spelling in the vocabulary.
    assert tokenizer.encode("\n", add_special_tokens=False)[0] in end_tokens(tokenizer, {"end_tokens": '["\\n"]'})


def test_glm_stops_where_its_makers_stop_it(tmp_path: Path) -> None:
    """Its template writes no end of a turn: `<|user|>` or `<|observation|>` follows, as its generation config lists."""
    folder = tokenizer_for(stock_templates()["glm4moe"], tmp_path)
    made = ChatTokenizer(TokenizerConfig(name=str(folder)))
    assert json.loads(made.mask_facts()["end_tokens"]) == ["<|user|>", "<|observation|>", "<|system|>"]
    assert {made.decode([token]) for token in made.ends} == {"<|user|>", "<|observation|>", "<|system|>", "</s>"}


MARKED = (
    "{% for m in messages %}{{ m['role'] }}: {% if m.role == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
)
CHAT = {"messages": [{"role": role, "content": f"{role} speaks"} for role in ("user", "assistant") * 2]}


@pytest.mark.parametrize(
    ("template", "settings"),
    [(WORDS, {}), (WORDS, {"mask": "all"}), (MARKED, {}), (MARKED, {"mask": "assistant_turns"})],
)
def test_a_last_turn_without_an_end_is_refused_or_gets_the_one_that_is_named(
    tmp_path: Path, template: str, settings: dict[str, str]
) -> None:
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    name = str(tokenizer_for(template + prompt, tmp_path / "tokenizer"))
    conversation = parse_record(CHAT, "line 1")
    assert isinstance(conversation, Conversation)
    (bad,) = ChatTokenizer(TokenizerConfig(name=name, **settings)).encode([conversation])
    assert isinstance(bad, BadRecord)
    assert (bad.reason, bad.where) == (BadReason.NO_END, "line 1")
    assert """set tokenizer.end_of_last_turn="'</s>'",""" in bad.detail

    named = ChatTokenizer(TokenizerConfig(name=name, end_of_last_turn="</s>", **settings))
    (made,) = named.encode_each([conversation])
    assert not isinstance(made, BadRecord), made
    # Each answer has its end, and so a sequence of its own where every answer is trained alone.
    assert len(made) == (1 if "mask" in settings else 2)
    for sequence in made:
        assert sequence.text.endswith("assistant speaks</s>")
        assert sequence.view.loss_mask[-2] == 1
        assert named.decode([int(sequence.view.input_ids[-1])]) == "</s>"
    assert json.loads(named.mask_facts()["end_tokens"]) == ["</s>"]
    if "mask" not in settings:
        (untrained,) = ChatTokenizer(TokenizerConfig(name=name, train_end_of_turn=False)).encode([conversation])
        assert not isinstance(untrained, BadRecord)


def test_the_named_end_is_a_special_token(tmp_path: Path) -> None:
    name = str(tokenizer_for(WORDS, tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match="is not a special token") as error:
        ChatTokenizer(TokenizerConfig(name=name, end_of_last_turn="<|stop|>"))
    assert "</s>" in error.value.fix


def test_a_tokenizer_without_a_template_has_its_own_end_alone(load: Any) -> None:
    tokenizer = load(WORDS)
    tokenizer.chat_template = None
    assert ends(tokenizer) == {"</s>"}
    tokenizer.eos_token = None
    assert end_tokens(tokenizer) == []


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ('["<|other|>"]', "the end token '<|other|>' is "),
        ("<|im_end|>", "records no list of end tokens"),
        ("[1]", "records no list of end tokens"),
    ],
)
def test_a_record_that_does_not_fit_the_tokenizer_is_refused(load: Any, recorded: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        end_tokens(load(WORDS), {"end_tokens": recorded})
    assert message in error.value.what
