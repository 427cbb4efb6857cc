"""Checks of settings that the configuration records of this package share."""

from __future__ import annotations

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
