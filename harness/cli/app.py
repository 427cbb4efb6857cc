"""Assemble the command `harness`: its commands, its version and its exit codes.

Exit codes: 0 all is well, 1 a check found something, 2 the command could not be carried out.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from harness.errors import exit_on_error
from harness.printing import print_line

_PROJECT = "megatron-sft-harness"
# Commands with an argument or a mode that reads standard input.
_READING = frozenset(("chat", "live", "preflight"))
# First the commands in the order of the work, then the groups: the module in this package, and the help. A module is
# imported when its command runs, so that `--version` and `--help` wait for nothing.
COMMANDS: dict[str, tuple[str, str]] = {
    "sft": ("end_to_end", "Prepare chats, train a model on them and export it."),
    "prepare": ("runs", "Turn chats into packed datasets."),
    "train": ("runs", "Train on one rank or several."),
    "export": ("runs", "Write a checkpoint as a folder that serves."),
    "chat": ("runs", "Chat with the model of a run."),
    "requeue": ("runs", "Record how a run ended and decide whether to start it again."),
    "plan": ("launch", "Compute memory, time and layouts of a training run, without a GPU."),
    "submit": ("launch", "Start a training run on a Slurm cluster."),
    "status": ("jobs", "Show how far a run is, how its attempts ended, and its jobs."),
    "logs": ("jobs", "Print the log of a run's job, or of a rank."),
    "cancel": ("jobs", "Cancel every job of a run."),
    "inspect": ("data", "Show what a dataset contains."),
    "verify": ("data", "Check all bytes of a dataset, a run, a checkpoint or an export."),
    "convert": ("data", "Write a dataset in another format."),
    "import": ("data", "Make a dataset from the files of other tools."),
    "repack": ("data", "Pack a dataset's sequences again, without tokenizing."),
    "diff": ("data", "Compare two datasets pack by pack."),
    "cluster": ("jobs", "Propose the settings of a Slurm cluster."),
    "live": ("live", "Train while data is being made."),
    "indexed": ("indexed", "Make Megatron's indexed datasets from token shards."),
    "preflight": ("preflight", "Check that every node of a job can start training."),
    "parity": ("parity", "Prove that other settings train the same."),
    "bench": ("bench", "Measure speed on this machine."),
}


class _Commands(TyperGroup):
    """The commands of `harness`, each imported when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

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
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


# Plain help: markup would import what draws it.
app = typer.Typer(
    name="harness", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
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
    """Packed SFT data for Megatron-Core: prepare, verify, convert, train on it, and prove that nothing changed.

    Settings are KEY=VALUE with the same names in every command; `--cfg` explains those of a command.
    """


def main() -> None:
    """Run the command line; a HarnessError becomes its message and exit code 2."""
    with exit_on_error(reads_input=bool(_READING.intersection(sys.argv[1:2]))):
        app()


if __name__ == "__main__":
    main()
