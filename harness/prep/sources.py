"""Where conversations come from: JSONL and Parquet files, read in a stream."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError, PrepError
from harness.formats.files import natural_key
from harness.prep.chat import BadRecord, Conversation, parse_line, parse_record
from harness.prep.checks import require_at_least, require_choice

SOURCE_KINDS = ("files", "pydoc")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip")
_CHUNK_BYTES = 1 << 18
_CHUNK_ROWS = 1024


@dataclass
class SourceConfig:
    """Where chat records are read.

    Attributes:
        kind: `files`, or `pydoc` for the corpus built from the documentation of Python's standard library.
        path: a file, a glob or a folder (searched with all below it); not used by `pydoc`.
        on_bad: `refuse` stops at bad records and lists them, `skip` leaves them out and counts them.
        limit: read so many records at most; 0 reads all.
    """

    kind: str = "pydoc"
    path: str = ""
    on_bad: str = "refuse"
    limit: int = 0

    def __post_init__(self) -> None:
        require_choice(self.kind, SOURCE_KINDS, setting="source.kind")
        require_choice(self.on_bad, ("refuse", "skip"), setting="source.on_bad")
        require_at_least(self.limit, 0, setting="source.limit")
        if self.kind == "files" and not self.path:
            raise ConfigError(
                "no path is given", where="source.path", fix="name a JSONL or Parquet file, a glob or a folder"
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one file, not yet parsed.

    Attributes:
        path: the file.
        unit: `line` (counted from 1) or `row` (counted from 0).
        first: number of the first record.
        records: lines as bytes, or decoded rows.
        num_bytes: size in the file, for progress; rows share their file's size evenly.
    """

    path: str
    unit: str
    first: int
    records: list[Any]
    num_bytes: int

    def parse(self) -> Iterator[Conversation | BadRecord]:
        """Every record in order; blank lines are no records."""
        for number, record in enumerate(self.records, start=self.first):
            where = f"{self.path}, {self.unit} {number}"
            if self.unit == "row":
                yield parse_record(record, where)
            elif record.strip():
                yield parse_line(record, where)


def list_files(path: str) -> list[Path]:
    """The files that `path` names, folders and globs in natural order (`part-2` before `part-10`).

    Raises:
        PrepError: nothing is there, or a file is of a kind that is not read.
    """
    found = Path(path)
    if found.is_dir():
        kinds = JSONL_SUFFIXES + PARQUET_SUFFIXES + _COMPRESSED_SUFFIXES
        files = [file for file in _visible_files(found) if file.suffix.lower() in kinds]
    elif found.is_file():
        files = [found]
    else:
        names = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        raise PrepError(
            "no chat files were found",
            where=path,
            fix=f"name a file, a glob or a folder with files that end in {' '.join(JSONL_SUFFIXES + PARQUET_SUFFIXES)}",
        )
    compressed = [file for file in files if file.suffix.lower() in _COMPRESSED_SUFFIXES]
    if compressed:
        raise PrepError("compressed chat files are not read", where=str(compressed[0]), fix="decompress them first")
    return sorted(files, key=lambda file: (natural_key(str(file)), str(file)))


def files_left_out(path: str) -> list[Path]:
    """Files below the folder `path` that `list_files` does not read: of another kind, or in Spark's way of hiding."""
    folder = Path(path)
    if not folder.is_dir():
        return []
    read = set(list_files(path))
    return sorted(file for file in folder.rglob("*") if file.is_file() and file not in read)


def read_chunks(files: Iterable[Path], *, limit: int = 0) -> Iterator[Chunk]:
    """Read files in order, about 256 KiB or 1,024 rows at a time.

    Args:
        files: as from `list_files`.
        limit: stop after so many records; 0 reads all. Blank lines are no records.

    Raises:
        PrepError: a file cannot be read, or is Parquet without a usable `messages` column.
    """
    left = limit if limit else None
    for file in files:
        chunks = _read_parquet(file) if file.suffix.lower() in PARQUET_SUFFIXES else _read_jsonl(file)
        for chunk in chunks:
            if left is None:
                yield chunk
                continue
            places = [place for place, record in enumerate(chunk.records) if not _is_blank(record)]
            if len(places) >= left:
                end = places[left - 1] + 1
                share = chunk.num_bytes * end // len(chunk.records)
                yield Chunk(chunk.path, chunk.unit, chunk.first, chunk.records[:end], share)
                return
            left -= len(places)
            yield chunk


def _is_blank(record: object) -> bool:
    return isinstance(record, bytes) and not record.strip()


def _read_jsonl(file: Path) -> Iterator[Chunk]:
    first = 1
    try:
        with file.open("rb") as lines:
            while records := lines.readlines(_CHUNK_BYTES):
                yield Chunk(str(file), "line", first, records, sum(map(len, records)))
                first += len(records)
    except OSError as error:
        raise PrepError(f"the file cannot be read: {error}", where=str(file)) from error


def _read_parquet(file: Path) -> Iterator[Chunk]:
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            check_messages_column(parquet.schema_arrow, file)
            row_bytes = file.stat().st_size / max(parquet.metadata.num_rows, 1)
            first = 0
            for batch in parquet.iter_batches(batch_size=_CHUNK_ROWS, columns=["messages"]):
                records = batch.to_pylist()
                yield Chunk(str(file), "row", first, records, int(row_bytes * len(records)))
                first += len(records)
    except (OSError, pa.ArrowException) as error:
        raise PrepError(f"the Parquet file cannot be read: {error}", where=str(file)) from error


def check_messages_column(schema: Any, file: Path) -> None:
    expected = "`messages` must be a list of structs with the strings `role` and `content`"
    if "messages" not in schema.names:
        raise PrepError(
            f"there is no `messages` column among: {', '.join(schema.names)}", where=str(file), fix=expected
        )
    kind = schema.field("messages").type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    turn = kind.value_type if is_list else None
    if turn is None or not pa.types.is_struct(turn) or not {"role", "content"} <= {field.name for field in turn}:
        raise PrepError(f"`messages` is of type {kind}", where=str(file), fix=expected)


def _visible_files(folder: Path) -> list[Path]:
    """All files but those with a dot or an underscore (`_SUCCESS`, `_temporary`) before a name below `folder`."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return [file for file in found if not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)]
