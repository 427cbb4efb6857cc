"""Chat files: list those that a path names, cut them into shards, and read their records in a stream."""

from __future__ import annotations

import glob
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from harness.checks import require_choice, require_numbers
from harness.errors import ConfigError, PrepError
from harness.prep.chat import BadRecord, Conversation, parse_line, parse_record
from harness.storage import natural_key

SOURCE_KINDS = ("files", "pydoc")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
# Written by `save_to_disk` of Hugging Face's datasets.
ARROW_SUFFIXES = (".arrow",)
# Compressed JSONL: suffix and pyarrow's name of the codec.
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_UNREAD_SUFFIXES = (".xz", ".zip", ".7z", ".lz4")
_SPLITS_FILE = "dataset_dict.json"

_LINE, _ROW = "line", "row"
_CHUNK_BYTES = 1 << 18
_CHUNK_ROWS = 1024
_SCAN_BYTES = 8 << 20


@dataclass
class SourceConfig:
    """Source of chat records.

    Attributes:
        kind: `files`, or `pydoc` for the corpus built from the documentation of Python's standard library; empty is
            `files` if there is a path, else `pydoc`.
        path: a file, a glob or a folder (searched recursively).
        schema: schema of the records (`harness.prep.chat.SCHEMAS`); empty to detect it from the first records.
        columns: other names of fields, as in `source.columns.messages=chat` for records with a field `chat`.
        ignore_fields: fields that are left out on purpose although they change what the model would see or write.
        on_bad: `refuse` stops at bad records and lists them, `skip` leaves them out and counts them.
        limit: maximum number of records to read; 0 reads all.
        shard_bytes: bytes of the source that are tokenized as one unit, which is also what an interruption can lose;
            does not change the result.
    """

    kind: str = ""
    path: str = ""
    schema: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    ignore_fields: list[str] = field(default_factory=list)
    on_bad: str = "refuse"
    limit: int = 0
    shard_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if self.kind:
            require_choice(self.kind, SOURCE_KINDS, setting="source.kind")
        require_choice(self.on_bad, ("refuse", "skip"), setting="source.on_bad")
        require_numbers(self, "source", "limit", lowest=0)
        require_numbers(self, "source", "shard_bytes", lowest=1)
        if self.kind == "pydoc" and self.path:
            what = f"{self.path} would not be read: the source is the built-in corpus"
            raise ConfigError(what, where="source.path", fix="omit source=pydoc, or omit source.path")
        if self.kind == "files" and not self.path:
            fix = "name a JSONL or Parquet file, a glob or a folder"
            raise ConfigError("no path is given", where="source.path", fix=fix)

    def resolve(self) -> SourceConfig:
        """Return these settings with their `kind`."""
        # Not done on construction: Hydra constructs the defaults first, and sets the path afterwards.
        return self if self.kind else replace(self, kind="files" if self.path else "pydoc")


def list_files(path: str) -> list[Path]:
    """Return the chat files that `path` names; those of a folder or glob in natural order (`part-2` before `part-10`).

    Raises:
        PrepError: nothing is there, a file has a compression that is not supported, or a folder holds several splits.
    """
    place = Path(path)
    if place.is_dir():
        for mark in sorted(place.rglob(_SPLITS_FILE))[:1]:
            splits = sorted(entry.name for entry in mark.parent.iterdir() if entry.is_dir())
            what = f"the folder holds the splits {', '.join(splits)} of a dataset"
            fix = "name the folder of one split: test data must not be trained on"
            raise PrepError(what, where=str(mark.parent), fix=fix)
        kinds = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *ARROW_SUFFIXES, *COMPRESSED, *_UNREAD_SUFFIXES)
        files = [file for file in place.rglob("*") if _kind(file) in kinds and file.is_file()]
        # As Spark does: `_SUCCESS` and the like are not data.
        files = [file for file in files if not any(part[0] in "._" for part in file.relative_to(place).parts)]
    elif place.is_file():
        files = [place]
    else:
        names = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        suffixes = " ".join(JSONL_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES)
        fix = f"name a file, a glob or a folder with files that end in {suffixes}"
        fix += f"; JSONL may be compressed ({' '.join(COMPRESSED)})"
        raise PrepError("there are no chat files", where=path, fix=fix)
    for file in files:
        inner = Path(file.stem).suffix.lower() if _kind(file) in COMPRESSED else ".jsonl"
        if _kind(file) in _UNREAD_SUFFIXES or inner not in (*JSONL_SUFFIXES, ".json", ""):
            raise PrepError("this kind of compressed file is not supported", where=str(file), fix="decompress it first")
    return sorted(files, key=lambda file: (natural_key(str(file)), str(file)))


def list_skipped_files(path: str) -> list[Path]:
    """Return the files in the folder `path` that `list_files` leaves out: of another kind, or hidden as Spark does."""
    folder = Path(path)
    if not folder.is_dir():
        return []
    read = set(list_files(path))
    return sorted(file for file in folder.rglob("*") if file.is_file() and file not in read)


def _kind(file: Path) -> str:
    return file.suffix.lower()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one file, not yet parsed.

    Attributes:
        path: the file.
        unit: `line` (counted from 1) or `row` (counted from 0).
        first: number of the first record.
        records: lines as bytes, or decoded rows.
        num_bytes: size in the file, for progress; rows share the size of their file evenly.
    """

    path: str
    unit: str
    first: int
    records: list[Any]
    num_bytes: int

    def parse(self) -> Iterator[Conversation | BadRecord]:
        """Yield every record in order; blank lines are skipped."""
        for number, record in enumerate(self.records, start=self.first):
            where = f"{self.path}, {self.unit} {number}"
            if self.unit == _ROW:
                yield parse_record(record, where)
            elif record.strip():
                yield parse_line(record, where)


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive records of one file that are prepared as one unit.

    Attributes:
        path: the file.
        first: number of the first record, as in `Chunk`.
        start, end: byte range of the file that holds the records.
        row_groups: first and past-the-end row group of a Parquet file; None for other files.
        limit: maximum number of records, blank lines not counted; None for all.
    """

    path: str
    first: int
    start: int
    end: int
    row_groups: tuple[int, int] | None = None
    limit: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def cut_shards(files: Iterable[Path], *, shard_bytes: int, limit: int = 0) -> list[Shard]:
    """Divide files into shards of about `shard_bytes`, in order; compressed and Arrow files are one shard each.

    Scans large JSONL files for line ends, so that each shard knows the number of its first line.

    Args:
        limit: maximum number of records in all shards together; 0 for all.

    Raises:
        PrepError: a file cannot be read.
    """
    shards = [shard for file in files for shard in _cut(file, shard_bytes)]
    if not limit:
        return shards
    kept, left = [], limit
    for shard in shards:
        count = sum(not _is_blank(record) for chunk in read_shard(shard) for record in chunk.records)
        kept.append(shard if count <= left else replace(shard, limit=left))
        left -= count
        if left <= 0:
            break
    return kept


def _cut(file: Path, shard_bytes: int) -> Iterator[Shard]:
    try:
        size = file.stat().st_size
        if _kind(file) in PARQUET_SUFFIXES:
            yield from _cut_parquet(file, size, shard_bytes)
        elif _kind(file) in (*COMPRESSED, *ARROW_SUFFIXES) or size <= shard_bytes:
            yield Shard(str(file), 0 if _kind(file) in ARROW_SUFFIXES else 1, 0, size)
        else:
            yield from _cut_lines(file, size, shard_bytes)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error


def _cut_lines(file: Path, size: int, shard_bytes: int) -> Iterator[Shard]:
    start, first = 0, 1
    with file.open("rb") as source:
        while start < size:
            source.seek(start)
            left, lines = shard_bytes, 0
            while left and (block := source.read(min(left, _SCAN_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
            rest = source.readline()
            end = source.tell()
            yield Shard(str(file), first, start, end)
            start, first = end, first + lines + bool(rest)


def _cut_parquet(file: Path, size: int, shard_bytes: int) -> Iterator[Shard]:
    metadata = pq.read_metadata(file)
    group, first, row, start = 0, 0, 0, 0
    for number in range(metadata.num_row_groups):
        row += metadata.row_group(number).num_rows
        is_last = number + 1 == metadata.num_row_groups
        end = size if is_last else _offset_of(metadata.row_group(number + 1))
        if is_last or end - start >= shard_bytes:
            yield Shard(str(file), first, start, end, (group, number + 1))
            group, first, start = number + 1, row, end


def _offset_of(row_group: Any) -> int:
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    offsets = [(column.data_page_offset, column.dictionary_page_offset) for column in columns]
    return min(int(min(data, dictionary or data)) for data, dictionary in offsets)


def read_shard(shard: Shard) -> Iterator[Chunk]:
    """Yield the records of a shard, about 256 KiB or 1,024 rows at a time.

    Raises:
        PrepError: the file cannot be read, or has no usable `messages` column.
    """
    return _limited(_read(Path(shard.path), shard), shard.limit)


def read_chunks(files: Iterable[Path], *, limit: int = 0) -> Iterator[Chunk]:
    """Yield the records of whole files in order, like `read_shard`.

    Args:
        files: from `list_files`.
        limit: maximum number of records, blank lines not counted; 0 reads all.
    """
    return _limited((chunk for file in files for chunk in _read(file, None)), limit or None)


def _limited(chunks: Iterator[Chunk], left: int | None) -> Iterator[Chunk]:
    if left is None:
        yield from chunks
        return
    for chunk in chunks:
        places = [place for place, record in enumerate(chunk.records) if not _is_blank(record)]
        if len(places) >= left:
            end = places[left - 1] + 1
            yield replace(chunk, records=chunk.records[:end], num_bytes=chunk.num_bytes * end // len(chunk.records))
            return
        left -= len(places)
        yield chunk


def _is_blank(record: object) -> bool:
    return isinstance(record, bytes) and not record.strip()


def _read(file: Path, shard: Shard | None) -> Iterator[Chunk]:
    """Yield the records of a shard of the file, or of the whole file."""
    kind = _kind(file)
    try:
        if kind in PARQUET_SUFFIXES:
            yield from _read_parquet(file, shard)
        elif kind in ARROW_SUFFIXES:
            yield from _read_arrow(file)
        elif kind in COMPRESSED:
            with pa.OSFile(str(file)) as source, pa.CompressedInputStream(source, COMPRESSED[kind]) as stream:
                yield from _read_lines(file, io.BufferedReader(stream, _CHUNK_BYTES), 1, source)
        else:
            with file.open("rb") as lines:
                if shard is None:
                    yield from _read_lines(file, lines, 1, lines)
                    return
                lines.seek(shard.start)
                data = io.BytesIO(lines.read(shard.num_bytes))
                yield from _read_lines(file, data, shard.first, data)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> PrepError:
    fix = "check its permissions; a damaged or truncated file must be written again"
    return PrepError(f"the file cannot be read: {error}", where=str(file), fix=fix)


def _read_lines(file: Path, lines: BinaryIO | io.BufferedReader, first: int, source: Any) -> Iterator[Chunk]:
    """Yield lines; `source` is the stream whose position counts as progress."""
    before = 0
    while records := lines.readlines(_CHUNK_BYTES):
        at = source.tell()
        yield Chunk(str(file), _LINE, first, records, at - before)
        first, before = first + len(records), at


def _read_parquet(file: Path, shard: Shard | None) -> Iterator[Chunk]:
    with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        check_messages_column(parquet.schema_arrow, file)
        row_bytes = file.stat().st_size / max(parquet.metadata.num_rows, 1)
        first = 0 if shard is None else shard.first
        groups = range(*(shard.row_groups if shard is not None and shard.row_groups else (0, parquet.num_row_groups)))
        for batch in parquet.iter_batches(batch_size=_CHUNK_ROWS, row_groups=list(groups), columns=["messages"]):
            records = batch.to_pylist()
            yield Chunk(str(file), _ROW, first, records, int(row_bytes * len(records)))
            first += len(records)


def _read_arrow(file: Path) -> Iterator[Chunk]:
    size = file.stat().st_size
    with pa.memory_map(str(file)) as source:
        try:
            batches: Any = pa.ipc.open_stream(source)
            schema = batches.schema
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(source)
            batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
            schema = opened.schema
        check_messages_column(schema, file)
        first, before = 0, 0
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                records = batch.select(["messages"]).slice(start, _CHUNK_ROWS).to_pylist()
                at = min(size, source.tell())
                yield Chunk(str(file), _ROW, first, records, at - before)
                first, before = first + len(records), at


def check_messages_column(schema: Any, file: Path) -> None:
    """Raise PrepError unless an Arrow schema has a usable `messages` column."""
    expected = "`messages` must be a list of structs with the strings `role` and `content`"
    if "messages" not in schema.names:
        what = f"there is no `messages` column among: {', '.join(schema.names)}"
        raise PrepError(what, where=str(file), fix=expected)
    kind = schema.field("messages").type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    turn = kind.value_type if is_list else None
    if turn is None or not pa.types.is_struct(turn) or not {"role", "content"} <= {field.name for field in turn}:
        raise PrepError(f"`messages` is of type {kind}", where=str(file), fix=expected)
