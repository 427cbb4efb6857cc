"""Every setting of every command refuses by name what it cannot hold, and otherwise holds exactly what was given.

The settings and their bounds come from the dataclasses, so a new setting is tried without a line here.
"""

from __future__ import annotations

import copy
import importlib
import random
import re
import shlex
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
from harness.recipes.parity import ParityConfig
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

import harness.config
from harness.bench.sizes import Sizes
from harness.cli.app import COMMANDS as HARNESS
from harness.cli.settings import SettingsCommand, parse_settings
from harness.config import compose_config
from harness.errors import ConfigError
from harness.launch.cluster import SubmitConfig
from harness.mistakes import _VALUES, SYNONYMS, suggest_setting
from harness.plan import PretrainConfig, RunConfig, SftConfig
from harness.prep import PrepareConfig
from harness.settings import REQUIRED, Setting, explain_settings, list_rules

for module, _ in HARNESS.values():
    importlib.import_module(f"harness.cli.{module}")
RECIPES: dict[str, type[Any]] = {
    "prepare": PrepareConfig,
    "sft": SftConfig,
    "pretrain": PretrainConfig,
    "parity": ParityConfig,
    "submit": SubmitConfig,
}
COMMANDS: dict[str, type[Any]] = {
    **{
        command.schema.__name__: command.schema
        for command in SettingsCommand.__subclasses__()
        if not command.is_composed
    },
    "harness bench": Sizes,
}
NUMBERS = ("-1", "0", "1", "2.7", "1e30", "1" + "0" * 30, "nan", "inf", "-inf", "'1'")
OTHERS = ("words", "[1, 2]", "{a: 1}", "null", "true", "")


def kind_of(setting: Setting) -> str:
    return setting.type.removesuffix(" or null").removeprefix("list of ").removeprefix("map of ")


@pytest.mark.parametrize("schema", [*RECIPES.values(), *COMMANDS.values()], ids=[*RECIPES, *COMMANDS])
def test_every_setting_is_explained_and_every_number_has_a_lowest_and_a_highest_value(schema):
    unbounded = [
        setting.key
        for setting in explain_settings(schema)
        if kind_of(setting) in ("int", "float")
        and (
            setting.bounds is None
            or (setting.bounds.lowest is None and setting.bounds.above is None)
            or (setting.bounds.highest is None and setting.bounds.below is None)
        )
    ]
    assert unbounded == []
    assert [setting.key for setting in explain_settings(schema) if not setting.text] == []


@pytest.mark.parametrize("schema", [*RECIPES.values(), *COMMANDS.values()], ids=[*RECIPES, *COMMANDS])
def test_every_rule_names_settings_that_exist(schema):
    known = {setting.key for setting in explain_settings(schema)}
    assert [name for rule in list_rules(schema) for name in rule.settings if name not in known] == []


@pytest.fixture
def compose_quickly(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[str], Any]]:
    """Return a function that composes a recipe's files once, and then as `compose_config` with one setting each."""
    compose = harness.config.compose

    def of(recipe: str) -> Callable[[str], Any]:
        compose_config(recipe, RECIPES[recipe])
        files = []
        monkeypatch.setattr(
            harness.config, "compose", lambda *args, **given: files.append(compose(*args, **given)) or files[0]
        )
        compose_config(recipe, RECIPES[recipe])

        groups, unchanged = files[0].__dict__["_content"], {}

        def applied(root: str, overrides: list[str]) -> Any:
            groups.update(unchanged)
            for text in overrides:  # copying all groups would take most of the time
                name = text.lstrip("+~").partition("=")[0].partition(".")[0]
                unchanged[name] = groups[name]
                groups[name] = copy.deepcopy(groups[name])
            parsed = OverridesParser.create().parse_overrides(overrides)
            ConfigLoaderImpl._apply_overrides_to_config(parsed, files[0])
            return files[0]

        monkeypatch.setattr(harness.config, "compose", applied)
        monkeypatch.setattr(harness.config, "_check_files", lambda *args: {})
        monkeypatch.setattr(ConfigStore, "store", lambda *args, **given: None)
        return lambda text: compose_config(recipe, RECIPES[recipe], [text])

    return of


# Of the values of each setting a quarter, and every night all.
SHARES = (4, pytest.param(1, marks=pytest.mark.nightly))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_refuses_by_name_or_holds_exactly(recipe, share, compose_quickly):
    shared = {setting.key for setting in explain_settings(RunConfig)} if recipe == "pretrain" else set()
    settings = [setting for setting in explain_settings(RECIPES[recipe]) if setting.key not in shared]
    assert find_wrong(settings, compose_quickly(recipe), share) == []


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_by_name_or_holds_exactly(command, share):
    schema = COMMANDS[command]
    settings = explain_settings(schema)
    required = [f"{setting.key}=8" for setting in settings if setting.default == REQUIRED]
    parse = partial(parse_settings, schema, command=command)
    assert find_wrong(settings, lambda text: parse([*required, text]), share) == []


TRAINED = ("prepare", "sft", "pretrain")
# Accepted with another setting only: several pipeline stages, a packed dataset, experts, chats of one's own.
DEPENDING = {
    *("parallel.pipeline_layout=some/name", "parallel.virtual_pipeline_parallel_size=8", "trainer.epochs=8"),
    *("model.experts_per_token=8", "model.aux_loss=0.5", "source.split=some/name", "source.subset=some/name"),
    "parallel.overlap_weights_with_step=true",
}
VALUES = {"int": ("8",), "float": ("0.5",), "bool": ("true",), "str": ("some/name",)}


def suggested(recipe: str, asked: str) -> set[str]:
    """Return the settings of a recipe that are suggested for the words of other tools where `asked` runs."""
    known = {setting.key for setting in explain_settings(RECIPES[asked])}
    kinds = {setting.key: kind_of(setting) for one in TRAINED for setting in explain_settings(RECIPES[one])}
    found = set()
    for word, meant in SYNONYMS.items():
        name = next((name for name in meant.split("|") if name in known), meant.split("|")[-1])
        theirs = re.findall(r"[^\s=,]+", _VALUES.get(name, ""))
        for value in ("true", "false", "nonsense") if "=" in name else theirs or VALUES[kinds.get(name, "str")]:
            hint = suggest_setting(word, value, known)
            homes = {f"harness train {recipe}", f"harness {recipe}"}
            if (here := re.fullmatch(r"did you mean (.*)\? ", hint)) and asked == recipe:
                found |= set(shlex.split(here[1]))
            elif (home := re.fullmatch(r"`(harness (?:train )?\w+) (.*)` sets it; ", hint)) and home[1] in homes:
                found |= set(shlex.split(home[2]))
    return found


@pytest.mark.submission
@pytest.mark.parametrize("recipe", TRAINED)
def test_what_is_suggested_for_the_words_of_other_tools_is_accepted(recipe, compose_quickly):
    texts = set().union(*(suggested(recipe, asked) for asked in TRAINED))
    names = {setting.key for setting in explain_settings(RECIPES[recipe])}
    assert {text for text in texts if text.partition("=")[0] not in names} == set()
    settings_with = compose_quickly(recipe)
    refused = {}
    for text in sorted(text for text in texts if "=" in text):
        try:
            settings_with(text)
        except ConfigError as error:
            refused[text] = str(error)
    assert refused.keys() <= DEPENDING, "\n".join(refused.values())
    assert sum("=" in text for text in texts) > 8


def find_wrong(settings: list[Setting], settings_with: Callable[[str], Any], share: int) -> list[str]:
    wrong = []
    for setting in settings:
        # Text holds any number as it is written.
        values = ("1e30", "'1'", *OTHERS) if kind_of(setting) == "str" else (*NUMBERS, *OTHERS)
        for value in random.Random(setting.key).sample(values, len(values) // share):
            above, is_record, name = setting.key.partition("[].")
            text = f"{above}=[{{{name}: {value}}}]" if is_record else f"{setting.key}={value}"
            try:
                config = settings_with(text)
            except ConfigError as error:
                names = above.split(".")[-2:]
                if not any(part in str(error) for part in names) or not error.fix or not error.where:
                    wrong.append(f"{text}: {error}")
                continue
            except Exception as error:
                wrong.append(f"{text}: {type(error).__name__}: {error}")
                continue
            places = {one.metadata.get("key"): one.name for one in config.__dataclass_fields__.values()}
            held = attrgetter(places.get(above, above))(config)
            held = getattr(held[0], name) if is_record else held
            if not is_held(setting, value, held):
                wrong.append(f"{text} is {held!r}")
    return wrong


def is_held(setting: Setting, value: str, held: Any) -> bool:
    plain, kind = value.strip("'"), kind_of(setting)
    if setting.bounds is not None and isinstance(held, int | float) and held not in setting.bounds:
        return False
    if value == "null":
        # A command without files has no null but that of optional settings.
        return held is None if "or null" in setting.type else held == "null"
    if isinstance(held, list | tuple | dict):
        items = {"[1, 2]": ["1", "2"], "{a: 1}": ["1"]}.get(value, [plain] if plain else [])
        values = [held["a"]] if isinstance(held, dict) and items else list(held)
        return [str(item) for item in values] == [str(float(item)) if kind == "float" else item for item in items]
    if kind == "bool":
        return held is {"true": True, "1": True, "0": False}[plain]
    if kind in ("int", "float"):
        return type(held).__name__ == kind and float(held) == float(plain)
    return str(held) in (plain, value)


@pytest.mark.parametrize("text", ["+no.such=1", "++other.key=3", "no=1", "~no", "++data={no: 1}"])
def test_an_unknown_setting_is_refused_whatever_its_prefix(text):
    with pytest.raises(ConfigError, match=r"no|other\.key"):
        compose_config("sft", SftConfig, [text])
