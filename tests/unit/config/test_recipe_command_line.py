"""The command line of a recipe: its flags, a user's own folder of YAML files, and the parts that Hydra carries out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from forks import run_in_forks

from harness.arguments import Options
from harness.config import CONFIGS, compose_config, compose_run
from harness.errors import ConfigError
from harness.plan import SftConfig


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder, with characters that a shell or Hydra could misread."""
    folder = tmp_path / "my own, configs"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: tiny\nname: mine\ntrainer:\n  steps: 7\n"
    )
    (folder / "larger.yaml").write_text("defaults:\n  - sft\n  - _self_\nname: larger\n")
    return folder


def test_settings_and_flags_are_separated(tmp_path):
    options = Options.parse(
        ["a=1", "--config-dir", str(tmp_path), "--config-name=mine", "+b.c=2", "--cfg", "a=--cfg"],
        where="harness.recipes.sft",
    )
    assert options == Options(["a=1", "+b.c=2", "a=--cfg"], tmp_path, "mine", show=True)
    assert Options.parse(["a=1", "--cfg", "job", "b=2"], where="") == Options(
        ["a=1", "b=2"], hydra_flags=["--cfg", "job"]
    )
    assert Options.parse(["--multirun", "a=1,2"], where="") == Options(["a=1,2"], hydra_flags=["--multirun"])
    assert Options.parse(["--info", "plugins"], where="").hydra_flags == ["--info", "plugins"]
    assert Options.parse(["--cfg", "a=1"], where="") == Options(["a=1"], show=True)
    assert Options.parse(["--cfg=job", "a=1"], where="") == Options(["a=1"], hydra_flags=["--cfg", "job"])


def test_a_path_in_the_home_folder_is_no_folder_of_that_name(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = ["data.path=~/data", "+run_dir=~/run", "source.path=~/chats.jsonl", "name=a~/b", "tokenizer.name=~/model"]
    there = ["data.path=/home/me/data", "+run_dir=/home/me/run", *given[2:]]
    assert Options.parse(given, where="").overrides == there
    assert Options.parse(given, where="", num_names=None).overrides == there


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--confg", "unknown flag --confg"),
        ("--config-dir", "--config-dir has no value"),
        ("--config-dir=nowhere", "the folder does not exist"),
        ("--config-path=x", "--config-path would replace every file"),
        ("--resolve", "unknown flag --resolve"),
        ("--preview", "--preview has no value"),
        ("--preview=", "--preview has no value"),
        ("--config-dir=", "--config-dir has no value"),
        ("--config-name=", "--config-name has no value"),
        ("--cfg=", "--cfg has no view ''"),
        ("--cfg=jobs", "--cfg has no view 'jobs'"),
        ("chats.jsonl", "'chats.jsonl' is not a setting"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_refused(argument, message):
    with pytest.raises(ConfigError, match=message):
        Options.parse([argument], where="harness.recipes.sft")


def test_an_experiment_of_a_users_own_folder_composes_with_the_built_in_groups(own):
    config = compose_config("sft", SftConfig, ["experiment=mine", "model=qwen3_0_6b"], config_dir=own)
    assert (config.name, config.trainer.steps, config.model.family) == ("mine", 7, "qwen3")
    assert compose_config("sft", SftConfig, config_dir=own, config_name="larger").name == "larger"
    composed = compose_run("mine", ["trainer.eval_interval=3"], config_dir=own)
    assert composed.arguments == ("--config-dir", str(own), "experiment=mine", "trainer.eval_interval=3")
    assert (composed.module, composed.config.trainer.steps) == ("harness.recipes.sft", 7)
    assert compose_run("pretrain", ["data.path=x"]).module == "harness.recipes.pretrain"


def test_an_unknown_experiment_names_the_nearest_one_and_all(own):
    with pytest.raises(ConfigError) as error:
        compose_run("mine_", [], config_dir=own)
    assert error.value.fix.startswith("did you mean mine? one of ")
    assert all(path.stem in error.value.fix for path in (CONFIGS / "experiment").glob("*.yaml"))


def test_a_file_that_does_not_exist_is_refused_with_the_nearest_name(own):
    with pytest.raises(ConfigError, match=r"no file largr\.yaml") as error:
        compose_config("sft", SftConfig, config_dir=own, config_name="largr")
    assert error.value.fix.startswith("did you mean larger?")


def test_an_experiment_that_forgets_its_package_names_the_missing_line(own):
    (own / "experiment" / "bare.yaml").write_text("trainer:\n  steps: 7\n")
    with pytest.raises(ConfigError) as error:
        compose_run("bare", [], config_dir=own)
    assert "# @package _global_" in error.value.fix


def test_a_mistake_in_a_file_is_reported_with_the_file_and_the_setting(own):
    (own / "experiment" / "wrong.yaml").write_text("# @package _global_\ntrainer:\n  stepz: 7\n")
    with pytest.raises(ConfigError, match=r"unknown setting 'trainer.stepz'") as error:
        compose_run("wrong", [], config_dir=own)
    assert error.value.where == f"{own}/experiment/wrong.yaml, key trainer.stepz"
    assert error.value.fix.startswith("did you mean trainer.steps?")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: {num_layers: 2.7}", "2.7 is not of type int"),
        ("trainer: {steps: 1:30}", "1:30 is read as 90"),
        ("loader: {persistent_workers: 2}", "2 is not of type bool"),
        ("name: 1:30", "name: 1:30 is read as 90"),
        ("name: no", "name: no is read as False"),
        ("trainer: {sample_prompts: [1e3]}", "1e3 is read as 1000.0"),
        ("trainer: {sample_prompts: [[a]]}", "['a'] is not an item of trainer.sample_prompts"),
        ("data: {evaluation: {new: 007}}", "007 is read as 7"),
        ("data: {blend: [{path: a, epochs: 2.7}]}", "2.7 is not of type int"),
        ("optimizer: {lr: fast}", "'fast' is not of type float"),
    ],
)
def test_a_value_in_a_file_that_would_be_changed_is_refused_with_the_file(own, content, message):
    (own / "experiment" / "changed.yaml").write_text(f"# @package _global_\n{content}\n")
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        compose_run("changed", [], config_dir=own)
    assert f"{own}/experiment/changed.yaml" in error.value.where


def test_a_value_in_a_file_is_held_as_it_is_written(own):
    (own / "experiment" / "kept.yaml").write_text(
        "# @package _global_\nname: 2026\ntrainer: {steps: 1_000, sample_prompts: ['1e3', 7]}\n"
        "optimizer: {lr: 1e-3, decay_steps: 0x10}\nloader: {persistent_workers: no}\n"
    )
    config = compose_run("kept", [], config_dir=own).config
    assert (config.name, config.trainer.steps, config.trainer.sample_prompts) == ("2026", 1000, ["1e3", "7"])
    assert (config.optimizer.lr, config.optimizer.decay_steps, config.loader.persistent_workers) == (1e-3, 16, False)


@pytest.mark.parametrize("name", ["pretrain", "bare"])
def test_the_file_of_another_recipe_is_refused(own, name):
    (own / "bare.yaml").write_text("trainer:\n  steps: 7\n")
    with pytest.raises(ConfigError, match=rf"{name}.yaml is a file of another recipe") as error:
        compose_config("sft", SftConfig, config_dir=own, config_name=name)
    assert "defaults: [sft, _self_]" in error.value.fix


# A job that composes the settings of another recipe, as those that start runs do.
PROGRAM = """
def run(config):
    compose_config('pretrain', PretrainConfig)
    print('run', config.trainer.steps, config.run_dir)
hydra_entry('sft', SftConfig, run)()
"""


def run_recipe(folder: Path, *commands: list[object]) -> list[tuple[int, str, str]]:
    names = "from harness.config import compose_config, hydra_entry\nfrom harness.plan import PretrainConfig, SftConfig"
    program, imports = PROGRAM, f"import hydra\n{names}"
    return run_in_forks(imports, program, commands, cwd=folder)


def test_hydra_prints_its_own_view_of_the_settings_and_sweeps_in_folders_of_their_own(own, tmp_path):
    more = ["trainer.eval_interval=1", "--config-dir", own, "--config-name", "larger", "--cfg", "job"]
    sweep = ["--multirun", "trainer.steps=3,4", "hydra.sweep.dir=sweep"]
    ended = run_recipe(tmp_path, [*more, "trainer.steps=3"], ["--info", "defaults"], ["--help"], sweep)
    assert [code for code, _, _ in ended] == [0, 0, 0, 0], ended
    settings, defaults, printed, swept = (output for _, output, _ in ended)
    found = yaml.safe_load(settings)
    assert (found["name"], found["trainer"]["steps"]) == ("larger", 3)
    assert "Defaults List" in defaults
    assert "experiment=" in printed
    lines = [line for line in swept.splitlines() if line.startswith("run ")]
    assert lines == [f"run {steps} {tmp_path}/sweep/{number}/run" for number, steps in enumerate((3, 4))]


def test_help_names_only_groups_and_files_of_the_command(harness):
    _, printed, _ = harness("prepare", "--help")
    assert "  data=  pack, pack_1k, pack_4k, train\n" in printed
    assert "harness prepare --cfg" in printed
    for other in ("experiment=", "cluster=", "model=", "harness.recipes.prepare"):
        assert other not in printed


def test_hydras_own_command_line_explains_mistakes_in_our_words_and_runs_nothing(own, tmp_path):
    (own / "experiment" / "changed.yaml").write_text("# @package _global_\nname: no\n")
    mistakes = {
        "'soon' is not of type int": ["--cfg", "job", "trainer.steps=soon"],
        "the value '[a' cannot be read": ["--info", "config", "name=[a"],
        "steps is 0": ["--multirun", "trainer.steps=0,1", "hydra.sweep.dir=sweep"],
        f"{own}/experiment/changed.yaml": ["--config-dir", own, "--multirun", "experiment=changed"],
    }
    for message, (code, output, error) in zip(mistakes, run_recipe(tmp_path, *mistakes.values()), strict=True):
        assert (code, "run " in output) == (2, False), error
        assert message in error
        for word in ("Traceback", "Could not", "HYDRA_FULL_ERROR"):
            assert word not in error


@pytest.mark.parametrize("content", ["[1, 2]\n", "- num_layers: 2\n", "5\n", "two layers\n", "[" * 3000])
def test_a_file_that_holds_no_settings_is_refused(own, content):
    (own / "model").mkdir(exist_ok=True)
    (own / "model" / "odd.yaml").write_text(content)
    with pytest.raises(ConfigError):
        compose_config("sft", SftConfig, ["model=odd"], config_dir=own)
