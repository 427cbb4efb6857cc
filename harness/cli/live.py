"""`harness live`: make chunks while training goes on, and see how both get along."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.errors import ConfigError

live_app = typer.Typer(
    name="live",
    help="Train while data is being made: write chunks into a folder, see who writes and who reads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="the folder of chunks")]


@live_app.command()
def produce(
    folder: Folder,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="file, folder or glob; - for standard input")],
    kind: Annotated[str, typer.Option(help="what SOURCE holds: chat (conversations) or packs (a dataset)")] = "chat",
    tokenizer: Annotated[str, typer.Option(help="pack conversations here, with this tokenizer folder or hub id")] = "",
    pack_size: Annotated[int, typer.Option(min=2, help="most tokens of a pack that is made here")] = 4096,
    mask: Annotated[str, typer.Option(help="which tokens of packs are trained: see tokenizer.mask")] = "generation",
    over_long: Annotated[str, typer.Option(help="conversations above the pack size: drop or truncate")] = "drop",
    on_bad: Annotated[str, typer.Option(help="conversations that cannot be used: refuse or skip")] = "refuse",
    to: Annotated[str, typer.Option(help="jsonl or parquet chunks")] = "jsonl",
    rows: Annotated[int, typer.Option(min=1, help="of one chunk")] = 1000,
    flush_s: Annotated[float, typer.Option(min=0, help="write a chunk of fewer rows after so many seconds")] = 60.0,
    max_waiting: Annotated[int, typer.Option(min=1, help="pause while so many chunks wait to be read")] = 16,
    keep: Annotated[int, typer.Option(min=0, help="newest completed chunks that are not deleted")] = 4,
    append: Annotated[bool, typer.Option("--append", help="SOURCE comes behind what the folder was given")] = False,
    leave_rest: Annotated[
        bool, typer.Option("--leave-rest", help="with --append: even if that was not added to its end")
    ] = False,
    leave_open: Annotated[bool, typer.Option("--leave-open", help="write no END: more will be appended")] = False,
) -> None:
    """Write live chunks. Started again with the same SOURCE after a crash, it goes on where it stopped."""
    from harness.checks import require_choice
    from harness.loader.live.folder import CHAT, PACKS
    from harness.loader.live.produce import STDIN, Packing, read_conversations, read_packs
    from harness.loader.live.produce import produce_chunks as add_all
    from harness.loader.live.producer import LiveProducer
    from harness.prep.tokenize import ChatTokenizer, TokenizerConfig

    for value, choices, option in (
        (kind, (CHAT, PACKS), "--kind"),
        (to, ("jsonl", "parquet"), "--to"),
        (on_bad, ("refuse", "skip"), "--on-bad"),
        (over_long, ("drop", "truncate"), "--over-long"),
    ):
        require_choice(value, choices, setting=option)
    if tokenizer and kind == PACKS:
        raise ConfigError("packs are tokenised already", where="--tokenizer", fix="leave it out, or use --kind chat")
    packing = None
    if tokenizer:
        made = ChatTokenizer(TokenizerConfig(kind="huggingface", name=tokenizer, mask=mask))
        packing = Packing(made, pack_size, over_long, block=1 if source == STDIN else 64)
    with LiveProducer(
        folder,
        kind=PACKS if packing is not None else kind,
        suffix=f".{to}",
        rows_per_chunk=rows,
        max_waiting=max_waiting,
        keep=keep,
        flush_s=flush_s,
        say=_say,
    ) as producer:
        had_ended = producer.ended
        if producer.num_chunks and not had_ended:
            _say(f"goes on after {producer.num_rows:,} rows in {producer.num_chunks:,} chunks")
        items = read_conversations(source) if kind == CHAT else read_packs(source)
        add_all(producer, items, packing=packing, append=append, leave_rest=leave_rest, on_bad=on_bad, say=_say)
        if not leave_open:
            producer.end()
        total = f"{producer.num_rows:,} rows in {producer.num_chunks:,} chunks"
        _say(f"{folder}: the stream had ended with all of it, {total}" if had_ended else f"{folder}: {total}")


@live_app.command()
def end(folder: Folder) -> None:
    """Say that there will be no more chunks, for a producer that did not: training ends after what is there."""
    from harness.loader.live.producer import LiveProducer

    if not Path(folder).is_dir():
        raise ConfigError("there is no folder of live chunks", where=str(folder), fix="name the one that is trained on")
    with LiveProducer(folder) as producer:
        producer.end()
        _say(f"{folder}: ends after {producer.num_chunks:,} chunks")


@live_app.command()
def status(
    folder: Folder,
    watch: Annotated[bool, typer.Option("--watch", help="refresh until interrupted")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, help="with --watch, seconds between two looks")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Show the producer, what waits to be read, rates, and the ranks that read."""
    from rich.console import Group
    from rich.live import Live

    from harness.loader.live.status import live_status, now, render_status

    console = Console() if sys.stdout.isatty() else Console(width=120)
    if as_json:
        print(json.dumps(live_status(folder).to_dict(), indent=2))
    elif not watch:
        console.print(render_status(live_status(folder)))
    else:

        def look() -> Group:
            return Group(f"{folder} at {now()}", render_status(live_status(folder)))

        with Live(look(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(look(), refresh=True)


def _say(line: str) -> None:
    # Of a producer in a pipe or a log, each line is there when it is said.
    print(line, flush=True)
