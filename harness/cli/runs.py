"""Commands on runs: prepare, train, export, requeue."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from harness.checks import KEY, CheckedSettings, bounded, require_cores, usable_cores
from harness.cli.settings import RECIPES, argument, class_of, complete_keys, option, require_training
from harness.errors import ConfigError
from harness.paths import is_run, is_there, suggest_recipe
from harness.printing import count_of, print_line, print_text

runs_app = typer.Typer()
_FORWARDED = {"ignore_unknown_options": True}


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    from harness.plan import PretrainConfig, SftConfig
    from harness.prep import PrepareConfig

    recipes = {"prepare": PrepareConfig, "sft": SftConfig, "pretrain": PretrainConfig}
    schema = recipes.get(str(ctx.params.get("recipe", ctx.info_name)))
    return complete_keys(schema, incomplete) if schema is not None else []


Arguments = Annotated[list[str] | None, argument("[KEY=VALUE]...", "settings of the recipe", autocompletion=_complete)]


@dataclass
class RequeueSettings(CheckedSettings):
    """Settings of `harness requeue`.

    Attributes:
        exit_code: exit code of the run.
        restart: the caller can restart the ranks in the same job; the restart is recorded.
        max_same_failures: number of identical failures at the same step after which the job is not requeued.
    """

    exit_code: int = bounded(lowest=-255, highest=255)
    restart: bool = False
    max_same_failures: int = bounded(3, lowest=1, key="cluster.max_same_failures")


@runs_app.command(context_settings={**_FORWARDED, "help_option_names": []})
def prepare(arguments: Arguments = None) -> None:
    """Pack chats into datasets; `harness prepare --cfg` prints the settings."""
    recipe_entry("prepare")(arguments or [])


@runs_app.command(context_settings={**_FORWARDED, "help_option_names": []})
def train(
    context: typer.Context,
    recipe: Annotated[str, argument("sft|pretrain", "the recipe", names=lambda: RECIPES)],
    arguments: Arguments = None,
) -> None:
    """Train a model: on N processes of this machine with `parallel.ranks=N`, or as one rank of torchrun or srun.

    `harness train sft --help` prints the settings that most runs change, and `--cfg` prints all.
    """
    from harness.arguments import Options
    from harness.config import TRAINING, compose_config
    from harness.launch.local import start_ranks
    from harness.launch.ranks import become_rank_of_slurm

    if recipe in ("--help", "-h"):
        print_text(context.get_help())
        return
    if recipe not in TRAINING:
        fix = f"{suggest_recipe(recipe)}specify one of {', '.join(TRAINING)}"
        fix = f"harness train sft {recipe} ..." if "=" in recipe else fix
        raise ConfigError(f"there is no recipe {recipe!r}", where="harness train", fix=fix)
    options = Options.parse(arguments or [], where=f"harness train {recipe}")
    # Settings are printed on any machine.
    shows = ("--cfg", "-c", "--info", "-i")
    is_shown = options.show or options.help or any(flag.startswith(shows) for flag in options.hydra_flags)
    if not is_shown:
        require_training("training")
    ranks = None
    if not is_shown and not {"RANK", "SLURM_PROCID"} & os.environ.keys():
        given = [text.partition("=")[2] for text in options.overrides if text.startswith("parallel.ranks=")]
        ranks = int(given[-1]) if given and given[-1].isdecimal() else None
        if not options.hydra_flags:
            # Wrong settings are refused once and here, not by every rank and their launcher.
            folder, file = options.config_dir, options.config_name
            config = compose_config(recipe, TRAINING[recipe], options.overrides, config_dir=folder, config_name=file)
            ranks = config.parallel.ranks
            # Those of a file may be of the cluster that it is for: one rank alone refuses them.
            if not given and ranks and ranks > (len([*Path("/dev").glob("nvidia[0-9]*")]) or usable_cores()):
                ranks = None
    if not ranks:
        become_rank_of_slurm()
        recipe_entry(recipe)(arguments or [])
        return
    require_cores(ranks, setting="parallel.ranks")
    raise typer.Exit(start_ranks([sys.executable, "-m", f"harness.recipes.{recipe}", *(arguments or [])], ranks))


@dataclass
class MovedData:
    """Data of a run that has been moved.

    Attributes:
        paths: current location of the run's data, in the order of its settings (one dataset, or the sources of its
            blend); empty uses the original location. The content must be the data that was trained.
    """

    paths: list[str] = field(default_factory=list, metadata={KEY: "data.paths"})


@runs_app.command(cls=class_of(MovedData))
def export(
    context: typer.Context,
    source: Annotated[Path, argument("RUN", "a run's folder, or one of its checkpoints")],
    out: Annotated[Path, argument("OUT", "a new folder")],
    adapter: Annotated[bool, option("--adapter", "export only the LoRA adapters, in PEFT's format")] = False,
    mtp: Annotated[bool, option("--mtp", "also export the initial weights' MTP layers")] = False,
    unchecked: Annotated[bool, option("--unchecked", "accept a checkpoint without checksums.json")] = False,
) -> None:
    """Export a checkpoint for serving: weights, end tokens, tokenizer, chat template and model card."""
    if is_run(out) and not (is_run(source) or is_there(source / "run.json")):
        what = "the arguments are reversed: OUT is a run's folder"
        raise ConfigError(what, where=str(out), fix=f"harness export {out} {source}")
    from harness.megatron import prepare_process

    prepare_process()
    from harness.megatron.export.folder import export_checkpoint

    chosen = {"adapters_only": adapter, "keep_mtp": mtp, "unchecked": unchecked}
    done = export_checkpoint(source, out, **chosen, data_paths=context.obj.paths)
    print_line(f"{out}: {count_of(done.num_weights, 'weight')} of step {done.step}, {done.num_bytes / 1e9:,.3f} GB")
    if done.end_tokens:
        print_line(f"  an answer ends at {' or '.join(done.end_tokens)}; padding is {done.pad_token}")
    for line in done.missing:
        print_line(f"  not written: {line}")
    if done.missing and not context.obj.paths:
        print_line("  if the data has been moved, set data.paths=[PATH]")


@runs_app.command(cls=class_of(RequeueSettings))
def requeue(context: typer.Context, run_dir: Annotated[Path, argument("RUN", "the run's folder")]) -> None:
    """Record how a run ended and decide whether to start it again: exit code 0 for yes, 1 for no."""
    from harness.train import alone_in
    from harness.train.attempts import decide
    from harness.train.folder import has_run

    if not run_dir.is_dir():
        raise ConfigError("the run does not exist", where=str(run_dir), fix="use the folder of a run")
    settings: RequeueSettings = context.obj
    # In the job that has the run, its ranks have ended; elsewhere it may be at work.
    with nullcontext() if has_run(run_dir) else alone_in(run_dir):
        decision = decide(
            run_dir, exit_code=settings.exit_code, max_same=settings.max_same_failures, in_job=settings.restart
        )
    print_line(f"{run_dir}: {decision.message}")
    raise typer.Exit(0 if decision.requeue else 1)


def recipe_entry(name: str) -> Callable[[list[str]], None]:
    """Return the entry point of `python -m harness.recipes.<name>`, which takes the arguments."""
    entry: Callable[[list[str]], None] = importlib.import_module(f"harness.recipes.{name}").entry
    return entry
