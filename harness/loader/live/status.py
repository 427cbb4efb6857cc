"""Status of a folder of live chunks: producer, backlog, rate, and the ranks that read it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from harness.errors import FormatError
from harness.loader.live.folder import CONSUMER_FILE, PRODUCER_FILE, LiveFolder, last_seen
from harness.printing import count_of
from harness.storage.claims import is_running
from harness.tables import Table

# Producers and consumers touch their files every second, but a training step may take longer.
_ALIVE_S = 10.0
_RECORDS_FOR_RATE = 20


@dataclass(frozen=True)
class LiveStatus:
    """Snapshot of a folder. Producer and consumer are `none`, `alive`, `silent`, `gone` or `ended`."""

    path: str
    producer: str
    producer_seen_s: float | None  # seconds since it was last active; None if never
    producer_status: dict[str, Any]
    consumer: str
    consumer_seen_s: float | None
    consumer_status: dict[str, Any]
    chunks: int
    rows: int | None  # rows in all chunks so far; None without records
    tokens: int | None  # tokens in all chunks so far; None if not tokenized
    waiting: int  # complete, unread chunks
    completed: int  # chunks in the folder that a checkpoint includes
    num_bytes: int
    rows_per_s: float | None  # rate of the newest chunks; None for fewer than two
    chunks_per_min: float | None
    ended: bool


def live_status(path: str | Path) -> LiveStatus:
    """Return the status of a folder; raise FormatError if it contains no stream."""
    folder = LiveFolder(path)
    if not folder.files.exists():
        raise FormatError("the folder does not exist", where=str(path), fix="specify the folder of the chunks")
    contents, end = folder.look(), folder.end()
    producer_seen_s, consumer_seen_s = folder.seen_s(PRODUCER_FILE), folder.seen_s(CONSUMER_FILE)
    if not contents.next_index and all(trace is None for trace in (producer_seen_s, consumer_seen_s, end)):
        what = "the folder contains no live stream: no chunk, no producer, no reader"
        fix = "specify the folder of the chunks; `harness live produce` starts a stream"
        raise FormatError(what, where=str(path), fix=fix)
    newest = sorted(contents.ready)[-_RECORDS_FOR_RATE:]
    records = [record for record in map(folder.record, newest) if record is not None]
    producer, consumer = folder.status(PRODUCER_FILE), folder.status(CONSUMER_FILE)
    seconds = records[-1].time - records[0].time if len(records) > 1 else 0.0
    made = sum(record.rows for record in records[1:])
    last = records[-1] if records else None
    return LiveStatus(
        path=str(path),
        producer="ended" if end is not None else _state(producer, producer_seen_s),
        producer_seen_s=producer_seen_s,
        producer_status=producer,
        consumer=_state(consumer, consumer_seen_s),
        consumer_seen_s=consumer_seen_s,
        consumer_status=consumer,
        chunks=end.chunks if end is not None else contents.next_index,
        rows=last.total_rows if last is not None else None,
        tokens=last.total_tokens if last is not None else None,
        waiting=contents.num_unread(contents.chunks, consumer),
        completed=len(contents.completed),
        num_bytes=sum(found[0] for found in map(folder.files.find, contents.chunks.values()) if found is not None),
        rows_per_s=made / seconds if seconds > 0 else None,
        chunks_per_min=60 * (len(records) - 1) / seconds if seconds > 0 else None,
        ended=end is not None,
    )


def render_status(status: LiveStatus) -> RenderableType:
    """Render a table of the folder and one of the ranks that read it."""
    state = status.producer_status.get("state")
    doing = f", {state}" if status.producer == "alive" and state else ""
    rates = ""
    if status.rows_per_s is not None and status.chunks_per_min is not None:
        rates = f"{status.rows_per_s:,.1f} rows/s, {status.chunks_per_min:,.1f} chunks/min"
    counts = {"chunk": status.chunks, "row": status.rows, "token": status.tokens}
    made = [count_of(count, of) for of, count in counts.items() if count is not None]
    facts = [
        ("producer", f"{_who(status.producer, status.producer_status, status.producer_seen_s)}{doing}"),
        ("made", ", ".join(made + ["ended"] * status.ended)),
        ("rate", rates or "unknown yet"),
        ("backlog", f"chunks to read: {status.waiting:,}, completed and not deleted yet: {status.completed:,}"),
        ("on disk", f"{status.num_bytes / 1e6:,.1f} MB of chunks"),
        ("training", _who(status.consumer, status.consumer_status, status.consumer_seen_s)),
    ]
    consumer = status.consumer_status
    if not consumer:
        return Table((), facts).to_terminal()
    read = f"{count_of(consumer.get('rows', 0), 'row')} read in {count_of(consumer.get('steps', 0), 'step')}, "
    speed = f"{consumer.get('packs_per_s', 0.0):,.1f} packs/s, {consumer.get('tokens_per_s', 0.0):,.0f} tokens/s"
    facts.append(("trained", read + speed))
    ranks = []
    for rank in consumer.get("ranks", ()):
        waits = "" if rank["waits_for"] is None else f"chunk {rank['waits_for']} for {rank['waits_s']:.0f} s"
        ranks.append((*("" if rank[name] is None else str(rank[name]) for name in ("rank", "chunk", "row")), waits))
    readers = Table(("reader", "chunk", "row", "waits for"), ranks, "rrrl")
    return Group(Table((), facts).to_terminal(), "", readers.to_terminal())


def _state(status: dict[str, Any], seen_s: float | None) -> str:
    if seen_s is None:
        return "none"
    if status.get("state") == "ended":
        return "ended"
    pid = status.get("pid")
    if status.get("host") == socket.gethostname() and not (type(pid) is int and is_running(pid)):
        return "gone"
    return "alive" if seen_s < _ALIVE_S else "silent"


def _who(state: str, status: dict[str, Any], seen_s: float | None) -> str:
    if state == "none":
        return "none yet"
    name = f" ({status['host']}, process {status['pid']})" if "host" in status else ""
    return f"{state}{name}" + ("" if state == "alive" else f", {last_seen(seen_s)}")
