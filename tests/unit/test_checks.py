"""Bounds of settings are checked in one place, and every refusal names the setting and its bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from harness.checks import (
    NOT_SET,
    SET,
    CheckedSettings,
    Rule,
    bounded,
    check_numbers,
    one_of,
    other_than,
    require_at_least,
    require_choice,
    require_cores,
)
from harness.errors import ConfigError


def test_choices_and_minimums_name_the_setting() -> None:
    require_choice("drop", ("drop", "truncate"), setting="data.over_long")
    with pytest.raises(ConfigError, match="drop, truncate"):
        require_choice("cut", ("drop", "truncate"), setting="data.over_long")
    with pytest.raises(ConfigError, match="2,048 or more"):
        require_at_least(1024, 2048, setting="data.pack_size")


@dataclass
class Kitchen(CheckedSettings, section="kitchen"):
    stove: str = one_of("gas", ("gas", "wood"))
    pans: int = bounded(2, lowest=1)
    has_chimney: bool = False
    dishes: tuple[str, ...] = ("soup",)

    rules = (
        Rule({"kitchen.stove": "wood", "kitchen.has_chimney": False}, "smoke stays inside", "add a chimney"),
        Rule({"kitchen.pans": other_than(1, 2), "kitchen.dishes": SET}, "two hands hold two", "use fewer"),
        Rule({"kitchen.dishes": NOT_SET}, "there is nothing to cook", "cook something"),
    )


@pytest.mark.parametrize(
    ("settings", "what", "where", "fix"),
    [
        ({"stove": "coal"}, "'coal' is not known", "kitchen.stove", "choose one of: gas, wood"),
        ({"pans": 0}, "pans is 0", "kitchen.pans", "the value must be at least 1 and at most 2,147,483,647"),
        ({"stove": "wood"}, "has_chimney is false: smoke", "kitchen.stove, kitchen.has_chimney", "add a chimney"),
        (
            {"pans": 3, "dishes": ("soup", "rice")},
            "kitchen.dishes is soup, rice",
            "kitchen.pans, kitchen.dishes",
            "use fewer",
        ),
        ({"dishes": ()}, "kitchen.dishes is empty: there is nothing to cook", "kitchen.dishes", "cook something"),
    ],
)
def test_settings_check_their_numbers_choices_and_rules_when_they_are_made(settings, what, where, fix):
    with pytest.raises(ConfigError) as error:
        Kitchen(**settings)
    assert (what in error.value.what, error.value.where, error.value.fix) == (True, where, fix)


def test_settings_that_meet_only_a_part_of_a_rule_and_numbers_within_bounds_pass():
    assert Kitchen(stove="wood", has_chimney=True).pans == 2
    assert Kitchen(pans=1, dishes=("soup", "rice")).stove == "gas"
    check_numbers(Sizes(), "data")
    check_numbers(Sizes(None, (0.1, 0.9)), "data")


@dataclass
class Sizes:
    rows: int | None = bounded(4, lowest=1)
    shares: tuple[float, ...] = bounded((0.5,), above=0, below=1)


@pytest.mark.parametrize(
    ("rows", "shares", "where", "fix"),
    [
        (0, (0.5,), "data.rows", "the value must be at least 1 and at most 2,147,483,647"),
        (10**30, (0.5,), "data.rows", "the value must be at least 1 and at most 2,147,483,647"),
        (10**400, (0.5,), "data.rows", "the value must be at least 1 and at most 2,147,483,647"),
        (True, (0.5,), "data.rows", "the value must be at least 1 and at most 2,147,483,647"),
        (None, (0.5, 1.0), "data.shares", "the value must be above 0 and below 1"),
        *((None, (one,), "data.shares", "the value must be above 0 and below 1") for one in (0.0, math.nan, math.inf)),
    ],
)
def test_bounds_that_stand_beside_a_field_are_checked_by_its_name(rows, shares, where, fix):
    with pytest.raises(ConfigError) as error:
        check_numbers(Sizes(rows, shares), "data")
    assert (error.value.where, error.value.fix) == (where, fix)


def test_more_than_eight_processes_a_core_are_refused():
    require_cores(32, setting="loader.num_workers", cores=4)
    require_cores(16, setting="loader.num_workers", cores=1)
    with pytest.raises(ConfigError, match=r"33 processes on 4 cores") as error:
        require_cores(33, setting="loader.num_workers", cores=4)
    assert error.value.where == "loader.num_workers"
