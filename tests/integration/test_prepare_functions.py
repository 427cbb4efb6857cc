"""A user's own function is a schema: it runs in every worker, is recorded, and its failures are bad records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.formats import load_manifest
from harness.prep.chat import BadReason, BadRecord, Conversation, RecordReader

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


def prepare(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "harness", "prepare", "source.path=chats.jsonl", "data.path=data", *settings]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_function_makes_a_conversation_of_a_record(here):
    reader = RecordReader(module(here, "plain_chats"))
    made = reader.parse(record(1), "a, line 1")
    assert isinstance(made, Conversation)
    assert [message.content for message in made.messages] == ["question 1", "answer 1"]
    assert reader.columns_to_read(["asked", "anything"]) == ["asked", "anything"]


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        ({"asked": "?"}, BadReason.FUNCTION_FAILED, "bad_chats:to_messages raised KeyError: 'kind'"),
        (record(1, "list"), BadReason.FUNCTION_FAILED, "bad_chats:to_messages returned [{"),
        (record(1, "skip"), BadReason.UNWANTED, "bad_chats:to_messages returned None"),
        ({**record(1), "said": ""}, BadReason.EMPTY_TURN, "turn 2 (assistant) is empty"),
    ],
)
def test_what_a_function_cannot_read_is_a_bad_record_with_the_reason(here, given, reason, words):
    bad = RecordReader(module(here, "bad_chats")).parse(given, "a, line 7")
    assert isinstance(bad, BadRecord)
    assert (bad.where, bad.reason) == ("a, line 7", reason)
    assert words in bad.detail


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("nowhere_chats:to_messages", "No module named 'nowhere_chats'", "chats.py in the working folder"),
        ("known_chats:messages", "has no function 'messages'", "its functions: to_messages"),
        ("broken_chats:to_messages", "cannot be imported: SyntaxError", "an importable module"),
        ("sys:exit", "has no source file", "module that calls"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused(here, name, words, fix):
    module(here, "known_chats")
    module(here, "broken_chats", "def to_messages(")
    with pytest.raises(ConfigError) as caught:
        RecordReader(name)
    assert caught.value.where == "source.schema"
    assert words in caught.value.what
    assert fix in caught.value.fix


def test_a_function_takes_no_names_of_columns(here):
    with pytest.raises(ConfigError, match="column names cannot be set"):
        RecordReader(module(here, "column_chats"), columns={"messages": "chat"})


def test_workers_call_the_function_and_another_one_is_not_taken_for_it(here):
    name = module(here, "worker_chats")
    lines = [record(number) for number in range(300)] + [{"no": "kind"}]
    (here / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = (f"source.schema={name}", "tokenizer.vocab_size=300", "data.pack_size=64", "source.shard_bytes=2000")
    refused = prepare(here, *settings, "data.num_workers=2")
    assert refused.returncode != 0
    assert "line 301: function_failed: worker_chats:to_messages raised KeyError: 'kind'" in refused.stderr
    done = prepare(here, *settings, "data.num_workers=2", "source.on_bad=skip")
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(here / "data" / "train")
    assert manifest is not None
    mask = manifest.provenance.mask
    assert mask["schema"] == name
    assert len(mask["schema_digest"]) == 16
    (here / "worker_chats.py").write_text(MODULE.replace("question", "Question") + "\n")
    other = prepare(here, *settings, "source.on_bad=skip")
    assert other.returncode != 0
    assert f"source.schema_digest was '{mask['schema_digest']}'" in other.stderr
