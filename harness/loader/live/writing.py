"""The rows of a chunk that is being made, and how they become a file."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from harness.errors import FormatError
from harness.formats.base import ShardOptions
from harness.formats.jsonl import line_of_pack
from harness.formats.parquet import ParquetWriter
from harness.loader.live.folder import JSONL, PACKS, EndRecord, ReadyRecord
from harness.prep import BadRecord, parse_line
from harness.records import Pack
from harness.storage import AtomicFile, file_digest

_ROWS_PER_GROUP = 64
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@dataclass(frozen=True)
class ProducerNote:
    """What a producer says of itself in the file that it locks; the next one goes on from it.

    Attributes:
        state: `working`, `paused` or `ended`.
        writing: number of the chunk that has a name and no record yet.
        kind: `chat` or `packs`.
        chunks, rows: made, those of producers before it included.
        input, input_is_whole: as of `LiveProducer`.
    """

    host: str = ""
    pid: int = 0
    state: str = ""
    writing: int | None = None
    stream: str = ""
    kind: str = ""
    chunks: int = 0
    rows: int = 0
    input: int = 0
    input_is_whole: bool = True

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ProducerNote:
        """What `to_json` wrote; an empty note for anything else, as of a producer that was killed while it wrote."""
        try:
            values = json.loads(data)
            known = {one.name: type(one.default) for one in fields(cls)}
            right = {name: value for name, value in values.items() if name in known}
            if not all(isinstance(value, (known[name], int)) for name, value in right.items()):
                return cls()
            return cls(**right)
        except (ValueError, AttributeError):
            return cls()


class ChunkRows:
    """Rows in memory.

    Attributes:
        num_bytes: about what they take as a file.
        sequences: conversations in them.
        tokens: stored ones; None for conversations.
    """

    def __init__(self, kind: str, suffix: str) -> None:
        self._kind, self._suffix = kind, suffix
        self._rows: list[Any] = []
        self.num_bytes = 0
        self.sequences = 0
        self.tokens = 0 if kind == PACKS else None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Any) -> None:
        """Add a Pack, or a JSON object with `messages` (a dict, or a line of bytes).

        Raises:
            FormatError: it is neither, or breaks what packs and conversations keep.
        """
        if self._kind == PACKS:
            self._add_pack(row)
            return
        try:
            line = row if isinstance(row, bytes) else json.dumps(row).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"the row is no JSON: {error}") from error
        # A line of its own, whatever line ends it came with.
        line = line.strip().replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
        parsed = parse_line(line, "the row")
        if isinstance(parsed, BadRecord):
            raise FormatError(
                f"the row cannot be used ({parsed.reason}): {parsed.detail}", fix="leave it out, or mend what makes it"
            )
        self._rows.append(line if self._suffix == JSONL else parsed.as_dicts())
        self.num_bytes += len(line)
        self.sequences += 1

    def _add_pack(self, pack: Any) -> None:
        if not isinstance(pack, Pack):
            raise FormatError(f"the row is a {type(pack).__name__}, expected a Pack")
        if problem := pack.problem():
            raise FormatError(f"the pack {problem}", fix="mend what makes packs")
        line = line_of_pack(pack) if self._suffix == JSONL else None
        self._rows.append(pack if line is None else line)
        self.num_bytes += 5 * len(pack) if line is None else len(line)
        self.sequences += pack.num_sequences
        assert self.tokens is not None
        self.tokens += len(pack)

    def write(self, path: Path) -> None:
        """Write all rows; the file appears whole, or not at all."""
        file = AtomicFile(path)
        try:
            if self._suffix == JSONL:
                for line in self._rows:
                    file.write(line)
            elif self._kind == PACKS:
                self._write_packs(file)
                return
            else:
                table = pa.table({"messages": pa.array(self._rows, _MESSAGES)})
                pq.write_table(table, file, compression="zstd", write_page_checksum=True)
            file.finish()
        except BaseException:
            with suppress(OSError):  # the error that brought us here says more
                file.abort()
            raise

    def record(self, path: Path, last: ReadyRecord | None, *, stream: str, position: Any) -> ReadyRecord:
        """What is to be said of the file that `write` made, after the chunk of record `last`."""
        xxh3 = file_digest(path)
        tokens_before = last.total_tokens if last is not None else 0
        return ReadyRecord(
            kind=self._kind,
            rows=len(self),
            sequences=self.sequences,
            tokens=self.tokens,
            num_bytes=path.stat().st_size,
            xxh3=xxh3,
            chain=_link(last.chain if last is not None else "", xxh3),
            stream=stream,
            total_rows=len(self) + (last.total_rows if last is not None else 0),
            total_sequences=self.sequences + (last.total_sequences if last is not None else 0),
            total_tokens=None if self.tokens is None or tokens_before is None else tokens_before + self.tokens,
            position=position,
            producer=f"{socket.gethostname()}:{os.getpid()}",
            time=time.time(),
        )

    def _write_packs(self, file: AtomicFile) -> None:
        most = max(map(len, self._rows))
        writer = ParquetWriter(file, ShardOptions(pack_size=most, rows_per_group=_ROWS_PER_GROUP))
        for pack in self._rows:
            writer.append(pack)
        writer.finish({})


def end_after(last: ReadyRecord | None, *, num_chunks: int, stream: str) -> EndRecord:
    """The END of a stream of `num_chunks`, the last of which has the record `last`, or none."""
    if last is None:
        none = None if num_chunks else 0
        return EndRecord(num_chunks, none, none, none, "", stream, time.time())
    return EndRecord(
        num_chunks, last.total_rows, last.total_sequences, last.total_tokens, last.chain, stream, time.time()
    )


def _link(chain: str, xxh3: str) -> str:
    """The chain of a chunk with this hash after one with that chain."""
    return str(xxhash.xxh3_128_hexdigest(f"{chain} {xxh3}".encode()))
