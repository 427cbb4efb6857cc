"""Reads token shards: Parquet files with a column of token ids, one document a row, in batches of bounded size.

Row groups are decoded on several threads, and come in order.
"""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import FormatError, PrepError
from harness.indexed.token_batches import TokenBatch, batch_of
from harness.storage import natural_key

# Decoded tokens of one batch; a row group of more is read in several.
_BATCH_TOKENS = 1 << 20
# Bytes that pyarrow reads of a column at a time.
_READ_BYTES = 1 << 20
_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_MAGIC = {
    b"\x1f\x8b": "is compressed with gzip",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd",
    b"BZh": "is compressed with bzip2",
    b"{": "is JSON lines",
    b"[": "is JSON",
    b"ARROW1": "is an Arrow file",
}


def list_shards(sources: Iterable[str]) -> list[Path]:
    """The files of some paths: files as they are, folders and patterns in natural order.

    Raises:
        PrepError: a path names nothing, or something else than Parquet.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            names = [entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith((".", "_"))]
            chosen = [entry for entry in names if entry.suffix == ".parquet"] or names
        elif path.is_file():
            chosen = [path]
        else:
            # Not Path.glob, which takes no absolute pattern.
            chosen = [Path(one) for one in glob.glob(source)]  # noqa: PTH207
        if not chosen:
            raise PrepError("there are no token shards", where=source, fix="name Parquet files, folders or patterns")
        found += sorted(chosen, key=lambda one: natural_key(str(one)))
    for path in found:
        _refuse_others(path)
    return found


def _refuse_others(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(b"PAR1"):
        return
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "is no Parquet file")
    raise PrepError(
        f"the shard {kind if start else 'has no bytes'}",
        where=str(path),
        fix="token shards are Parquet files with a column of token ids; chats are prepared with recipes.prepare",
    )


def read_shards(paths: Iterable[Path], *, column: str) -> Iterator[tuple[Path, TokenBatch]]:
    """The documents of some shards, in order, each batch with its file.

    At most a batch a thread is in memory.

    Raises:
        PrepError: a shard cannot be read, has no such column or one of another type, or holds what is no token id;
            names the file and the row.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting: deque[tuple[Path, Future[list[TokenBatch]]]] = deque()

        def take(most: int) -> Iterator[tuple[Path, TokenBatch]]:
            while len(waiting) > most:
                path, future = waiting.popleft()
                yield from ((path, batch) for batch in future.result())

        try:
            for path in paths:
                with _open(path, column) as file:
                    metadata = file.metadata
                for run in _split_groups(metadata, column):
                    read = (path, metadata, column, run)
                    if run.num_tokens > _BATCH_TOKENS:
                        yield from take(0)
                        yield from ((path, batch) for batch in _read_ahead(pool, _read_run(*read)))
                    else:
                        waiting.append((path, pool.submit(_read_whole_run, *read)))
                        yield from take(_THREADS)
            yield from take(0)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Run:
    """Row groups that follow one another, with the number of the first row, and how many tokens they can hold."""

    groups: range
    first_row: int
    num_rows: int
    num_tokens: int


def _split_groups(metadata: pq.FileMetaData, column: str) -> Iterator[_Run]:
    """The row groups of a file in runs of at most a batch, or of one row group that is larger."""
    first = row = rows = tokens = 0
    for group in range(metadata.num_row_groups):
        more = _tokens_of_group(metadata, group, column)
        if rows and tokens + more > _BATCH_TOKENS:
            yield _Run(range(first, group), row, rows, tokens)
            first, row, rows, tokens = group, row + rows, 0, 0
        rows += metadata.row_group(group).num_rows
        tokens += more
    if rows:
        yield _Run(range(first, metadata.num_row_groups), row, rows, tokens)


def _read_ahead(pool: ThreadPoolExecutor, batches: Iterator[TokenBatch]) -> Iterator[TokenBatch]:
    """The same batches; the next one is decoded while one is used."""
    future = pool.submit(next, batches, None)
    while (batch := future.result()) is not None:
        future = pool.submit(next, batches, None)
        yield batch


def _open(path: Path, column: str) -> pq.ParquetFile:
    try:
        file = _open_file(path, None)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    if column not in names:
        raise PrepError(
            f"the shard has no column {column!r}", where=str(path), fix=f"name one of its columns: {', '.join(names)}"
        )
    return file


def _open_file(path: Path, metadata: pq.FileMetaData | None) -> pq.ParquetFile:
    # Neither reads ahead nor keeps: memory is that of a batch, whatever the row groups' size.
    options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
    return pq.ParquetFile(path, metadata=metadata, **options)


def _unreadable(path: Path, error: Exception) -> PrepError:
    said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return PrepError(f"the shard cannot be read: {said}", where=str(path), fix="copy the shard again, or make it anew")


def _tokens_of_group(metadata: pq.FileMetaData, group: int, column: str) -> int:
    """Tokens that a row group claims for a column, or that its bytes could be: of text one in eight."""
    row_group = metadata.row_group(group)
    chunks = [row_group.column(index) for index in range(row_group.num_columns)]
    mine = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
    return max((max(chunk.num_values, chunk.total_uncompressed_size // 8) for chunk in mine), default=0)


def _read_whole_run(path: Path, metadata: pq.FileMetaData, column: str, run: _Run) -> list[TokenBatch]:
    return list(_read_run(path, metadata, column, run))


def _read_run(path: Path, metadata: pq.FileMetaData, column: str, run: _Run) -> Iterator[TokenBatch]:
    row = run.first_row
    try:
        with _open_file(path, metadata) as file:
            mean = max(1.0, run.num_tokens / run.num_rows)
            batches = file.iter_batches(
                batch_size=int(max(1, min(1 << 17, _BATCH_TOKENS // mean))),
                row_groups=list(run.groups),
                columns=[column],
                use_threads=False,
            )
            for batch in batches:
                yield batch_of(batch.column(0), first_row=row)
                row += batch.num_rows
    except FormatError as error:
        raise PrepError(error.what, where=f"{path}, column {column}", fix=error.fix) from None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
