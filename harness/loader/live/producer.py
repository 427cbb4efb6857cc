"""Writes live chunks: each is there whole or not at all, no faster than they are read, and a crash loses no row."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from harness.checks import require_at_least, require_choice
from harness.errors import FormatError, HarnessError, LoaderError
from harness.loader.live.folder import (
    CHAT,
    CONSUMER_FILE,
    JSONL,
    PACKS,
    PRODUCER_FILE,
    SUFFIXES,
    LiveFolder,
    ReadyRecord,
    chunk_name,
)
from harness.loader.live.writing import ChunkRows, ProducerNote, end_after
from harness.storage import TEMPORARY_SUFFIX, Marker, sync_folder

# A chunk is closed at this size whatever its rows, so that memory stays bounded.
_MAX_CHUNK_BYTES = 64 << 20
_TICK_S, _LOOK_S = 1.0, 0.2


class LiveProducer:
    """Adds chunks to a folder. One producer works on a folder at a time; a later one goes on where it stopped.

        with LiveProducer("data/live", kind="chat") as producer:
            for conversation in conversations:  # {"messages": [...]}
                producer.add(conversation)
            producer.end()

    Args:
        path: the folder; made where it is missing.
        kind: `chat`, rows are JSON objects with `messages`; or `packs`, rows are `Pack`s.
        suffix: `.jsonl` or `.parquet`.
        rows_per_chunk: a chunk is written when it has as many, 64 MiB, or has been open for `flush_s` seconds.
        max_waiting: chunks that may wait to be read; `add` blocks while there are as many.
        keep: how many of the newest completed chunks are not deleted.
        say: takes a line for the log.

    Attributes:
        ended: the stream has its END record; nothing can be added.
        input: number of the input that rows come from, 0 for the first.
        input_is_whole: nothing more of it is to come; False from `begin_input` to `end_input`, over crashes too.

    Raises:
        FormatError: another producer works on the folder, or it cannot be written to.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        kind: str = CHAT,
        suffix: str = JSONL,
        rows_per_chunk: int = 1000,
        max_waiting: int = 16,
        keep: int = 4,
        flush_s: float = 60.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        require_choice(kind, (CHAT, PACKS), setting="kind")
        require_choice(suffix, SUFFIXES, setting="suffix")
        require_at_least(rows_per_chunk, 1, setting="rows_per_chunk")
        require_at_least(max_waiting, 1, setting="max_waiting")
        require_at_least(keep, 0, setting="keep")
        self._folder = LiveFolder(path)
        self._kind, self._suffix = kind, suffix
        self._rows_per_chunk, self._max_waiting, self._keep, self._flush_s = rows_per_chunk, max_waiting, keep, flush_s
        self._say = say
        self._rows = ChunkRows(kind, suffix)
        self._opened = 0.0
        self._pending_position: Any = None
        self.ended = False
        self.input, self.input_is_whole = 0, True
        self._next_index, self._last_index = 0, -1
        self._last: ReadyRecord | None = None
        self._stream = ""
        self._lock = threading.RLock()
        self._failed: HarnessError | None = None
        self._closing = threading.Event()
        self._mark = Marker(self._folder.path / PRODUCER_FILE)
        with self._explained("cannot be written to"):
            self._folder.path.mkdir(parents=True, exist_ok=True)
            before = self._mark.acquire()
        try:
            self._begin(before)
        except BaseException:
            self._mark.release(remove=False)
            raise
        self._ticking = threading.Thread(target=self._tick, name="live-producer", daemon=True)
        self._ticking.start()

    def begin_input(self, *, is_new: bool) -> None:
        """Rows come from an input that has an end; where it `is_new`, positions begin anew."""
        with self._lock:
            self._check()
            self.input, self.input_is_whole = self.input + is_new, False
            self._note("working")

    def end_input(self) -> None:
        """All of the input was added: write what is left of it as a chunk."""
        with self._lock:
            self.flush()
            self.input_is_whole = True
            self._note("working")

    def add(self, row: Any, position: dict[str, Any] | None = None) -> None:
        """Add a row; returns once it is in memory, and blocks while too many chunks wait to be read.

        Args:
            row: a JSON object with `messages`, as a dict or as a line of bytes; or a Pack.
            position: of the input once this row is whole on disk, with values that JSON can hold; None counts rows.

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
        """Write the rows at hand as a chunk; waits for room."""
        with self._lock:
            self._check()
            if not self._rows:
                return
            paused = False
            while not self._has_room():
                if not paused:
                    paused = True
                    self._say(f"paused: {self._max_waiting} chunks wait to be read")
                    self._note("paused")
                time.sleep(_LOOK_S)
            self._write()

    def end(self) -> None:
        """Write what is left and the END record: no more will come."""
        with self._lock:
            if self.ended:
                return
            self.flush()
            # Chunks of other producers behind the last record are in no totals.
            last = self._last if self._last_index == self._next_index - 1 else None
            with self._explained("END.json cannot be written"):
                self._folder.write_end(end_after(last, num_chunks=self._next_index, stream=self._stream))
            self.ended = True
            self._note("ended")

    def close(self) -> None:
        """Let go of the folder; rows that are in no chunk yet are dropped."""
        self._closing.set()
        self._ticking.join()
        self._mark.release(remove=False)

    def __enter__(self) -> LiveProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self.ended:
                self.flush()
        finally:
            self.close()

    @property
    def num_rows(self) -> int:
        """Rows in whole chunks, those of producers before this one included."""
        return self._last.total_rows if self._last is not None else 0

    @property
    def position(self) -> dict[str, Any] | None:
        """Given with the last row of the newest whole chunk: what to go on from. None where no chunk is of `input`."""
        position = self._last.position if self._last is not None else None
        return position if isinstance(position, dict) and position.get("input", 0) == self.input else None

    @property
    def num_chunks(self) -> int:
        return self._next_index

    def _begin(self, before: bytes) -> None:
        """Find out where the producer before stopped, and clear away what it left unfinished."""
        with self._explained("cannot be written to"):
            for name in self._folder.path.glob(f"chunk_*{TEMPORARY_SUFFIX}"):
                name.unlink(missing_ok=True)
            contents = self._folder.look()
            note = ProducerNote.from_json(before)
            half = note.writing
            if half in contents.chunks and half not in contents.ready:
                # Named, but killed before its record: its rows come again.
                contents.chunks.pop(half).unlink(missing_ok=True)
        end = self._folder.end()
        self.ended = end is not None
        self._next_index = max(contents.next_index, end.chunks if end is not None else 0)
        self._last_index = max(contents.ready, default=-1)
        self._last = self._folder.record(self._last_index) if self._last_index >= 0 else None
        self._stream = self._last.stream if self._last is not None else uuid.uuid4().hex[:16]
        position = self._last.position if self._last is not None else None
        self.input = max(note.input, int(position.get("input", 0)) if isinstance(position, dict) else 0)
        self.input_is_whole = note.input_is_whole
        with self._explained("cannot be written to"):
            self._note("ended" if self.ended else "working")

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self.ended:
            raise LoaderError(
                "the stream has ended, nothing can be added",
                where=str(self._folder.path),
                fix="name a new folder; or remove END.json, if no training has seen it",
            )

    def _has_room(self) -> bool:
        contents = self._folder.look()
        # The newest record stays, it says where to go on.
        self._folder.delete_completed(contents, keep=self._keep, spare=self._last_index)
        told = self._folder.told(CONSUMER_FILE)
        # Ranks go through their chunks at their own pace: what one waits for comes, however many the others have.
        if max(told.get("waiting_for") or [-1]) >= self._next_index:
            return True
        return contents.num_unread(contents.ready, told) < self._max_waiting

    def _write(self) -> None:
        index = self._next_index
        path = self._folder.path / chunk_name(index, self._suffix)
        with self._explained(f"{path.name} cannot be written"):
            if self._folder.find(index) is not None:
                raise FormatError(
                    f"{path.name} is there already",
                    where=str(self._folder.path),
                    fix="another program writes here too; give each a folder of its own",
                )
            self._note("working", writing=index)
            try:
                self._rows.write(path)
                sync_folder(self._folder.path)
                record = self._rows.record(path, self._last, stream=self._stream, position=self._pending_position)
                self._folder.write_record(path, record)
            except BaseException:
                # With its record a chunk is whole, and may have been read: the next producer goes on behind it.
                if index not in self._folder.look().ready:
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
                raise
        self._last, self._last_index, self._next_index = record, index, index + 1
        self._rows = ChunkRows(self._kind, self._suffix)
        self._note("working")

    def _note(self, state: str, *, writing: int | None = None) -> None:
        note = ProducerNote(
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            writing=writing,
            stream=self._stream,
            kind=self._kind,
            chunks=self._next_index,
            rows=self.num_rows,
            input=self.input,
            input_is_whole=self.input_is_whole,
        )
        self._mark.write(note.to_json())

    def _tick(self) -> None:
        """Show every second that this producer is alive, and close a chunk that has been open for long."""
        while not self._closing.wait(_TICK_S):
            with suppress(OSError):
                os.utime(self._mark.path)
            if not self._lock.acquire(blocking=False):
                continue
            try:
                late = self._rows and time.monotonic() - self._opened >= self._flush_s
                if late and self._failed is None and self._has_room():
                    self._write()
            except HarnessError as error:
                self._failed = error
            finally:
                self._lock.release()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            told = getattr(error, "strerror", None) or str(error)
            raise FormatError(
                f"{what}: {told}",
                where=str(self._folder.path),
                fix="make room or mend the folder, then start again: rows that are in no whole chunk come again",
            ) from error
