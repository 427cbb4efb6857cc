"""From token shards to one of Megatron's indexed datasets, X.bin and X.idx: the bytes, and no policy.

Names, splits and layout of what a training run reads are `token_family`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.checks import require_at_least
from harness.errors import ConfigError, PrepError
from harness.indexed.index import prefix_of, smallest_dtype
from harness.indexed.token_batches import TokenBatch
from harness.indexed.token_shards import list_shards, read_shards
from harness.indexed.writer import IndexedWriter
from harness.records import MAX_TOKEN_ID


@dataclass(frozen=True)
class TokenSource:
    """Which documents to take, and what becomes of them.

    Attributes:
        column: of the token ids, in each shard.
        eod: token that is appended to every document; None appends none.
        vocab_size: token ids must be below it. It also fixes the dtype, to the one that Megatron expects of such a
            tokenizer; without it that is the smallest that holds the tokens.
        empty: `drop` or `refuse` rows without tokens.
    """

    column: str = "input_ids"
    eod: int | None = None
    vocab_size: int | None = None
    empty: str = "drop"

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            require_at_least(self.vocab_size, 1, setting="vocab_size")
        if self.eod is not None and not 0 <= self.eod <= self.largest_token:
            raise ConfigError(
                f"the token {self.eod:,} is not from 0 to {self.largest_token:,}", where="eod", fix="name another"
            )
        if self.empty not in ("drop", "refuse"):
            raise ConfigError(f"{self.empty!r} is not known", where="empty", fix="choose drop or refuse")

    @property
    def largest_token(self) -> int:
        return MAX_TOKEN_ID if self.vocab_size is None else self.vocab_size - 1

    @property
    def dtype(self) -> np.dtype[Any] | None:
        return None if self.vocab_size is None else smallest_dtype(self.vocab_size)

    def batches(self, paths: Iterable[Path]) -> Iterator[TokenBatch]:
        """The documents of some shards, in order, each with its EOD; PrepError for what cannot be taken."""
        for path, batch in read_shards(paths, column=self.column):
            if batch.empty_documents and self.empty == "refuse":
                raise PrepError(
                    f"{batch.empty_documents:,} rows close by have no tokens",
                    where=str(path),
                    fix="mend the shard, or leave such rows out with empty=drop",
                )
            if self.vocab_size is not None and len(batch.tokens) and batch.tokens.max() > self.largest_token:
                raise PrepError(
                    f"a token is {int(batch.tokens.max()):,}, the vocabulary has {self.vocab_size:,}",
                    where=str(path),
                    fix="name the size of the vocabulary that the shards were tokenised with",
                )
            yield batch if self.eod is None else batch.with_eod(self.eod)


@dataclass(frozen=True)
class IndexedReport:
    """A pair that was written: X, the dtype's name, and its counts."""

    prefix: str
    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    empty_documents: int = 0


def convert_tokens(
    sources: Iterable[str],
    prefix: str,
    *,
    source: TokenSource | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> IndexedReport:
    """Write token shards as X.bin and X.idx, as Megatron's own builder would, byte for byte.

    Memory does not grow with the data. The pair appears whole or not at all.

    Args:
        sources: Parquet files, folders or patterns.
        prefix: X.
        source: which documents to take; token ids of `input_ids`, as they are, where None.
        overwrite: replace a pair that is there.
        progress: called with numbers of documents as they are written.

    Raises:
        PrepError: a shard is missing or damaged, or a row holds what is no token; names file and row.
        FormatError: the pair cannot be written, is there already, or would be empty.
    """
    source = source or TokenSource()
    empty = 0
    paths = list_shards(sources)
    with IndexedWriter(prefix_of(prefix), dtype=source.dtype, overwrite=overwrite) as writer:
        for batch in source.batches(paths):
            writer.append(batch.tokens, batch.lengths, batch.documents)
            empty += batch.empty_documents
            if progress is not None:
                progress(len(batch.documents))
    return report_of(writer, empty_documents=empty)


def report_of(writer: IndexedWriter, *, empty_documents: int = 0) -> IndexedReport:
    """What a writer wrote."""
    return IndexedReport(
        prefix=str(writer.prefix),
        dtype=writer.dtype.name,
        num_documents=writer.num_documents,
        num_sequences=writer.num_sequences,
        num_tokens=writer.num_tokens,
        empty_documents=empty_documents,
    )
