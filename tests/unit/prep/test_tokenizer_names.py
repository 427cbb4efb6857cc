"""A tokenizer's name is a folder or a repository of the hub; anything else is refused after one request at most."""

from __future__ import annotations

import json
import os
import sys

import pytest
from tokenizers import Tokenizer, decoders, models

from harness.errors import ConfigError
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, train_bpe
from tests.samples.loopback_hub import LoopbackHub, cache_model

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub without models, and an empty cache."""
    server = LoopbackHub({})
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield server
    server.close()


def asked(hub):
    """Return the requests for a model; huggingface_hub makes others of its own, once a process."""
    return [request for request in hub.requests if "tokeniz" in request]


def load(name):
    return ChatTokenizer(TokenizerConfig(name=name, mask="all"))


def refusal(name):
    with pytest.raises(ConfigError) as error:
        load(name)
    assert error.value.where == name
    return error.value


@pytest.mark.parametrize("name", ["data/my/tokenizr", "./tokenizr", "/none/tokenizr", "my tokenizr", "hub@main"])
def test_a_path_that_cannot_be_a_hub_id_is_refused_without_a_request(hub, name):
    assert "tokenizer folder does not exist" in refusal(name).what
    assert asked(hub) == []


def test_a_name_that_the_hub_does_not_have_is_refused_after_one_request(hub, tmp_path):
    (tmp_path / "data" / "tokenizer").mkdir(parents=True)
    error = refusal("data/tokenizr")
    assert "the hub has no model" in error.what
    assert "did you mean data/tokenizer?" in error.fix
    assert asked(hub) == ["GET /api/models/data/tokenizr"]


def test_a_hub_that_fails_is_asked_once(hub):
    hub.faults = {"": 503}
    error = refusal("org/tokenizer")
    assert "the hub cannot be reached" in error.what
    assert "hf download org/tokenizer" in error.fix
    assert asked(hub) == ["GET /api/models/org/tokenizer"]


def test_offline_mode_makes_no_request(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal("org/tokenizer").what
    assert asked(hub) == []


def test_a_cached_tokenizer_loads_while_the_hub_is_down(hub, tmp_path):
    hub.faults = {"": 503}
    train_bpe(["a word", "another word"], tmp_path / "made", vocab_size=270)
    cache_model(tmp_path / "cache", tmp_path / "made", "org/tokenizer")
    assert load("org/tokenizer").tokenizer_hash == load(str(tmp_path / "made")).tokenizer_hash
    assert asked(hub) == ["GET /api/models/org/tokenizer"]


def test_the_name_of_a_file_is_refused_with_its_folder(hub, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    error = refusal(str(tmp_path / "tokenizer.json"))
    assert error.fix == f"set tokenizer.name={tmp_path}"
    assert asked(hub) == []


def test_a_folder_with_code_of_its_own_is_refused_and_standard_input_is_no_consent(tmp_path, monkeypatch):
    folder, marker = tmp_path / "tokenizer", tmp_path / "marker"
    folder.mkdir()
    config = {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": ["planted.Planted", "planted.Planted"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "planted.py").write_text(f"open({str(marker)!r}, 'w')\nclass Planted: ...\n")
    usual, (reads, writes) = os.dup(0), os.pipe()
    os.write(writes, b"yes\n" * 9)
    os.close(writes)
    os.dup2(reads, 0)
    monkeypatch.setattr(sys, "stdin", open(0, closefd=False))  # noqa: SIM115
    try:
        error = refusal(str(folder))
    finally:
        os.dup2(usual, 0)
    assert "the tokenizer cannot be loaded" in error.what
    assert error.fix.startswith("its Python code is never run: remove auto_map")
    assert not marker.exists()


@pytest.mark.parametrize("before", [None, "0"])
def test_loading_a_tokenizer_leaves_the_environment_as_it_was(tmp_path, monkeypatch, before):
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refusal(str(tmp_path)).what
    assert os.environ.get(name) == before


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    empty = Tokenizer(models.BPE())
    empty.decoder = decoders.ByteLevel()
    empty.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no tokens") as caught:
        ChatTokenizer(TokenizerConfig(name=str(tmp_path)))
    assert caught.value.where == str(tmp_path)
