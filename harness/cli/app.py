"""Assemble the command `harness`: its groups of commands, its version and its exit codes.

Exit codes: 0 all is well, 1 a check found something, 2 the command could not be carried out.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.bench import run_bench
from harness.cli.data import data_app
from harness.cli.indexed import indexed_app
from harness.cli.jobs import cluster_app, jobs_app
from harness.cli.launch import launch_app
from harness.cli.live import live_app
from harness.cli.parity import parity_app
from harness.cli.preflight import preflight_app
from harness.cli.runs import runs_app
from harness.errors import exit_on_error
from harness.printing import print_line
from harness.storage import name_bus_errors

_PROJECT = "megatron-sft-harness"
# Commands with an argument or a mode that reads standard input.
_READING = frozenset(("chat", "live", "preflight"))

app = typer.Typer(
    name="harness",
    help="Packed SFT data for Megatron-Core: prepare, inspect, verify, convert, train on it, and prove that nothing "
    "changed. Settings are KEY=VALUE with the same names in every command; `--cfg` explains those of a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# First the commands in the order of the work, then the groups.
app.add_typer(runs_app)
app.add_typer(launch_app)
app.add_typer(jobs_app)
app.add_typer(data_app)
app.add_typer(cluster_app, name="cluster")
app.add_typer(live_app, name="live")
app.add_typer(indexed_app, name="indexed")
app.add_typer(preflight_app, name="preflight")
app.add_typer(parity_app, name="parity")
app.command(name="bench", no_args_is_help=True)(run_bench)


def installed_version() -> str:
    """Return the version of the package, or of the pyproject.toml of a checkout that is not installed."""
    try:
        return importlib.metadata.version(_PROJECT)
    except importlib.metadata.PackageNotFoundError:
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
    pass


def main() -> None:
    """Run the command line; a HarnessError becomes its message and exit code 2."""
    name_bus_errors()
    with exit_on_error(reads_input=bool(_READING.intersection(sys.argv[1:2]))):
        app()


if __name__ == "__main__":
    main()
