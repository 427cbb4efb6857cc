"""Compose the files of `configs/` into settings dataclasses with Hydra; the only module that imports Hydra."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from harness.arguments import Options
from harness.errors import ConfigError, HarnessError, exit_on_error
from harness.launch.ranks import become_rank_of_slurm, bind_rank
from harness.mistakes import KnownSettings
from harness.paths import suggest_recipe
from harness.plan import ModelConfig, PretrainConfig, RunConfig, SftConfig, read_hf_config
from harness.plan.hf_config import complete_model, find_config
from harness.printing import print_text
from harness.settings import CONFIGS, flatten, nearest_name, render_settings
from harness.storage import name_bus_errors

__all__ = ["CONFIGS", "TRAINING", "ComposedRun", "compose_config", "compose_run", "hydra_entry"]

T = TypeVar("T")
# Recipes that train, and their settings.
TRAINING: dict[str, type[RunConfig]] = {"sft": SftConfig, "pretrain": PretrainConfig}


@dataclass(frozen=True)
class ComposedRun:
    """A training run as a command and as settings.

    Attributes:
        module: module of the recipe, such as `recipes.sft`.
        arguments: command line of the recipe.
        config: composed settings.
    """

    module: str
    arguments: tuple[str, ...]
    config: RunConfig


def compose_config(
    name: str,
    schema: type[T],
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    config_name: str | None = None,
    command: str = "",
    also: Iterable[str] = (),
) -> T:
    """Compose `configs/<name>.yaml` with `overrides` into an instance of the dataclass `schema`.

    Only the root is registered (as `<name>_schema`), so that misspelled keys are refused at any level. Raises
    ConfigError for an unknown key or group, a value of the wrong type or refused by a dataclass, and invalid YAML.

    Args:
        config_dir: additional folder of YAML files, for example with an `experiment/mine.yaml`.
        config_name: file to compose instead of `<name>.yaml`.
        command: command that prints all settings with `--cfg`, for errors; empty for the recipe's command.
        also: further settings of the command, for suggestions about misspelled ones.
    """
    folders = _folders(config_dir)
    if config_name is not None and not any((folder / f"{config_name}.yaml").is_file() for folder in folders):
        near = nearest_name(config_name, sorted(file.stem for folder in folders for file in folder.glob("*.yaml")))
        fix = (f"did you mean {near}? " if near else "") + "--config-name specifies a file in one of these folders"
        raise ConfigError(f"there is no file {config_name}.yaml", where=" and ".join(map(str, folders)), fix=fix)
    known = KnownSettings(command or command_of(name), schema, folders, frozenset(also), name)
    # Hydra's launchers, logs and help are only for its command line, and reading them would double the time here.
    _register(name, schema, HydraConf(defaults=[]))
    GlobalHydra.instance().clear()
    root = config_name or name
    first, second = CONFIGS, config_dir
    if config_dir is not None and (config_dir / f"{config_name}.yaml").is_file():
        # Hydra looks for the primary file only in the first folder.
        first, second = config_dir.resolve(), CONFIGS
    search = [] if second is None else [f"hydra.searchpath=['file://{second.resolve()}']"]
    with _in_our_words(known, root, overrides), initialize_config_dir(config_dir=str(first), version_base="1.3"):
        arguments = [*search, *(_check_override(text, known) for text in overrides)]
        set_by = _check_files(known, root, arguments, [first] if second is None else [first, second])
        config = _to_settings(compose(root, overrides=arguments), set_by)
    if not isinstance(config, schema):
        raise known.other_recipe(root)
    return config


def _register(name: str, schema: type, hydra_settings: HydraConf) -> None:
    """Store only the root schema of `configs/<name>.yaml`, because Hydra copies the store often."""
    store = ConfigStore.instance()
    for other in [one for one in store.repo if one.endswith("_schema.yaml")]:
        del store.repo[other]
    store.repo[f"{name}_schema.yaml"] = _root_node(name, schema)
    store.store(group="hydra", name="config", node=hydra_settings, provider="hydra")


@functools.cache  # a large dataclass takes tens of milliseconds
def _root_node(name: str, schema: type) -> ConfigNode:
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=schema)
    return store.repo[f"{name}_schema.yaml"]  # type: ignore[no-any-return]


@contextlib.contextmanager
def _in_our_words(known: KnownSettings, root: str, overrides: Sequence[str]) -> Iterator[None]:
    """Convert errors of Hydra to ConfigErrors, and unwrap errors raised by dataclasses."""
    try:
        yield
    except yaml.YAMLError as error:
        what = "; ".join(line.strip() for line in str(error).splitlines())
        raise known.error(f"a file is not YAML: {what}", where=f"{root}.yaml", fix="correct this line; ") from None
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError, OSError) as error:
        if isinstance(error.__cause__, HarnessError):
            raise error.__cause__ from None
        # Of system errors, convert only those caused by a value or a file.
        if getattr(error, "errno", None) not in (None, errno.ENAMETOOLONG):
            raise
        raise known.explain(error, root, overrides) from error


def _check_override(text: str, known: KnownSettings, *, may_sweep: bool = False) -> str:
    """Return a `key=value` in Hydra's syntax; raise ConfigError if Hydra would not read it as written."""
    value, taken = known.check(text), known.as_hydra(text)
    try:
        override = OverridesParser.create().parse_override(taken)
    except (HydraException, ValueError):
        fix = "text with special characters is KEY=\"'VALUE'\", a list KEY='[A, B]'; "
        raise known.error(f"the value {value!r} cannot be read", where=text, fix=fix) from None
    if may_sweep and override.is_sweep_override():
        return taken
    if not may_sweep and override.key_or_group.startswith("hydra/"):
        raise known.error("this setting is used by Hydra's own command line", where=text, fix="add --multirun; ")
    if override.is_sweep_override():
        key = override.key_or_group
        listed = known.as_list(key, list(override.sweep_string_iterator())) if override.is_choice_sweep() else ""
        fix = f"{listed} is a list, " * bool(listed) + f"{key}=\"'{value}'\" is text, and --multirun runs each value; "
        raise known.error(f"the value {value!r} can be read in several ways", where=text, fix=fix)
    if override.is_add() or override.is_force_add() or override.type is OverrideType.CHANGE:
        known.check_kinds(override.key_or_group, override.value(), where=text)
    return taken


def _check_files(
    known: KnownSettings, root: str, arguments: list[str], folders: Sequence[Path]
) -> dict[str, str | None]:
    """Return where each setting was set, such as `model=qwen3_8b`; None if only by the recipe's default model."""
    chosen = GlobalHydra.instance().config_loader().compute_defaults_list(root, arguments, RunMode.RUN)
    set_by: dict[str, str | None] = {}
    for default in chosen.defaults:
        path = str(default.config_path)
        places = [folder / f"{path}.yaml" for folder in folders]
        if file := next((place for place in places if place.is_file()), None):
            text = file.read_text()
            content = yaml.load(text, Loader=get_yaml_loader()) or {}
            if not isinstance(content, dict):
                raise known.error("a file holds no settings", where=str(file), fix="write NAME: VALUE on each line; ")
            content.pop("defaults", None)
            texts = yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
            known.check_kinds(default.package or "", content, where=str(file), written=texts)
            is_usual = path.startswith("model/") and default.parent in TRAINING
            is_chosen = not is_usual or "model" in chosen.overrides.override_choices
            group, slash, name = path.rpartition("/")
            place = (f"{group}={name}" if slash else f"{name}.yaml") if is_chosen else None
            set_by |= dict.fromkeys(flatten({default.package: content} if default.package else content), place)
    for override in chosen.config_overrides:
        set_by |= dict.fromkeys(flatten({override.key_or_group: override.value()}), override.input_line or "")
    return set_by


def _to_settings(composed: DictConfig, set_by: Mapping[str, str | None]) -> Any:
    """Convert composed settings to their dataclass, with model sizes from `model.init_from`.

    The recipe's default model is replaced by the model of the weights. For an explicitly chosen model, config.json is
    not fetched from the hub: its sizes are checked when the weights are loaded.
    """
    weights = OmegaConf.select(composed, "model.init_from")
    model = {key.removeprefix("model."): place for key, place in set_by.items() if key.startswith("model.")}
    if weights is not None and (None in model.values() or Path(weights).is_dir()):
        usual, chosen = ModelConfig(), {name: place for name, place in model.items() if place is not None}
        composed.model.update({name: getattr(usual, name) for name in model if name not in chosen})
        stored = read_hf_config(find_config(weights))
        composed.model.update(complete_model(composed.model, stored, chosen, where=weights))
    return OmegaConf.to_object(composed)


def compose_run(
    experiment: str, overrides: Sequence[str], *, config_dir: Path | None = None, **options: Any
) -> ComposedRun:
    """Compose the settings of an experiment (for `recipes.sft`) or of a training recipe; raise ConfigError if unknown.

    Args:
        experiment: file of `configs/experiment` or of `experiment` in `config_dir`, or `sft` or `pretrain`.
        options: `command` and `also` of `compose_config`.
    """
    name, arguments = experiment, list(overrides)
    if experiment not in TRAINING:
        names = KnownSettings("", SftConfig, _folders(config_dir)).files("experiment")
        if experiment not in names:
            near = nearest_name(experiment, [*names, *TRAINING])
            where = " and ".join(str(folder / "experiment") for folder in _folders(config_dir))
            meant = f"did you mean {near}? " if near else suggest_recipe(experiment)
            fix = f"{meant}one of {', '.join([*names, *TRAINING])}"
            raise ConfigError(f"there is no experiment {experiment!r}", where=where, fix=fix)
        name, arguments = "sft", [f"experiment={experiment}", *arguments]
    config = compose_config(name, TRAINING[name], arguments, config_dir=config_dir, **options)
    own = () if config_dir is None else ("--config-dir", str(config_dir.resolve()))
    return ComposedRun(f"harness.recipes.{name}", (*own, *arguments), config)


def hydra_entry(name: str, schema: type[T], main: Callable[[T], int | None]) -> Callable[..., None]:
    """Return the entry point of `python -m recipes.<name> [KEY=VALUE]...` and of the command `harness`.

    The entry point takes a list of arguments, by default those of the process.

    `--cfg` prints all settings with values and explanations, `--help` how to change settings; `--config-dir` adds a
    folder of YAML files. `--multirun`, `--info` and `--cfg job|hydra|all` are handled by Hydra's own command line. A
    HarnessError ends the process with exit code 2 and its three lines on stderr; HARNESS_TRACEBACK=1 adds the
    traceback.
    """

    @functools.wraps(main)
    def entry(arguments: Sequence[str] | None = None) -> None:
        name_bus_errors()
        with exit_on_error():
            options = Options.parse(sys.argv[1:] if arguments is None else arguments, where=command_of(name))
            folder, file = options.config_dir, options.config_name
            if options.help:
                print_text((sys.modules[main.__module__].__doc__ or main.__doc__ or "").strip())
                print_text(_usage(KnownSettings(command_of(name), schema, _folders(folder))))
            elif options.hydra_flags:
                _run_hydra(name, schema, main, options)
            else:
                config = compose_config(name, schema, options.overrides, config_dir=folder, config_name=file)
                if options.show:
                    print_text(render_settings(config), end="")
                    return
                bind_rank()
                if code := main(config):
                    sys.exit(code)

    return entry


def _run_hydra(name: str, schema: type[T], main: Callable[[T], int | None], options: Options) -> None:
    """Run Hydra's command line; a sweep runs `main` as a separate job for every combination of settings.

    With `hydra/launcher=submitit_slurm` these are Slurm jobs. The folder of a run is `run` in the output folder that
    Hydra assigns to the job.
    """
    known = KnownSettings(command_of(name), schema, _folders(options.config_dir), recipe=name)
    settings = [_check_override(text, known, may_sweep=True) for text in options.overrides]
    _register(name, schema, HydraConf())

    def run_one(composed: DictConfig) -> None:
        with exit_on_error():
            become_rank_of_slurm()
            hydra_config = HydraConfig.get()
            with _in_our_words(known, name, options.overrides):
                sources = hydra_config.runtime.config_sources
                folders = [Path(source.path) for source in sources if source.schema == "file"]
                root = hydra_config.job.config_name or name
                config = _to_settings(composed, _check_files(known, root, [*hydra_config.overrides.task], folders))
            if getattr(config, "run_dir", "") is None:
                config.run_dir = str(Path(HydraConfig.get().runtime.output_dir) / "run")
            sweeping = GlobalHydra.instance().hydra
            code = main(config)
            # Restore Hydra's state for the next job of the sweep; `main` may have composed other settings.
            GlobalHydra.instance().hydra = sweeping
            _register(name, schema, HydraConf())
            if code:
                sys.exit(code)

    # Hydra would name the job after this file. Its parser requires settings before flags.
    flags = [*options.hydra_flags]
    flags += [] if options.config_dir is None else ["--config-dir", str(options.config_dir.resolve())]
    flags += [] if options.config_name is None else ["--config-name", options.config_name]
    sys.argv[1:] = [*settings, f"hydra.job.name={name}", *flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors instead of printing them; they are explained here
    with _in_our_words(known, options.config_name or name, options.overrides):
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(run_one)()


def command_of(name: str) -> str:
    """Return the command with the settings of `configs/<name>.yaml`."""
    return f"harness train {name}" if name in TRAINING else f"harness {name}"


def _usage(known: KnownSettings) -> str:
    files = "\n".join(f"  {group}=  {', '.join(known.files(group))}" for group in sorted(known.groups))
    return (
        f"\nSettings are key=value; `{known.command} --cfg` prints each with its value and its explanation.\n"
        + (f"Groups of settings, one file each:\n{files}\n" if files else "")
        + "Flags: --config-dir DIR (your own YAML files), --config-name NAME, --cfg [job|hydra|all], --info, --multirun"
    )


def _folders(config_dir: Path | None) -> list[Path]:
    return [CONFIGS, *([] if config_dir is None else [config_dir])]
