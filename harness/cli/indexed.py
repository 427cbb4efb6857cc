"""`harness indexed`: Megatron's indexed datasets (.bin and .idx) from token shards.

What imports pyarrow is imported by the command that needs it: other commands of `harness` start sooner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.errors import ConfigError, Problem
from harness.formats.binidx import LOSS_BIN
from harness.indexed import (
    BIN,
    IDX,
    count_sequences,
    merge_indexed,
    prefix_of,
    save_counts,
    verify_indexed,
    with_suffix,
)

if TYPE_CHECKING:
    from harness.indexed import IndexedReport

indexed_app = typer.Typer(
    name="indexed",
    help="Megatron's indexed datasets (.bin and .idx) from token shards: no torch, no Megatron.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Shards = Annotated[list[str], typer.Argument(metavar="SRC...", help="Parquet files, folders or patterns")]
Pairs = Annotated[list[str], typer.Argument(metavar="PREFIX...", help="pairs: X, X.bin or X.idx")]
Prefix = Annotated[str, typer.Option("--to", metavar="PREFIX", help="the pair to write: X of X.bin and X.idx")]
Column = Annotated[str, typer.Option(help="of token ids: lists, lists of lists, or ids as text")]
Eod = Annotated[int | None, typer.Option(min=0, help="token to append to every document")]
VocabSize = Annotated[int | None, typer.Option(min=1, help="of the tokenizer: fixes the dtype, bounds the ids")]
Empty = Annotated[str, typer.Option(help="drop or refuse rows without tokens")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what is at the destination")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


@indexed_app.command()
def convert(
    sources: Shards,
    to: Prefix,
    column: Column = "input_ids",
    eod: Eod = None,
    vocab_size: VocabSize = None,
    empty: Empty = "drop",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write token shards as one pair, byte for byte as Megatron's own builder would; a row is a document."""
    from harness.indexed import TokenSource, convert_tokens

    source = TokenSource(column=column, eod=eod, vocab_size=vocab_size, empty=empty)
    with _bar("converting", quiet=as_json) as progress:
        report = convert_tokens(sources, to, source=source, overwrite=overwrite, progress=progress)
    _say([report], as_json=as_json)


@indexed_app.command()
def family(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder of the family")],
    name: Annotated[str, typer.Option(help="part of every file's name")],
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SRC]...", help="shards to split by hash")] = None,
    split: Annotated[
        list[str] | None, typer.Option(metavar="SPLIT=PART", help="train=98, valid=1, test=1; default: all is train")
    ] = None,
    shards: Annotated[
        list[str] | None, typer.Option(metavar="SPLIT=SRC", help="shards of one split; instead of SRC and --split")
    ] = None,
    column: Column = "input_ids",
    eod: Eod = None,
    vocab_size: VocabSize = None,
    empty: Empty = "drop",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write token shards as named pairs, one a split, with the JSON files that Megatron reads beside them."""
    from harness.indexed import TokenFamily, TokenSource, write_family

    source = TokenSource(column=column, eod=eod, vocab_size=vocab_size, empty=empty)
    if bool(sources) == bool(shards) or (shards and split):
        raise ConfigError("the shards of each split are not clear", where="SRC", fix="give SRC, or --shards SPLIT=SRC")
    named = _named_shards(shards or [])
    parts = dict.fromkeys(named, 1.0) or _parts(split or ["train=1"])
    made = TokenFamily(name=name, splits=parts, source=source)
    with _bar("converting", quiet=as_json) as progress:
        report = write_family(named or sources or [], out, made, overwrite=overwrite, progress=progress)
    _say(list(report.splits.values()), as_json=as_json)


@indexed_app.command()
def merge(pairs: Pairs, to: Prefix, overwrite: Overwrite = False, as_json: AsJson = False) -> None:
    """Join pairs end to end as one."""
    with _bar("merging", quiet=as_json) as progress:
        report = merge_indexed(
            pairs, to, overwrite=overwrite, progress=lambda done, total: progress(0, completed=done, total=total)
        )
    _say([report], as_json=as_json)


@indexed_app.command()
def counts(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="as they stand in --data-path")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="the JSON to write")],
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="of the tokenizer: refuses pairs that Megatron would then misread")
    ] = None,
) -> None:
    """Write the numbers of sequences of many prefixes for Megatron's --per-dataset-sequences-path."""
    found = count_sequences(prefixes, vocab_size=vocab_size)
    save_counts(found, to)
    if vocab_size is None:
        print("dtypes were not checked: Megatron will take them from the tokenizer's vocabulary (--vocab-size checks)")
    print(f"{to}: {len(found):,} prefixes, {sum(count for count, _ in found.values()):,} sequences")


def find_check(path: str) -> Callable[..., list[Problem]] | None:
    """What verifies a path that names a family's record or a pair without packs; None where it is something else."""
    if path.endswith(".json"):
        from harness.indexed import is_family, verify_family

        return verify_family if is_family(path) else None
    prefix = prefix_of(path)
    there = [with_suffix(prefix, suffix).is_file() for suffix in (BIN, IDX, LOSS_BIN)]
    return verify_indexed if any(there[:2]) and not there[2] else None


def _named_shards(given: list[str]) -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    for one in given:
        name, _, source = one.partition("=")
        if not source:
            raise ConfigError(f"{one!r} names no shards", where="--shards", fix="write --shards valid=PATH")
        named.setdefault(name, []).append(source)
    return named


def _parts(given: list[str]) -> dict[str, float]:
    parts = {}
    for one in given:
        name, _, part = one.partition("=")
        try:
            parts[name] = float(part)
        except ValueError:
            raise ConfigError(f"{one!r} names no part", where="--split", fix="write --split train=98") from None
    return parts


@contextmanager
def _bar(what: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; yields advance(documents) that also takes what `Progress.update` takes."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def advance(step: int, **others: Any) -> None:
            progress.update(task, advance=None if others else step, **others)

        yield advance


def _say(reports: list[IndexedReport], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
        return
    for report in reports:
        left_out = f", {report.empty_documents:,} empty rows left out" if report.empty_documents else ""
        print(
            f"{report.prefix}: {report.num_documents:,} documents, {report.num_sequences:,} sequences, "
            f"{report.num_tokens:,} tokens as {report.dtype}{left_out}"
        )
