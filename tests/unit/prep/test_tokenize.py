"""Conversations become the tokens of their chat template, and exactly the assistant's tokens are trained."""

from __future__ import annotations

import json
import shutil
import unicodedata

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.prep.chat import BadRecord, Conversation, Message, ToolCall
from harness.prep.tokenize import CHAT_TEMPLATE, ChatTokenizer, TokenBytes, TokenizerConfig, token_mask, train_bpe
from harness.prep.tokenize import tokenizer as module

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def f(x):\n    return x + 1\n",
    "Grüße, 世界! \U0001f600",
] * 20
PLAIN_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, path, vocab_size=300)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return ChatTokenizer(TokenizerConfig(name=str(folder)))


def with_template(folder, path, template, **settings):
    file = path / "template.jinja"
    file.write_text(template)
    return ChatTokenizer(TokenizerConfig(name=str(folder), chat_template=str(file), **settings))


def test_a_template_that_is_not_valid_jinja_is_refused_before_any_conversation(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"the chat template is not valid Jinja: .*line 2") as caught:
        with_template(folder, tmp_path, "{% generation %}\n{% endfr %}")
    assert caught.value.where.endswith("template.jinja")


def chat(*turns: str, first: str = "user") -> Conversation:
    """Turns that alternate between user and assistant."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    messages = tuple(Message(roles[number % 2], text) for number, text in enumerate(turns))
    return Conversation(messages, "chat.jsonl, line 1")


def encode(tokenizer, conversation):
    return tokenizer.encode([conversation])[0]


def trained_text(tokenizer, sequence) -> str:
    """Text of the labels of trained positions."""
    return tokenizer.decode(sequence.input_ids[1:][sequence.loss_mask[:-1] == 1])


CHATS = [
    chat("Hi", "Hello"),
    chat("Hi", " leading space and trailing \n", "more?", "\n\nyes  "),
    chat("Grüße", "世界 \U0001f600\U0001f600", "x", "  \t y"),
    Conversation((Message("system", "Be brief."), *chat("a", "b").messages, Message("tool", "42")), ""),
    chat("I begin", "and you?", first="assistant"),
    chat("def f(x):", "    return x + 1\n" * 50),
]


def test_tokens_and_masks_are_those_of_apply_chat_template(folder, tokenizer):
    from transformers import AutoTokenizer

    for conversation, sequence in zip(CHATS, tokenizer.encode(CHATS), strict=True):
        turns = [turn.as_dict() for turn in conversation.messages]
        asked = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=True, **asked)
        assert sequence.input_ids.tolist() == expected["input_ids"]
        assert sequence.loss_mask.tolist() == [*expected["assistant_masks"][1:], 0]
        assert (sequence.input_ids.dtype, sequence.loss_mask.dtype) == (np.int32, np.uint8)


def test_white_space_outside_the_offsets_neither_loses_nor_adds_trained_tokens(folder, tmp_path):
    # Tokenizers that trim offsets give no token for a space at either end of a turn; transformers' own mask then
    # stops before the first turn or runs on through the user's.
    shutil.copytree(folder, tmp_path / "trim")
    file = tmp_path / "trim" / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["post_processor"]["trim_offsets"] = True
    file.write_text(json.dumps(settings))
    template = CHAT_TEMPLATE.replace(
        "{{- message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{- message['content'] }}{% endgeneration %}{{- '<|im_end|>' }}",
    )
    trimmed = with_template(tmp_path / "trim", tmp_path, template, end_of_last_turn="<|im_end|>")
    sequence = encode(trimmed, chat("Hi", " Hello ", "secret", "Bye  "))
    assert trained_text(trimmed, sequence) == " Hello <|im_end|>Bye  <|im_end|>"


@pytest.mark.parametrize(
    ("template", "reason", "words"),
    [
        ("{% generation %}{{ raise_exception('must alternate') }}{% endgeneration %}", "template_failed", "altern"),
        ("{% generation %}{{ messages + 1 }}{% endgeneration %}", "template_failed", "TypeError"),
        (
            "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}",
            "nothing_trained",
            "no trainable",
        ),
        ("{% generation %}x<|im_end|>{% endgeneration %}", "not_written", "turn 1 (user): 'Hi'"),
    ],
)
def test_a_failing_template_reports_the_conversation(folder, tmp_path, template, reason, words):
    bad = encode(with_template(folder, tmp_path, template), chat("Hi", "Hello"))
    assert (bad.reason, bad.where) == (reason, "chat.jsonl, line 1")
    assert words in bad.detail


@pytest.mark.parametrize(("answer", "reason"), [("x", "too_short"), ("", "nothing_trained")])
def test_a_rendering_with_nothing_to_predict_is_refused(folder, tmp_path, answer, reason):
    template = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    bad = encode(with_template(folder, tmp_path, template, train_end_of_turn=False), chat("", answer))
    assert bad.reason == reason


@pytest.mark.parametrize("is_text", [True, False])
def test_a_sequence_of_more_characters_than_memory_is_there_for_is_a_bad_record(tokenizer, monkeypatch, is_text):
    answer = "\u00e9" * 400
    long = Conversation((), "l, line 1", text=answer) if is_text else chat("Hi", answer)
    short = chat("Hi", "Hello")
    ((made,), _) = fitting = tokenizer.encode_each([long, short])
    monkeypatch.setattr(module, "_MAX_CHARACTERS", len(made.text))
    assert [[one.text for one in each] for each in tokenizer.encode_each([long, short])] == [
        [one.text for one in each] for each in fitting
    ]
    monkeypatch.setattr(module, "_MAX_CHARACTERS", len(made.text) - 1)
    bad, other = tokenizer.encode_each([long, short])
    assert (bad.reason, bad.where) == ("too_long", long.where)
    assert bad.detail.startswith(f"has {len(made.text)} characters, and may have {len(made.text) - 1}, each of which")
    assert bad.detail.endswith("; divide the record")
    assert [one.text for one in other] == [one.text for one in fitting[1]]


def test_tokenizers_and_templates_have_hashes_of_their_own_and_a_copy_has_the_same(tokenizer, folder, tmp_path):
    tokenizer.save(tmp_path / "copy")
    copy = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "copy")))
    assert (copy.tokenizer_hash, copy.chat_template_hash) == (tokenizer.tokenizer_hash, tokenizer.chat_template_hash)
    train_bpe(TEXTS, tmp_path / "other", vocab_size=299)
    other = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "other")))
    assert other.tokenizer_hash != tokenizer.tokenizer_hash
    assert other.chat_template_hash == tokenizer.chat_template_hash
    plain = with_template(folder, tmp_path, PLAIN_TEMPLATE, mask="all")
    assert plain.tokenizer_hash == tokenizer.tokenizer_hash
    assert plain.chat_template_hash != tokenizer.chat_template_hash


def test_a_tokenizer_without_a_template_is_refused(folder, tmp_path):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTokenizer(TokenizerConfig(name=str(tmp_path)))


def test_padding_and_truncation_in_a_tokenizer_file_are_ignored(folder, tokenizer, tmp_path):
    shutil.copytree(folder, tmp_path / "cut")
    file = tmp_path / "cut" / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(settings))
    cut = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "cut")))
    np.testing.assert_array_equal(encode(cut, CHATS[1]).input_ids, encode(tokenizer, CHATS[1]).input_ids)


def test_a_token_that_shares_a_character_with_a_span_is_masked():
    # "ab|cd|ef" as tokens a, bc, d, e, f; the span is cd.
    assert token_mask([(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)], [(2, 4)]).tolist() == [0, 1, 1, 0, 0]
    # One character in three byte tokens.
    assert token_mask([(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)], [(1, 2)]).tolist() == [0, 1, 1, 1, 0]
    # A trimmed space: "a b" as a, " b" with offsets of b alone.
    assert token_mask([(0, 1), (2, 3)], [(1, 3)]).tolist() == [0, 1]
    assert token_mask([(0, 1)], []).dtype == np.uint8


def test_a_token_of_no_bytes_is_spelled_as_it_is():
    made = TokenBytes({"a": 0, "世": 1}, {})
    assert made.mask(np.array([0, 1], np.int32), "a世", [(1, 2)]).tolist() == [0, 1]


@pytest.mark.parametrize("change", ["normalizer", "added", ""])
def test_masks_from_the_bytes_of_tokens_equal_those_from_all_offsets(folder, change):
    from tokenizers import AddedToken, Tokenizer, normalizers

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if change == "normalizer":
        backend.normalizer = normalizers.NFC()
    if change == "added":
        backend.add_tokens([AddedToken("<x>", lstrip=True, rstrip=True, normalized=False), AddedToken("世界")])
    added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
    made = TokenBytes.of(backend, added)
    assert made is not None
    texts = ["An \u00e9migr\u00e9 火車 🙂🙂 stops.\n ", "plain  words ", "cafe\u0301", "a  <x>  世界 b"]
    known = [text for text in texts if made.mask(np.array(backend.encode(text).ids, np.int32), text, []) is not None]
    # Both change the text that the tokens stand for.
    unknown = {"": set(), "normalizer": {texts[2]}, "added": {texts[3]}}
    assert set(texts) - set(known) == unknown[change]
    random = np.random.default_rng(0)
    for text in known:
        encoding = backend.encode(text)
        ids = np.array(encoding.ids, np.int32)
        for _ in range(100):
            spans = [tuple(sorted(random.integers(0, len(text) + 1, 2).tolist()))]
            expected = token_mask(encoding.offsets, spans).tolist()
            if spans[0][0] < spans[0][1]:
                assert made.mask(ids, text, spans).tolist() == expected, (text, spans)


def test_a_tokenizer_that_changes_every_text_or_spells_no_bytes_has_no_bytes_of_tokens(folder):
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    for name, value in (
        ("normalizer", normalizers.Lowercase()),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("decoder", decoders.Metaspace()),
    ):
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        setattr(backend, name, value)
        assert TokenBytes.of(backend, {}) is None, name


def test_a_conversation_that_the_tokenizer_normalizes_is_masked_as_others(folder, tmp_path):
    from tokenizers import Tokenizer, normalizers

    shutil.copytree(folder, tmp_path / "nfc")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    backend.save(str(tmp_path / "nfc" / "tokenizer.json"))
    made = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "nfc")))
    for answer in ("cafe\u0301s", "cafes"):
        sequence = encode(made, chat("ye\u0301s", answer))
        assert trained_text(made, sequence) == unicodedata.normalize("NFC", answer) + "<|im_end|>"


@pytest.mark.parametrize("change", [{"vocab_size": 258}, {"mask": "user"}, {"control_tokens": "escape"}])
def test_invalid_settings_are_refused(change):
    with pytest.raises(ConfigError):
        TokenizerConfig(**change)


@pytest.mark.timeout(30)
def test_a_mask_of_many_spans_takes_time_in_proportion():
    """Minutes where all of the text is encoded for each of them."""
    count = 2_000_000
    spans = [(start, start + 1) for start in range(0, count, 100)]
    mask = TokenBytes({"\u00c3": 0, "\u00a9": 1}, {}).mask(
        np.tile(np.array([0, 1], np.int32), count), "é" * count, spans
    )
    assert np.flatnonzero(mask[::2]).tolist() == [start for start, _ in spans]
    assert (mask[::2] == mask[1::2]).all()


END, ESCAPED = "<|im_end|>", '{"a": "\\u003c|im_end|>"}'


@pytest.mark.parametrize(
    ("turn", "kwargs", "place"),
    [
        (Message("user", "Hi", name=END), {}, "the name of turn 2 (user)"),
        (Message("tool", "Hi", tool_call_id=END), {}, "the id of turn 2 (tool)"),
        (Message("assistant", "", tool_calls=(ToolCall("f", {}, END),)), {}, "the id of a tool call of turn 2"),
        (Message("assistant", "", tool_calls=(ToolCall("f", ESCAPED),)), {}, "a tool call of turn 2 (assistant)"),
        (Message("user", "Hi"), {"greeting": END}, "`chat_template_kwargs`"),
    ],
)
def test_a_control_token_in_any_text_that_a_template_may_write_is_refused(folder, tmp_path, turn, kwargs, place):
    wider = "{{ greeting }}{% for m in messages %}{{ m.name }}{{ m.tool_call_id }}{{ m.tool_calls | tojson }}"
    tokenizer = with_template(folder, tmp_path, f"{wider}{{% endfor %}}{PLAIN_TEMPLATE}")
    turns = (Message("user", "Hi"), turn, Message("assistant", "Hello"))
    (bad,) = tokenizer.encode([Conversation(turns, "line 1", template_kwargs=kwargs)])
    assert isinstance(bad, BadRecord), tokenizer.decode(bad.input_ids)
    assert (bad.reason, bad.detail.startswith(place)) == ("control_token", True), bad.detail


@pytest.mark.parametrize("left_out", ["train_end_of_turn", "train_reasoning", "train_tool_calls"])
def test_a_turn_that_the_template_does_not_mark_is_read_and_not_trained(folder, tmp_path, left_out):
    marked = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    template += "{% if m.role == 'assistant' and m.content[-1] != '.' %}" + marked
    template += "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = with_template(folder, tmp_path, template, **{left_out: False})
    answers = [Message("assistant", text) for text in ("<think>hm</think>A draft.", "Hello")]
    (view,) = tokenizer.encode(
        [Conversation((Message("user", "Hi"), answers[0], Message("user", "Hi"), answers[1]), "")]
    )
    trained = tokenizer.decode(view.input_ids[1:][view.loss_mask[:-1] == 1])
    assert trained == "Hello" + "<|im_end|>" * (left_out != "train_end_of_turn")
