"""Every settings file composes into its dataclasses, and a mistake is one clear error."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from harness.config import CONFIGS, compose_config
from harness.errors import ConfigError
from harness.plan import SftConfig
from harness.prep import PrepareConfig

RECIPES = {"sft": SftConfig, "prepare": PrepareConfig}
REQUIRED = {
    "source=files": ["source.path=chats"],
    "tokenizer=huggingface": ["tokenizer.name=org/name"],
    "data=pack_4k": ["data.path=data/x"],
}
# Models and layouts are composed in tests/unit/plan.
CHOICES = [
    (recipe, f"{group}={file.stem}")
    for recipe, groups in {
        "sft": {"data": "train*.yaml", "schedule": "*.yaml", "trainer": "*.yaml"},
        "prepare": {"source": "*.yaml", "tokenizer": "*.yaml", "data": "pack*.yaml"},
    }.items()
    for group, pattern in groups.items()
    for file in sorted((CONFIGS / group).glob(pattern))
]


@pytest.mark.parametrize(("recipe", "choice"), CHOICES)
def test_every_file_composes_and_a_choice_that_needs_a_name_is_refused_without_one(recipe, choice):
    required = REQUIRED.get(choice, [])
    assert isinstance(compose_config(recipe, RECIPES[recipe], [choice, *required]), RECIPES[recipe])
    if required:
        with pytest.raises(ConfigError, match=r"is set"):
            compose_config(recipe, RECIPES[recipe], [choice])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loader.path=x", "path"),
        ("modle.num_layers=2", "did you mean model.num_layers=2?"),
        ("model=qwen3_0_6", "did you mean model=qwen3_0_6b?"),
        ("modell=tiny", "did you mean model?"),
        ("trainer.lr=1", "did you mean optimizer.lr=1?"),
        ("model=huge", "the group model has no file 'huge'"),
        ("trainer.eval_interval=null", "trainer.eval_interval cannot be null"),
        ("trainer.steps=[1", "the value '[1' cannot be read"),
        ("data.path=a,b", "the value 'a,b' can be read in several ways"),
        ("hydra/launcher=basic", "this setting is used by Hydra's own command line"),
        ("data.blend=3", "data.blend is a list"),
        ("data.blend=[{path:a,wieght:2}]", "unknown setting 'wieght'"),
        ("optimizer=adam", "optimizer is a section of settings"),
        ("trainer=3", "the group trainer has no file '3'"),
        ("+trainer.steps=1", "+ changes groups, and trainer.steps is a setting"),
        ("=3", "'=3' is not a setting"),
        ("schedule.name=best", "'best' is not known"),
        ("name=${nope}", "the reference ${nope} names no setting"),
        ("trainer.trackers=[wandbb]", "trackers are wandbb"),
        ("model.hidden_size=12", "rotates 3 of the 3 numbers of a head"),
    ],
)
def test_a_mistake_in_a_setting_is_refused_before_anything_starts(override, message):
    with pytest.raises(ConfigError) as error:
        compose_config("sft", SftConfig, [override])
    assert message in str(error.value)
    for word in ("search path", "Could not", "override", "Config'", "input"):
        assert word not in str(error.value)
    assert error.value.fix


@pytest.mark.parametrize(
    ("recipe", "override", "pasted"),
    [
        ("prepare", "source.path=a.jsonl,b.jsonl", "source.mix='[{path: a.jsonl}, {path: b.jsonl}]'"),
        ("prepare", "source.path=[a.jsonl,b.jsonl]", "source.mix='[{path: a.jsonl}, {path: b.jsonl}]'"),
        ("prepare", "source.mix=a.jsonl,b.jsonl", "source.mix='[{path: a.jsonl}, {path: b.jsonl}]'"),
        ("prepare", "source.mix=[a.jsonl,b.jsonl]", "source.mix='[{path: A}, {path: B}]'"),
        ("prepare", "source.mix=a.jsonl", "source.mix='[{path: A}, {path: B}]'"),
        ("sft", "data.path=a,b", "data.blend='[{path: a}, {path: b}]'"),
        ("sft", "data.path=a,b", "data.path=\"'a,b'\""),
        ("sft", "data.path=[a,b]", "data.blend='[{path: a}, {path: b}]'"),
        ("sft", "data.blend=[a,b]", "data.blend='[{path: A}, {path: B}]'"),
        ("sft", "trainer.trackers=wandb,mlflow", "trainer.trackers='[wandb, mlflow]'"),
        ("sft", "trainer.trackers=wandb", "trainer.trackers='[A, B]'"),
        ("sft", "name=[a,b]", "name=TEXT"),
    ],
)
def test_a_list_or_text_in_the_place_of_the_other_is_refused_with_a_line_that_composes(recipe, override, pasted):
    schema = {"prepare": PrepareConfig, "sft": SftConfig}[recipe]
    with pytest.raises(ConfigError) as error:
        compose_config(recipe, schema, [override])
    assert pasted in error.value.fix
    if "[A, B]" not in pasted:  # no trackers have these names
        compose_config(recipe, schema, shlex.split(pasted))


def test_the_defaults_prepare_the_built_in_corpus():
    config = compose_config("prepare", PrepareConfig)
    assert (config.source.resolve().kind, config.tokenizer.name, config.tokenizer.vocab_size) == ("pydoc", "", 8192)
    assert (config.data.path, config.data.pack_size) == ("data/pydoc", 4096)


def test_a_path_alone_names_files_and_contradicts_the_built_in_corpus():
    assert compose_config("prepare", PrepareConfig, ["source.path=chats.jsonl"]).source.resolve().kind == "files"
    with pytest.raises(ConfigError, match=r"source.path would not be used"):
        compose_config("prepare", PrepareConfig, ["source=pydoc", "source.path=chats.jsonl"])


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


def test_a_file_that_is_not_yaml_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "sft.yaml").write_text("name: mine\nname is: [\n")
    monkeypatch.setattr("harness.config.CONFIGS", tmp_path)
    with pytest.raises(ConfigError, match=r"sft.yaml.*, line 3") as error:
        compose_config("sft", SftConfig)
    assert "sft.yaml" in error.value.where


def test_a_path_that_is_too_long_for_the_system_is_refused():
    with pytest.raises(ConfigError, match="File name too long"):
        compose_config("sft", SftConfig, [f"model.init_from={'x' * 300}"])


def test_library_modules_need_neither_torch_nor_hydra():
    """The packages are blocked in a process of its own, which imports what a machine that prepares data uses."""
    blocked = ("torch", "megatron", "transformer_engine", "hydra", "omegaconf", "transformers", "tokenizers")
    program = f"""
import importlib, sys
for name in {blocked!r}:
    sys.modules[name] = None
from harness.cli.app import COMMANDS
for module, _ in COMMANDS.values():
    importlib.import_module("harness.cli." + module)
import harness.formats, harness.prep.packing, harness.thd
import harness.schedule.batch, harness.loader.order, harness.loader.state, harness.loader.live.produce
from harness import Loader, LoaderConfig
from harness.formats import FORMATS, load_format
for name in FORMATS:
    load_format(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
