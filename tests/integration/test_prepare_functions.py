"""A user's own function is a schema: it runs in every worker, is recorded, and its failures are bad records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from harness.errors import ConfigError, PrepError
from harness.formats import load_manifest
from harness.prep import TokenizerConfig, prepare
from harness.prep.chat import BadReason, BadRecord, Conversation, RecordReader
from harness.prep.chat.reader import load_function
from harness.prep.sources.config import SourceConfig

MODULE = """
def to_messages(record):
    if record["kind"] == "skip":
        return None
    if record["kind"] == "list":
        return [record]
    turns = [("user", record["asked"]), ("assistant", record["said"])]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}
"""


def record(number: int, kind: str = "chat") -> dict[str, object]:
    return {"kind": kind, "asked": f"question {number}", "said": f"answer {number}"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module(folder: Path, name: str, text: str = MODULE) -> str:
    (folder / f"{name}.py").write_text(text)
    return f"{name}:to_messages"


def test_a_function_makes_a_conversation_of_a_record(here):
    reader = RecordReader(module(here, "plain_chats"))
    made = reader.parse(record(1), "a, line 1")
    assert isinstance(made, Conversation)
    assert [message.content for message in made.messages] == ["question 1", "answer 1"]
    assert reader.columns_to_read(["asked", "anything"]) == ["asked", "anything"]


LEAVING = "def to_messages(record):\n    raise SystemExit(0)\n"
ARRAYS = """
import numpy as np
def to_messages(record):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    made = {"messages": turns}
    (turns[0] if record["place"] == "turn" else made)["images"] = np.arange(2)
    return made
"""


@pytest.mark.parametrize(
    ("text", "given", "reason", "words"),
    [
        (MODULE, {"asked": "?"}, BadReason.FUNCTION_FAILED, "chats:to_messages raised KeyError: 'kind'"),
        (MODULE, record(1, "list"), BadReason.FUNCTION_FAILED, "chats:to_messages returned [{"),
        (MODULE, record(1, "skip"), BadReason.OMITTED, "chats:to_messages returned None"),
        (MODULE, {**record(1), "said": ""}, BadReason.EMPTY_TURN, "turn 2 (assistant) is empty"),
        (LEAVING, record(1), BadReason.FUNCTION_FAILED, "raised SystemExit"),
        (ARRAYS, {"place": "turn"}, BadReason.MEDIA, ""),
        (ARRAYS, {"place": "record"}, BadReason.MEDIA, ""),
    ],
)
def test_what_a_function_cannot_read_is_a_bad_record_with_the_reason(here, request, text, given, reason, words):
    name = f"bad_{request.node.callspec.indices['given']}_chats"
    bad = RecordReader(module(here, name, text)).parse(given, "a, line 7")
    assert isinstance(bad, BadRecord)
    assert (bad.where, bad.reason) == ("a, line 7", reason)
    assert words in bad.detail


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("nowhere_chats:to_messages", "No module named 'nowhere_chats'", "chats.py in the working folder"),
        ("known_chats:messages", "has no function 'messages'", "its functions: to_messages"),
        ("broken_chats:to_messages", "cannot be imported: SyntaxError", "an importable module"),
        ("ending_chats:to_messages", "cannot be imported: SystemExit", "an importable module"),
        ("sys:exit", "has no source file", "module that calls"),
    ],
)
def test_a_function_that_cannot_be_loaded_and_names_of_columns_are_refused(here, name, words, fix):
    module(here, "known_chats")
    module(here, "broken_chats", "def to_messages(")
    module(here, "ending_chats", "raise SystemExit(0)")
    with pytest.raises(ConfigError) as caught:
        RecordReader(name)
    assert caught.value.where == "source.schema"
    assert words in caught.value.what
    assert fix in caught.value.fix
    with pytest.raises(ConfigError, match="column names cannot be set"):
        RecordReader("known_chats:to_messages", columns={"messages": "chat"})


@pytest.mark.submission
def test_workers_call_the_function_and_another_one_is_not_taken_for_it(here):
    name = module(here, "worker_chats")
    lines = [record(number, "skip" if number % 3 == 0 else "chat") for number in range(300)] + [{"no": "kind"}]
    (here / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = SourceConfig(path="chats.jsonl", schema=name, shard_bytes=2000)
    given = (source, TokenizerConfig(vocab_size=300), "data")
    settings = {"pack_size": 64, "num_workers": 2, "console": Console(quiet=True)}
    with pytest.raises(PrepError, match="there are bad records: 1 function_failed") as refused:
        prepare(*given, **settings)
    assert "line 301: function_failed: worker_chats:to_messages raised KeyError: 'kind'" in refused.value.where
    source.on_bad = "skip"
    report = prepare(*given, **settings)
    assert (report.bad, report.dropped["omitted"]) == ({"function_failed": 1}, 100)
    manifest = load_manifest(here / "data" / "train")
    mask = manifest.provenance.mask
    assert mask["schema"] == name
    assert len(mask["schema_digest"]) == 16
    (here / "worker_chats.py").write_text(MODULE.replace("question", "Question") + "\n")
    load_function.cache_clear()  # as in another process
    with pytest.raises(ConfigError, match=f"source.schema_digest was '{mask['schema_digest']}'"):
        prepare(*given, **settings)
