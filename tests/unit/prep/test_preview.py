"""A preview shows records as they will be trained, marks what is trained, and writes nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from harness.prep import PrepareConfig, TokenizerConfig, show_preview
from harness.prep.chat import Conversation
from harness.prep.packing import PackingConfig
from harness.prep.shards import make_sample
from harness.prep.sources.config import SourceConfig
from harness.prep.tokenize.bpe import train_bpe
from harness.records import SequenceView


def test_records_that_are_refused_for_the_same_reason_are_shown_once_with_their_count(tmp_path):
    path = tmp_path / "chats.jsonl"
    image = {"messages": [turn("user", "Look"), {**turn("assistant", "I do."), "images": ["x.png"]}]}
    records = [image, CHATS[0], image, image, {"messages": [turn("user", "Hi"), turn("robot", "Hello")]}]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in records))
    page = shown(str(path), count=5)
    assert page.count("refused, media") == 1
    assert "line 1 (and 2 more records)" in " ".join(page.split())
    assert page.count("refused, ") == 2


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [
    {"messages": [turn("user", "Is [b]2[/b] even?"), turn("assistant", "Yes, it is.")], "id": 7},
    {"messages": [turn("user", "Look"), {**turn("assistant", "I do."), "images": ["x.png"]}]},
    {"messages": [turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "\x1b[2Jbye")]},
    {"messages": [turn("user", "Count"), turn("assistant", "one two three " * 40)]},
]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return str(path)


def shown(source: str, *, color: bool = False, count: int = 4, tokenizer: TokenizerConfig | None = None, **data) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=color, color_system="standard" if color else None)
    read = SourceConfig(path=source, limit=data.pop("limit", 0))
    config = PrepareConfig(read, tokenizer or TokenizerConfig(), PackingConfig(**data))
    config.preview = count
    show_preview(config, console=console)
    return console.file.getvalue()


def test_trained_text_is_in_brackets_where_there_are_no_colors(source):
    page = shown(source)
    assert "<|im_start|>assistant\n[[Yes, it is.<|im_end|>]]\n" in page
    assert "Is [b]2[/b] even?" in page
    assert max(map(len, page.splitlines())) <= 80
    assert "schema     messages, detected" in page
    assert "not read   id" in page
    assert "mask       marks, because" in page
    assert "trained on the first records for this preview" in page


def test_trained_text_is_in_color_on_a_terminal(source):
    page = shown(source, color=True)
    assert "\x1b[1;32mYes, it is.<|im_end|>" in page
    assert "[[Yes" not in page


def test_refused_records_and_over_long_conversations_are_named(source):
    page = shown(source, pack_size=300)
    # Long paths wrap anywhere.
    words = " ".join(page.split())
    assert "line 2 refused, media: turn 2 (assistant) has `images`" in words
    assert "ends with a user turn" in page
    assert "left out, over_long" in shown(source, pack_size=20)
    assert "longer than a pack, cut" in shown(source, pack_size=40, over_long="split")
    # Text of a record does not control the terminal.
    assert "\x1b[2J" not in page


def test_no_schema_is_named_where_no_record_can_be_read(tmp_path):
    (tmp_path / "pretty.jsonl").write_text(json.dumps(CHATS[0], indent=1))
    train_bpe(["packs hold turns"] * 9, tmp_path / "tokenizer", vocab_size=300, chat_template="qwen3")
    tokenizer = TokenizerConfig(name=str(tmp_path / "tokenizer"))
    page = " ".join(shown(str(tmp_path / "pretty.jsonl"), count=1, tokenizer=tokenizer).split())
    assert ", detected" not in page
    assert "as `jq -c .` writes it" in page


def test_a_conversation_that_makes_several_sequences_shows_each(tmp_path):
    train_bpe(["packs hold turns"] * 9, tmp_path / "tokenizer", vocab_size=300, chat_template="qwen3")
    chat = [turn("user", "a"), {**turn("assistant", "b"), "reasoning_content": "think"}] * 2
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": chat}) + "\n")
    page = " ".join(shown(str(source), tokenizer=TokenizerConfig(name=str(tmp_path / "tokenizer"))).split())
    assert "4 turns, 2 sequences" in page
    assert "sequence 2 of 2" in page
    kept = shown(str(source), tokenizer=TokenizerConfig(name=str(tmp_path / "tokenizer"), history="kept"))
    words = " ".join(kept.split())
    assert "4 turns, 1 sequence" in words
    assert "in 2 sequences; the last turn is trained after lines that a server would omit: +<think> +think" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "SOURCE", "--raw", "--json"], "no packs"),
        (["inspect", "SOURCE", "data.pack_size=64"], "tokenizer.name"),
        (["prepare", "--preview", "0", "source.path=SOURCE"], "--preview 0 shows nothing"),
    ],
)
def test_chats_have_no_packs_and_nothing_can_be_shown_of_them(source, tmp_path, monkeypatch, harness, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, error = harness(*(argument.replace("SOURCE", source) for argument in arguments))
    assert (code, words in error) == (2, True)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["prepare", "--preview", "2", "source.path=SOURCE"],
        ["prepare", "--preview=2", "source.path=SOURCE"],
        ["inspect", "--raw", "SOURCE", "preview=2"],
    ],
)
def test_the_commands_take_the_settings_of_a_preparation(source, tmp_path, monkeypatch, harness, command):
    monkeypatch.chdir(tmp_path)
    arguments = [word.replace("SOURCE", source) for word in command]
    code, page, _ = harness(*arguments, "tokenizer.vocab_size=300", "data.pack_size=64")
    assert code == 0
    assert "pack size  64 tokens" in page
    assert "2 records shown; nothing was written." in page
    assert not (tmp_path / "data").exists()


def test_a_preview_shows_no_record_beyond_the_limit_of_the_source(source):
    assert "1 record shown" in shown(source, limit=1)


def test_a_sample_of_a_long_conversation_decodes_its_beginning_alone():
    """Each run is decoded with all that is before it."""
    lengths = []

    class Words:
        def decode(self, ids):
            lengths.append(len(ids))
            return "word " * len(ids)

    view = SequenceView(np.arange(20_000, dtype=np.int32), np.arange(20_000, dtype=np.uint8) % 2)
    (sample,) = make_sample(Conversation((), "x", text="-"), [view], Words()).sequences
    assert (sample.is_whole, sum(len(text) for text, _ in sample.runs)) == (False, 6000)
    assert max(lengths) < 2000
