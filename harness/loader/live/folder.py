"""A folder of live chunks: what its files are called, and what says that a chunk, or all of them, are whole.

chunk_00000.jsonl             rows: conversations or packs; Parquet chunks end in .parquet
chunk_00000.jsonl.ready       written after it: counts and hash (`ReadyRecord`)
chunk_00000.jsonl.completed   a checkpoint holds all that was trained from it: it may be deleted
END.json                      there is no more; totals of all chunks (`EndRecord`)
_producer, _consumer          locked by who writes and who trains, with what they are doing; touched every second
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import ConfigError, FormatError
from harness.storage import is_uri, sync_folder, write_atomically

CHAT, PACKS = "chat", "packs"
JSONL, PARQUET = ".jsonl", ".parquet"
SUFFIXES = (JSONL, PARQUET)
READY, COMPLETED = ".ready", ".completed"
END_FILE = "END.json"
PRODUCER_FILE, CONSUMER_FILE = "_producer", "_consumer"

_NAME = re.compile(r"chunk_(\d{5,})(\.jsonl|\.parquet)(\.ready|\.completed)?")
T = TypeVar("T", bound="ReadyRecord | EndRecord")


@dataclass(frozen=True)
class ReadyRecord:
    """What is known of a whole chunk.

    Attributes:
        kind: `chat` or `packs`.
        rows: conversations, or packs.
        sequences: conversations in them.
        tokens: stored ones; None where nothing was tokenised yet.
        num_bytes, xxh3: of its file.
        chain: over its hash and the chain of the chunk before: the last one stands for the whole stream.
        stream: names the stream; the same in every chunk of a folder.
        total_rows, total_sequences, total_tokens: of this chunk and all before it.
        position: where in its input a producer goes on after this chunk.
        producer: who wrote it, as host and process id.
        time: seconds since 1970.
    """

    kind: str
    rows: int
    sequences: int
    tokens: int | None
    num_bytes: int
    xxh3: str
    chain: str
    stream: str
    total_rows: int
    total_sequences: int
    total_tokens: int | None
    position: Any
    producer: str
    time: float


@dataclass(frozen=True)
class EndRecord:
    """The whole stream: `chunks` and the totals of the last chunk's record, None where chunks have no records."""

    chunks: int
    rows: int | None
    sequences: int | None
    tokens: int | None
    chain: str
    stream: str
    time: float


@dataclass
class Contents:
    """One look at a folder.

    Attributes:
        chunks: by index, the chunk files.
        ready, completed: indices that have such a file.
    """

    chunks: dict[int, Path] = field(default_factory=dict)
    ready: dict[int, Path] = field(default_factory=dict)
    completed: dict[int, Path] = field(default_factory=dict)

    @property
    def next_index(self) -> int:
        """The number of the chunk after all that there is a trace of."""
        return 1 + max((*self.chunks, *self.ready, *self.completed), default=-1)

    def num_unread(self, chunks: Iterable[int], told: dict[str, Any]) -> int:
        """How many of `chunks` nobody has read, by what a run says of itself (`LiveFolder.told`) and by their marks."""
        read = set(told.get("read") or ()) | set(self.completed)
        below = told.get("read_below") or 0
        return sum(index >= below and index not in read for index in chunks)


def chunk_name(index: int, suffix: str = JSONL) -> str:
    return f"chunk_{index:05d}{suffix}"


class LiveFolder:
    """Looks into a folder, which need not be there yet; raises ConfigError for one that is on no file system."""

    def __init__(self, path: str | Path) -> None:
        if is_uri(str(path)):
            raise ConfigError(
                "live chunks are written to a file system that all ranks share, not to object storage",
                where=str(path),
                fix="name a folder",
            )
        self.path = Path(path)

    def look(self) -> Contents:
        """All files with a chunk's name.

        Raises:
            FormatError: the folder cannot be listed.
        """
        contents = Contents()
        try:
            names = os.listdir(self.path)  # noqa: PTH208 - half the time of Path.iterdir, and asked every second
        except FileNotFoundError:
            return contents
        except OSError as error:
            raise FormatError(f"the folder cannot be read: {error.strerror}", where=str(self.path)) from error
        of = {None: contents.chunks, READY: contents.ready, COMPLETED: contents.completed}
        for name in names:
            if match := _NAME.fullmatch(name):
                of[match[3]][int(match[1])] = self.path / name
        return contents

    def find(self, index: int) -> Path | None:
        """The chunk's file, whole or not."""
        return next((path for path in self._names(index) if path.exists()), None)

    def record(self, index: int) -> ReadyRecord | None:
        """The ready record of a chunk, None where there is none; raises FormatError for a damaged one."""
        for path in self._names(index):
            found = _read(path.with_name(path.name + READY), ReadyRecord)
            if found is not None:
                return found
        return None

    def end(self) -> EndRecord | None:
        """What says that there is no more, None where more may come; raises FormatError for a damaged one."""
        return _read(self.path / END_FILE, EndRecord)

    def write_record(self, path: Path, record: ReadyRecord) -> None:
        write_atomically(path.with_name(path.name + READY), _to_json(record))

    def write_end(self, record: EndRecord) -> None:
        write_atomically(self.path / END_FILE, _to_json(record))

    def complete(self, indices: Iterable[int]) -> None:
        """Mark chunks of which a checkpoint holds every row; chunks that are gone get no mark.

        Raises:
            FormatError: the folder cannot be written to.
        """
        contents = self.look()
        try:
            new = [contents.chunks[i] for i in indices if i in contents.chunks and i not in contents.completed]
            for path in new:
                path.with_name(path.name + COMPLETED).touch()
            if new:
                sync_folder(self.path)
        except OSError as error:
            raise FormatError(
                f"chunks that are trained cannot be marked: {error.strerror}",
                where=str(self.path),
                fix="the training ranks need to write to this folder",
            ) from error

    def delete_completed(self, contents: Contents, *, keep: int, spare: int) -> None:
        """Delete completed chunks but the newest `keep` and that of index `spare`; what fails waits for next time."""
        done = sorted(contents.completed)
        for index in done[: max(0, len(done) - keep)]:
            if index != spare:
                mark = contents.completed[index]
                path = mark.with_name(mark.stem)
                with suppress(OSError):
                    # The mark last: killed in between, the next try goes on.
                    for one in (path, path.with_name(path.name + READY), mark):
                        one.unlink(missing_ok=True)

    def seen_s(self, who: str = PRODUCER_FILE) -> float | None:
        """Seconds since a producer (or consumer) was last at work, None where there never was one."""
        try:
            return max(0.0, time.time() - (self.path / who).stat().st_mtime)
        except OSError:
            return None

    def told(self, who: str) -> dict[str, Any]:
        """What the producer (or consumer) says it is doing; empty where it says nothing, or is just writing it."""
        try:
            values = json.loads((self.path / who).read_bytes())
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _names(self, index: int) -> list[Path]:
        return [self.path / chunk_name(index, suffix) for suffix in SUFFIXES]


def ago(seconds: float | None) -> str:
    """When something was last seen, in words."""
    if seconds is None:
        return "never seen"
    return f"last seen {seconds:.0f} s ago" if seconds < 120 else f"last seen {seconds / 60:.0f} min ago"


def _to_json(record: ReadyRecord | EndRecord) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path)) from error
    try:
        values = json.loads(data)
        names = [one.name for one in fields(kind)]
        record = kind(**{name: values[name] for name in names})
        counts = {"rows", "chunks", "num_bytes", "sequences", "tokens"} & set(names)
        numbers = [values[name] for name in counts if values[name] is not None]
        if not all(type(number) is int and number >= 0 for number in numbers) or type(values["time"]) is not float:
            raise ValueError("a count is not a whole number")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"is no record of this harness: {type(error).__name__}: {error}",
            where=str(path),
            fix="it was changed by hand or damaged; write the chunk again",
        ) from error
    return record
