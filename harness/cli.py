"""`harness`: look at datasets, check, convert and measure them, from a terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from harness.errors import exit_on_error
from harness.formats import open_dataset
from harness.report.inspect import find_datasets, find_tokenizer, inspect_dataset, render_pack, render_summary

app = typer.Typer(
    name="harness",
    help="Packed SFT data for Megatron-Core: look at it, check it, convert it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DatasetPath = Annotated[str, typer.Argument(metavar="PATH", help="dataset folder, file, glob, prefix or URI")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


@app.callback()
def harness() -> None:
    """Keeps `harness inspect` a command of its own while there is only one."""


@app.command()
def inspect(
    path: DatasetPath,
    pack: Annotated[int | None, typer.Option(help="show this pack's text, trained tokens in colour")] = None,
    tokenizer: Annotated[str, typer.Option(help="tokenizer folder, where the dataset does not name one")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what a dataset holds, or the text of one pack."""
    console = Console(soft_wrap=True) if not sys.stdout.isatty() else Console()
    if pack is not None:
        reader = open_dataset(find_datasets(path)[0])
        console.print(render_pack(reader, pack, find_tokenizer(reader, tokenizer)))
        return
    summaries = [inspect_dataset(found) for found in find_datasets(path)]
    if as_json:
        print(json.dumps([summary.to_dict() for summary in summaries], indent=2))
        return
    for summary in summaries:
        console.print(render_summary(summary))


def main() -> None:
    """Entry point: a HarnessError becomes its message and exit code 2."""
    with exit_on_error():
        app()


if __name__ == "__main__":
    main()
