"""Engines are checked before any work begins."""

from __future__ import annotations

import importlib.util
import os

import pytest

from harness.errors import ConfigError
from harness.prep import PrepareConfig, prepare
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def test_ray_is_refused_before_anything_is_written_where_it_is_not_installed(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    config = PrepareConfig(engine="ray")
    config.data.path = str(tmp_path / "out")
    with pytest.raises(ConfigError, match="Ray is not installed") as raised:
        prepare(config)
    assert "engine=local" in raised.value.fix
    assert not (tmp_path / "out").exists()


def test_loading_a_tokenizer_leaves_the_environment_as_it_was(tmp_path, monkeypatch):
    monkeypatch.delenv(ADVICE, raising=False)
    with pytest.raises(ConfigError):
        ChatTokenizer(TokenizerConfig(kind="huggingface", name=str(tmp_path)))
    assert ADVICE not in os.environ
    monkeypatch.setenv(ADVICE, "0")
    with pytest.raises(ConfigError):
        ChatTokenizer(TokenizerConfig(kind="huggingface", name=str(tmp_path)))
    assert os.environ[ADVICE] == "0"
