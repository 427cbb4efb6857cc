"""The built-in corpus is large enough, the same on every run, and made of valid conversations."""

from __future__ import annotations

import io
import statistics
import sys

import pytest
from rich.console import Console

from harness.errors import PrepError
from harness.prep import TokenizerConfig, prepare
from harness.prep.chat import Conversation
from harness.prep.pydoc import write_pydoc_corpus
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import list_files
from harness.prep.sources.reading import read_chunks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "pydoc.jsonl"
    write_pydoc_corpus(path)
    return path


def test_the_corpus_has_at_least_8000_conversations_and_no_bad_record(corpus):
    records = [record for chunk in read_chunks(list_files(str(corpus))) for record in chunk.parse()]
    assert len(records) >= 8000
    assert all(isinstance(record, Conversation) for record in records)
    assert len({record.hash() for record in records}) == len(records)
    sizes = sorted(sum(len(message.content) for message in record.messages) for record in records)
    assert sizes[-1] > 8000
    assert statistics.median(sizes) < 500
    assert sum(len(record.messages) > 3 for record in records) > 500
    answers = [m.content for record in records for m in record.messages if m.role == "assistant"]
    # The same answer in validation and in training would make the validation loss meaningless.
    assert len(set(answers)) == len(answers)


def test_a_preparation_without_a_source_writes_the_same_corpus_and_is_reused(corpus, tmp_path):
    console, settings = Console(file=io.StringIO(), width=120), {"pack_size": 1024, "num_workers": 0}
    given = (SourceConfig(limit=400), TokenizerConfig(vocab_size=1000), tmp_path / "d")
    assert prepare(*given, console=console, **settings).records == 400
    first = "The source is the built-in corpus, Python's documentation; set source.path to use your own chats."
    assert console.file.getvalue().startswith(first)
    (written,) = (tmp_path / "d" / "source").iterdir()
    assert (written.name, written.read_bytes()) == ("pydoc.jsonl", corpus.read_bytes())
    assert prepare(*given, console=console, **settings).reused


def test_a_failing_collector_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PrepError, match=r"failed: .* exit status 1"):
        write_pydoc_corpus(tmp_path / "x.jsonl")
