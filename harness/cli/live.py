"""Commands on live data: write chunks into a folder while training reads them, and show both sides."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.checks import KEY, LONGEST_S, CheckedSettings, bounded, one_of, read_rules
from harness.cli.settings import AsJson, argument, class_of, option, print_json
from harness.errors import ConfigError
from harness.prep import OVER_LONG, TokenizerConfig
from harness.prep.sources.config import TOOL_CALLS
from harness.printing import count_of, open_console, print_line

if TYPE_CHECKING:
    from harness.prep import ChatTokenizer

live_app = typer.Typer(
    help="Train while data is being generated: write chunks into a folder, and show its producer and readers.",
    no_args_is_help=True,
)
# Flushed: a log shows the progress of the producer.
_print_line = functools.partial(print_line, flush=True)
Folder = Annotated[str, argument("DIR", "the folder of chunks, on a shared disk or in a bucket")]


@dataclass
class ChunkSettings(CheckedSettings, section="chunks"):
    """The input and the chunks made from it.

    Attributes:
        kind: content of the input: `chat` (conversations) or `packs` (a dataset).
        format: format of the chunks: `jsonl` or `parquet`.
        rows: number of rows in a chunk.
        flush_s: seconds after which a chunk with fewer rows is written.
        max_waiting: maximum number of unread chunks; the producer pauses when it is reached.
        keep: number of newest completed chunks to keep.
    """

    kind: str = one_of("chat", ("chat", "packs"))
    format: str = one_of("jsonl", ("jsonl", "parquet"))
    rows: int = bounded(1000, lowest=1)
    flush_s: float = bounded(60.0, lowest=0, highest=LONGEST_S)
    max_waiting: int = bounded(16, lowest=1)
    keep: int = bounded(4)


@dataclass
class ProduceSettings(CheckedSettings):
    """Settings of `harness live produce`.

    Attributes:
        pack_size: maximum number of tokens in a pack that is made from conversations.
        over_long: `drop`, `cut` or `split` conversations of more than `pack_size` tokens, as in `harness prepare`.
        tokenizer: tokenizer for packs. Without a name, conversations are written, and the ranks tokenize them.
        schema, columns, ignore_fields, drop_media, tool_calls: as in `harness prepare`; the schema, if it is
            empty, is detected in every run.
        on_bad: `refuse` or `skip` invalid conversations.
    """

    chunks: ChunkSettings = field(default_factory=ChunkSettings)
    pack_size: int = bounded(4096, lowest=2, key="data.pack_size")
    over_long: str = one_of("drop", OVER_LONG, key="data.over_long")
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    schema: str = field(default="", metadata={KEY: "source.schema"})
    columns: dict[str, str] = field(default_factory=dict, metadata={KEY: "source.columns"})
    ignore_fields: list[str] = field(default_factory=list, metadata={KEY: "source.ignore_fields"})
    drop_media: bool = field(default=False, metadata={KEY: "source.drop_media"})
    tool_calls: str = one_of("given", TOOL_CALLS, key="source.tool_calls")
    on_bad: str = one_of("refuse", ("refuse", "skip"), key="source.on_bad")

    rules = read_rules("""
        tokenizer.name, chunks.kind=packs | packs are tokenized already | omit tokenizer.name, or set chunks.kind=chat
    """)


@live_app.command(cls=class_of(ProduceSettings))
def produce(
    context: typer.Context,
    source: Annotated[str, argument("SRC", "file, folder or glob; - for standard input")],
    folder: Folder,
    append: Annotated[bool, option("--append", "append SRC to the chunks in the folder")] = False,
    leave_rest: Annotated[
        bool, option("--leave-rest", "with --append: leave out the rest of an incompletely read input")
    ] = False,
    leave_open: Annotated[bool, option("--leave-open", "keep the stream open for --append")] = False,
) -> None:
    """Write live chunks. To continue after a crash, run the command again with the same SRC."""
    from harness.loader import live
    from harness.prep.chat import RecordReader
    from harness.prep.media import MediaLimits

    if folder == "-" or Path(folder).is_file():
        what, fix = "the input comes first, then the folder of chunks", f"harness live produce {folder} {source}"
        raise ConfigError(what, where=f"{source} {folder}", fix=f"check both names; in the other order: {fix}")
    if leave_rest and not append:
        what = "--leave-rest leaves the rest of the last input out, and begins another"
        raise ConfigError(what, where=str(folder), fix="add --append")
    settings: ProduceSettings = context.obj
    chunks, of, packing = settings.chunks, settings, None
    if settings.tokenizer.name:
        block = 1 if source == live.STDIN else 64
        made: dict[str, Any] = {"pack_size": settings.pack_size, "over_long": settings.over_long, "block": block}
        packing = live.Packing(_open_tokenizer(settings), **made)
    with live.LiveProducer(
        folder,
        kind="packs" if packing is not None else chunks.kind,
        suffix=f".{chunks.format}",
        rows_per_chunk=chunks.rows,
        max_waiting=chunks.max_waiting,
        keep=chunks.keep,
        flush_s=chunks.flush_s,
        log=_print_line,
    ) as producer:
        had_ended = producer.ended
        if producer.num_chunks and not had_ended:
            so_far = f"{count_of(producer.num_rows, 'row')} in {count_of(producer.num_chunks, 'chunk')}"
            _print_line(f"continues after {so_far}")
        items = live.read_packs(source)
        if chunks.kind == "chat":
            media = None if of.drop_media or packing is not None else MediaLimits()
            reader = RecordReader(of.schema, of.columns, of.ignore_fields, of.drop_media, of.tool_calls, media)
            items = live.log_unused_fields(live.read_conversations(source, reader), source, _print_line)
        begun = {"append": append, "leave_rest": leave_rest, "ends": not leave_open}
        live.produce_chunks(producer, items, packing=packing, on_bad=of.on_bad, log=_print_line, **begun)
        if not leave_open:
            if not producer.num_chunks:
                fix = f"check SRC; to end a stream without rows, run `harness live end {folder}`"
                raise ConfigError("the input contains no rows", where=source, fix=fix)
            producer.end()
        total = f"{count_of(producer.num_rows, 'row')} in {count_of(producer.num_chunks, 'chunk')}"
        was_there = "the stream has ended and contains all of the input, " if had_ended else ""
        _print_line(f"{folder}: {was_there}{total}")


def _open_tokenizer(settings: ProduceSettings) -> ChatTokenizer:
    from harness.prep import ChatTokenizer, as_prepared
    from harness.prep.tokenize.config import refuse_weighted

    config, mask_of = as_prepared(settings.tokenizer)
    refuse_weighted(config, "tokenizer")
    tokenizer = ChatTokenizer(config)
    as_of = f", as of {mask_of}" if mask_of is not None else ""
    _print_line(f"mask {tokenizer.mask_rule}{as_of}: {tokenizer.mask_facts()['why']}")
    return tokenizer


@live_app.command()
def end(folder: Folder) -> None:
    """End a stream whose producer did not end it: training stops after the existing chunks."""
    from harness.loader.live import LiveProducer
    from harness.loader.live.folder import LiveFolder

    if not LiveFolder(folder).files.exists():
        raise ConfigError("there is no folder of live chunks", where=folder, fix="use the folder of data.live.path")
    with LiveProducer(folder) as producer:
        producer.end()
        _print_line(f"{folder}: ends after {count_of(producer.num_chunks, 'chunk')}")


@live_app.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """Show the producer, the unread chunks, the rates, and the ranks that read."""
    from harness.loader.live.status import live_status, render_status

    if as_json:
        print_json(asdict(live_status(folder)))
    else:
        open_console(width=120).print(render_status(live_status(folder)))
