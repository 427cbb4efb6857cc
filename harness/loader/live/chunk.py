"""One live chunk, open for reading: checked against its record once, then row by row."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import FormatError, PrepError
from harness.formats.jsonl import JsonlShard
from harness.formats.parquet import ParquetShard
from harness.loader.live.folder import CHAT, JSONL, PACKS, Contents, LiveFolder, ReadyRecord
from harness.prep import BadRecord, Conversation, check_messages_column, parse_line, parse_record
from harness.records import Pack
from harness.storage import file_digest

_WRITE_AGAIN = "write the chunk again under this name, with a record of its own; the run then goes on with resume=true"


class LiveChunk:
    """An open chunk.

    Args:
        path: its file.
        record: what it must hold; None takes what is there.

    Raises:
        FormatError: the file is not what its record says, or is no chunk.
    """

    def __init__(self, path: Path, record: ReadyRecord | None) -> None:
        self.path = path
        try:
            if record is not None:
                _check(path, record)
            self._lines = JsonlShard(path) if path.suffix == JSONL else None
            columns = None if self._lines is not None else pq.read_schema(path).names
            self.kind = record.kind if record is not None else self._guess_kind(columns)
            self._packs: JsonlShard | ParquetShard | None = None
            self._messages: Any = None
            if self.kind == PACKS:
                self._packs = self._lines or ParquetShard(path)
            elif self._lines is None:
                with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
                    check_messages_column(parquet.schema_arrow, path)
                    self._messages = parquet.read(columns=["messages"]).column("messages")
        except OSError as error:
            raise FormatError(f"the chunk cannot be read: {error}", where=str(path), fix=_WRITE_AGAIN) from error
        except (pa.ArrowException, PrepError) as error:
            raise FormatError(f"is no chunk of rows: {error}", where=str(path), fix=_WRITE_AGAIN) from error
        if record is not None and self.num_rows != record.rows:
            raise FormatError(
                f"holds {self.num_rows:,} rows, its ready record says {record.rows:,}",
                where=str(path),
                fix=_WRITE_AGAIN,
            )

    @property
    def num_rows(self) -> int:
        if self._lines is not None:
            return self._lines.num_packs
        return self._packs.num_rows if isinstance(self._packs, ParquetShard) else len(self._messages)

    def where(self, row: int) -> str:
        return f"{self.path}, row {row:,}" if self._lines is None else self._lines.where(row)

    def pack(self, row: int) -> Pack:
        """The pack of a row; raises FormatError for one that breaks the invariants of packs."""
        assert self._packs is not None
        pack = self._packs.read_row(row)
        if problem := pack.problem():
            raise FormatError(f"the pack {problem}", where=self.where(row), fix="write it again, whole")
        return pack

    def conversation(self, row: int) -> Conversation | BadRecord | None:
        """The conversation of a row, or why it is none; None for a blank line."""
        if self._lines is None:
            return parse_record({"messages": self._messages[row].as_py()}, self.where(row))
        line = self._lines.line(row)
        return parse_line(line, self.where(row)) if line.strip() else None

    def close(self) -> None:
        for one in (self._lines, self._packs):
            if one is not None:
                one.close()

    def _guess_kind(self, columns: list[str] | None) -> str:
        if columns is None and self._lines is not None:
            if self._lines.num_packs == 0:
                return CHAT
            try:
                columns = list(json.loads(self._lines.line(0)))
            except (ValueError, TypeError, RecursionError):
                columns = []
        for name, kind in (("messages", CHAT), ("input_ids", PACKS)):
            if name in (columns or []):
                return kind
        raise FormatError(
            "holds neither conversations (`messages`) nor packs (`input_ids`)", where=str(self.path), fix=_WRITE_AGAIN
        )


def open_chunk(folder: LiveFolder, index: int, *, require_ready: bool, settle_s: float) -> LiveChunk | None:
    """The chunk, once it is whole; None before.

    Raises:
        FormatError: it, or its record, is damaged.
    """
    record = folder.record(index)
    if record is None and require_ready:
        return None
    path = folder.find(index)
    if path is None:
        return None
    if record is None and folder.end() is None and not _is_settled(path, index, folder.look(), settle_s):
        return None
    return LiveChunk(path, record)


def _is_settled(path: Path, index: int, contents: Contents, settle_s: float) -> bool:
    if max(contents.chunks, default=index) > index:
        return True
    try:
        return time.time() - path.stat().st_mtime > settle_s
    except OSError:
        return False


def _check(path: Path, record: ReadyRecord) -> None:
    num_bytes, xxh3 = path.stat().st_size, file_digest(path)
    if (num_bytes, xxh3) != (record.num_bytes, record.xxh3):
        raise FormatError(
            f"the chunk is damaged: {num_bytes:,} bytes with hash {xxh3}, and its ready record says "
            f"{record.num_bytes:,} with {record.xxh3}",
            where=str(path),
            fix=_WRITE_AGAIN,
        )
