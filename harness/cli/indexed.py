"""Commands on Megatron's indexed datasets (.bin and .idx), made from token shards.

What imports pyarrow is imported by the command that needs it, so that other commands of `harness` start sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.checks import KEY, CheckedSettings, bounded
from harness.cli.settings import AsJson, Overwrite, argument, class_of, print_json, progress_bar
from harness.errors import ConfigError, Problem
from harness.printing import count_of, print_line

if TYPE_CHECKING:
    from harness.indexed.convert import TokenSource
    from harness.indexed.index import IndexedReport

indexed_app = typer.Typer(help="Build Megatron's indexed datasets from token shards.", no_args_is_help=True)

Shards = Annotated[list[str], argument("SRC...", "Parquet files, folders or patterns")]
Pairs = Annotated[list[str], argument("PREFIX...", "pairs: X, X.bin or X.idx")]
Prefix = Annotated[str, argument("DST", "the pair to write: X for X.bin and X.idx")]


@dataclass
class Vocabulary(CheckedSettings):
    """The tokenizer that made the ids.

    Attributes:
        vocab_size: vocabulary size, which determines the dtype and the largest valid id; null derives the dtype.
    """

    vocab_size: int | None = bounded(None, lowest=1, key="tokenizer.vocab_size")


@dataclass
class TokenSettings(Vocabulary):
    """Settings of `harness indexed convert`: rows of the token shards, and their tokenizer.

    Attributes:
        column: name of the column with token ids: lists, lists of lists, or ids as text.
        eod: token to append to every document; null for none.
        empty: `drop` or `refuse` rows without tokens.
    """

    column: str = field(default="input_ids", metadata={KEY: "data.column"})
    eod: int | None = bounded(None, key="data.eod")
    empty: str = field(default="drop", metadata={KEY: "data.empty"})

    def source(self) -> TokenSource:
        from harness.indexed.convert import TokenSource

        return TokenSource(column=self.column, eod=self.eod, empty=self.empty, vocab_size=self.vocab_size)


@dataclass
class FamilySettings(TokenSettings):
    """Settings of `harness indexed family`.

    Attributes:
        split: ratio of the splits, such as split.train=98 split.valid=1 split.test=1; omit to write only train.
        shards: shards of each split, such as shards.valid=PATH, instead of SRC and split.
    """

    split: dict[str, float] = bounded(default_factory=dict, lowest=0, highest=10**12)
    shards: dict[str, list[str]] = field(default_factory=dict)


@indexed_app.command(cls=class_of(TokenSettings))
def convert(
    context: typer.Context, sources: Shards, to: Prefix, overwrite: Overwrite = False, as_json: AsJson = False
) -> None:
    """Write token shards, one document per row, as one pair of .bin and .idx, the same bytes as Megatron's builder."""
    from harness.indexed.convert import convert_tokens

    settings: TokenSettings = context.obj
    with progress_bar("converting", quiet=as_json) as advance:
        report = convert_tokens(sources, to, source=settings.source(), overwrite=overwrite, progress=_counted(advance))
    _print_reports([report], as_json=as_json)


@indexed_app.command(cls=class_of(FamilySettings))
def family(
    context: typer.Context,
    out: Annotated[Path, argument("DIR", "folder of the family")],
    name: Annotated[str, argument("NAME", "part of the name of every file")],
    sources: Annotated[list[str] | None, argument("[SRC]...", "shards to split by hash")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write token shards as one named pair of .bin and .idx per split, with the JSON files that Megatron reads."""
    from harness.indexed.convert import TokenFamily, write_family

    settings: FamilySettings = context.obj
    if bool(sources) == bool(settings.shards) or (settings.shards and settings.split):
        raise ConfigError("it is unclear which shards a split has", where="SRC", fix="give SRC, or shards.SPLIT=SRC")
    splits = dict.fromkeys(settings.shards, 1.0) or settings.split or {"train": 1.0}
    made = TokenFamily(name=name, splits=splits, source=settings.source())
    with progress_bar("converting", quiet=as_json) as advance:
        reports = write_family(
            settings.shards or sources or [], out, made, overwrite=overwrite, progress=_counted(advance)
        )
    _print_reports(list(reports.values()), as_json=as_json)


@indexed_app.command(cls=class_of(Vocabulary))
def counts(
    context: typer.Context,
    prefixes: Annotated[list[str], argument("PREFIX...", "as in Megatron's --data-path")],
    to: Annotated[Path, argument("FILE", "the JSON to write")],
) -> None:
    """Write the sequence counts of many prefixes for Megatron's --per-dataset-sequences-path."""
    from harness.indexed.convert import count_sequences, save_counts

    vocab_size = context.obj.vocab_size
    by_prefix = count_sequences(prefixes, vocab_size=vocab_size)
    save_counts(by_prefix, to)
    if vocab_size is None:
        print_line("not checked: dtypes, which Megatron takes from the vocabulary (tokenizer.vocab_size=N checks them)")
    sequences = sum(count for count, _ in by_prefix.values())
    print_line(f"{to}: {len(by_prefix):,} prefixes, {count_of(sequences, 'sequence')}")


@indexed_app.command()
def merge(pairs: Pairs, to: Prefix, overwrite: Overwrite = False, as_json: AsJson = False) -> None:
    """Concatenate several pairs of .bin and .idx into one."""
    from harness.indexed.convert import merge_indexed

    with progress_bar("merging", quiet=as_json) as advance:
        report = merge_indexed(pairs, to, overwrite=overwrite, progress=advance)
    _print_reports([report], as_json=as_json)


def find_checks(path: str) -> list[tuple[str, Callable[..., list[Problem]]]]:
    """Return families' records and pairs without packs, each with the function that verifies it; [] for any other path.

    Of a folder that holds these alone, all of its families, and its pairs that belong to none.
    """
    from harness.indexed.convert import family_pairs, verify_family
    from harness.indexed.index import BIN, IDX, LOSS_BIN, prefix_of, verify_indexed, with_suffix

    if path.endswith(".json"):
        return [(path, verify_family)] if family_pairs(path) is not None else []
    if Path(path).is_dir():
        records = [str(one) for one in sorted(Path(path).glob("*.json")) if family_pairs(str(one)) is not None]
        prefixes = sorted({prefix_of(one) for suffix in (BIN, IDX) for one in Path(path).glob(f"*{suffix}")})
        # Shards of packs that lost files, manifest included, are no pairs, and other tools' files are named .bin too.
        if not any(with_suffix(prefix, IDX).exists() for prefix in prefixes):
            prefixes = []
        if any(with_suffix(prefix, LOSS_BIN).exists() or prefix.name.startswith("shard_") for prefix in prefixes):
            return []
        named = {prefix for record in records for prefix in family_pairs(record) or ()}
        pairs = [str(prefix) for prefix in prefixes if prefix not in named]
        return [*((record, verify_family) for record in records), *((pair, verify_indexed) for pair in pairs)]
    prefix = prefix_of(path)
    there = [with_suffix(prefix, suffix).is_file() for suffix in (BIN, IDX, LOSS_BIN)]
    return [(path, verify_indexed)] if any(there[:2]) and not there[2] else []


def _counted(advance: Callable[..., None]) -> Callable[[int], None]:
    """Turn numbers of further documents into the total that a progress bar shows."""
    done = 0

    def add(documents: int) -> None:
        nonlocal done
        done += documents
        advance(done, None)

    return add


def _print_reports(reports: list[IndexedReport], *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(report) for report in reports])
        return
    for report in reports:
        left_out = f", {count_of(report.empty_documents, 'empty row')} left out" if report.empty_documents else ""
        print_line(
            f"{report.prefix}: {count_of(report.num_documents, 'document')}, "
            f"{count_of(report.num_sequences, 'sequence')}, "
            f"{count_of(report.num_tokens, 'token')} as {report.dtype}{left_out}"
        )
