"""Write pairs X.bin and X.idx, from token shards or by joining pairs, and count them for Megatron.

A family of pairs is one corpus, with one pair per split and the JSON files for Megatron's options:

    OUT/NAME_train.bin, .idx        and so on, one pair per split
    OUT/NAME_sequences.json         for Megatron's --per-dataset-sequences-path
    OUT/NAME_splits.json            for Megatron's --per-split-data-args-path
    OUT/NAME.json                   record of the family: sources, settings, counts, file hashes; written last

Given counts of sequences, Megatron takes the dtype of tokens from its tokenizer's vocabulary and not from the pairs, so
`NAME_sequences.json` is written only if the vocabulary size is known.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from harness.checks import CheckedSettings, bounded, one_of
from harness.errors import ConfigError, FormatError, PrepError, Problem
from harness.indexed.index import (
    BIN,
    IDX,
    INT32,
    LOSS_BIN,
    UINT16,
    IndexedReport,
    IndexedWriter,
    MappedIndex,
    check_indexed,
    prefix_of,
    smallest_dtype,
    verify_indexed,
    with_suffix,
)
from harness.records import MAX_TOKEN_ID
from harness.settings import from_plain
from harness.storage import Marker, StoredFile, file_digest, make_folder, stamp_of, write_atomically
from harness.storage.checksums import find_damage
from harness.storage.files import PlacingClaim, Stamp, explain_os_errors

if TYPE_CHECKING:
    from harness.indexed.token_shards import TokenBatch

_BLOCK_TOKENS = 1 << 20
# Names used by Megatron.
SPLITS = ("train", "valid", "test")
# Typed loosely, because numpy arrays are buffers only to type checkers of Python 3.12 and later.
_xxh3: Callable[..., int] = xxhash.xxh3_64_intdigest
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_RECORD_BYTES = 64 << 20


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
        # Imported here, because importing pyarrow takes 0.1 s and an index does not need it.
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

    ConfigError if there are no sources, or the destination is one of them; FormatError if a source is damaged, packed,
    has modes and others have none, or has a dtype that cannot hold tokens.
    """
    pairs, destination = list(map(prefix_of, sources)), prefix_of(prefix)
    if not pairs:
        raise ConfigError("no pairs to merge", where=prefix, fix="specify the pairs to merge")
    if os.path.realpath(destination) in map(os.path.realpath, pairs):
        raise ConfigError("the destination is one of the sources", where=prefix, fix="choose another destination")
    # Open one pair at a time: a memory map keeps a file open, and there may be thousands of pairs.
    dtype, total, has_modes = UINT16, 0, False
    for number, pair in enumerate(pairs):
        index = check_indexed(pair)
        where = str(with_suffix(pair, IDX))
        if with_suffix(pair, LOSS_BIN).is_file():
            raise FormatError("contains packs, whose masks would be lost", where=where, fix="use `harness convert`")
        if number and index.has_modes != has_modes:
            what = (
                f"has {'modes' if index.has_modes else 'no modes'}, unlike the first pair: one index cannot have both"
            )
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
                # Replacing a pair removes its index first: if the index is unchanged, these tokens belong to it.
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
    """Return the number of sequences and of document bounds of each prefix, in the form that Megatron expects.

    Given these counts, by prefixes exactly as in `--data-path`, Megatron does not read the headers and takes the dtype
    from the tokenizer's vocabulary: it would misread the tokens of a file with another dtype. FormatError for one,
    unless `vocab_size` is None, and if an index cannot be read or its size does not match its counts.
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
    """Write the file for `--per-dataset-sequences-path`; raise FormatError if it cannot be written."""
    with explain_os_errors(path):
        write_atomically(path, json.dumps(counts).encode())


@dataclass(frozen=True)
class TokenFamily:
    """Name of a family and split of its documents.

    Attributes:
        name: part of every file name: letters, digits, dots, dashes and underscores.
        splits: relative weights of `train`, `valid` and `test`. The hash of its tokens decides where a document goes:
            it stays in its split when others are added or removed, and equal documents share a split.
    """

    name: str
    splits: Mapping[str, float] = field(default_factory=lambda: {"train": 1.0})
    source: TokenSource = field(default_factory=TokenSource)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            fix = "use letters, digits, dots, dashes and underscores"
            raise ConfigError(f"{self.name[:60]!r} is not valid in a file name", where="name", fix=fix)
        unknown = [name for name in self.splits if name not in SPLITS]
        if unknown or not any(self.splits.values()) or any(not 0 <= part < np.inf for part in self.splits.values()):
            fix = f"use weights of {', '.join(SPLITS)}, such as train=98 valid=2"
            raise ConfigError(f"the splits {dict(self.splits)} are not valid", where="splits", fix=fix)

    @property
    def parts(self) -> dict[str, float]:
        """The splits that receive documents, in Megatron's order, each with its share."""
        total = sum(self.splits.values())
        return {name: self.splits[name] / total for name in SPLITS if self.splits.get(name)}


def write_family(
    sources: Sequence[str] | Mapping[str, Sequence[str]],
    folder: Path,
    family: TokenFamily,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, IndexedReport]:
    """Write token shards as the pairs of a family, with the JSON files that Megatron reads.

    Raises as `convert_tokens`, and PrepError where a split would have no document.

    Args:
        sources: Parquet files, folders or patterns to split by hash; or a mapping with the sources of each split.
        folder: OUT. Prefixes in the JSON files begin with this path as given.
        progress: called with numbers of documents as they are written.
    """
    from harness.indexed.token_shards import list_shards  # as in `TokenSource.batches`

    named_sources = sources if isinstance(sources, Mapping) else {"": sources}
    if isinstance(sources, Mapping) and set(sources) != set(family.parts):
        what = f"there are shards for {', '.join(sources)} but the splits are {', '.join(family.parts)}"
        raise ConfigError(what, where="splits", fix="specify shards for exactly these splits")
    shards = {name: list_shards(paths) for name, paths in named_sources.items()}
    record = folder / f"{family.name}.json"

    def refuse_existing() -> None:
        if record.exists() and not overwrite:
            raise PrepError("the family already exists", where=str(record), fix="choose another name, or overwrite it")

    claim = PlacingClaim(Marker(folder / f".{family.name}.json_writing"), refuse_existing)
    with explain_os_errors(folder):
        make_folder(folder)
        claim.enter()
        is_whole = False
        try:
            reports = _write_pairs(shards, folder, family, claim, overwrite or claim.is_placing, progress)
            is_whole = True
        finally:
            # Pairs without a record stay in the folder; the next attempt replaces them.
            claim.release(remove=is_whole or not claim.is_placing)
    return reports


def _write_pairs(
    shards: Mapping[str, Sequence[Path]],
    folder: Path,
    family: TokenFamily,
    claim: PlacingClaim,
    overwrite: bool,
    progress: Callable[[int], None] | None,
) -> dict[str, IndexedReport]:
    record, splits_file, counts_file = (folder / f"{family.name}{end}.json" for end in ("", "_splits", "_sequences"))
    prefixes = {name: folder / f"{family.name}_{name}" for name in family.parts}
    empty = 0
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(IndexedWriter(prefix, dtype=family.source.dtype, overwrite=overwrite))
            for name, prefix in prefixes.items()
        }
        for split, paths in shards.items():
            for batch in family.source.batches(paths):
                for name, part in [(split, batch)] if split else _split(batch, family.parts):
                    writers[name].append(part.tokens, part.lengths, part.documents)
                empty += batch.empty_documents
                if progress is not None:
                    progress(len(batch.documents))
        for name, writer in writers.items():
            if writer.num_documents == 0:
                fix = "increase its weight, omit the split, or read more documents"
                raise PrepError(f"no document falls into the split {name}", where=str(folder), fix=fix)
        # One tokenizer made all splits, and Megatron may derive a single dtype from it.
        narrow = [writer for writer in writers.values() if writer.dtype != INT32]
        for writer in narrow if len(narrow) < len(writers) else []:
            writer.widen()
        claim.place()
        for old in (record, splits_file, counts_file):  # they describe the previous pairs
            old.unlink(missing_ok=True)
    reports = {name: writer.report() for name, writer in writers.items()}
    if family.source.vocab_size is not None:
        counts = count_sequences([str(prefix) for prefix in prefixes.values()], vocab_size=family.source.vocab_size)
        save_counts(counts, counts_file)
    # Megatron expects an entry for every split; null means no data.
    write_atomically(splits_file, _json({name: [str(prefixes[name])] if name in prefixes else None for name in SPLITS}))
    files = [with_suffix(prefix, suffix) for prefix in prefixes.values() for suffix in (BIN, IDX)]
    content = {
        "name": family.name,
        "shards": [path.name for paths in shards.values() for path in paths],
        "source": asdict(family.source),
        "parts": family.parts,
        "empty_documents": empty,
        "splits": {name: {**asdict(report), "prefix": prefixes[name].name} for name, report in reports.items()},
        "files": {path.name: {"num_bytes": path.stat().st_size, "xxh3": file_digest(path)} for path in files},
    }
    write_atomically(record, _json(content))
    return reports


def family_pairs(path: str) -> list[Path] | None:
    """Return the prefixes of the pairs listed in the record of a family, or None for any other file."""
    record = _read_record(Path(path))
    return None if record is None else [Path(path).parent / split["prefix"] for split in record["splits"].values()]


def verify_family(path: str, *, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Return every problem of a family's pairs, by the hashes in its record OUT/NAME.json; [] if there is none."""
    record, folder = _read_record(Path(path)), Path(path).parent
    if record is None:
        return [Problem("is not a record of a token family", path)]
    problems = []
    for name, facts in record["files"].items():
        problems += find_damage(folder, StoredFile(name, 0, facts["xxh3"]))
    vocab_size = record["source"]["vocab_size"]
    for split in record["splits"].values():
        problems += verify_indexed(folder / split["prefix"], vocab_size=vocab_size, progress=progress)
    return problems


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:  # may be any file; a larger one is truncated and fails to parse
            record: dict[str, Any] = json.loads(file.read(_MAX_RECORD_BYTES))
        files, splits = (from_plain(dict[str, dict[str, Any]], record[name]).values() for name in ("files", "splits"))
        texts = [*(file["xxh3"] for file in files), *(split["prefix"] for split in splits)]
        is_record = all(isinstance(text, str) for text in texts)
        is_record &= isinstance(record["source"]["vocab_size"], int | None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if is_record else None


def _split(batch: TokenBatch, parts: Mapping[str, float]) -> Iterator[tuple[str, TokenBatch]]:
    if len(parts) == 1:
        yield next(iter(parts)), batch
        return
    # Hashed as int32, so that the integer type of a shard does not change a document's split.
    tokens = np.ascontiguousarray(batch.tokens, np.int32)
    ends = np.concatenate([[0], np.cumsum(batch.document_tokens())]).tolist()
    hashes = np.array([_xxh3(tokens[begin:end]) for begin, end in pairwise(ends)], np.uint64)
    chosen = np.searchsorted(np.cumsum(list(parts.values()))[:-1], hashes.astype(np.float64) / 2.0**64, "right")
    for number, name in enumerate(parts):
        yield name, batch.select(chosen == number)


def _json(values: object) -> bytes:
    return (json.dumps(values, indent=1, default=np.generic.item) + "\n").encode()  # NumPy numbers too
