"""Columns of token ids, whatever their form, as arrays: one document a row.

A row is a list of ids, a list of such lists (a document of several sequences), or text of ids (`"5 17 3"`, also
`"[5, 17, 3]"`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from harness.errors import FormatError
from harness.indexed.index import largest_token
from harness.records import MAX_TOKEN_ID, Int64Array


@dataclass(frozen=True, eq=False, slots=True)
class TokenBatch:
    """Some documents, end to end.

    Attributes:
        tokens: integers [n], none below 0 or above 2**31 - 1.
        lengths: int64 [sequences], none 0; they add up to n.
        documents: int64 [documents], sequences of each, none 0.
        empty_documents: rows left out, because they have no tokens.
    """

    tokens: npt.NDArray[Any]
    lengths: Int64Array
    documents: Int64Array
    empty_documents: int = 0

    def document_tokens(self) -> Int64Array:
        """int64 [documents]: tokens of each."""
        return (
            np.add.reduceat(self.lengths, np.cumsum(self.documents) - self.documents)
            if len(self.documents)
            else (np.zeros(0, np.int64))
        )

    def select(self, chosen: npt.NDArray[np.bool_]) -> TokenBatch:
        """The documents where `chosen` [documents] is true."""
        sequences = np.repeat(chosen, self.documents)
        tokens = self.tokens[np.repeat(sequences, self.lengths)]
        return TokenBatch(tokens, self.lengths[sequences], self.documents[chosen])

    def with_eod(self, token: int) -> TokenBatch:
        """The same documents, each with a token more at the end of its last sequence."""
        ends = np.cumsum(self.document_tokens()) + np.arange(len(self.documents))
        dtype = self.tokens.dtype if token <= np.iinfo(self.tokens.dtype).max else np.dtype(np.int32)
        tokens = np.empty(len(self.tokens) + len(ends), dtype)
        is_old = np.ones(len(tokens), np.bool_)
        is_old[ends] = False
        tokens[is_old] = self.tokens
        tokens[ends] = token
        lengths = self.lengths.copy()
        lengths[np.cumsum(self.documents) - 1] += 1
        return TokenBatch(tokens, lengths, self.documents, self.empty_documents)


def batch_of(column: pa.Array, *, first_row: int = 0) -> TokenBatch:
    """The documents of a column, or of a slice of one.

    Args:
        column: lists of integers, lists of such lists, or text.
        first_row: number of its first row, for errors.

    Raises:
        FormatError: another type, a null, or a number that is no token id; names the row.
    """
    _refuse_nulls(column, "row", first_row)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = _parse_text(column, first_row)
    if not _is_list(column.type):
        what = f"is of type {column.type}, expected lists of whole numbers"
        raise FormatError(f"the column {what}", fix="name the column of token ids")
    documents = _counts(column)
    inner = column.flatten()
    if _is_list(inner.type):
        _refuse_nulls(inner, "a sequence of row", first_row, documents)
        lengths, tokens = _counts(inner), inner.flatten()
    else:
        lengths, tokens = documents, inner
        documents = np.ones(len(column), np.int64)
    if not pa.types.is_integer(tokens.type):
        what = f"the column is of type {column.type}, expected lists of whole numbers"
        raise FormatError(what, fix="name the column of token ids")
    rows = np.repeat(np.arange(len(column)), documents)
    if tokens.null_count:
        at = int(np.argmax(tokens.is_null().to_numpy(zero_copy_only=False)))
        raise _bad_token("null", at, lengths, rows, first_row)
    values = tokens.to_numpy()
    if largest_token(values) > MAX_TOKEN_ID:
        at = int(np.argmax((values < 0) | (values > MAX_TOKEN_ID)))
        kind = "the negative token" if values[at] < 0 else f"a token above {MAX_TOKEN_ID:,}:"
        raise _bad_token(f"{kind} {int(values[at]):,}", at, lengths, rows, first_row)
    return _without_empty(values, lengths, documents)


def _without_empty(tokens: npt.NDArray[Any], lengths: Int64Array, documents: Int64Array) -> TokenBatch:
    """Sequences without tokens, and documents without sequences, take up no place."""
    if lengths.all() and documents.all():
        return TokenBatch(tokens, lengths, documents)
    rows = np.repeat(np.arange(len(documents)), documents)
    kept = np.bincount(rows[lengths > 0], minlength=len(documents))
    return TokenBatch(tokens, lengths[lengths > 0], kept[kept > 0], int(np.count_nonzero(kept == 0)))


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
    raise FormatError(
        f"{what} {first_row + row:,} is null, one of {column.null_count:,} close by",
        fix="leave such rows out when the shard is made; an empty document is an empty list",
    )


def _bad_token(kind: str, at: int, lengths: Int64Array, rows: Int64Array, first_row: int) -> FormatError:
    ends = np.cumsum(lengths)
    sequence = int(np.searchsorted(ends, at, "right"))
    position = at - int(ends[sequence] - lengths[sequence])
    return FormatError(
        f"row {first_row + int(rows[sequence]):,} has {kind} at position {position:,}",
        fix="mend what makes the shards; token ids go from 0 to the size of the vocabulary",
    )


def _parse_text(column: pa.Array, first_row: int) -> pa.Array:
    trimmed = pc.ascii_trim(column, " \t\r\n,[]")
    parts = pc.split_pattern_regex(trimmed, r"[,\s]+")
    # Splitting nothing gives one part of nothing.
    lengths = np.where(pc.equal(trimmed, "").to_numpy(zero_copy_only=False), 0, _counts(parts))
    words = parts.flatten().filter(pc.not_equal(parts.flatten(), ""))
    try:
        numbers = words.cast(pa.int64())
    except pa.ArrowException:
        is_number = pc.match_substring_regex(words, r"^[+-]?\d{1,18}$").to_numpy(zero_copy_only=False)
        at = int(np.argmin(is_number))
        row = int(np.searchsorted(np.cumsum(lengths), at, "right"))
        raise FormatError(
            f"row {first_row + row:,} has the text {words[at].as_py()[:40]!r} where a token id should be",
            fix="the column must hold token ids as text; plain text is not tokenised here",
        ) from None
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), numbers)
