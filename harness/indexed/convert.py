"""Convert token shards to one of Megatron's indexed datasets, X.bin and X.idx."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.checks import require_at_least, require_choice
from harness.errors import ConfigError, PrepError
from harness.indexed.index import prefix_of, smallest_dtype
from harness.indexed.writer import IndexedReport, IndexedWriter
from harness.records import MAX_TOKEN_ID

if TYPE_CHECKING:
    from harness.indexed.token_shards import TokenBatch


@dataclass(frozen=True)
class TokenSource:
    """Settings for reading documents from token shards.

    Attributes:
        column: name of the column of token ids.
        eod: token appended to every document; None appends none.
        vocab_size: upper bound of token ids. It also fixes the dtype to the one that Megatron expects for a tokenizer
            of this size; without it the dtype is the smallest that holds the tokens.
        empty: `drop` or `refuse` rows without tokens.
    """

    column: str = "input_ids"
    eod: int | None = None
    vocab_size: int | None = None
    empty: str = "drop"

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            require_at_least(self.vocab_size, 1, setting="vocab_size")
        if self.eod is not None and not 0 <= self.eod <= self._largest_token:
            what = f"the token {self.eod:,} is not between 0 and {self._largest_token:,}"
            raise ConfigError(what, where="eod", fix="choose a token of the vocabulary")
        require_choice(self.empty, ("drop", "refuse"), setting="empty")

    @property
    def _largest_token(self) -> int:
        return MAX_TOKEN_ID if self.vocab_size is None else self.vocab_size - 1

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The dtype that `vocab_size` fixes, if it is given."""
        return None if self.vocab_size is None else smallest_dtype(self.vocab_size)

    def batches(self, paths: Iterable[Path]) -> Iterator[TokenBatch]:
        """Yield the documents of shards in order, each with its EOD; raises PrepError for rows that are refused."""
        # Imported here: pyarrow takes 0.1 s, which users of an index must not pay.
        from harness.indexed.token_shards import read_shards

        for path, batch in read_shards(paths, column=self.column):
            if batch.empty_documents and self.empty == "refuse":
                raise PrepError(
                    f"{batch.empty_documents:,} rows in one batch have no tokens",
                    where=str(path),
                    fix="fix the shard, or leave such rows out with empty=drop",
                )
            if self.vocab_size is not None and len(batch.tokens) and batch.tokens.max() > self._largest_token:
                raise PrepError(
                    f"a token is {int(batch.tokens.max()):,}, the vocabulary has {self.vocab_size:,}",
                    where=str(path),
                    fix="set vocab_size to that of the tokenizer that made the shards",
                )
            yield batch if self.eod is None else batch.with_eod(self.eod)


def convert_tokens(
    sources: Iterable[str],
    prefix: str,
    *,
    source: TokenSource | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> IndexedReport:
    """Write token shards as X.bin and X.idx, byte for byte as Megatron's own builder would.

    Memory does not grow with the data. The pair appears whole or not at all.

    Args:
        sources: Parquet files, folders or patterns.
        prefix: X.
        source: settings for reading; None reads `input_ids` unchanged.
        overwrite: replace an existing pair.
        progress: called with numbers of documents as they are written.

    Raises:
        PrepError: a shard is missing or damaged, or a row holds an invalid token; names file and row.
        FormatError: the pair cannot be written, exists already, or would be empty.
    """
    from harness.indexed.token_shards import list_shards

    source = source or TokenSource()
    empty = 0
    paths = list_shards(sources)
    with IndexedWriter(prefix_of(prefix), dtype=source.dtype, overwrite=overwrite) as writer:
        for batch in source.batches(paths):
            writer.append(batch.tokens, batch.lengths, batch.documents)
            empty += batch.empty_documents
            if progress is not None:
                progress(len(batch.documents))
    return writer.report(empty_documents=empty)
