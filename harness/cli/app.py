"""`harness`: look at datasets, check, convert, compare and measure them, from a terminal.

Exit codes: 0 all is well, 1 a check found something, 2 the command could not be carried out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness.cli.bench import bench
from harness.cli.indexed import find_check, indexed_app
from harness.cli.live import live_app
from harness.cli.parity import parity_app
from harness.cli.preflight import preflight_app
from harness.cli.runs import runs_app
from harness.errors import exit_on_error
from harness.formats import (
    CONVENTIONS,
    FORMATS,
    convert_dataset,
    diff_datasets,
    find_datasets,
    find_tokenizer,
    import_dataset,
    inspect_dataset,
    open_dataset,
    render_pack,
    render_summary,
    verify_dataset,
)
from harness.loader.inspect_blend import SUFFIXES, render_blend, summarize_blend
from harness.storage import is_uri

app = typer.Typer(
    name="harness",
    help="Packed SFT data for Megatron-Core: look at it, check it, convert it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings={"ignore_unknown_options": True}, no_args_is_help=True)(bench)
app.add_typer(indexed_app, name="indexed")
app.add_typer(live_app, name="live")
app.add_typer(parity_app, name="parity")
app.add_typer(preflight_app, name="preflight")
app.add_typer(runs_app)

DatasetPath = Annotated[str, typer.Argument(metavar="PATH", help="dataset folder, file, glob, prefix or URI")]
Destination = Annotated[str, typer.Argument(metavar="DST", help="folder to write, or a .parquet or .npy file")]
ToFormat = Annotated[str, typer.Option("--to", help=f"one of {', '.join(FORMATS)}")]
PackSize = Annotated[int | None, typer.Option(help="pack size of the result, where the source does not say")]
PacksPerShard = Annotated[int | None, typer.Option(help="packs of one shard")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what is at the destination")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


@app.command()
def inspect(
    path: DatasetPath,
    pack: Annotated[int | None, typer.Option(min=0, help="show this pack's text, trained tokens in colour")] = None,
    tokenizer: Annotated[str, typer.Option(help="tokenizer folder, where the dataset does not name one")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what a dataset holds, or the text of one pack; of a YAML file, the blend that it configures."""
    console = Console() if sys.stdout.isatty() else Console(soft_wrap=True)
    if path.endswith(SUFFIXES):
        blend = summarize_blend(path)
        if as_json:
            _print_json(blend.to_dict())
        else:
            console.print(render_blend(blend))
        return
    if pack is not None:
        reader = open_dataset(find_datasets(path)[0])
        if as_json:
            fields = ("input_ids", "loss_mask", "seq_start_id")
            shown = reader[pack]
            _print_json({"pack": pack, **{name: getattr(shown, name).tolist() for name in fields}})
            return
        console.print(render_pack(reader, pack, find_tokenizer(reader, tokenizer)))
        return
    summaries = [inspect_dataset(found) for found in find_datasets(path)]
    if as_json:
        _print_json([summary.to_dict() for summary in summaries])
        return
    for summary in summaries:
        console.print(render_summary(summary))


@app.command()
def verify(path: DatasetPath, as_json: AsJson = False) -> None:
    """Check every byte and every invariant of a dataset; exit code 1 where something is wrong.

    Also of Megatron's indexed datasets: X.idx, or the NAME.json of a family of them.
    """
    found = []
    num_packs = 0
    check = None if is_uri(path) else find_check(path)
    if check is None and not is_uri(path) and not Path(path).exists():
        # A path that names nothing is no damaged dataset; a prefix or a pattern opens.
        open_dataset(path).close()
    for dataset in find_datasets(path) if check is None else [path]:
        with _bar(f"verifying {dataset}", quiet=as_json) as advance:
            found += (check or verify_dataset)(dataset, progress=advance)
        num_packs += _num_packs(dataset) if not found and check is None else 0
    if as_json:
        _print_json({"path": path, "problems": [asdict(problem) for problem in found]})
    else:
        for problem in found:
            print(f"{problem.what}\n  where: {problem.where}")
        said = f"{len(found):,} problem{'s' if len(found) > 1 else ''} in {path}"
        counted = f"{num_packs:,} packs, " if check is None else ""
        print(said if found else f"{path}: {counted}nothing wrong")
    raise typer.Exit(1 if found else 0)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="dataset folder, file, glob, prefix or URI")],
    destination: Destination,
    to: ToFormat,
    pack_size: PackSize = None,
    packs_per_shard: PacksPerShard = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a dataset in another format and compare both sides. An interrupted conversion goes on where it was.

    Memory does not grow with the dataset, but for npy: a pickled file is read, and written, as a whole, shard by
    shard.
    """
    with _bar("", quiet=as_json) as advance:
        manifest = convert_dataset(
            source,
            destination,
            format=to,
            pack_size=pack_size,
            packs_per_shard=packs_per_shard,
            overwrite=overwrite,
            progress=lambda stage, done, total: advance(done, total, stage),
        )
    _say_written(destination, manifest, {}, as_json=as_json)


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(metavar="SRC", help="what the other tool wrote")],
    destination: Destination,
    convention: Annotated[str, typer.Option("--from", help=f"one of {', '.join(CONVENTIONS)}")],
    to: ToFormat = "parquet",
    split: Annotated[str, typer.Option(help="which split, where the tool keeps several")] = "train",
    pack_size: PackSize = None,
    packs_per_shard: PacksPerShard = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Take over packed data of Megatron-Bridge, Nemotron, ms-swift or Megatron-LM; changes are counted and told."""
    with _bar(f"importing {source}", quiet=as_json) as advance:
        report = import_dataset(
            source,
            destination,
            convention=convention,
            format=to,
            split=split,
            pack_size=pack_size,
            packs_per_shard=packs_per_shard,
            overwrite=overwrite,
            progress=advance,
        )
    _say_written(destination, report.manifest, dict(report.counts), as_json=as_json)


@app.command()
def repack(
    store: Annotated[str, typer.Argument(metavar="STORE", help="a dataset in the format virtual, or a plan over one")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="folder to write")],
    pack_size: Annotated[int, typer.Option(min=2, help="most tokens of a pack")],
    algorithm: Annotated[str, typer.Option(help="as data.algorithm in a recipe")] = "best_fit_decreasing",
    seed: Annotated[int, typer.Option(min=0, help="which of equal sequences share a pack, and the order of packs")] = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Plan packs again over sequences that are stored once: seconds, and no token is copied."""
    from harness.prep.repack import repack_store

    manifest = repack_store(
        store, destination, pack_size=pack_size, algorithm=algorithm, seed=seed, overwrite=overwrite
    )
    _say_written(destination, manifest, {}, as_json=as_json)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="a dataset")],
    b: Annotated[str, typer.Argument(metavar="B", help="another")],
    as_json: AsJson = False,
) -> None:
    """Compare two datasets pack by pack and name the first difference; exit code 1 where there is one."""
    difference = diff_datasets(a, b)
    if as_json:
        _print_json({"a": a, "b": b, "difference": None if difference is None else asdict(difference)})
    else:
        print(f"{a} and {b} hold the same packs" if difference is None else f"first difference: {difference}")
    raise typer.Exit(0 if difference is None else 1)


@contextmanager
def _bar(what: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; yields advance(done, total, description=what)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what)

        def advance(done: int, total: int, description: str = what) -> None:
            progress.update(task, completed=done, total=total, description=description)

        yield advance


def _num_packs(path: str) -> int:
    reader = open_dataset(path)
    try:
        return len(reader)
    finally:
        reader.close()


def _say_written(destination: str, manifest: Any, changes: dict[str, int], *, as_json: bool) -> None:
    if as_json:
        _print_json({"path": destination, "manifest": asdict(manifest), "changes": changes})
        return
    print(
        f"{destination}: {manifest.num_packs:,} packs, {manifest.num_sequences:,} sequences, "
        f"{manifest.num_tokens:,} tokens as {manifest.format}"
        + (f", fingerprint {manifest.fingerprint}" if manifest.fingerprint else "")
    )
    for name, count in changes.items():
        print(f"  {name.replace('_', ' ')}: {count:,}")


def _print_json(values: Any) -> None:
    print(json.dumps(values, indent=2))


def main() -> None:
    """Entry point: a HarnessError becomes its message and exit code 2."""
    with exit_on_error():
        app()


if __name__ == "__main__":
    main()
