"""Join Megatron's indexed datasets end to end, and count them for `--per-dataset-sequences-path`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from harness.errors import ConfigError, FormatError
from harness.indexed.index import BIN, IDX, INT32, UINT16, MappedIndex, prefix_of, smallest_dtype, with_suffix
from harness.indexed.verify import check_indexed
from harness.indexed.writer import IndexedReport, IndexedWriter
from harness.storage import write_atomically

_BLOCK_TOKENS = 1 << 20


def merge_indexed(
    sources: Iterable[str],
    prefix: str,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> IndexedReport:
    """Write the documents of several pairs, in order, as one pair, byte for byte as Megatron's `add_index` would.

    Memory does not grow with the data. A mix of uint16 and int32 pairs becomes int32.

    Args:
        sources: X, X.bin or X.idx of each.
        prefix: of the pair to write.
        overwrite: replace an existing pair.
        progress: called with tokens written and tokens in total.

    Raises:
        ConfigError: there are no sources, or the destination is one of them.
        FormatError: a source is damaged, multimodal, packed, or has a dtype that cannot hold tokens.
    """
    pairs = [prefix_of(source) for source in sources]
    destination = prefix_of(prefix)
    if not pairs:
        raise ConfigError("there is nothing to merge", where=prefix, fix="name the pairs to merge")
    if destination.resolve() in {pair.resolve() for pair in pairs}:
        raise ConfigError("the destination is one of the sources", where=prefix, fix="choose another destination")
    # One pair is open at a time: a map holds a file open, and there may be thousands of pairs.
    dtype, total = UINT16, 0
    for pair in pairs:
        index = _open_mergeable(pair)
        dtype = dtype if index.header.dtype == UINT16 else INT32
        total += int(index.lengths.sum(dtype=np.int64))
    with IndexedWriter(destination, dtype=dtype, overwrite=overwrite) as writer:
        for pair in pairs:
            index = MappedIndex(with_suffix(pair, IDX))
            with with_suffix(pair, BIN).open("rb") as file:
                while block := file.read(_BLOCK_TOKENS * index.header.dtype.itemsize):
                    writer.append_tokens(np.frombuffer(block, index.header.dtype))
                    if progress is not None:
                        progress(writer.num_tokens, total)
            writer.append_ledgers(index.lengths, index.documents[1:])
    return writer.report()


def _open_mergeable(prefix: Path) -> MappedIndex:
    index = check_indexed(prefix)
    where = str(with_suffix(prefix, IDX))
    if with_suffix(prefix, ".loss.bin").is_file():
        raise FormatError("holds packs, whose loss masks would be lost", where=where, fix="use `harness convert`")
    if index.has_modes:
        raise FormatError("is multimodal; modes cannot be merged", where=where, fix="use Megatron's tools")
    if index.header.dtype not in (UINT16, INT32):
        raise FormatError(
            f"holds {index.header.dtype.name}, only uint16 and int32 can be merged",
            where=where,
            fix="write the pair again from its tokens",
        )
    return index


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
            raise FormatError(
                f"holds {header.dtype.name}, but Megatron will read {expected.name}: given these counts it takes "
                f"the dtype from the vocabulary of {vocab_size:,}",
                where=prefix + IDX,
                fix="write the pair again with this vocab_size, or train without --per-dataset-sequences-path",
            )
        counts[prefix] = (header.num_sequences, header.num_bounds)
    return counts


def save_counts(counts: dict[str, tuple[int, int]], path: Path) -> None:
    """Write the file for `--per-dataset-sequences-path`."""
    write_atomically(path, json.dumps(counts).encode())
