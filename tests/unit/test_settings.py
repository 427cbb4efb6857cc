"""Settings as `key=value`: filled from text, explained by docstrings, refused with the nearest name."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from harness.checks import Bounds, require_bounds
from harness.cli.settings import parse_settings
from harness.errors import CheckpointError, ConfigError
from harness.settings import (
    Setting,
    explain_settings,
    find_odd,
    from_plain,
    load,
    nearest_name,
    render_settings,
    to_plain,
)


@dataclass
class Source:
    """One source.

    Attributes:
        path: where it is.
    """

    path: str = ""


@dataclass
class Inner:
    """Settings of packing.

    Attributes:
        pack_size, seed: numbers of
            the packs.
        sizes: several sizes.
    """

    pack_size: int
    seed: int = 0
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_bounds(self.pack_size, Bounds(2), "pack_size", "data")


@dataclass
class Outer:
    """Everything.

    Attributes:
        data: not a setting itself.
        name: of the whole.
        rate: share of the peak, or null.
        split: parts by name.
        blend: the sources.
    """

    data: Inner
    name: str = "x"
    rate: float | None = 0.5
    is_on: bool = False
    folder: Path = Path("here")
    split: dict[str, float] = field(default_factory=dict)
    blend: list[Source] = field(default_factory=list)


def parse(*arguments: str, base: Outer | None = None) -> Outer:
    return parse_settings(Outer, arguments, command="harness try", base=base)


def test_every_setting_has_a_key_a_type_a_default_and_an_explanation_which_yaml_has_too():
    assert explain_settings(Outer)[:5] == [
        Setting("data.pack_size", "int", "required", "numbers of the packs."),
        Setting("data.seed", "int", 0, "numbers of the packs."),
        Setting("data.sizes", "list of int", [], "several sizes."),
        Setting("name", "str", "x", "of the whole."),
        Setting("rate", "float or null", 0.5, "share of the peak, or null."),
    ]
    assert explain_settings(Outer)[-1] == Setting("blend[].path", "str", "", "where it is.")
    text = render_settings(Outer(Inner(8)))
    assert yaml.safe_load(text)["data"] == {"pack_size": 8, "seed": 0, "sizes": []}
    assert "# Settings of packing.\ndata:\n  # numbers of the packs.\n  pack_size: 8\n" in text


def test_values_have_the_types_of_their_fields_the_last_one_counts_and_the_base_has_the_rest():
    made = parse(
        *("data.pack_size=8", "data.pack_size=16", "data.sizes=[1, 2]", "name='a=b'", "rate=null", "is_on=true"),
        *("folder=a/b", "split.train=98", "split.valid.long=1"),
    )
    split = {"train": 98.0, "valid.long": 1.0}
    assert made == Outer(Inner(16, sizes=[1, 2]), "a=b", None, True, Path("a/b"), split=split)
    assert parse("name=y", base=Outer(Inner(4, seed=7))) == Outer(Inner(4, seed=7), "y")


@pytest.mark.parametrize(
    ("argument", "message", "fix"),
    [
        ("data.pack_sze=8", "unknown setting 'data.pack_sze'", "did you mean data.pack_size?"),
        ("pack_size=8", "unknown setting 'pack_size'", "did you mean data.pack_size=8?"),
        ("zzz=8", "unknown setting 'zzz'", "`harness try --cfg` prints every setting"),
        ("data.pack_size=many", "'many' is not of type int", "data.pack_size=INT"),
        ("data.sizes=[1\n2]", "is not of type list of int", "data.sizes=LIST OF INT"),
        ("rate=much", "'much' is not of type float", "rate=FLOAT"),
        ("is_on=maybe", "'maybe' is not of type bool", "is_on=BOOL"),
        ("split=1", "'1' has no names", "split.NAME=FLOAT"),
        ("data={pack_size: 8}", "data is a section of settings", "data.NAME=VALUE"),
        ("hydra.run.dir=x", "unknown setting 'hydra.run.dir'", "`harness try --cfg` prints every setting"),
        ("~data.pack_size", "~ changes groups", "data.pack_size=VALUE"),
        ("data.pack_size", "'data.pack_size' is not a setting", "key=value"),
        ("data.pack_size=1", "pack_size is 1", "at least 2"),
    ],
)
def test_a_mistake_is_one_error_with_its_fix(argument, message, fix):
    with pytest.raises(ConfigError) as error:
        parse("data.pack_size=8", argument)
    assert message in error.value.what
    assert fix in error.value.fix


def test_a_required_setting_that_is_missing_and_the_nearest_to_an_unknown_one_are_named():
    with pytest.raises(ConfigError, match=r"data\.pack_size is not set") as error:
        parse("data.seed=1")
    assert error.value.fix == "add data.pack_size=INT"
    assert nearest_name("trainer.step", ["trainer.steps", "name"]) == "trainer.steps"
    assert nearest_name("steps", ["trainer.steps", "name"]) == "trainer.steps"
    assert nearest_name("quite_other", ["trainer.steps", "name"]) is None


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ({}, None),
        ({"rate": None, "split": {"train": 1}, "blend": [{"path": "a"}]}, None),
        ([], "the file contains '[]' instead of settings"),
        ({"nam": "x"}, "there is no setting 'nam'"),
        ({"data": 3}, "data contains '3' instead of settings"),
        ({"data": {"seed": True}}, "data.seed is 'True', not of type int"),
        ({"data": {"seed": 1.5}}, "data.seed is '1.5', not of type int"),
        ({"data": {"sizes": [1, "2"]}}, "data.sizes[] is '2', not of type int"),
        ({"rate": "0.5"}, "rate is '0.5', not of type float or null"),
        ({"name": None}, "name is 'None', not of type str"),
        ({"is_on": 1}, "is_on is '1', not of type bool"),
        ({"split": {"train": "a"}}, "split[] is 'a', not of type float"),
        ({"blend": {}}, "blend is '{}', not of type list of records"),
        ({"blend": [{"path": 3}]}, "blend[].path is '3', not of type str"),
    ],
)
def test_plain_values_that_are_no_settings_are_named(values, odd):
    assert find_odd(values, Outer) == odd
    assert find_odd(to_plain(Outer(Inner(8))), Outer) is None


@dataclass
class Kinds:
    """A record with the types that settings do not have."""

    pairs: tuple[tuple[str, int], ...]
    counts: Counter[str]
    loss: float
    inner: Inner | None


def test_a_record_is_read_as_it_was_written():
    whole = Outer(Inner(8, sizes=[1, 2]), split={"train": 0.5})
    assert load(Outer, json.dumps(to_plain(whole)), where="x") == whole
    kinds = from_plain(Kinds, {"pairs": [["a", 1]], "counts": {"b": 2}, "loss": None, "inner": {"pack_size": 8}})
    assert (kinds.pairs, kinds.counts, kinds.inner) == ((("a", 1),), Counter(b=2), Inner(8))
    assert math.isnan(kinds.loss)
    assert from_plain(Inner, {"pack_size": 8, "later": 1}, lenient=True) == Inner(8)


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "maximum recursion depth"),
        (b"\xff", "'utf-8' codec can't decode"),
        ("{}", "the file is incomplete"),
        ('{"data": {}}', "data is incomplete"),
        ('{"data": {"pack_size": 8, "later": 1}}', "there is no setting 'data.later'"),
        ('{"data": {"pack_size": null}}', "data.pack_size is 'None', not of type int"),
    ],
)
def test_a_damaged_record_is_one_error_with_its_place_and_fix(text, odd):
    with pytest.raises(CheckpointError) as error:
        load(Outer, text, where="x.json", fix="delete it", what="the record is odd", error=CheckpointError)
    assert error.value.what.startswith(f"the record is odd: {odd}")
    assert (error.value.where, error.value.fix) == ("x.json", "delete it")
