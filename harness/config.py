"""The one place that knows Hydra: composes `configs/`, checks it against dataclasses, and reports errors plainly."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.errors import ConfigError, HarnessError, exit_on_error
from harness.launch import become_rank_of_slurm
from harness.settings import to_yaml

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
T = TypeVar("T")
# Lines of Hydra's messages that help nobody here; no key can be appended.
_HYDRAS_OWN = ("full_key", "object_type", "To append to your config")


def compose_config(name: str, schema: type[T], overrides: list[str] | None = None, *, fix: str | None = None) -> T:
    """Compose `configs/<name>.yaml` with `overrides` into an instance of the dataclass `schema`.

    Only the root is registered (as `<name>_schema`), so that a misspelt key anywhere is refused.

    Args:
        fix: where the keys are shown; None where `name` is a recipe, which prints them.

    Raises:
        ConfigError: unknown key or group, a value of another type or one that a dataclass refuses, or a file that is no
            YAML.
    """
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
            return cast(T, OmegaConf.to_object(compose(name, overrides=overrides or [])))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        cause = error.__cause__
        if isinstance(cause, HarnessError):
            raise cause from None
        said = str(error).strip().splitlines()
        # Where Hydra looked is of no use here: there is one folder, and it is named below.
        said = list(itertools.takewhile(lambda line: "Config search path" not in line, said))
        told = [line.strip() for line in said if line.strip() and not any(word in line for word in _HYDRAS_OWN)]
        if cause is not None and str(cause) not in str(error):
            told.append(str(cause).splitlines()[0])
        keys = [line.split(":", 1)[1].strip() for line in said if "full_key" in line]
        raise ConfigError(
            "; ".join(told) or type(error).__name__,
            where=f"configs/{name}.yaml" + (f", key {keys[0]}" if keys and keys[0] else "") + _shown(overrides),
            fix=fix or f"`python -m recipes.{name} --cfg` prints every key with its value",
        ) from error


def _shown(overrides: list[str] | None) -> str:
    return f" with {' '.join(overrides)}" if overrides else ""


def hydra_entry(name: str, schema: type[T]) -> Callable[[Callable[[T], int | None]], Callable[[], None]]:
    """Make `main(config)` the entry point of `python -m recipes.<name> [overrides]`.

    `--cfg` prints the composed configuration and `--help` how to change it; `--multirun` hands over to Hydra's sweepers
    and launchers. A HarnessError ends the process with
    exit code 2 and its three lines on stderr; HARNESS_TRACEBACK=1 adds the traceback.
    """

    def decorate(main: Callable[[T], int | None]) -> Callable[[], None]:
        @functools.wraps(main)
        def entry() -> None:
            arguments = sys.argv[1:]
            if {"-h", "--help"} & set(arguments):
                print((sys.modules["__main__"].__doc__ or main.__doc__ or "").strip())
                print(
                    f"\nSettings: `key=value` ..., groups: {', '.join(_groups())}; "
                    f"`python -m recipes.{name} --cfg` prints them all."
                )
                return
            show = "--cfg" in arguments
            with exit_on_error():
                if {"-m", "--multirun"} & set(arguments):
                    _sweep(name, schema, main)
                    return
                config = compose_config(name, schema, [a for a in arguments if a != "--cfg"])
                if show:
                    print(to_yaml(config), end="")
                    return
                code = main(config)
                if code:
                    sys.exit(code)

        return entry

    return decorate


def _sweep(name: str, schema: type[T], main: Callable[[T], int | None]) -> None:
    """Run `main` for every combination of settings, in a job each where `hydra/launcher=submitit_slurm` says so.

    A run's folder, where its settings have one, is `run` in the output folder that Hydra gives the job.
    """
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)

    def run_one(composed: DictConfig) -> None:
        with exit_on_error():
            become_rank_of_slurm()
            config = cast(Any, OmegaConf.to_object(composed))
            if getattr(config, "run_dir", "") is None:
                config.run_dir = str(Path(HydraConfig.get().runtime.output_dir) / "run")
            code = main(config)
            if code:
                sys.exit(code)

    # Hydra names a job after the file of its function, which is this one.
    sys.argv.append(f"hydra.job.name={name}")
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(run_one)()


def _groups() -> list[str]:
    return sorted(
        f"{folder.name}={{{','.join(sorted(f.stem for f in folder.glob('*.yaml')))}}}"
        for folder in CONFIGS.iterdir()
        if folder.is_dir()
    )
