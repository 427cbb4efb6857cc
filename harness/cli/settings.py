"""Typer commands whose settings are `key=value`, and shared parts of their output.

`class_of(schema)` makes the class of a command that fills `schema` from its `key=value` arguments and hands it over as
`context.obj`. Names and paths stay positional, switches stay flags.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperCommand

from harness.arguments import Options
from harness.checks import KEY
from harness.errors import ConfigError, HarnessError
from harness.mistakes import KnownSettings
from harness.printing import open_console, print_line, print_text, redact_all
from harness.settings import CONFIGS, REQUIRED, explain_settings
from harness.tables import Table

T = TypeVar("T")
RECIPES = ("sft", "pretrain")
_MAP = "map of "
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "path": Path,
    "bool": lambda text: _BOOLEANS[text.lower()],
    "str": lambda text: text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text,
}


class SettingsCommand(TyperCommand):
    """A command with settings; `context.obj` is its schema, filled.

    Attributes:
        takes_recipe: settings and flags that are not the command's own are those of a recipe; `context.obj` is then a
            pair of the filled schema and these.
        is_composed: the command composes its own settings from files; they stay a list of `key=value`.
    """

    schema: type[Any]
    takes_recipe = False
    is_composed = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for the completion of the shell
            return super().parse_args(ctx, [word for word in args if "=" not in word])
        switches = {name for param in self.params for name in param.opts if name.startswith("-")}
        switches |= {*ctx.help_option_names}
        num_names = 1 if self.takes_recipe else None
        options = Options.parse(args, where=ctx.command_path, switches=switches, num_names=num_names)
        if ignored := [*options.hydra_flags, *(["--config-name"] if options.config_name else [])]:
            fix = "settings are key=value; flags of a recipe are --cfg and --config-dir"
            raise ConfigError(f"{ctx.command_path} has no flag {ignored[0]}", where=ctx.command_path, fix=fix)
        settings = options.overrides
        if self.takes_recipe:
            settings = [text for text in options.overrides if self._is_own(text.partition("=")[0])]
            options.overrides = [text for text in options.overrides if text not in settings]
        # A recipe prints its settings itself, together with those of the command.
        if options.show and not (self.takes_recipe and options.names):
            known = KnownSettings(ctx.command_path, self.schema, [])
            for text in [] if self.is_composed else settings:
                known.check(text)
            open_console().print(self._settings_table(settings).to_terminal())
            ctx.exit()
        unparsed: list[str] = super().parse_args(ctx, options.names)
        filled: Any = settings
        if not self.is_composed:
            filled = parse_settings(self.schema, settings, command=ctx.command_path)
        ctx.obj = (filled, options) if self.takes_recipe else filled
        return unparsed

    def _is_own(self, key: str) -> bool:
        """Return whether a setting is the command's own, and not the recipe's."""
        keys = {setting.key for setting in explain_settings(self.schema)}
        # A recipe may have settings of the same section; settings of a composed section are all the command's own.
        roots = {own.partition(".")[0] for own in keys} if self.is_composed else set()
        return key in keys or key.partition(".")[0] in roots

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        keys = complete_keys(self.schema, incomplete)
        if self.takes_recipe:
            from harness.plan import PretrainConfig, SftConfig

            recipe = PretrainConfig if "pretrain" in ctx.params.values() else SftConfig
            keys = sorted({*keys, *complete_keys(recipe, incomplete)})
        # Of the fields of click's CompletionItem: recent releases of Typer have a class of their own instead.
        items = (SimpleNamespace(value=key, type="plain", help=None) for key in keys)
        return [*super().shell_complete(ctx, incomplete), *items]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[KEY=VALUE]..."]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        open_console().print(self._settings_table([]).to_terminal())
        if self.takes_recipe:
            print_line("Settings of the recipe keep their names; `--cfg` after the name of an experiment prints all.")

    def _settings_table(self, given: Sequence[str]) -> Table:
        values = dict(text.split("=", 1) for text in given)
        rows = []
        for setting in explain_settings(self.schema):
            if "[]" not in setting.key:
                default = setting.default
                shown = json.dumps(default) if default is None or isinstance(default, bool) else str(default)
                rows.append((setting.key, values.get(setting.key, shown), setting.text))
        return Table(("setting", "value", "meaning"), rows)


def require_training(what: str) -> None:
    """Raise HarnessError with the extra to install if torch or Megatron-Core is missing."""
    if missing := [name for name in ("torch", "megatron") if importlib.util.find_spec(name) is None]:
        fix = "pip install 'megatron-sft-harness[train]'"
        raise HarnessError(f"{what} requires {' and '.join(missing)} (not installed)", where=sys.executable, fix=fix)


def complete_keys(schema: type[Any], incomplete: str) -> list[str]:
    """Return the settings and groups of files that begin with `incomplete`, for the completion of the shell."""
    known = KnownSettings("", schema, [CONFIGS])
    names = {key for key in known.types if "[]" not in key} | known.groups
    return sorted(f"{name}=" for name in names if name.startswith(incomplete))


def argument(metavar: str, text: str, *, names: Callable[[], Iterable[str]] | None = None, **more: Any) -> Any:
    """Declare an argument with this help; `names` are those that the shell completes it to."""
    if names is not None:
        more["autocompletion"] = lambda incomplete: sorted(name for name in names() if name.startswith(incomplete))
    return typer.Argument(metavar=metavar, help=text, **more)


def option(name: str, text: str, **more: Any) -> Any:
    """Declare an option or a flag of this name, such as `--json`, with this help."""
    return typer.Option(name, help=text, **more)


AsJson = Annotated[bool, option("--json", "print JSON")]
Overwrite = Annotated[bool, option("--overwrite", "replace the destination")]


def list_experiments() -> list[str]:
    """Return what `harness plan` and `harness submit` take: the files of configs/experiment, and recipes."""
    return [*RECIPES, *(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))]


def class_of(schema: type[Any], *, takes_recipe: bool = False, is_composed: bool = False) -> type[SettingsCommand]:
    """Make the class of a command, `cls=class_of(MySettings)`."""
    members = {"schema": schema, "takes_recipe": takes_recipe, "is_composed": is_composed}
    return type(f"{schema.__name__}Command", (SettingsCommand,), members)


def parse_settings(schema: type[T], arguments: Sequence[str], *, command: str, base: T | None = None) -> T:
    """Fill a dataclass from `key=value` arguments; of a key that is given twice the last one counts.

    Lists are `[a, b]` or `a,b`, records of a map are `key.name=value`, and `null` empties an optional setting. Those
    that are not given are as in `base`, or the defaults. Raises ConfigError for an argument that is not `key=value`, an
    unknown key, a value of another type or that the dataclass refuses, and a required setting that is missing.
    """
    known, settings = KnownSettings(command, schema, []), explain_settings(schema)
    missing = [one.key for one in settings if base is None and one.default == REQUIRED and "[]" not in one.key]
    given: dict[str, Any] = {}
    for argument in arguments:
        text, key = known.check(argument), argument.partition("=")[0]
        # A map has many keys, whose names may have dots.
        name = next((name for name in known.types if key.startswith(f"{name}.")), key)
        kind = known.types[name].removeprefix(_MAP)
        if name == key and known.types[name].startswith(_MAP):
            raise ConfigError(f"{text!r} has no names", where=key, fix=f"{key}.NAME={kind.upper()}")
        try:
            given[key] = _convert(kind, text)
        except (ValueError, KeyError, csv.Error):
            raise ConfigError(f"{text!r} is not of type {kind}", where=key, fix=f"{key}={kind.upper()}") from None
        missing = [name for name in missing if name != key]
    if missing:
        fix = f"add {missing[0]}={known.types[missing[0]].upper()}"
        raise ConfigError(f"{missing[0]} is not set", where=command, fix=fix)
    return cast(T, _fill(schema, given, base))


def _convert(kind: str, text: str) -> Any:
    if kind.endswith(" or null"):
        return None if text == "null" else _convert(kind.removesuffix(" or null"), text)
    if kind.startswith("list of "):
        if text == "null" or text.startswith("{"):
            raise ValueError
        between = text[1:-1] if text[:1] in "[(" and text[-1:] in "])" else text
        items = [item.strip() for row in csv.reader([between], skipinitialspace=True) for item in row]
        return [_convert(kind.removeprefix("list of "), item) for item in items]
    return _SCALARS[kind](text)


def _fill(schema: Any, given: Mapping[str, Any], base: Any) -> Any:
    hints, values = typing.get_type_hints(schema), dict[str, Any]()
    for field in dataclasses.fields(schema):
        key = field.metadata.get(KEY) or field.name
        # Of a record or a map, whose names may have dots.
        inner = {name.removeprefix(f"{key}."): value for name, value in given.items() if name.startswith(f"{key}.")}
        if inner and dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _fill(hints[field.name], inner, getattr(base, field.name, None))
        elif inner or key in given:
            values[field.name] = inner or given[key]
    return schema(**values) if base is None else dataclasses.replace(base, **values)


@contextmanager
def progress_bar(title: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr of a terminal; yields `advance(done, total, description=title)`."""
    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int | None, description: str = title) -> None:
            progress.update(task, completed=done, total=total, description=description)

        yield advance


def print_json(values: Any) -> None:
    print_text(json.dumps(redact_all(values), indent=2))
