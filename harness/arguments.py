"""Command line grammar of all commands: names and switches, flags of a recipe, and settings as `key=value`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import ConfigError
from harness.mistakes import SYNONYMS, word_of
from harness.paths import explain_path, is_dataset, is_there

_SETTING = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
# Flags listed in errors: for every recipe, and for some.
_FLAGS = ("--cfg", "--help", "--info", "--config-dir", "--config-name", "--multirun")
_FLAGS_OF = {"prepare": ("--preview", "--overwrite")}
# Flags handled by Hydra's own command line, and the words that may follow two of them.
_HYDRA_FLAGS = ("--multirun", "-m", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_VIEWS = ("job", "hydra", "all")


@dataclass
class Options:
    """A parsed command line.

    Attributes:
        overrides: `key=value` settings in Hydra's syntax.
        config_dir: user's folder of YAML files, searched after `configs/`.
        config_name: file of either folder to compose instead of the recipe's own.
        show: print the settings instead of running.
        help: print how to change settings.
        hydra_flags: flags handled by Hydra's own command line, such as `--multirun` and `--cfg job`.
        names: names, paths and switches of the command itself.
    """

    overrides: list[str] = field(default_factory=list)
    config_dir: Path | None = None
    config_name: str | None = None
    show: bool = False
    help: bool = False
    hydra_flags: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @classmethod
    def parse(
        cls, arguments: Sequence[str], *, where: str, switches: Collection[str] = (), num_names: int | None = 0
    ) -> Options:
        """Parse the command line of a recipe, or of a command with settings.

        Raises ConfigError for an unknown flag, an argument that is not a setting, or a missing `--config-dir`.

        Args:
            where: name of the command, for errors.
            switches: flags of the command itself.
            num_names: number of names before a recipe; None for a command without a recipe, whose own parser checks all
                words that are not settings.
        """
        options, rest = cls(), list(arguments)
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            if name in switches or (word == "data.overwrite=true" and "--overwrite" in switches):
                options.names.append(word if name in switches else "--overwrite")
            elif name.startswith("--") and word_of(name) in SYNONYMS:
                # Refused later with the settings, where the intended one is suggested.
                has_next = not equals and rest[:1] and "=" not in rest[0] and not rest[0].startswith("-")
                key = name if num_names is None else word_of(name)
                options.overrides.append(f"{key}={rest.pop(0) if has_next else value or 'true'}")
            elif num_names is None and word == "--cfg":
                options.show = True
            elif num_names is None:
                match = _SETTING.fullmatch(word)
                is_setting = match is not None and (match[1] or match[3] is not None)
                (options.overrides if is_setting else options.names).append(word)
            elif word.startswith("-"):
                options._take_flag(name, value if equals else None, rest, where=where)
            elif equals or word.startswith("~"):
                options.overrides.append(word)
            elif len(options.names) < num_names:
                options.names.append(word)
            else:
                raise ConfigError(f"{word!r} is not a setting", where=where, fix=_fix_of_path(Path(word), where=where))
        options.overrides = list(map(_in_home, options.overrides))
        if options.config_dir is not None and not options.config_dir.is_dir():
            fix = "--config-dir specifies a folder of YAML files"
            raise ConfigError("the folder does not exist", where=str(options.config_dir), fix=fix)
        return options

    def _take_flag(self, name: str, value: str | None, rest: list[str], *, where: str) -> None:
        """Parse a flag of a recipe and the following words that are its value."""
        if name in ("-h", "--help"):
            self.help = True
        elif name in ("--cfg", "-c"):
            view = rest.pop(0) if value is None and rest[:1] and rest[0] in _VIEWS else value
            if view not in (None, *_VIEWS):
                fix = f"omit it for the settings of the command, or one of {', '.join(_VIEWS)}"
                raise ConfigError(f"{name} has no view {view!r}", where=where, fix=fix)
            self.show = view is None
            self.hydra_flags += [] if view is None else [name, view]
        elif name in _HYDRA_FLAGS:
            self.hydra_flags.append(name if value is None else f"{name}={value}")
            self.hydra_flags += [rest.pop(0)] if name in ("--info", "-i") and rest[:1] and rest[0] in _INFO else []
        elif name == "--overwrite":
            self.overrides.append("data.overwrite=true")
        elif name == "--preview":
            number = _value_of(name, value, rest, where=where, fix=f"{name} 3 shows three records")
            if number.strip("0") == "":
                raise ConfigError("--preview 0 shows nothing", where=where, fix="omit it to prepare")
            self.overrides.append(f"preview={number}")
        elif name in ("--config-dir", "-cd"):
            self.config_dir = Path(_value_of(name, value, rest, where=where, fix=f"{name} VALUE"))
        elif name in ("--config-name", "-cn"):
            self.config_name = _value_of(name, value, rest, where=where, fix=f"{name} VALUE")
        elif name == "--config-path":
            raise ConfigError(f"{name} would replace every file", where=where, fix="--config-dir DIR adds one")
        else:
            flags = ", ".join(_FLAGS + _FLAGS_OF.get(where.rpartition(" ")[2], ()))
            raise ConfigError(f"unknown flag {name}", where=where, fix=f"settings are key=value; flags are {flags}")


def _value_of(flag: str, value: str | None, rest: list[str], *, where: str, fix: str) -> str:
    """Return the value of a flag: after the equals sign, or the next argument."""
    if value == "" or (value is None and (not rest or (flag == "--preview" and "=" in rest[0]))):
        raise ConfigError(f"{flag} has no value", where=where, fix=fix)
    return rest.pop(0) if value is None else value


def _fix_of_path(path: Path, *, where: str) -> str:
    """Return the fix for an argument that is not a setting but may be a path."""
    prepares = where.endswith("prepare")
    if not prepares and not is_dataset(path) and (explained := explain_path(path, expected="a dataset")):
        return explained[1]
    name = "source.path" if prepares else "data.path"
    return "settings are key=value" + (f", such as {name}={path}" if is_there(path) else ", without spaces")


def _in_home(setting: str) -> str:
    """Expand `~/` in the value of a setting, where a shell does not expand it."""
    name, _, value = setting.partition("=")
    # Sources and tokenizers expand it themselves, and reports keep the path as given.
    is_kept = name.lstrip("+").startswith(("source.", "tokenizer."))
    return f"{name}={Path(value).expanduser()}" if value.startswith("~/") and not is_kept else setting


def quote_value(text: str) -> str:
    """Return text as the value of a setting, in quotes if Hydra would interpret special characters."""
    if re.fullmatch(r"[\w.:/@%+*?-]+", text, re.ASCII):
        return text
    # Only backslashes before a quote are doubled.
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", r"\'"), text)
    return f"'{escaped}'"
