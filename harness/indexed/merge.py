"""Joining Megatron's indexed datasets end to end, and counting them for `--per-dataset-sequences-path`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from harness.errors import ConfigError, FormatError
from harness.indexed.index import (
    BIN,
    IDX,
    INT32,
    UINT16,
    MappedIndex,
    prefix_of,
    smallest_dtype,
    with_suffix,
)
from harness.indexed.verify import check_indexed
from harness.indexed.writer import IndexedWriter
from harness.storage import write_atomically

_BLOCK_TOKENS = 1 << 20


def merge_indexed(
    sources: Iterable[str],
    prefix: str,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> IndexedWriter:
    """Write the documents of some pairs, in order, as one pair: what Megatron's `add_index` makes, byte for byte.

    Memory does not grow with the data. Pairs of uint16 and int32 may be mixed, and then make int32.

    Args:
        sources: X, X.bin or X.idx of each.
        prefix: of the pair to write.
        overwrite: replace a pair that is there.
        progress: called with tokens written and tokens in all.

    Returns:
        the writer, which knows the counts.

    Raises:
        ConfigError: no sources, or the destination is one of them.
        FormatError: a source is damaged, multimodal, packed or of a dtype that holds no tokens.
    """
    found = [prefix_of(source) for source in sources]
    destination = prefix_of(prefix)
    if not found:
        raise ConfigError("there is nothing to merge", where=prefix, fix="name pairs")
    if destination.resolve() in {one.resolve() for one in found}:
        raise ConfigError("the destination is one of the sources", where=prefix, fix="name another destination")
    # One is open at a time: a map holds a file open, and there may be thousands of pairs.
    dtype, total = UINT16, 0
    for one in found:
        index = _open_whole(one)
        dtype = dtype if index.header.dtype == UINT16 else INT32
        total += int(index.lengths.sum(dtype=np.int64))
    with IndexedWriter(destination, dtype=dtype, overwrite=overwrite) as writer:
        for one in found:
            index = MappedIndex(with_suffix(one, IDX))
            with with_suffix(one, BIN).open("rb") as file:
                while block := file.read(_BLOCK_TOKENS * index.header.dtype.itemsize):
                    writer.append_tokens(np.frombuffer(block, index.header.dtype))
                    if progress is not None:
                        progress(writer.num_tokens, total)
            writer.append_ledgers(index.lengths, index.documents[1:])
    return writer


def _open_whole(prefix: Path) -> MappedIndex:
    """The index of a pair that is whole and can be merged."""
    index = check_indexed(prefix)
    where = str(with_suffix(prefix, IDX))
    if with_suffix(prefix, ".loss.bin").is_file():
        raise FormatError("holds packs, whose loss masks would be lost", where=where, fix="use `harness convert`")
    if index.has_modes:
        raise FormatError("is multimodal; modes are not merged", where=where, fix="use Megatron's tools")
    if index.header.dtype not in (UINT16, INT32):
        raise FormatError(f"holds {index.header.dtype.name}, merged are uint16 and int32", where=where)
    return index


def count_sequences(prefixes: Sequence[str], *, vocab_size: int | None = None) -> dict[str, tuple[int, int]]:
    """Of each prefix, as it is named, its numbers of sequences and of document bounds, as Megatron wants them.

    With these counts Megatron does not read the headers, and takes the dtype from the tokenizer's vocabulary: where
    a file has another one, its tokens would be read as others.

    Args:
        prefixes: as they stand in `--data-path`.
        vocab_size: of the tokenizer that will be trained with; None checks no dtype.

    Raises:
        FormatError: an index cannot be read or does not have the size that its counts make, or a dtype is not the one
            that Megatron will take.
    """
    counts = {}
    for prefix in prefixes:
        header = MappedIndex(with_suffix(Path(prefix), IDX)).header
        if vocab_size is not None:
            expected = smallest_dtype(vocab_size)
            if header.dtype != expected:
                raise FormatError(
                    f"holds {header.dtype.name}, but Megatron will read {expected.name}: with these counts it takes "
                    f"the dtype from the vocabulary of {vocab_size:,}",
                    where=prefix + IDX,
                    fix="write the pair again with this vocab_size, or train without --per-dataset-sequences-path",
                )
        counts[prefix] = (header.num_sequences, header.num_bounds)
    return counts


def save_counts(counts: dict[str, tuple[int, int]], path: Path) -> None:
    """Write what `--per-dataset-sequences-path` reads."""
    write_atomically(path, json.dumps(counts).encode())
