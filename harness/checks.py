"""Checks of settings that the configuration dataclasses of this package share."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Iterable
from typing import Any

from harness.errors import ConfigError

# Counts, sizes and seeds stay below it, so that their products fit 64 bits and libraries that take 32 bits take them.
LARGEST = 2**31 - 1
# 30 days: clocks of threads and of the operating system take no longer waits.
LONGEST_S = 30 * 24 * 3600
PROCESSES_PER_CORE = 8
_BOUNDS = "bounds"


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
        texts = {"lowest": "{:,} or more", "above": "above {:,}", "highest": "at most {:,}", "below": "below {:,}"}
        given = [text.format(getattr(self, name)) for name, text in texts.items() if getattr(self, name) is not None]
        return " and ".join(given) or "a finite number"


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    lowest: float | None = None,
    above: float | None = None,
    highest: float | None = LARGEST,
    below: float | None = None,
) -> Any:
    """Declare a field of a settings dataclass that is a number, or numbers, within bounds: see `Bounds`.

    `num_workers: int = bounded(2, lowest=0)`. `check_numbers` in `__post_init__` refuses other values.

    Args:
        default, default_factory: of the field; omit both for a field that is required.
        lowest, highest: bounds that are allowed themselves; 0 and `LARGEST` where none is given.
        above, below: bounds that are not.
    """
    bounds = Bounds(
        lowest=0 if lowest is None and above is None else lowest,
        above=above,
        highest=None if below is not None else highest,
        below=below,
    )
    values: dict[str, Any] = {"default": default, "default_factory": default_factory}
    return dataclasses.field(**values, metadata={_BOUNDS: bounds})


def bounds_of(field: dataclasses.Field[Any]) -> Bounds | None:
    """Return the bounds that `bounded` declares for a field."""
    bounds: Bounds | None = field.metadata.get(_BOUNDS)
    return bounds


def check_numbers(config: Any, section: str) -> None:
    """Raise ConfigError unless each number of a dataclass is finite and within its bounds; None passes.

    Args:
        config: the dataclass.
        section: where its settings are in a run's configuration, such as `loader`; "" for the top.
    """
    for field in dataclasses.fields(config):
        if (bounds := bounds_of(field)) is not None:
            _check(getattr(config, field.name), bounds, field.name, section)


def require_choice(value: str, choices: Iterable[str], *, setting: str) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    names = list(choices)
    if value not in names:
        raise ConfigError(f"{value!r} is not known", where=setting, fix=f"choose one of: {', '.join(names)}")


def require_at_least(value: int, minimum: int, *, setting: str) -> None:
    """Raise ConfigError where `value` is below `minimum`."""
    if value < minimum:
        raise ConfigError(f"{value:,} is too small", where=setting, fix=f"set it to {minimum:,} or more")


def require_numbers(
    config: object,
    section: str,
    *names: str,
    lowest: float | None = None,
    above: float | None = None,
    highest: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ConfigError unless each of these fields is a finite number within bounds that depend on other settings.

    Bounds that do not are declared with `bounded`, beside the field. A field of None passes.

    Args:
        config: the dataclass.
        section: where its settings are in a run's configuration, such as `loader`; "" for the top.
        names: fields of `config`.
        lowest, highest: bounds that are allowed themselves.
        above, below: bounds that are not.
    """
    for name in names:
        _check(getattr(config, name), Bounds(lowest, above, highest, below), name, section)


def require_cores(num_processes: int, *, setting: str, cores: int | None = None) -> None:
    """Raise ConfigError for more processes than this machine can run: 8 for each of its cores, 16 on one core."""
    cores = cores or os.cpu_count() or 1
    most = max(16, PROCESSES_PER_CORE * cores)
    if num_processes > most:
        what = f"{num_processes:,} processes on {cores:,} cores would only wait for each other"
        raise ConfigError(what, where=setting, fix=f"set it to {most:,} or less, {PROCESSES_PER_CORE} a core")


def memory_bytes() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check(value: Any, bounds: Bounds, name: str, section: str) -> None:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    for one in values:
        if one is None:
            continue
        if one not in bounds:
            where = f"{section}.{name}" if section else name
            raise ConfigError(f"{name} is {value}", where=where, fix=f"set it to {bounds}")
