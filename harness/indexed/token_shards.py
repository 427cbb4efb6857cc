"""Read token shards: Parquet files with a column of token ids, one document per row, in batches of bounded size.

A row is a list of ids, a list of such lists (a document of several sequences), or ids as text (`"5 17 3"`, also
`"[5, 17, 3]"`). Row groups are decoded on several threads and arrive in order.
"""

from __future__ import annotations

import glob
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness.checks import usable_cores
from harness.errors import FormatError, PrepError
from harness.indexed.index import largest_token
from harness.records import MAX_TOKEN_ID, Int64Array
from harness.storage import natural_key

# Decoded tokens in one batch; a larger row group is read in several.
_BATCH_TOKENS = 1 << 20
_READ_BYTES = 1 << 20
# Between token ids that are text.
_BETWEEN = " \t\r\n\f,"
_THREADS = min(8, usable_cores())


@dataclass(frozen=True, eq=False, slots=True)
class TokenBatch:
    """Some documents, end to end.

    Attributes:
        tokens: integers [n] from 0 to 2**31 - 1.
        lengths: int64 [sequences], at least 1 each; they add up to n.
        documents: int64 [documents], number of sequences in each, at least 1.
        empty_documents: rows left out because they have no tokens.
    """

    tokens: npt.NDArray[Any]
    lengths: Int64Array
    documents: Int64Array
    empty_documents: int = 0

    def document_tokens(self) -> Int64Array:
        """int64 [documents]: number of tokens in each."""
        if len(self.documents) == 0:
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.lengths, np.cumsum(self.documents) - self.documents)

    def select(self, chosen: npt.NDArray[np.bool_]) -> TokenBatch:
        """Return the documents where `chosen` [documents] is true."""
        sequences = np.repeat(chosen, self.documents)
        tokens = self.tokens[np.repeat(sequences, self.lengths)]
        return TokenBatch(tokens, self.lengths[sequences], self.documents[chosen])

    def with_eod(self, token: int) -> TokenBatch:
        """Return the same documents with `token` appended to the last sequence of each."""
        dtype = self.tokens.dtype if token <= np.iinfo(self.tokens.dtype).max else np.dtype(np.int32)
        tokens = np.insert(self.tokens.astype(dtype, copy=False), np.cumsum(self.document_tokens()), token)
        lengths = self.lengths.copy()
        lengths[np.cumsum(self.documents) - 1] += 1
        return TokenBatch(tokens, lengths, self.documents, self.empty_documents)


def list_shards(sources: Iterable[str]) -> list[Path]:
    """Return the Parquet files of paths, folders and patterns, those of each in natural order; PrepError for none."""
    shards: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            files = [entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith((".", "_"))]
            files = [file for file in files if file.suffix == ".parquet"] or files
        elif path.is_file():
            files = [path]
        else:
            # Not Path.glob, which takes no absolute pattern.
            files = [path for name in glob.glob(source, recursive=True) if (path := Path(name)).is_file()]  # noqa: PTH207
        if not files:
            raise PrepError("there are no token shards", where=source, fix="specify Parquet files, folders or patterns")
        shards += sorted(files, key=lambda file: natural_key(str(file)))
    return shards


def read_shards(paths: Iterable[Path], *, column: str) -> Iterator[tuple[Path, TokenBatch]]:
    """Yield the documents of shards in order, with their file, a batch per thread; PrepError names file and row."""
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting: deque[tuple[Path, Future[list[TokenBatch]]]] = deque()

        def take(most: int) -> Iterator[tuple[Path, TokenBatch]]:
            while len(waiting) > most:
                path, future = waiting.popleft()
                yield from ((path, batch) for batch in future.result())

        try:
            for path in paths:
                with _opened(path) as file:
                    names, metadata = file.schema_arrow.names, file.metadata
                    parts = list(_split_groups(metadata, column))
                if column not in names:
                    fix = f"specify one of its columns: {', '.join(names)}"
                    raise PrepError(f"the shard has no column {column!r}", where=str(path), fix=fix)
                for groups, first_row, num_rows, num_tokens in parts:
                    mean = max(1.0, num_tokens / num_rows)
                    batches = _read_groups(path, metadata, column, groups, first_row, int(_BATCH_TOKENS // mean))
                    if num_tokens > _BATCH_TOKENS:
                        yield from take(0)
                        yield from ((path, batch) for batch in _read_ahead(pool, batches))
                    else:
                        waiting.append((path, pool.submit(list, batches)))
                        yield from take(_THREADS)
            yield from take(0)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _split_groups(metadata: pq.FileMetaData, column: str) -> Iterator[tuple[range, int, int, int]]:
    """Cut the row groups of a file into runs of at most a batch, or of a single larger row group.

    Yields the groups, the number of their first row, of their rows, and an upper bound of their tokens.
    """
    first = row = rows = tokens = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        chunks = [row_group.column(index) for index in range(row_group.num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
        # Tokens that the group claims for the column, or that its bytes could hold: one in eight bytes for text.
        more = max((max(chunk.num_values, chunk.total_uncompressed_size // 8) for chunk in chunks), default=0)
        if rows and tokens + more > _BATCH_TOKENS:
            yield range(first, group), row, rows, tokens
            first, row, rows, tokens = group, row + rows, 0, 0
        rows += row_group.num_rows
        tokens += more
    if rows:
        yield range(first, metadata.num_row_groups), row, rows, tokens


def _read_ahead(pool: ThreadPoolExecutor, batches: Iterator[TokenBatch]) -> Iterator[TokenBatch]:
    """Yield the same batches, decoding the next one while the current one is used."""
    future = pool.submit(next, batches, None)
    while (batch := future.result()) is not None:
        future = pool.submit(next, batches, None)
        yield batch


@contextmanager
def _opened(path: Path, metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """Open a shard; raise PrepError if reading it fails."""
    # Neither reads ahead nor keeps: one batch is in memory, whatever the size of the row groups.
    options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
    try:
        with pq.ParquetFile(path, metadata=metadata, **options) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns too
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        fix = "write or copy it again, as Parquet with a column of token ids; `harness prepare` is for chats"
        raise PrepError(f"the shard cannot be read: {reason}", where=str(path), fix=fix) from None


def _read_groups(
    path: Path, metadata: pq.FileMetaData, column: str, groups: range, row: int, batch_rows: int
) -> Iterator[TokenBatch]:
    with _opened(path, metadata) as file:
        size = max(1, min(1 << 17, batch_rows))
        for batch in file.iter_batches(size, row_groups=list(groups), columns=[column], use_threads=False):
            try:
                yield parse_column(batch.column(0), first_row=row)
            except FormatError as error:
                raise PrepError(error.what, where=f"{path}, column {column}", fix=error.fix) from None
            row += batch.num_rows


def parse_column(column: pa.Array, *, first_row: int = 0) -> TokenBatch:
    """Convert a column of token ids, or a slice of one from row `first_row` on: lists of integers or of lists, or text.

    FormatError names the row that has a null or a number that is no token id, or the type of another column.
    """
    _refuse_nulls(column, "row", first_row)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = _parse_text(column, first_row)
    wrong_type = FormatError(f"the column is of type {column.type}, expected lists of integers", fix="set the column")
    if not _is_list(column.type):
        raise wrong_type
    documents = _counts(column)
    inner = column.flatten()
    if _is_list(inner.type):
        _refuse_nulls(inner, "a sequence of row", first_row, documents)
        lengths, tokens = _counts(inner), inner.flatten()
    else:
        lengths, tokens, documents = documents, inner, np.ones(len(column), np.int64)
    if not pa.types.is_integer(tokens.type):
        raise wrong_type
    rows = np.repeat(np.arange(len(column)), documents)
    values = tokens.to_numpy(zero_copy_only=False)
    if tokens.null_count or largest_token(values) > MAX_TOKEN_ID:
        bad = tokens.is_null().to_numpy(zero_copy_only=False) if tokens.null_count else values < 0
        at = int(np.argmax(bad if bad.any() else values > MAX_TOKEN_ID))
        ends = np.cumsum(lengths)
        sequence = int(np.searchsorted(ends, at, "right"))
        position = at - int(ends[sequence] - lengths[sequence])
        what = f"row {first_row + int(rows[sequence]):,} has the token {tokens[at]} at position {position:,}"
        fix = "fix the program that writes the shards; token ids are 0 or more and below the size of the vocabulary"
        raise FormatError(f"{what}, expected 0 to {MAX_TOKEN_ID:,}", fix=fix)
    if lengths.all() and documents.all():
        return TokenBatch(values, lengths, documents)
    # Sequences without tokens, and documents without sequences, are left out.
    kept = np.bincount(rows[lengths > 0], minlength=len(documents))
    return TokenBatch(values, lengths[lengths > 0], kept[kept > 0], int(np.count_nonzero(kept == 0)))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _counts(column: pa.Array) -> Int64Array:
    counts: Int64Array = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return counts


def _refuse_nulls(column: pa.Array, what: str, first_row: int, documents: Int64Array | None = None) -> None:
    if not column.null_count:
        return
    at = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
    row = at if documents is None else int(np.searchsorted(np.cumsum(documents), at, "right"))
    fix = "omit such rows; an empty document is an empty list"
    raise FormatError(f"{what} {first_row + row:,} is null (1 of {column.null_count:,} in this batch)", fix=fix)


def _parse_text(column: pa.Array, first_row: int) -> pa.Array:
    # The same characters at both, or an empty word at an end would count as a token.
    trimmed = pc.ascii_trim(column, f"{_BETWEEN}[]")
    parts = pc.split_pattern_regex(trimmed, f"[{_BETWEEN}]+")
    # Splitting an empty string gives one empty part.
    lengths = np.where(pc.equal(trimmed, "").to_numpy(zero_copy_only=False), 0, _counts(parts))
    words = parts.flatten().filter(pc.not_equal(parts.flatten(), ""))
    try:
        numbers = words.cast(pa.int64())
    except pa.ArrowException:
        is_number = pc.match_substring_regex(words, r"^[+-]?\d{1,18}$").to_numpy(zero_copy_only=False)
        at = int(np.argmin(is_number))
        row = int(np.searchsorted(np.cumsum(lengths), at, "right"))
        what = f"row {first_row + row:,} contains the text {words[at].as_py()[:40]!r} instead of a token id"
        fix = "the column must contain token ids as text; this command does not tokenize text"
        raise FormatError(what, fix=fix) from None
    return pa.LargeListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64()), numbers)
