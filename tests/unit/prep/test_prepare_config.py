"""Every YAML file of the preparation composes into its dataclasses, and invalid settings are refused."""

from __future__ import annotations

import pytest

from harness.config import CONFIGS, compose_config
from harness.errors import ConfigError
from harness.prep import PrepareConfig

REQUIRED = {
    "source=files": ["source.path=chats"],
    "tokenizer=huggingface": ["tokenizer.name=org/name"],
    "data=pack_4k": ["data.path=data/x"],
}
CHOICES = [
    f"{group}={file.stem}"
    for group, pattern in (("source", "*.yaml"), ("tokenizer", "*.yaml"), ("data", "pack*.yaml"))
    for file in sorted((CONFIGS / group).glob(pattern))
]


def test_the_defaults_prepare_the_built_in_corpus():
    config = compose_config("prepare", PrepareConfig)
    assert isinstance(config, PrepareConfig)
    assert (config.source.resolve().kind, config.tokenizer.name, config.tokenizer.vocab_size) == ("pydoc", "", 8192)
    assert (config.data.path, config.data.pack_size) == ("data/pydoc", 4096)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_file_composes(choice):
    assert isinstance(compose_config("prepare", PrepareConfig, [choice, *REQUIRED.get(choice, [])]), PrepareConfig)


def test_a_path_alone_names_files_and_contradicts_the_built_in_corpus():
    assert compose_config("prepare", PrepareConfig, ["source.path=chats.jsonl"]).source.resolve().kind == "files"
    with pytest.raises(ConfigError, match=r"source.path would not be used"):
        compose_config("prepare", PrepareConfig, ["source=pydoc", "source.path=chats.jsonl"])


@pytest.mark.parametrize("choice", sorted(REQUIRED))
def test_a_choice_that_needs_a_name_is_refused_without_one(choice):
    with pytest.raises(ConfigError, match=r"is set"):
        compose_config("prepare", PrepareConfig, [choice])


@pytest.mark.parametrize(
    ("overrides", "columns"),
    [
        (["source.columns.messages=chat", "source.columns.role=who"], {"messages": "chat", "role": "who"}),
        (["+source.columns.messages=chat"], {"messages": "chat"}),
        (["source.columns.messages.role=who"], {"messages.role": "who"}),
        (["source.columns={messages:chat,messages.role:who}"], {"messages": "chat", "messages.role": "who"}),
        (["source.columns.output='my answer'"], {"output": "my answer"}),
        (["source.columns={}"], {}),
    ],
)
def test_columns_are_named_without_any_mark_of_hydra(overrides, columns):
    assert compose_config("prepare", PrepareConfig, overrides).source.columns == columns
