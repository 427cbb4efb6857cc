"""Checks of settings that the configuration dataclasses of this package share."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from harness.errors import ConfigError


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
    """Raise ConfigError unless each of these fields is a finite number within bounds; a field of None passes.

    `require_numbers(self, "loader", "num_workers", "prefetch_factor", lowest=1)` is one line of a `__post_init__`.

    Args:
        config: the dataclass.
        section: where its settings are in a run's configuration, such as `loader`; "" for the top.
        names: fields of `config`.
        lowest, highest: bounds that are allowed themselves.
        above, below: bounds that are not.
    """
    bounds = [
        (text.format(bound), holds, bound)
        for bound, text, holds in (
            (lowest, "{:,} or more", operator.ge),
            (above, "above {:,}", operator.gt),
            (highest, "at most {:,}", operator.le),
            (below, "below {:,}", operator.lt),
        )
        if bound is not None
    ]
    for name in names:
        value = getattr(config, name)
        if value is None or (math.isfinite(value) and all(holds(value, bound) for _, holds, bound in bounds)):
            continue
        raise ConfigError(
            f"{name} is {value}",
            where=f"{section}.{name}" if section else name,
            fix=f"set it to {' and '.join(text for text, _, _ in bounds) or 'a finite number'}",
        )
