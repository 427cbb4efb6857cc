"""Built-in chat templates are found by name and mark exactly what the assistant has to generate."""

from __future__ import annotations

import pytest

from harness.errors import ConfigError
from harness.prep.chat import BadRecord, Conversation, Message
from harness.prep.tokenize import CHAT_TEMPLATE, ChatTokenizer, TokenizerConfig, train_bpe
from harness.prep.tokenize.templates import built_in_templates, load_template, template_tokens

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def f(x):\n    return x + 1\n",
    "Grüße, 世界! \U0001f600",
] * 20
NAMES = built_in_templates()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A tokenizer for each built-in template, with the special tokens of the template."""
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        train_bpe(TEXTS, folder, vocab_size=300, chat_template=name)
        made[name] = ChatTokenizer(TokenizerConfig(name=str(folder), mask="generation"))
    return made


def chat(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, text) for role, text in turns), "chat.jsonl, line 1")


def trained_text(tokenizer, sequence) -> str:
    return tokenizer.decode(sequence.input_ids[1:][sequence.loss_mask[:-1] == 1])


@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_template_trains_the_answers_and_the_end_of_each_turn(tokenizers, name):
    end = template_tokens(name).ends[0]
    (sequence,) = tokenizers[name].encode(
        [chat(("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "So long"))]
    )
    assert trained_text(tokenizers[name], sequence) == f"Hello{end}So long{end}"


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_of_a_template_are_single_tokens_of_the_tokenizer_trained_for_it(tokenizers, name):
    tokens = template_tokens(name)
    vocabulary = tokenizers[name]._hf.get_vocab()
    assert [token for token in (*tokens.ends, *tokens.marks, tokens.begin) if token and token not in vocabulary] == []
    assert tokenizers[name].chat_template == load_template(name)


def test_the_text_of_chatml_is_the_one_that_existing_datasets_name():
    import hashlib

    assert load_template("chatml") == CHAT_TEMPLATE
    assert hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()[:16] == "019c64426a9595a2"


def test_a_name_that_is_nothing_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="there is no chat template 'lama3'") as caught:
        load_template("lama3")
    assert "did you mean llama3?" in caught.value.fix
    assert "chatml, llama3" in caught.value.fix


def test_a_path_names_a_file_and_a_folder_is_none(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ 1 }}\n")
    assert load_template(str(tmp_path / "mine.jinja")) == "{{ 1 }}\n"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(str(tmp_path))
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(str(tmp_path / "latin.jinja"))


def test_a_tokenizer_without_the_end_of_a_templates_turns_is_refused(tmp_path):
    train_bpe(TEXTS, tmp_path, vocab_size=300, chat_template="llama3")
    with pytest.raises(ConfigError, match=r"'chatml' ends turns with <\|im_end\|>, which is no token") as caught:
        ChatTokenizer(TokenizerConfig(name=str(tmp_path), chat_template="chatml"))
    assert caught.value.where == str(tmp_path)


def test_turns_that_a_format_cannot_hold_fail_with_words(tokenizers):
    answer = Message("assistant", "Hello", reasoning="Think first")
    bad = tokenizers["llama3"].encode([Conversation((Message("user", "Hi"), answer), "line 1")])[0]
    assert isinstance(bad, BadRecord)
    assert "the llama3 format has no place for reasoning" in bad.detail
