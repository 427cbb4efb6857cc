"""Typer commands whose settings are `key=value`, and shared parts of their output.

`class_of(schema)` makes the class of a command that fills `schema` from its `key=value` arguments and hands it over as
`context.obj`. Names and paths stay positional, switches stay flags. Flags that named settings in earlier versions are
translated, and are not shown in the help.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperCommand

from harness.settings import explain_settings, is_assignment, parse_settings

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the destination")]
# Flags of a recipe that take a value.
_WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn")


class SettingsCommand(TyperCommand):
    """A command with settings; `context.obj` is its schema, filled.

    Attributes:
        schema: dataclass of the settings.
        flags: flags of earlier versions: the key that each set, ending in a dot for the entries of a map, or the place
            of a positional argument.
        takes_recipe: arguments that are not the command's own are those of a recipe; `context.obj` is then a pair of
            the filled schema and this list.
        is_composed: the command composes its own settings from files; they stay a list of `key=value`.
    """

    schema: type[Any]
    flags: Mapping[str, str | int]
    takes_recipe = False
    is_composed = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        keys = [setting.key for setting in explain_settings(self.schema)]
        flags = {f"--{key.rpartition('.')[2].replace('_', '-')}": key for key in reversed(keys)} | dict(self.flags)
        declared = {name for param in self.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
        roots = {key.partition(".")[0] for key in keys}
        settings: list[str] = []
        own: list[str] = []
        recipe: list[str] = []
        places: dict[int, str] = {}
        has_name, rest = False, list(args)
        while rest:
            argument = rest.pop(0)
            name, equals, value = argument.partition("=")
            if name.startswith("--") and name in flags and name not in declared:
                value = value if equals else (rest.pop(0) if rest else "")
                key = flags[name]
                if isinstance(key, int):
                    places[key] = value
                else:
                    _add(settings, f"{key}{value}" if key.endswith(".") else f"{key}={value}", is_map=key.endswith("."))
            elif is_assignment(argument) and (not self.takes_recipe or name.partition(".")[0] in roots):
                settings.append(argument)
            elif not self.takes_recipe or argument in declared or not (has_name or "=" in argument or name[:1] == "-"):
                has_name = has_name or not argument.startswith("-")
                own.append(argument)
            else:
                recipe.append(argument)
                recipe += [rest.pop(0)] if argument in _WITH_VALUE and rest else []
        for place, value in sorted(places.items(), key=lambda item: (item[0] < 0, item[0])):
            own.insert(place if place >= 0 else len(own), value)
        if "--cfg" in own or ("--cfg" in recipe and not has_name):
            Console(soft_wrap=True).print(self._settings_table(settings))
            ctx.exit()
        unparsed: list[str] = super().parse_args(ctx, own)
        if not ctx.resilient_parsing:
            filled: Any = settings
            if not self.is_composed:
                filled = parse_settings(self.schema, settings, command=ctx.command_path)
            ctx.obj = (filled, recipe) if self.takes_recipe else filled
        return unparsed

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[KEY=VALUE]..."]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        Console().print(self._settings_table([]))
        if self.takes_recipe:
            print("Settings of the recipe keep their names: `python -m recipes.sft --cfg` prints them.")

    def _settings_table(self, given: Sequence[str]) -> Table:
        values = dict(text.split("=", 1) for text in given)
        table = Table("setting", "value", "meaning", box=None, pad_edge=False)
        for key, kind, default, text in explain_settings(self.schema):
            if "[]" not in key:
                shown = "null" if default is None else json.dumps(default) if kind == "bool" else str(default)
                table.add_row(key, values.get(key, shown), text)
        return table


def class_of(
    schema: type[Any],
    flags: Mapping[str, str | int] | None = None,
    *,
    takes_recipe: bool = False,
    is_composed: bool = False,
) -> type[SettingsCommand]:
    """Make the class of a command with these settings: `@app.command(cls=class_of(MySettings))`."""
    members = {"schema": schema, "flags": flags or {}, "takes_recipe": takes_recipe, "is_composed": is_composed}
    return type(f"{schema.__name__}Command", (SettingsCommand,), members)


def _add(settings: list[str], text: str, *, is_map: bool) -> None:
    """Add a setting; further values of a map's entry, which were flags given again, extend its list."""
    name, _, value = text.partition("=")
    for index, other in enumerate(settings):
        if is_map and other.startswith(f"{name}="):
            settings[index] = f"{other},{value}"
            return
    settings.append(text)


@contextmanager
def progress_bar(title: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr of a terminal; yields `advance(done, total, description=title)`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int | None, description: str = title) -> None:
            progress.update(task, completed=done, total=total, description=description)

        yield advance


def stdout_console(width: int | None = None) -> Console:
    """Make a console for tables: as wide as the terminal, or `width` (omit to never wrap) in a pipe or a log."""
    return Console() if sys.stdout.isatty() else Console(width=width, soft_wrap=width is None)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=2))
