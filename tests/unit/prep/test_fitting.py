"""Over-long conversations are dropped, cut, or split between turns; a trained token is lost only if it is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.formats.inspect import text_runs
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.chat import Message, ToolCall
from harness.prep.chat.records import Conversation
from harness.prep.fitting import fit_conversation
from harness.prep.report import PrepareReport, SourceReport
from harness.prep.tokenize.bpe import train_bpe
from harness.records import Medium, SequenceView

WORDS = ["packs", "hold", "turns", "that", "a", "model", "reads", "and", "learns"]
TOOLS = ({"type": "function", "function": {"name": "find", "parameters": {}}},)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["system user assistant tool find 0123456789 " + " ".join(WORDS)] * 9, path, vocab_size=400)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return ChatTokenizer(TokenizerConfig(name=folder))


def chat(*turns: tuple[str, str], tools=()) -> Conversation:
    return Conversation(tuple(Message(role, text) for role, text in turns), "chats.jsonl, line 1", tools=tools)


def fit(tokenizer, conversation, pack_size, over_long="split"):
    (made,) = tokenizer.encode_each([conversation])
    return fit_conversation(conversation, made, tokenizer, pack_size=pack_size, over_long=over_long)


def texts(tokenizer, fitted) -> list[str]:
    return [tokenizer.decode(piece.input_ids.tolist()) for piece in fitted.pieces]


def trained(tokenizer, fitted) -> list[str]:
    return [text for piece in fitted.pieces for text, is_trained in text_runs(piece, tokenizer) if is_trained]


def size_of(tokenizer, conversation) -> int:
    (view,) = tokenizer.encode([conversation])
    return len(view)


def test_an_over_long_conversation_is_dropped_or_cut_and_the_last_token_is_untrained(tokenizer):
    one = chat(("user", "packs"), ("assistant", "turns that a model reads"))
    size = size_of(tokenizer, one)
    kept = fit(tokenizer, one, size, "drop")
    assert (len(kept.pieces), kept.reason, kept.is_cut, kept.num_lost) == (1, "", False, 0)
    dropped = fit(tokenizer, one, size - 1, "drop")
    assert (dropped.pieces, dropped.reason) == ((), "over_long")
    fitted = fit(tokenizer, one, size - 3, "cut")
    (piece,) = fitted.pieces
    assert len(piece) == size - 3
    assert piece.loss_mask[-1] == 0
    # The newline after the end of the turn is not trained anyway.
    assert (fitted.is_cut, fitted.num_lost) == (True, 2)
    assert fit(tokenizer, one, 3, "cut").reason == "untrained"
    with pytest.raises(ConfigError, match="over_long"):
        fit(tokenizer, one, 3, "wrap")


def test_a_split_repeats_the_system_prompt_and_keeps_questions_with_their_answers(tokenizer):
    turns = [("user", "model"), ("assistant", "reads"), ("user", "packs"), ("assistant", "hold turns")]
    whole = chat(("system", "learns"), *turns, ("user", "and"), ("assistant", "a"))
    two = size_of(tokenizer, chat(("system", "learns"), *turns))
    fitted = fit(tokenizer, whole, two)
    system = "<|im_start|>system\nlearns<|im_end|>\n"
    assert texts(tokenizer, fitted) == [
        f"{system}<|im_start|>user\nmodel<|im_end|>\n<|im_start|>assistant\nreads<|im_end|>\n"
        "<|im_start|>user\npacks<|im_end|>\n<|im_start|>assistant\nhold turns<|im_end|>\n",
        f"{system}<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
    ]
    assert trained(tokenizer, fitted) == ["reads<|im_end|>", "hold turns<|im_end|>", "a<|im_end|>"]
    assert (fitted.is_split, fitted.is_cut, fitted.num_lost) == (True, False, 0)


def test_a_long_exchange_is_divided_before_answers_and_each_part_begins_with_the_question(tokenizer):
    steps = [("assistant", "find model"), ("tool", "reads and learns"), ("assistant", "find packs"), ("tool", "hold")]
    whole = chat(("user", "a model"), *steps, ("assistant", "turns"))
    fitted = fit(tokenizer, whole, size_of(tokenizer, chat(("user", "a model"), *steps[:3])))
    question = "<|im_start|>user\na model<|im_end|>\n"
    parts = texts(tokenizer, fitted)
    assert len(parts) == 2
    assert all(part.startswith(question) for part in parts)
    # The result of the last call of a part is in neither: nothing is trained from it in the first.
    assert parts[0].endswith("<|im_start|>assistant\nfind packs<|im_end|>\n")
    assert parts[1].endswith("<|im_start|>assistant\nturns<|im_end|>\n")
    assert trained(tokenizer, fitted) == ["find model<|im_end|>", "find packs<|im_end|>", "turns<|im_end|>"]
    assert fitted.num_lost == 0
    # One that just fits is not divided.
    more = replace(whole, messages=whole.messages * 2)
    assert len(fit(tokenizer, more, size_of(tokenizer, whole)).pieces) == 2


@pytest.mark.parametrize(("over_long", "reason"), [("cut", "over_long_media"), ("drop", "over_long")])
def test_a_sequence_with_media_is_neither_cut_nor_split(tokenizer, over_long, reason):
    view = SequenceView(np.arange(9), np.ones(9, np.uint8), (Medium("image", 1, 2, b"pixels"),))
    one = chat(("user", "packs"), ("assistant", "turns"))
    made = fit_conversation(one, [SimpleNamespace(view=view)], tokenizer, pack_size=8, over_long=over_long)
    assert (made.pieces, made.reason, made.num_lost) == ((), reason, 9)


def test_an_answer_that_is_too_long_with_its_question_is_cut_and_the_other_exchanges_are_kept(tokenizer):
    whole = chat(("user", "a"), ("assistant", "packs " * 90), ("user", "model"), ("assistant", "learns"))
    fitted = fit(tokenizer, whole, 40)
    assert len(fitted.pieces[0]) == 40
    assert trained(tokenizer, fitted)[-1] == "learns<|im_end|>"
    assert (fitted.is_cut, fitted.is_split) == (True, True)
    assert fitted.num_lost > 50


def test_with_only_the_last_turn_trained_a_split_keeps_what_fits_before_it(folder):
    tokenizer = ChatTokenizer(TokenizerConfig(name=folder, train_on="last_turn"))
    turns = [("user", "model"), ("assistant", "reads"), ("user", "packs"), ("assistant", "hold turns")]
    whole = chat(("system", "and"), *turns, ("user", "that"), ("assistant", "a"))
    fitted = fit(tokenizer, whole, size_of(tokenizer, whole) - 4)
    (text,) = texts(tokenizer, fitted)
    assert "reads" not in text
    assert "hold turns" in text
    assert trained(tokenizer, fitted) == ["a<|im_end|>"]
    # A question without an answer is left out, and all that is before it fits.
    asked = chat(("system", "and"), *turns, ("user", "packs hold"))
    (text,) = texts(tokenizer, fit(tokenizer, asked, size_of(tokenizer, asked) - 1))
    assert text == tokenizer.decode(tokenizer.encode([chat(("system", "and"), *turns)])[0].input_ids.tolist())


def test_every_token_is_trained_once_where_all_are(folder):
    tokenizer = ChatTokenizer(TokenizerConfig(name=folder, mask="all"))
    exchanges = [(role, f"turns {number}") for number in range(3) for role in ("user", "assistant")]
    whole = chat(("system", "learns"), *exchanges)
    fitted = fit(tokenizer, whole, size_of(tokenizer, whole) - 1)
    assert len(fitted.pieces) == 2
    assert fitted.pieces[1].loss_mask[:5].tolist() == [0, 0, 0, 0, 0]
    assert "".join(trained(tokenizer, fitted)).count("learns") == 1
    twice = [("user", "turns"), ("assistant", "model")] * 2
    again = fit(tokenizer, chat(*twice), size_of(tokenizer, chat(*twice[:2])))
    assert len(again.pieces) == 1
    assert again.num_lost == len(again.pieces[0])


def test_tools_are_in_every_part_and_each_is_rendered_as_served(tmp_path):
    train_bpe([" ".join(WORDS)] * 9, tmp_path, vocab_size=400, chat_template="qwen3")
    tokenizer = ChatTokenizer(TokenizerConfig(name=str(tmp_path)))
    call = Message("assistant", "", reasoning="that", tool_calls=(ToolCall("find", {"text": "packs"}),))
    answer = Message("assistant", "turns", reasoning="and")
    exchanges = [(Message("user", f"packs {number}"), call, Message("tool", "hold"), answer) for number in range(4)]
    whole = Conversation(sum(exchanges, ()), "x", tools=TOOLS)
    (made,) = tokenizer.encode_each([whole])
    alone = [tokenizer.encode_each([Conversation(part, "x", tools=TOOLS)])[0] for part in exchanges]
    longest = max(len(one.view) for part in alone for one in part)
    fitted = fit(tokenizer, whole, longest)
    # No two exchanges fit together, so that each gives what it gives as a conversation of its own.
    expected = [one.view.input_ids.tolist() for part in alone for one in part]
    assert [piece.input_ids.tolist() for piece in fitted.pieces] == expected
    assert all("# Tools" in text for text in texts(tokenizer, fitted))
    assert len(made) > 1
    assert fitted.num_lost == 0
    views = [one.view for one in made]
    dropped = fit(tokenizer, whole, sorted(map(len, views))[-2], "drop")
    assert (len(dropped.pieces), dropped.is_cut, dropped.is_partial) == (len(made) - 1, False, True)
    assert dropped.num_lost == max(views, key=len).loss_mask.sum()


def test_text_without_turns_is_divided_every_pack(tokenizer):
    whole = Conversation((), "x", text="packs hold turns that a model reads and learns " * 9)
    (made,) = tokenizer.encode_each([whole])
    fitted = fit(tokenizer, whole, 20)
    ids = np.concatenate([piece.input_ids for piece in fitted.pieces])
    assert ids.tolist() == made[0].view.input_ids.tolist()
    assert all(piece.loss_mask[:-1].all() and piece.loss_mask[-1] == 0 for piece in fitted.pieces)
    # The first token of a piece has nothing before it.
    assert fitted.num_lost == len(fitted.pieces) - 1


@pytest.mark.parametrize(
    ("schema", "over_long", "counts", "found"),
    [
        ("text", "split", {"split": 2}, ""),
        ("messages", "split", {"split": 2}, "2 of 4 conversations (50.0%) divided"),
        ("messages", "cut", {"split": 1, "truncated": 2}, "2 of 4 conversations (50.0%) cut"),
        ("messages", "cut", {"dropped": Counter(over_long_media=1)}, "1 of 5 conversations (20.0%) left out"),
    ],
)
def test_the_report_names_the_conversations_with_lost_tokens_except_text_divided_as_asked(
    schema, over_long, counts, found
):
    settings = {"data": {"pack_size": 64, "over_long": over_long}}
    sources = {"chats.jsonl": SourceReport(conversations=4, trained_tokens=90)}
    report = PrepareReport(schema=schema, settings=settings, sources=sources, lost_tokens=10, **counts)
    found += ", with 10 of 100 trained tokens (10.0%)" if found else ""
    assert report.loss().partition(": longer than data.pack_size=64")[0] == found
    assert ("over_long=split or" in report.loss()) == ("truncated" in counts)  # media are never split


def test_the_pieces_together_train_what_the_conversation_trains_unless_it_is_counted_as_lost(tokenizer):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        number = iter(range(10_000))

        def text(rng=rng, number=number) -> str:
            return " ".join([*rng.choice(WORDS, rng.integers(0, 20)), str(next(number))])

        turns = [("system", text())] * int(rng.integers(0, 2))
        for _ in range(rng.integers(1, 7)):
            turns.append(("user", text()))
            for _ in range(rng.integers(0, 3)):
                turns += [("assistant", text()), ("tool", text())]
            turns.append(("assistant", text()))
        whole = chat(*turns)
        pack_size = int(rng.integers(40, 200))
        fitted = fit(tokenizer, whole, pack_size)
        answers = [f"{text}<|im_end|>" for role, text in turns if role == "assistant"]
        if not fitted.is_cut and fitted.pieces:
            assert trained(tokenizer, fitted) == answers
            assert fitted.num_lost == 0
        (view,) = tokenizer.encode([whole])
        kept = sum(int(piece.loss_mask.sum()) for piece in fitted.pieces)
        assert kept + fitted.num_lost == int(view.loss_mask.sum())
        for piece in fitted.pieces:
            assert isinstance(piece, SequenceView)
            assert len(piece) <= pack_size
            assert piece.loss_mask.any()
            assert piece.loss_mask[-1] == 0
            if turns[0][0] == "system":
                assert tokenizer.decode(piece.input_ids.tolist()).startswith(f"<|im_start|>system\n{turns[0][1]}")


def test_a_split_where_every_token_is_trained_leaves_out_turns_without_an_answer(folder):
    tokenizer = ChatTokenizer(TokenizerConfig(name=folder, mask="all"))
    turns = [("user", "model"), ("assistant", "reads " * 9), ("user", "packs"), ("assistant", "hold turns")]
    whole = chat(*turns, ("user", "and " * 30))
    fitted = fit(tokenizer, whole, size_of(tokenizer, chat(*turns)))
    assert texts(tokenizer, fitted) == [tokenizer.decode(tokenizer.encode([chat(*turns)])[0].input_ids.tolist())]
    assert fitted.num_lost > 30


def test_a_split_tries_few_groups_where_exchanges_differ_in_what_is_written_once(tmp_path, monkeypatch):
    """The reasoning of the first answer is left out once others follow, and that of the others is short."""
    train_bpe([" ".join(WORDS)] * 9, tmp_path, vocab_size=400, chat_template="qwen3")
    tokenizer = ChatTokenizer(TokenizerConfig(name=str(tmp_path)))
    first = (Message("user", "packs"), Message("assistant", "turns", reasoning="that a model reads " * 20))
    rest = [(Message("user", f"packs {number}"), Message("assistant", "hold")) for number in range(60)]
    whole = Conversation(sum([first, *rest], ()), "x")
    (made,) = tokenizer.encode_each([whole])
    num_tokens, encode = [], tokenizer.encode_each

    def count(parsed):
        made = encode(parsed)
        num_tokens.append(sum(len(one.view) for sequences in made for one in sequences))
        return made

    monkeypatch.setattr(tokenizer, "encode_each", count)
    fitted = fit_conversation(whole, made, tokenizer, pack_size=400, over_long="split")
    assert fitted.num_lost == 0
    assert sum(num_tokens) < 30 * sum(map(len, fitted.pieces))
