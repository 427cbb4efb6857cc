"""Datasets of the hub: one split is chosen by name, downloaded into the hub's cache, and read as local files."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loopback_hub import LoopbackHub

from harness.errors import ConfigError, PrepError
from harness.prep.sources import hub
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import find_files, find_schema
from harness.prep.sources.reading import read_chunks

constants = pytest.importorskip("huggingface_hub.constants")


def chat(question):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes"}]}


def jsonl(*questions):
    return "".join(json.dumps(chat(question)) + "\n" for question in questions).encode()


def parquet(*questions):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([chat(question) for question in questions]), file)
    return file.getvalue()


CARD = b"""---
license: mit
configs:
- config_name: all
  data_files:
  - split: train
    path: data/all/train-*
  - split: test
    path: data/all/test-*
- config_name: short
  data_files:
  - split: train
    path: [data/short/*.parquet]
---
# Chats
"""
CARD_OF_PARTS = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: a/*
  - split: train
    path: [b/*]
---
"""
DATASETS = {
    "org/plain": {"README.md": b"# Chats", "chats.jsonl": jsonl("a", "b"), "dataset_infos.json": b"{}"},
    "org/splits": {
        "data/train-00000-of-00002.parquet": parquet("a", "b"),
        "data/train-00001-of-00002.parquet": parquet("c"),
        "data/test-00000-of-00001.parquet": parquet("t"),
        "README.md": b"",
    },
    "org/named": {
        "data/train_sft-00000-of-00001.parquet": parquet("s"),
        "data/train_gen-00000-of-00001.parquet": parquet("g"),
    },
    "org/card": {
        "README.md": CARD,
        "data/all/train-00000-of-00001.parquet": parquet("a1", "a2"),
        "data/all/test-00000-of-00001.parquet": parquet("a3"),
        "data/short/train-00000-of-00001.parquet": parquet("s"),
    },
    "org/parts": {"README.md": CARD_OF_PARTS, "a/train.parquet": parquet("a"), "b/train.parquet": parquet("b1", "b2")},
    "org/twice": {"chats.jsonl": jsonl("a"), "chats.parquet": parquet("a")},
    "org/held": {"chats.jsonl": jsonl("a"), "test.jsonl": jsonl("t")},
    "org/scripts": {"chats.py": b"", "README.md": b""},
    "squad": {"train/a.json": json.dumps([chat("q")]).encode(), "test/a.json": b"[]"},
}


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A hub with DATASETS, and an empty cache."""
    server = LoopbackHub(DATASETS)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield server
    server.close()


def questions(path, **settings):
    source = SourceConfig(path=path, **settings)
    files = find_files(source).files
    chunks = read_chunks(files, reader=find_schema(files, source)[0])
    return [record.messages[0].content for chunk in chunks for record in chunk.parse()]


@pytest.mark.parametrize(
    "path", ["hf://datasets/org/plain", "org/plain", "org/plain@main", "hf://datasets/org/plain@v1"]
)
def test_a_dataset_is_downloaded_once_and_its_commit_recorded(server, path):
    lines = []
    found = find_files(SourceConfig(path=path), show=lines.append)
    assert found.facts == {"dataset": "org/plain", "revision": server.commit("org/plain")}
    assert lines[0].startswith(f"dataset org/plain of the hub at {server.commit('org/plain')[:12]}: 1 file")
    assert questions(path) == ["a", "b"]
    assert server.downloaded() == ["chats.jsonl"]
    assert found.digest == find_files(SourceConfig(path=path)).digest


def test_a_new_commit_gives_another_digest(server, monkeypatch):
    before = find_files(SourceConfig(path="org/plain")).digest
    monkeypatch.setitem(server.datasets, "org/plain", {"chats.jsonl": jsonl("other")})
    after = find_files(SourceConfig(path="org/plain"))
    assert after.digest != before
    assert questions("org/plain") == ["other"]


def test_the_training_split_is_read_and_named_and_the_other_files_are_listed(server):
    lines = []
    found = find_files(SourceConfig(path="org/splits"), show=lines.append)
    assert questions("org/splits") == ["a", "b", "c"]
    assert found.facts["split"] == "train"
    assert "split train: 2 files" in lines[0]
    assert found.skipped == ("hf://datasets/org/splits/data/test-00000-of-00001.parquet",)
    assert "data/test-00000-of-00001.parquet" not in server.downloaded()


@pytest.mark.parametrize(
    ("path", "settings", "expected"),
    [
        ("org/splits", {"split": "test"}, ["t"]),
        ("hf://datasets/org/splits/test", {}, ["t"]),
        ("hf://datasets/org/splits/data", {}, ["a", "b", "c"]),
        ("hf://datasets/org/splits/data/train-00001-of-00002.parquet", {}, ["c"]),
        ("hf://datasets/org/splits/data/*-00000-*.parquet", {}, ["t", "a", "b"]),
        ("hf://datasets/org/splits/**/test*", {}, ["t"]),
        ("org/named", {"split": "train_gen"}, ["g"]),
        ("org/card", {"subset": "all"}, ["a1", "a2"]),
        ("org/card", {"subset": "all", "split": "test"}, ["a3"]),
        ("org/card", {"subset": "short"}, ["s"]),
        ("org/parts", {}, ["a", "b1", "b2"]),
        ("hf://datasets/squad", {}, ["q"]),
    ],
)
def test_splits_subsets_and_files_are_chosen_by_setting_or_path(server, path, settings, expected):
    assert questions(path, **settings) == expected


@pytest.mark.parametrize(
    ("path", "settings", "words", "fix"),
    [
        ("org/named", {}, "several splits: train_gen, train_sft", "source.split=train_gen"),
        ("org/card", {}, "has the subsets all, short", "source.subset=all"),
        ("org/card", {"subset": "long"}, "subset 'long' does not exist, only all, short", "source.subset"),
        ("org/card", {"subset": "short", "split": "test"}, "split 'test' does not exist, only train", "source.split"),
        ("org/splits", {"split": "dev"}, "split 'dev' does not exist, only test, train", "source.split"),
        ("org/held", {}, "split 'train' does not exist, only test", "source.split"),
        ("org/splits", {"subset": "x"}, "defines no subsets", "source.subset"),
        ("hf://datasets/org/splits/data/*.jsonl", {}, r"no file of the dataset matches data/\*.jsonl", "address"),
        ("org/twice", {}, r"several kinds \(.jsonl .parquet\)", "hf://datasets/org/twice/**/*.jsonl"),
        ("org/scripts", {}, "no files that end in", "@refs/convert/parquet"),
        ("org/missing", {}, "there is no such local path, and the hub has no dataset org/missing", "HF_TOKEN"),
        ("hf://datasets/org/missing", {}, "the hub has no dataset org/missing", "HF_TOKEN"),
        ("org/plain@nowhere", {}, "no revision 'nowhere'", "branch"),
    ],
)
def test_what_is_missing_or_ambiguous_is_refused_with_the_choice(server, path, settings, words, fix):
    with pytest.raises(PrepError, match=words) as error:
        find_files(SourceConfig(path=path, **settings))
    assert "org/" in error.value.where
    assert fix in error.value.fix
    assert server.downloaded() == []


@pytest.mark.parametrize("failure", ["no network", "offline", "silent", 401, 503])
def test_a_hub_that_cannot_be_reached_is_given_up_with_how_to_download(server, monkeypatch, failure):
    if failure == "no network":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif failure == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif failure == "silent":
        monkeypatch.setattr(hub, "_LISTING_S", 0.2)
        server.hang = "/api/datasets/org/plain$"
    else:
        server.faults = {"/api/datasets/org/plain": failure}
    for path in ("hf://datasets/org/plain", "org/plain"):
        with pytest.raises(PrepError, match="the hub" if failure == 401 else "the hub cannot be reached") as error:
            find_files(SourceConfig(path=path))
        assert error.value.fix
        assert failure == 401 or "hf download org/plain --repo-type dataset" in error.value.fix
    assert bool(server.requests) == (failure in ("silent", 401, 503))


def test_local_paths_are_never_looked_up_on_the_hub(server, tmp_path):
    (tmp_path / "org").mkdir()
    for path in ("org/plain", "org/chats.jsonl", "./org/x", "other/chats.jsonl", "a/b/c", "*/x"):
        with pytest.raises(PrepError, match=r"there are no chat files|does not exist"):
            find_files(SourceConfig(path=path))
    (tmp_path / "org" / "plain").mkdir()
    (tmp_path / "org" / "plain" / "a.jsonl").write_bytes(jsonl("local"))
    assert questions("org/plain") == ["local"]
    assert server.requests == []


@pytest.mark.parametrize("path", ["hf://org/plain", "hf://datasets/", "hf://models/org/name", "hf://datasets/*/x"])
def test_other_addresses_are_refused(path):
    with pytest.raises(ConfigError, match="not a dataset address of the hub"):
        find_files(SourceConfig(path=path))


@pytest.mark.parametrize("name", ["chatz/a.csv", "chatz/a.tsv", "chatz/a.jsonl.gz", "chatz/notes.md"])
def test_a_missing_file_is_not_looked_for_on_the_hub(server, name):
    with pytest.raises(PrepError, match="the file or folder does not exist"):
        find_files(SourceConfig(path=name))
