"""An answer ends at every token that ends a turn: as recorded, or as the template writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stock_templates import stock_templates, tokenizer_for

from harness.errors import ConfigError
from harness.prep import end_tokens
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig

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


def test_glm_stops_where_its_makers_stop_it_and_its_missing_end_is_reported(tmp_path: Path) -> None:
    """Its template writes no end of a turn: `<|user|>` or `<|observation|>` follows, as its generation config lists."""
    folder = tokenizer_for(stock_templates()["glm4moe"], tmp_path)
    made = ChatTokenizer(TokenizerConfig(name=str(folder)))
    assert json.loads(made.mask_facts()["end_tokens"]) == ["<|user|>", "<|observation|>", "<|system|>"]
    assert {made.decode([token]) for token in made.ends} == {"<|user|>", "<|observation|>", "<|system|>", "</s>"}
    assert "the last turn does not teach the model to stop" in made.mask_facts()["why"]


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
        ("<|im_end|>", "expected a JSON list of texts"),
        ("[1]", "expected a JSON list of texts"),
    ],
)
def test_a_record_that_does_not_fit_the_tokenizer_is_refused(load: Any, recorded: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        end_tokens(load(WORDS), {"end_tokens": recorded})
    assert message in error.value.what
