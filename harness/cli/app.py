"""Assemble the command `harness`: its commands, its version and its usage errors."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from harness.errors import ConfigError
from harness.printing import print_line

_PROJECT = "megatron-sft-harness"
# The base of errors in a command line, which typer does not export.
USAGE_ERROR: Any = typer.BadParameter.__base__
# Groups by the purpose of the commands, in the order of the work: the module in this package, and the help. A module is
# imported when its command runs, so that `--version` and `--help` wait for nothing.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "From chats to a model": {
        "sft": ("end_to_end", "Prepare chats, train a model on them and export it."),
        "prepare": ("runs", "Pack chats into datasets."),
        "train": ("runs", "Train a model on one or more ranks."),
        "export": ("runs", "Export a checkpoint for serving."),
    },
    "Before a run": {
        "models": ("launch", "Show which models can be trained, or check one."),
        "plan": ("launch", "Estimate memory, time and layouts of a training run, without a GPU."),
        "bench": ("bench", "Measure speed on this machine."),
    },
    "Check and compare": {
        "inspect": ("data", "Show what a dataset contains."),
        "verify": ("data", "Check all bytes of a dataset, a run, a checkpoint or an export."),
        "diff": ("data", "Compare two datasets pack by pack."),
        "compare": ("parity", "Compare the loss curves of runs, and plot them together."),
        "parity": ("parity", "Prove that other settings give the same losses."),
        "conformance": ("conformance", "Check how another trainer packs, masks, averages and resumes."),
    },
    "On a Slurm cluster": {
        "cluster": ("jobs", "Propose the settings of a Slurm cluster."),
        "preflight": ("preflight", "Check that every node of a job can start training."),
        "submit": ("launch", "Start a training run on a Slurm cluster."),
        "status": ("jobs", "Show the progress, the attempts and the jobs of a run."),
        "logs": ("jobs", "Print the log of a run's job, or of a rank."),
        "cancel": ("jobs", "Cancel every job of a run."),
        "requeue": ("runs", "Record how a run ended and decide whether to start it again."),
    },
    "Other data": {
        "convert": ("data", "Write a dataset in another format."),
        "import": ("data", "Import packed datasets of other tools."),
        "repack": ("data", "Pack a dataset's sequences again, without tokenizing."),
        "live": ("live", "Train while data is being generated."),
        "indexed": ("indexed", "Build Megatron's indexed datasets from token shards."),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
# Ours, each with the words for it in other tools.
_ELSEWHERE = {
    "transformers chat FOLDER": ("chat", "generate", "infer", "serve"),
    "export RUN FOLDER": ("merge", "save", "merge-lora"),
    "prepare": ("pack", "preprocess", "tokenize"),
    "sft MODEL CHATS": ("finetune", "tune", "fit"),
    "submit": ("launch", "sbatch"),
    "train sft run_dir=RUN resume=true": ("resume", "continue"),
}


class _Commands(TyperGroup):
    """The commands of `harness`, each imported when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from harness.settings import nearest_name

            nearest = nearest_name(args[0], COMMANDS)
            near = next((ours for ours, words in _ELSEWHERE.items() if args[0] in words), nearest)
            fix = (f"did you mean {near}? " if near else "") + "`harness --help` lists all commands"
            raise ConfigError(f"there is no command {args[0]!r}", where="harness", fix=fix)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            from harness.storage import name_bus_errors

            name_bus_errors()
            module = import_module(f"harness.cli.{COMMANDS[cmd_name][0]}")
            if (alone := getattr(module, f"{cmd_name}_app", None)) is not None:
                group = typer.main.get_group(alone)
                self.commands[cmd_name] = group.commands.get(cmd_name, group)
                self.commands[cmd_name].name = cmd_name
            else:
                self.commands.update(typer.main.get_group(getattr(module, f"{COMMANDS[cmd_name][0]}_app")).commands)
            for command in (*self.commands.values(), *getattr(self.commands[cmd_name], "commands", {}).values()):
                command.help = re.sub(r"(?<!\n)\n(?=\S)", " ", command.help or "")  # Rich keeps line breaks
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in group.items()])


# Plain help: markup would import what draws it.
app = typer.Typer(
    name="harness",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def installed_version() -> str:
    """Return the version of the package, or of the pyproject.toml of a checkout that is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(_PROJECT)
    except importlib.metadata.PackageNotFoundError:
        import tomllib

        file = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return str(tomllib.loads(file.read_text())["project"]["version"]) if file.exists() else "unknown"


def _print_version(is_set: bool) -> None:
    if is_set:
        print_line(f"harness {installed_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Prepare packed SFT data for Megatron-Core, verify and convert it, train on it, and prove that nothing changed.

    Settings are KEY=VALUE, with the same names in every command; `--cfg` prints the settings of a command.
    """


def usage_error(error: Any) -> ConfigError:
    """Return the error of a command line that Typer refuses; for a missing argument, with those that were given."""
    command = "harness" if error.ctx is None else error.ctx.command_path
    if not isinstance(error, typer.BadParameter) or error.param is None or error.ctx is None or error.message:
        what = error.format_message().rstrip(".")
        return ConfigError(what[:1].lower() + what[1:], where=command, fix=f"{command} --help lists the arguments")
    names = [each for each in error.ctx.command.params if each.param_type_name == "argument" and each.required]
    missing = error.param.metavar
    given = [str(error.ctx.params.get(each.name) or each.metavar) for each in names]
    fix = f"{' '.join([command, *given])} ({missing}: {getattr(error.param, 'help', '')})"
    return ConfigError(f"{missing} is missing", where=command, fix=fix)
