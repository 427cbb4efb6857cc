"""Checks shared by the settings dataclasses of this package."""

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

# Upper bound of counts, sizes and seeds, so that products fit 64 bits and libraries with 32-bit arguments accept them.
LARGEST = 2**31 - 1
# 30 days; thread and system clocks do not support longer waits.
LONGEST_S = 30 * 24 * 3600
PROCESSES_PER_CORE = 8
# Keys of the metadata of a settings field.
BOUNDS, CHOICES, KEY = "bounds", "choices", "key"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of a number: `lowest` and `highest` are inclusive, `above` and `below` exclusive."""

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
    """Declare a settings field that contains a number, or numbers, within `Bounds`.

    `num_workers: int = bounded(2, lowest=0)`. `CheckedSettings` refuses other values.

    Args:
        default: default value; omit it for a required field or one with a `default_factory`.
        key: dotted name of the setting, if it is outside the section of the dataclass.
        others: `default_factory`, and the arguments of `Bounds`. The default lower bound is `lowest=0`, the default
            upper bound `highest=LARGEST`.
    """
    factory = others.pop("default_factory", dataclasses.MISSING)
    lower = {} if {"lowest", "above"} & others.keys() else {"lowest": 0}
    upper = {} if {"highest", "below"} & others.keys() else {"highest": LARGEST}
    values: dict[str, Any] = {"default": default, "default_factory": factory}
    return dataclasses.field(**values, metadata={BOUNDS: Bounds(**lower, **upper, **others), KEY: key})


def one_of(default: str | None, choices: Collection[str], *, key: str | None = None) -> Any:
    """Declare a settings field that is one of `choices`, or None; `CheckedSettings` refuses other values."""
    return dataclasses.field(default=default, metadata={CHOICES: choices, KEY: key})


@dataclasses.dataclass(frozen=True)
class Condition:
    """Set of values of a setting, defined by a test; `text` describes them in the reference, such as `set`."""

    text: str
    test: Callable[[Any], bool]


SET = Condition("set", bool)
NOT_SET = Condition("not set", lambda value: not value)


def other_than(*values: object) -> Condition:
    """Return the condition that a setting is none of `values`."""
    return Condition(f"other than {' and '.join(map(show_value, values))}", lambda value: value not in values)


def includes(*values: object) -> Condition:
    """Return the condition that a list contains one of `values`."""
    return Condition(f"with {' or '.join(map(show_value, values))}", lambda found: not set(values).isdisjoint(found))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Combination of settings that is refused.

    Attributes:
        settings: dotted names as users write them, each with its refused value or a `Condition`.
        why: reason, printed after the settings and their values in the error.
        fix: fix of the error.
    """

    settings: Mapping[str, object]
    why: str
    fix: str

    def check(self, config: object, section: str = "") -> None:
        """Raise ConfigError if a configuration, or a section of it, has these values."""
        values = {}
        for name, refused in self.settings.items():
            values[name] = value = operator.attrgetter(name.removeprefix(f"{section}."))(config)
            if not (refused.test(value) if isinstance(refused, Condition) else value == refused):
                return
        what = ", and ".join(f"{name} is {show_value(value)}" for name, value in values.items())
        raise ConfigError(f"{what}: {self.why}", where=", ".join(values), fix=self.fix)


_CONDITION = re.compile(r"(!?)([\w.]+)(?:(!?=|~)([^,]+))?")


def read_rules(text: str) -> tuple[Rule, ...]:
    """Parse a table of rules, `SETTING=VALUE, SETTING | why | fix`; indented lines continue a rule.

    `NAME` means that a setting is set, `!NAME` that it is not, `NAME=VALUE` that it has a value, `NAME!=A/B` that it
    has none of them, and `NAME~VALUE` that a list contains it. Values are true, false, null, integers or strings.
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
    """Raise the ConfigError of the first rule that matches a configuration."""
    for rule in rules:
        rule.check(config)


class CheckedSettings:
    """Base of settings dataclasses, which checks values on construction: numbers, choices, then rules.

    `class OptimizerConfig(CheckedSettings, section="optimizer")` sets the section, which is used in errors.

    Attributes:
        section: dotted name of the section; "" for the top level.
        rules: rules that depend only on these settings.
        job_rules: rules that a method of the class checks before a job starts.
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
    """Raise ConfigError unless each number of a dataclass is within its declared bounds."""
    for name, key, bounds in _declared(type(config), BOUNDS):  # type: ignore[arg-type]
        own_section, _, last = key.rpartition(".")
        require_bounds(getattr(config, name), bounds, last or name, own_section or section)


@functools.cache
def _declared(settings: type, kind: str) -> list[tuple[str, str, Any]]:
    """Return name, key and declaration of the fields with bounds or choices; cached, because searches need it often."""
    declared = ((field.name, field.metadata) for field in dataclasses.fields(settings))
    return [(name, of.get(KEY) or "", of[kind]) for name, of in declared if of.get(kind) is not None]


def require_bounds(value: Any, bounds: Bounds, name: str, section: str) -> None:
    """Raise ConfigError unless a number, or each of several, is finite and within its bounds; None passes.

    `section` is the section of the setting, such as `loader`, or "" for the top level.
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
    """Raise ConfigError if `value` is below `minimum`."""
    if value < minimum:
        raise ConfigError(f"{value:,} is too small", where=setting, fix=f"set it to {minimum:,} or more")


def require_cores(num_processes: int, *, setting: str, cores: int | None = None) -> None:
    """Raise ConfigError for more processes than this machine can run: 8 per core, but at least 16."""
    cores = cores or os.cpu_count() or 1
    most = max(16, PROCESSES_PER_CORE * cores)
    if num_processes > most:
        what = f"{num_processes:,} processes on {cores:,} cores would only wait for each other"
        raise ConfigError(what, where=setting, fix=f"set it to {most:,} or less, {PROCESSES_PER_CORE} per core")


def usable_cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def show_value(value: object) -> str:
    """Format a value as users write it, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        value = ", ".join("{...}" if dataclasses.is_dataclass(item) else str(item) for item in value)
    return str(value)[:80] or "empty"
