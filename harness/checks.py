"""Checks of settings that the configuration dataclasses of this package share."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import operator
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from harness.errors import ConfigError

# Counts, sizes and seeds stay below it, so that their products fit 64 bits and libraries that take 32 bits take them.
LARGEST = 2**31 - 1
# 30 days: clocks of threads and of the operating system take no longer waits.
LONGEST_S = 30 * 24 * 3600
PROCESSES_PER_CORE = 8
# What the metadata of a field of settings has.
BOUNDS, CHOICES, KEY = "bounds", "choices", "key"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of a number: `lowest` and `highest` are allowed themselves, `above` and `below` are not."""

    lowest: float | None = None
    above: float | None = None
    highest: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            isinstance(value, numbers.Real)
            and not isinstance(value, bool)
            and abs(value) < math.inf  # false for NaN
            and (self.lowest is None or value >= self.lowest)
            and (self.above is None or value > self.above)
            and (self.highest is None or value <= self.highest)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        texts = {"lowest": "at least {:,}", "above": "above {:,}", "highest": "at most {:,}", "below": "below {:,}"}
        given = [text.format(getattr(self, name)) for name, text in texts.items() if getattr(self, name) is not None]
        return " and ".join(given) or "a finite number"


def bounded(default: Any = dataclasses.MISSING, *, key: str | None = None, **others: Any) -> Any:
    """Declare a field of a settings dataclass that is a number, or numbers, within bounds: see `Bounds`.

    `num_workers: int = bounded(2, lowest=0)`. `CheckedSettings` refuses other values.

    Args:
        default: of the field; omit it for a field that is required or has a `default_factory`.
        key: dotted name of the setting, where it is not of the dataclass's section.
        others: `default_factory`, and the arguments of `Bounds`; without any on a side, `lowest` is 0, and `highest`
            is `LARGEST`.
    """
    factory = others.pop("default_factory", dataclasses.MISSING)
    lower = {} if {"lowest", "above"} & others.keys() else {"lowest": 0}
    upper = {} if {"highest", "below"} & others.keys() else {"highest": LARGEST}
    values: dict[str, Any] = {"default": default, "default_factory": factory}
    return dataclasses.field(**values, metadata={BOUNDS: Bounds(**lower, **upper, **others), KEY: key})


def one_of(default: str | None, choices: Collection[str], *, key: str | None = None) -> Any:
    """Declare a field of a settings dataclass that is one of these texts, or None; `CheckedSettings` refuses others."""
    return dataclasses.field(default=default, metadata={CHOICES: choices, KEY: key})


@dataclasses.dataclass(frozen=True)
class Condition:
    """Values of a setting: those that pass a test. `text` names them in the reference, such as `set`."""

    text: str
    test: Callable[[Any], bool]


SET = Condition("set", bool)
NOT_SET = Condition("not set", lambda value: not value)


def other_than(*values: object) -> Condition:
    """Return the condition that a setting has none of these values."""
    return Condition(f"other than {' and '.join(map(show_value, values))}", lambda value: value not in values)


def includes(*values: object) -> Condition:
    """Return the condition that a list has one of these values."""
    return Condition(f"with {' or '.join(map(show_value, values))}", lambda found: not set(values).isdisjoint(found))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Settings that are refused together.

    Attributes:
        settings: dotted names as users write them, each with the value that is refused, or a `Condition` of it.
        why: reason, which follows the settings and their values in the error.
        fix: of the error.
    """

    settings: Mapping[str, object]
    why: str
    fix: str

    def check(self, config: object, section: str = "") -> None:
        """Raise ConfigError if the settings of a configuration, or of a section of it, have these values."""
        values = {}
        for name, refused in self.settings.items():
            values[name] = value = operator.attrgetter(name.removeprefix(f"{section}."))(config)
            if not (refused.test(value) if isinstance(refused, Condition) else value == refused):
                return
        what = ", and ".join(f"{name} is {show_value(value)}" for name, value in values.items())
        raise ConfigError(f"{what}: {self.why}", where=", ".join(values), fix=self.fix)


_CONDITION = re.compile(r"(!?)([\w.]+)(?:(!?=|~)([^,]+))?")


def read_rules(text: str) -> tuple[Rule, ...]:
    """Read a table of rules: `SETTING=VALUE, SETTING | why | fix`, each on a line and further ones that are indented.

    `NAME` stands for a setting that is set, `!NAME` for one that is not, `NAME=VALUE` and `NAME!=A/B` for a value and
    for others, and `NAME~VALUE` for a list that has it. Values are true, false, null, whole numbers or texts.
    """
    rules, words = [], {"true": True, "false": False, "null": None}
    for row in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        names, why, fix = " ".join(row.split()).split(" | ")
        settings: dict[str, object] = {}
        for no, name, kind, values in _CONDITION.findall(names):
            given = [int(word) if word.isdecimal() else words.get(word, word) for word in values.split("/")]
            kinds = {"=": given[0], "!=": other_than(*given), "~": includes(*given), "": NOT_SET if no else SET}
            settings[name] = kinds[kind]
        rules.append(Rule(settings, why, fix))
    return tuple(rules)


def check_rules(config: object, rules: Iterable[Rule]) -> None:
    """Raise the ConfigError of the first rule that refuses a configuration."""
    for rule in rules:
        rule.check(config)


class CheckedSettings:
    """Base of a dataclass of settings, which checks its values when it is made: numbers, choices, then rules.

    `class OptimizerConfig(CheckedSettings, section="optimizer")` names its place in the configuration, for errors.

    Attributes:
        section: dotted name of the settings; "" for the top.
        rules: refusals that depend on these settings alone.
        job_rules: those that wait for a method of the class, before a job starts.
    """

    section: ClassVar[str] = ""
    rules: ClassVar[Sequence[Rule]] = ()
    job_rules: ClassVar[Sequence[Rule]] = ()

    def __init_subclass__(cls, *, section: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if section is not None:
            cls.section = section

    def __post_init__(self) -> None:
        check_numbers(self, self.section)
        for name, key, choices in _declared(type(self), CHOICES):  # type: ignore[arg-type]
            if (value := getattr(self, name)) is not None:
                setting = key or (f"{self.section}.{name}" if self.section else name)
                require_choice(value, choices, setting=setting)
        for rule in self.rules:
            rule.check(self, self.section)


def check_numbers(config: Any, section: str) -> None:
    """Raise ConfigError unless each number of a dataclass is as `require_bounds` wants it."""
    for name, key, bounds in _declared(type(config), BOUNDS):  # type: ignore[arg-type]
        own_section, _, last = key.rpartition(".")
        require_bounds(getattr(config, name), bounds, last or name, own_section or section)


@functools.cache
def _declared(settings: type, kind: str) -> list[tuple[str, str, Any]]:
    """Return the fields that declare bounds or choices, their own keys, and these; searches make many settings."""
    declared = ((field.name, field.metadata) for field in dataclasses.fields(settings))
    return [(name, of.get(KEY) or "", of[kind]) for name, of in declared if of.get(kind) is not None]


def require_bounds(value: Any, bounds: Bounds, name: str, section: str) -> None:
    """Raise ConfigError unless a number, or each of several, is finite and within its bounds; None passes.

    `section` is that of the setting in a run's configuration, such as `loader`; "" for the top.
    """
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    for one in values:
        if one is not None and one not in bounds:
            where = f"{section}.{name}" if section else name
            raise ConfigError(f"{name} is {value}", where=where, fix=f"the value must be {bounds}")


def require_choice(value: str, choices: Iterable[str], *, setting: str) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    names = list(choices)
    if value not in names:
        raise ConfigError(f"{value!r} is not known", where=setting, fix=f"choose one of: {', '.join(names)}")


def require_at_least(value: int, minimum: int, *, setting: str) -> None:
    """Raise ConfigError where `value` is below `minimum`."""
    if value < minimum:
        raise ConfigError(f"{value:,} is too small", where=setting, fix=f"set it to {minimum:,} or more")


def require_cores(num_processes: int, *, setting: str, cores: int | None = None) -> None:
    """Raise ConfigError for more processes than this machine can run: 8 for each of its cores, 16 on one core."""
    cores = cores or os.cpu_count() or 1
    most = max(16, PROCESSES_PER_CORE * cores)
    if num_processes > most:
        what = f"{num_processes:,} processes on {cores:,} cores would only wait for each other"
        raise ConfigError(what, where=setting, fix=f"set it to {most:,} or less, {PROCESSES_PER_CORE} per core")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def show_value(value: object) -> str:
    """Return a value as users write it, in short."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        value = ", ".join("{...}" if dataclasses.is_dataclass(item) else str(item) for item in value)
    return str(value)[:80] or "empty"
