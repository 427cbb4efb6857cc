"""Import of packed data that other tools wrote, each by its own convention.

Data that a pack cannot hold is removed and counted; nothing is dropped silently. Padding is removed if the tool stores
real lengths, and kept if not: a token that looks like padding may be an end of sequence, so it is never guessed.

| convention | reads | masks | padding |
|---|---|---|---|
| megatron_bridge | `*.idx.parquet`, `.npy`, or the prefix of a `.sft.bin`/`.sft.idx` pair | as ours | unknown: kept |
| nemotron | a folder of `shard_*.parquet`, or one that has `splits/<split>/` | as ours | never stored |
| ms_swift | chunks, `chunk_*.jsonl`, labels aligned with tokens | moved by one | cut off by `lengths` |
| megatron_lm | rows of `SFTDataset` as JSONL: tokens, labels, loss_mask, cu_seqlens | as ours | unknown: kept |

Megatron-Bridge counts a sequence of L tokens as L - 1 against its pack size, so its packs can exceed that size: the
imported `pack_size` is that of the longest pack unless one is given. Nemotron releases up to early 2026 moved masks the
wrong way (`[0] + mask[:-1]` over the whole pack); the stored bits do not reveal the release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import ConfigError, FormatError
from harness.formats.layouts.jsonl import (
    IGNORED_LABEL,
    JsonlShard,
    check_counts,
    check_labels,
    pack_of_labels,
    parse_line,
    whole_numbers,
)
from harness.formats.manifest import Manifest, Provenance, load_manifest
from harness.formats.opening import open_dataset, refuse_parts
from harness.formats.writer import open_writer
from harness.indexed.index import BIN, IDX, read_lengths, with_suffix
from harness.records import Int32Array, Pack
from harness.storage import is_uri, natural_key

# Changes of an import, as counted in the manifest's provenance.
CLEARED_LAST = "import_cleared_last_positions"
CLEARED_FIRST = "import_cleared_first_labels"
REMOVED_PADDING = "import_removed_padding_tokens"
APPENDED_LAST = "import_appended_last_labels"

_ROW_MAGIC = 0x53465442  # Megatron-Bridge's packed rows in an indexed dataset begin with it.
_ROW_VERSION = 1
_ROW_HEAD = 3
_FIX = "correct the row in the tool that wrote it, or set the convention of that tool"


# Packs of another tool: a function that reads them one at a time and counts what it changes, and their number.
ForeignPacks = tuple[Callable[[Counter[str]], Iterator[Pack]], int]


def import_dataset(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    convention: str,
    format: str = "parquet",
    pack_size: int | None = None,
    split: str = "train",
    packs_per_shard: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write another tool's packed data as a dataset; its provenance counts the positions that changed, by kind.

    Args:
        source: file, folder, glob or prefix that the tool wrote.
        destination, format, packs_per_shard, overwrite: as for `open_writer`.
        convention: a key of CONVENTIONS.
        pack_size: tokens that no pack exceeds; the longest pack's if None, which reads the source twice.
        split: of the tool's folder, if that has several.
        progress: called with packs done and packs in total.

    Raises:
        ConfigError: an unknown convention.
        FormatError: the source does not follow the convention (the error names file and row).
    """
    if convention not in CONVENTIONS:
        known = ", ".join(CONVENTIONS)
        raise ConfigError(f"unknown convention {convention!r}", where="convention", fix=f"use one of {known}")
    if not is_uri(str(source)):
        if Path(source).is_dir() and load_manifest(Path(source)) is not None:
            raise _ours(source)
        refuse_parts([Path(source)])
    packs, num_packs = CONVENTIONS[convention](str(source), split)
    if pack_size is None:
        pack_size = max((len(pack) for pack in packs(Counter())), default=0)
        if not pack_size:
            fix = "set the path to the output of the tool, or set split=NAME"
            raise FormatError("the source contains no packs", where=str(source), fix=fix)
    counts: Counter[str] = Counter()
    provenance = Provenance(packer=convention)
    with open_writer(
        destination,
        format=format,
        pack_size=pack_size,
        provenance=provenance,
        packs_per_shard=packs_per_shard,
        overwrite=overwrite,
    ) as writer:
        for pack in packs(counts):
            writer.append(pack)
            if progress is not None:
                progress(writer.num_packs, num_packs)
        # Known only now that all packs are read; the manifest is written on leaving.
        writer.provenance = replace(provenance, counts=dict(+counts))
    assert writer.manifest is not None
    return writer.manifest


def _ours(source: str | PathLike[str]) -> FormatError:
    fix = "use it directly; to change its format, run `harness convert SRC DST FORMAT`"
    return FormatError("this dataset was written by the harness, not by another tool", where=str(source), fix=fix)


def _read_megatron_bridge(source: str, _split: str) -> ForeignPacks:
    prefix = Path(source)
    if prefix.suffix in (BIN, IDX):
        prefix = prefix.with_suffix("")
    if with_suffix(prefix, IDX).is_file() and with_suffix(prefix, BIN).is_file():
        return _read_bridge_rows(prefix)
    return _read_dataset(source)


def _read_nemotron(source: str, split: str) -> ForeignPacks:
    folder = Path(source)
    for candidate in (folder / "splits" / split, folder / split):
        if candidate.is_dir():
            return _read_dataset(str(candidate))
    if (folder / "splits").is_dir():
        splits = ", ".join(sorted(entry.name for entry in (folder / "splits").iterdir()))
        raise FormatError(f"there is no split {split!r}", where=source, fix=f"use one of {splits}")
    return _read_dataset(source)


def _read_dataset(source: str) -> ForeignPacks:
    reader = open_dataset(source)
    if reader.manifest is not None:
        raise _ours(source)

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        for pack in reader:
            yield clear_last_positions(pack, counts)

    return packs, len(reader)


def _read_bridge_rows(prefix: Path) -> ForeignPacks:
    """Read an indexed dataset whose items are whole packs."""
    lengths = read_lengths(with_suffix(prefix, IDX))
    data = with_suffix(prefix, BIN)
    total = 4 * int(lengths.sum(dtype=np.int64))
    if data.stat().st_size != total:
        raise FormatError(f"has {data.stat().st_size:,} bytes, but its index lists {total:,}", where=str(data))

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        with data.open("rb") as file:
            for row, length in enumerate(lengths.tolist()):
                with _named(f"{data}, item {row:,}"):
                    pack = pack_of_bridge_row(np.frombuffer(file.read(4 * length), "<i4"))
                yield clear_last_positions(pack, counts)

    return packs, lengths.shape[0]


def _read_swift(source: str, _split: str) -> ForeignPacks:
    if (Path(source) / "state.json").is_file():
        what = "a cached dataset of ms-swift stores chats, which it renders and packs during training, not packs"
        raise FormatError(what, where=source, fix="pack the chats: harness prepare source.path=CACHE data.path=DIR")
    return _read_jsonl(source, pack_of_swift)


def _read_jsonl(source: str, pack_of: Callable[[dict[str, Any], Counter[str]], Pack]) -> ForeignPacks:
    """Read the rows of a file, or of all `.jsonl` files of a folder in natural order."""
    path = Path(source)
    paths = sorted(path.glob("*.jsonl"), key=lambda file: natural_key(file.name)) if path.is_dir() else [path]
    if not paths or not paths[0].is_file():
        raise FormatError("there is no .jsonl file", where=source, fix="check the path")

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        for file in paths:
            with closing(JsonlShard(file)) as shard:
                for row in range(shard.num_packs):
                    with _named(shard.where(row)):
                        pack = pack_of(parse_line(shard.line(row)), counts)
                        if problem := pack.problem():
                            raise FormatError(problem)
                    yield pack

    return packs, sum(JsonlShard(file).num_packs for file in paths)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Name the row that cannot be converted."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"the row {error.what}", where=where, fix=_FIX) from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise FormatError(f"the row cannot be read: {str(error)[:200]}", where=where, fix=_FIX) from None


def clear_last_positions(pack: Pack, counts: Counter[str]) -> Pack:
    """Untrain the last position of each sequence, which has no next token in it."""
    lasts = np.append(pack.seq_start_id[1:], len(pack)) - 1
    trained = int(np.count_nonzero(pack.loss_mask[lasts]))
    if not trained:
        return pack
    counts[CLEARED_LAST] += trained
    mask = pack.loss_mask.copy()
    mask[lasts] = 0
    return Pack(pack.input_ids, mask, pack.seq_start_id)


def pack_of_bridge_row(words: Int32Array) -> Pack:
    """Convert an item of an indexed dataset: head, starts, and tokens with the mask in their highest bit."""
    if words.shape[0] < _ROW_HEAD or words[0] != _ROW_MAGIC or words[1] != _ROW_VERSION:
        raise FormatError("does not begin with the header of a packed row, version 1")
    num_starts = int(words[2])
    begin = _ROW_HEAD + num_starts
    if not num_starts > 0 or begin >= words.shape[0]:
        raise FormatError(f"claims {num_starts:,} sequences in {words.shape[0]:,} words")
    tokens = words[begin:].view(np.uint32)
    mask = (tokens >> np.uint32(31)).astype(np.uint8)
    pack = Pack((tokens & np.uint32(0x7FFFFFFF)).astype(np.int32), mask, words[_ROW_HEAD:begin].astype(np.int32))
    if problem := pack.problem():
        raise FormatError(problem)
    return pack


def pack_of_swift(fields: dict[str, Any], counts: Counter[str]) -> Pack:
    """Convert a pre-packed line: labels aligned with tokens, -100 if untrained; `lengths` are without padding."""
    ids, labels, lengths = (whole_numbers(fields, name) for name in ("input_ids", "labels", "lengths"))
    real = check_counts(ids, labels, lengths, is_padded=True)
    counts[REMOVED_PADDING] += ids.shape[0] - real
    pack, firsts = pack_of_labels(ids[:real], labels[:real], np.cumsum(lengths) - lengths)
    counts[CLEARED_FIRST] += int(np.count_nonzero(firsts))
    return pack


def pack_of_megatron_lm(fields: dict[str, Any], counts: Counter[str]) -> Pack:
    """Convert a row of `SFTDataset`: labels[j] is the token after tokens[j], or -100; `cu_seqlens` bounds sequences.

    The row was cut by one token to align it, so the label of its last position is missing from `tokens`: if trained,
    it is appended, and trained as before.
    """
    ids, labels, bounds = (whole_numbers(fields, name) for name in ("tokens", "labels", "cu_seqlens"))
    n = ids.shape[0]
    if labels.shape != ids.shape or n == 0:
        raise FormatError(f"has {n:,} tokens but {labels.shape[0]:,} labels")
    if bounds.shape[0] < 2 or bounds[0] != 0 or bounds[-1] > n or (np.diff(bounds) <= 0).any():
        raise FormatError(f"has cu_seqlens {bounds.tolist()[:8]} for {n:,} tokens")
    trained = labels != IGNORED_LABEL
    if "loss_mask" in fields:
        stored = np.asarray(fields["loss_mask"], np.float64)
        if stored.shape != ids.shape or not np.isin(stored, (0.0, 1.0)).all():
            raise FormatError("has a loss_mask that is not a 0 or 1 for each token")
        trained &= stored == 1.0
    ids, labels, trained = ids[: bounds[-1]], labels[: bounds[-1]], trained[: bounds[-1]].copy()
    counts[REMOVED_PADDING] += n - ids.shape[0]
    lasts = bounds[1:] - 1
    inner = lasts[:-1]
    counts[CLEARED_LAST] += int(np.count_nonzero(trained[inner]))
    trained[inner] = False
    if trained[-1]:
        counts[APPENDED_LAST] += 1
        ids = np.append(ids, labels[-1])
        trained = np.append(trained, False)
        labels = np.append(labels, IGNORED_LABEL)
    at = np.flatnonzero(trained)
    check_labels(labels[at], ids[at + 1], at)
    return Pack(ids, trained, bounds[:-1])


CONVENTIONS: dict[str, Callable[[str, str], ForeignPacks]] = {
    "megatron_bridge": _read_megatron_bridge,
    "nemotron": _read_nemotron,
    "ms_swift": _read_swift,
    "megatron_lm": lambda source, _split: _read_jsonl(source, pack_of_megatron_lm),
}
