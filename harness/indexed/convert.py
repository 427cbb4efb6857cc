"""Write pairs X.bin and X.idx, from token shards or by joining pairs, and count them for Megatron."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.checks import CheckedSettings, bounded, one_of
from harness.errors import ConfigError, FormatError, PrepError
from harness.indexed.index import BIN, IDX, INT32, LOSS_BIN, UINT16, MappedIndex, prefix_of, smallest_dtype, with_suffix
from harness.indexed.verify import check_indexed
from harness.indexed.writer import IndexedReport, IndexedWriter
from harness.records import MAX_TOKEN_ID
from harness.storage import stamp_of, write_atomically
from harness.storage.files import Stamp, explain_os_errors

if TYPE_CHECKING:
    from harness.indexed.token_shards import TokenBatch

_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class TokenSource(CheckedSettings):
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
    vocab_size: int | None = bounded(None, lowest=1)
    empty: str = one_of("drop", ("drop", "refuse"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eod is not None and not 0 <= self.eod <= self._largest_token:
            what = f"the token {self.eod:,} is not between 0 and {self._largest_token:,}"
            raise ConfigError(what, where="eod", fix="choose a token id of the vocabulary")

    @property
    def _largest_token(self) -> int:
        return MAX_TOKEN_ID if self.vocab_size is None else self.vocab_size - 1

    @property
    def dtype(self) -> np.dtype[Any] | None:
        return None if self.vocab_size is None else smallest_dtype(self.vocab_size)

    def batches(self, paths: Iterable[Path]) -> Iterator[TokenBatch]:
        """Yield the documents of shards in order, each with its EOD; raises PrepError for rows that are refused."""
        # Imported here: pyarrow takes 0.1 s, which users of an index must not pay.
        from harness.indexed.token_shards import read_shards

        for path, batch in read_shards(paths, column=self.column):
            if batch.empty_documents and self.empty == "refuse":
                fix = "fix the shard, or omit such rows with empty=drop"
                raise PrepError(f"{batch.empty_documents:,} rows in one batch have no tokens", where=str(path), fix=fix)
            if self.vocab_size is not None and len(batch.tokens) and batch.tokens.max() > self._largest_token:
                what = f"token id {int(batch.tokens.max()):,} is outside the vocabulary of {self.vocab_size:,}"
                raise PrepError(what, where=str(path), fix="set vocab_size to the size of the shards' vocabulary")
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
        source: settings for reading `sources`, Parquet files, folders or patterns; None reads `input_ids` unchanged.
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


def merge_indexed(
    sources: Iterable[str], prefix: str, *, overwrite: bool = False, progress: Callable[[int, int], None] | None = None
) -> IndexedReport:
    """Write the documents of several pairs, in order, as one pair, byte for byte as Megatron's `add_index` would.

    Memory does not grow with the data. A mix of uint16 and int32 pairs becomes int32. Multimodal pairs keep the mode of
    every sequence, and merge only with each other. `progress` is called with tokens written and tokens in total.

    Raises:
        ConfigError: there are no sources, or the destination is one of them.
        FormatError: a source is damaged, packed, has modes and others have none, or has a dtype that cannot hold
            tokens.
    """
    pairs = [prefix_of(source) for source in sources]
    destination = prefix_of(prefix)
    if not pairs:
        raise ConfigError("no pairs to merge", where=prefix, fix="specify the pairs to merge")
    if destination.resolve() in {pair.resolve() for pair in pairs}:
        raise ConfigError("the destination is one of the sources", where=prefix, fix="choose another destination")
    # One pair is open at a time: a map holds a file open, and there may be thousands of pairs.
    dtype, total, has_modes = UINT16, 0, False
    for number, pair in enumerate(pairs):
        index = check_indexed(pair)
        where = str(with_suffix(pair, IDX))
        if with_suffix(pair, LOSS_BIN).is_file():
            raise FormatError("contains packs, whose masks would be lost", where=where, fix="use `harness convert`")
        if number and index.has_modes != has_modes:
            what = f"has {'modes' if index.has_modes else 'no modes'}, but the first pair has "
            what += "modes: one index cannot contain both" if has_modes else "none: one index cannot contain both"
            raise FormatError(what, where=where, fix="merge multimodal pairs and others separately")
        has_modes = index.has_modes
        if index.header.dtype not in (UINT16, INT32):
            what = f"holds {index.header.dtype.name}, only uint16 and int32 can be merged"
            raise FormatError(what, where=where, fix="write the pair again from its tokens")
        dtype = dtype if index.header.dtype == UINT16 else INT32
        total += int(index.lengths.sum(dtype=np.int64))
    with IndexedWriter(destination, dtype=dtype, overwrite=overwrite) as writer:
        for pair in pairs:
            before = _find_stamp(with_suffix(pair, IDX))
            index = MappedIndex(with_suffix(pair, IDX))
            with with_suffix(pair, BIN).open("rb") as file:
                # A pair that is replaced loses its index first: with the same index, these are its tokens.
                if before is None or before != _find_stamp(with_suffix(pair, IDX)):
                    fix = "wait until the pair is complete, then run the same command again"
                    raise FormatError("the pair is being replaced", where=str(pair), fix=fix)
                while block := file.read(_BLOCK_TOKENS * index.header.dtype.itemsize):
                    writer.append_tokens(np.frombuffer(block, index.header.dtype))
                    if progress is not None:
                        progress(writer.num_tokens, total)
            writer.append_ledgers(index.lengths, index.documents[1:], index.modes if has_modes else None)
    return writer.report()


def _find_stamp(path: Path) -> Stamp | None:
    return stamp_of(path) if path.exists() else None


def count_sequences(prefixes: Sequence[str], *, vocab_size: int | None = None) -> dict[str, tuple[int, int]]:
    """Return the numbers of sequences and of document bounds of each prefix, as Megatron wants them.

    Given these counts, Megatron does not read the headers and takes the dtype from the tokenizer's vocabulary: it
    would misread the tokens of a file with another dtype.

    Args:
        prefixes: exactly as in `--data-path`.
        vocab_size: of the tokenizer used for training; None checks no dtype.

    Raises:
        FormatError: an index cannot be read or its size does not match its counts, or a dtype is not the one that
            Megatron will assume.
    """
    counts = {}
    for prefix in prefixes:
        header = MappedIndex(with_suffix(Path(prefix), IDX)).header
        expected = header.dtype if vocab_size is None else smallest_dtype(vocab_size)
        if header.dtype != expected:
            what = f"holds {header.dtype.name}, but Megatron will read {expected.name}: with these counts, it derives "
            what += f"the dtype from the vocabulary of {vocab_size:,}"
            fix = "write the pair again with this vocab_size, or train without --per-dataset-sequences-path"
            raise FormatError(what, where=prefix + IDX, fix=fix)
        counts[prefix] = (header.num_sequences, header.num_bounds)
    return counts


def save_counts(counts: dict[str, tuple[int, int]], path: Path) -> None:
    """Write the file for `--per-dataset-sequences-path`; raises FormatError if it cannot be written."""
    with explain_os_errors(path):
        write_atomically(path, json.dumps(counts).encode())
