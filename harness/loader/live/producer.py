"""A producer of live chunks: each appears whole or not at all, no faster than they are read; a crash loses no row."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from harness.checks import require_at_least, require_choice
from harness.errors import FormatError, HarnessError, LoaderError, os_errors_as
from harness.formats import load_format
from harness.formats.layouts.jsonl import line_of_pack
from harness.loader.live import folder as live
from harness.prep.chat import BadRecord, Conversation, parse_line
from harness.prep.media import MediaLimits
from harness.records import Pack
from harness.storage import LocalFolder, file_digest, write_atomically

# A chunk is closed at this size whatever its rows, so that memory stays bounded.
_MAX_CHUNK_BYTES, _GROUP_BYTES = 64 << 20, 16 << 20
_TICK_S = 1.0
_ROWS_PER_GROUP = 64
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


class LiveProducer(AbstractContextManager["LiveProducer"]):
    """Adds chunks to a folder. One producer writes to a folder at a time; a later one continues where it stopped.

        with LiveProducer("data/live", kind="chat") as producer:
            for conversation in conversations:  # {"messages": [...]}, or another of `harness.prep.chat.SCHEMAS`
                producer.add(conversation)
            producer.end()

    Args:
        path: the folder, created if missing.
        kind: `chat`, rows are JSON objects of any chat schema; or `packs`, rows are `Pack`s.
        suffix: `.jsonl` or `.parquet`.
        rows_per_chunk: a chunk is written when it has that many rows, 64 MiB, or is `flush_s` seconds old.
        max_waiting: unread chunks at which `add` blocks until one is read.
        keep: number of the newest completed chunks to keep.

    Attributes:
        ended: the stream has its END record, so nothing can be added.
        num_chunks: chunks of the folder, including those of earlier producers.
        input: number of the input that rows come from, from 0.
        input_is_whole: all rows of the input were added; False from `begin_input` to `end_input`, also after a crash.

    Raises:
        FormatError: another producer writes to the folder, or it is not writable.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        kind: str = live.CHAT,
        suffix: str = live.JSONL,
        rows_per_chunk: int = 1000,
        max_waiting: int = 16,
        keep: int = 4,
        flush_s: float = 60.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        require_choice(kind, (live.CHAT, live.PACKS), setting="kind")
        require_choice(suffix, live.SUFFIXES, setting="suffix")
        require_at_least(rows_per_chunk, 1, setting="rows_per_chunk")
        require_at_least(max_waiting, 1, setting="max_waiting")
        require_at_least(keep, 0, setting="keep")
        self._folder = live.LiveFolder(path)
        self.path = self._folder.where
        self._kind, self._suffix = kind, suffix
        self._rows_per_chunk, self._max_waiting, self._keep, self._flush_s = rows_per_chunk, max_waiting, keep, flush_s
        self._log = log
        self._rows = ChunkRows(kind, suffix)
        self._opened = 0.0
        self._pending_position: Any = None
        self.ended, self.input, self.input_is_whole = False, 0, True
        self._last, self._last_index, self.num_chunks, self._stream = live.NO_RECORD, -1, 0, ""
        self._lock = threading.RLock()
        self._failed: HarnessError | None = None
        self._closing = threading.Event()
        self._mark = self._folder.files.lock(live.PRODUCER_FILE)
        with self._explained("the folder cannot be written to"):
            self._folder.files.make()
            before = self._mark.acquire()
        try:
            self._begin(before)
        except BaseException:
            self._mark.release(remove=False)
            raise
        self._ticking = threading.Thread(target=self._tick, name="live-producer", daemon=True)
        self._ticking.start()

    def begin_input(self, *, is_new: bool) -> None:
        """Begin an input that has an end; positions start again if it `is_new`."""
        with self._lock:
            self._check()
            self.input, self.input_is_whole = self.input + is_new, False
            self._write_status("working")

    def end_input(self) -> None:
        """End the input: write its last rows as a chunk."""
        with self._lock:
            self.flush()
            self.input_is_whole = True
            self._write_status("working")

    def add(self, row: Any, position: dict[str, Any] | None = None) -> None:
        """Add a row; return when it is in memory, and block while too many chunks are unread.

        Args:
            row: a JSON object of any chat schema, as a dict or as a line of bytes; or a Pack.
            position: of the input after this row, of JSON values; None to count rows.

        Raises:
            FormatError: the pack breaks an invariant, or a chunk cannot be written.
            LoaderError: the stream has ended.
        """
        with self._lock:
            self._check()
            self._opened = self._opened if self._rows else time.monotonic()
            self._rows.add(row)
            counted = {"items": self.num_rows + len(self._rows)} if self.input == 0 else {}
            self._pending_position = {**(counted if position is None else position), "input": self.input}
            if len(self._rows) >= self._rows_per_chunk or self._rows.num_bytes >= _MAX_CHUNK_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write the rows in memory as a chunk, after waiting for room."""
        with self._lock:
            self._check()
            if not self._rows:
                return
            if not self._has_room():
                self._log(f"paused until a run reads: {self._max_waiting} chunks are unread (chunks.max_waiting)")
                self._write_status("paused")
                while not self._has_room():
                    time.sleep(self._folder.files.look_s)
            self._write()

    def end(self) -> None:
        """Write the last rows and the END record."""
        with self._lock:
            if self.ended:
                return
            self.flush()
            last = self._last
            # Chunks of other producers after the last record are in no totals.
            totals: tuple[int | None, int | None, int | None, str] = (None, None, None, "")
            if self._last_index == self.num_chunks - 1:
                totals = (last.total_rows, last.total_sequences, last.total_tokens, last.chain)
            with self._explained("END.json cannot be written"):
                end = live.EndRecord(self.num_chunks, *totals, self._stream, time.time())
                self._folder.write_record(live.END_FILE, end)
            self.ended = self.input_is_whole = True
            self._write_status("ended")

    def close(self) -> None:
        """Release the folder; rows that are in no chunk are dropped."""
        self._closing.set()
        self._ticking.join()
        self._mark.release(remove=False)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None and not self.ended:
                self.flush()
        finally:
            self.close()

    @property
    def num_rows(self) -> int:
        """Rows in whole chunks, including those of earlier producers."""
        return self._last.total_rows

    @property
    def position(self) -> dict[str, Any] | None:
        """Position to continue from, that of the newest whole chunk's last row; None if no chunk is of `input`."""
        position = self._last.position
        return position if isinstance(position, dict) and position.get("input", 0) == self.input else None

    def _begin(self, before: bytes) -> None:
        """Find the position at which the last producer stopped, and remove its unfinished chunk."""
        with self._explained("the folder cannot be written to"):
            self._folder.files.remove_temporary()
            contents = self._folder.look()
            try:
                left = json.loads(before)
                half, number, self.input_is_whole = left["writing"], int(left["input"]), bool(left["input_is_whole"])
            except (ValueError, TypeError, KeyError, RecursionError):  # none, or cut short by a crash
                half, number, self.input_is_whole = None, 0, True
            if half in contents.chunks and half not in contents.ready:
                # Its producer was killed before it wrote the record: the rows come again.
                self._folder.files.delete(contents.chunks.pop(half))
        end = self._folder.end()
        self.ended = end is not None
        self.num_chunks = max(contents.next_index, end.chunks if end is not None else 0)
        self._last_index = max(contents.ready, default=-1)
        last = self._folder.record(self._last_index) if self._last_index >= 0 else None
        self._stream = last.stream if last is not None else uuid.uuid4().hex[:16]
        self._last = last or live.NO_RECORD
        position = self._last.position
        self.input = max(number, int(position.get("input", 0)) if isinstance(position, dict) else 0)
        with self._explained("the folder cannot be written to"):
            self._write_status("ended" if self.ended else "working")

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self.ended:
            what = "the stream has ended; no rows can be added"
            fix = "use a new folder, or remove END.json if no run has read it"
            raise LoaderError(what, where=self._folder.where, fix=fix)

    def _has_room(self) -> bool:
        contents = self._folder.look()
        self._mark.check()
        # The newest record stays, because it has the position to continue from.
        self._folder.delete_completed(contents, keep=self._keep, spare=self._last_index)
        status = self._folder.status(live.CONSUMER_FILE)
        # Ranks read their chunks at their own pace: a chunk that one waits for is written whatever the others have.
        if max(status.get("waiting_for") or [-1]) >= self.num_chunks:
            return True
        return contents.num_unread(contents.ready, status) < self._max_waiting

    def _write(self) -> None:
        index = self.num_chunks
        name, files = live.chunk_name(index, self._suffix), self._folder.files
        with self._explained(f"{name} cannot be written"):
            if self._folder.find(index) is not None:
                raise live.conflict(name, self._folder.where)
            self._write_status("working", writing=index)
            path = files.begin_chunk(name)
            try:
                self._rows.write(path)
                record = self._rows.record(path, self._last, stream=self._stream, position=self._pending_position)
                files.finish_chunk(name, path)
                self._mark.check()
                self._folder.write_record(name + live.READY, record)
            except BaseException:
                # With its record a chunk is whole, and may have been read: the next producer continues after it.
                with suppress(OSError, FormatError):
                    self._mark.check()  # or else it may be another producer's by now
                    if index not in self._folder.look().ready:
                        files.drop_chunk(name, path)
                raise
        self._last, self._last_index, self.num_chunks = record, index, index + 1
        self._rows = ChunkRows(self._kind, self._suffix)
        self._write_status("working")

    def _write_status(self, state: str, *, writing: int | None = None) -> None:
        """Write what the next producer continues from; `writing` is the index of a chunk without a record yet."""
        status = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "state": state,
            "writing": writing,
            "stream": self._stream,
            "kind": self._kind,
            "chunks": self.num_chunks,
            "rows": self.num_rows,
            "input": self.input,
            "input_is_whole": self.input_is_whole,
        }
        with self._explained("the producer's status cannot be written"):
            self._mark.write(json.dumps(status).encode())

    def _tick(self) -> None:
        """Touch the lock file every second, and write a chunk that is older than `flush_s`."""
        while not self._closing.wait(_TICK_S):
            with suppress(OSError):
                self._mark.touch()
            if not self._lock.acquire(blocking=False):
                continue
            try:
                is_late = self._rows and time.monotonic() - self._opened >= self._flush_s
                if is_late and self._failed is None and self._has_room():
                    self._write()
            except HarnessError as error:
                self._failed = error
            finally:
                self._lock.release()

    def _explained(self, what: str) -> AbstractContextManager[None]:
        fix = "free disk space or fix the folder, then start again: rows not in a complete chunk are added again"
        return os_errors_as(FormatError, what, where=self._folder.where, fix=fix)


def _table_of_chats(conversations: list[Conversation]) -> pa.Table:
    """Return conversations as columns; all but plain ones as JSON text, because structs would share their fields."""
    records = [conversation.as_record() for conversation in conversations]
    plain = {"role", "content"}
    if all(record.keys() == {"messages"} for record in records) and all(
        turn.keys() == plain and isinstance(turn["content"], str) for record in records for turn in record["messages"]
    ):
        return pa.table({"messages": pa.array([record["messages"] for record in records], _MESSAGES)})
    texts = [
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()}
        for record in records
    ]
    return pa.table(
        {name: pa.array([text.get(name) for text in texts], pa.string()) for name in sorted(set().union(*texts))}
    )


class ChunkRows:
    """The rows of the next chunk, in memory, and the conversations and stored tokens (or None) in them."""

    def __init__(self, kind: str, suffix: str) -> None:
        self._kind, self._suffix = kind, suffix
        self._rows: list[Any] = []
        self.num_bytes = 0  # about those of a file
        self.sequences = 0
        self.tokens = 0 if kind == live.PACKS else None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Any) -> None:
        """Add a Pack, or a JSON object of any chat schema (dict or line of bytes); raise FormatError for others."""
        if self._kind == live.PACKS:
            if not isinstance(row, Pack):
                raise FormatError(f"the row is a {type(row).__name__}, expected a Pack", fix="write harness.Pack")
            if problem := row.problem():
                raise FormatError(f"the pack {problem}", fix="fix the source of packs")
            if row.media:
                fix = "add their conversations, with chunks.kind=chat"
                raise FormatError("packs with media cannot be live rows", fix=fix)
            packed = row if self._suffix == live.PARQUET else line_of_pack(row)
            self._rows.append(packed)
            self.num_bytes += len(packed) * (5 if packed is row else 1)
            self.sequences += row.num_sequences
            assert self.tokens is not None
            self.tokens += len(row)
            return
        try:
            line = row if isinstance(row, bytes) else json.dumps(row).encode()
        except (TypeError, ValueError, RecursionError) as error:
            fix = "write one JSON object per conversation, as text or as a dict"
            raise FormatError(f"the row is not JSON: {error}", fix=fix) from error
        # One line, whatever line ends it came with.
        line = line.strip().replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
        parsed = parse_line(line, "the row", media=MediaLimits())
        if isinstance(parsed, BadRecord):
            raise FormatError(f"the row is invalid ({parsed.reason}): {parsed.detail}", fix="skip it or fix its source")
        self._rows.append(line if self._suffix == live.JSONL else parsed)
        self.num_bytes += len(line)
        self.sequences += 1

    def write(self, path: Path) -> None:
        """Write all rows; the file appears whole or not at all."""
        if self._suffix == live.JSONL:
            write_atomically(path, self._rows)
        elif self._kind == live.PACKS:
            folder, pack_size = LocalFolder(path.parent), max(map(len, self._rows))
            writer = load_format("parquet").write_shard(folder, path.name, pack_size, _ROWS_PER_GROUP)
            try:
                for pack in self._rows:
                    writer.append(pack)
                writer.finish({})
            except BaseException:
                with suppress(OSError):  # the first error has the cause
                    writer.abort()
                raise
        else:
            file = pa.BufferOutputStream()
            # Few rows with media in a group, of which ranks read one at a time; and no dictionary, which would hold
            # each of them once more and be larger than readers accept.
            rows = max(1, len(self) * _GROUP_BYTES // max(self.num_bytes, 1))
            options = {"compression": "zstd", "write_page_checksum": True, "use_dictionary": False}
            pq.write_table(_table_of_chats(self._rows), file, row_group_size=rows, **options)
            write_atomically(path, file.getvalue().to_pybytes())

    def record(self, path: Path, last: live.ReadyRecord, *, stream: str, position: Any) -> live.ReadyRecord:
        """Return the record of the file that `write` made, after the chunk of record `last`."""
        xxh3 = file_digest(path)
        return live.ReadyRecord(
            kind=self._kind,
            rows=len(self),
            sequences=self.sequences,
            tokens=self.tokens,
            num_bytes=path.stat().st_size,
            xxh3=xxh3,
            chain=xxhash.xxh3_128_hexdigest(f"{last.chain} {xxh3}".encode()),
            stream=stream,
            total_rows=len(self) + last.total_rows,
            total_sequences=self.sequences + last.total_sequences,
            total_tokens=None if self.tokens is None or last.total_tokens is None else last.total_tokens + self.tokens,
            position=position,
            producer=f"{socket.gethostname()}:{os.getpid()}",
            time=time.time(),
        )
