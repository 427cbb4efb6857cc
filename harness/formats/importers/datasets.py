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

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import ConfigError, FormatError
from harness.formats.importers.rows import clear_last_positions, pack_of_bridge_row, pack_of_megatron_lm, pack_of_swift
from harness.formats.jsonl import JsonlShard
from harness.formats.manifest import Manifest, Provenance
from harness.formats.opening import open_dataset
from harness.formats.writer import open_writer
from harness.records import Pack
from harness.storage import natural_key


@dataclass(frozen=True)
class ForeignPacks:
    """Packs of another tool: `packs(counts)` reads them one at a time and counts what it changes."""

    packs: Callable[[Counter[str]], Iterator[Pack]]
    num_packs: int


@dataclass(frozen=True)
class ImportReport:
    """The manifest of an import, and how many positions it changed, by kind."""

    manifest: Manifest
    counts: Mapping[str, int]


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
) -> ImportReport:
    """Write another tool's packed data as a dataset.

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
    foreign = CONVENTIONS[convention](str(source), split)
    if pack_size is None:
        pack_size = max((len(pack) for pack in foreign.packs(Counter())), default=0)
        if pack_size == 0:
            raise FormatError("the source holds no packs", where=str(source))
    counts: Counter[str] = Counter()
    provenance = Provenance(packer=convention)
    writer = open_writer(
        destination,
        format=format,
        pack_size=pack_size,
        provenance=provenance,
        packs_per_shard=packs_per_shard,
        overwrite=overwrite,
    )
    with writer:
        for pack in foreign.packs(counts):
            writer.append(pack)
            if progress is not None:
                progress(writer.num_packs, foreign.num_packs)
        # Known only now that all packs are read; the manifest is written on leaving.
        writer.provenance = replace(provenance, counts=dict(+counts))
    assert writer.manifest is not None
    return ImportReport(writer.manifest, dict(+counts))


def _read_megatron_bridge(source: str, _split: str) -> ForeignPacks:
    from harness.indexed import BIN, IDX, with_suffix

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
        raise FormatError(f"no split {split!r}", where=source, fix=f"there are {splits}")
    return _read_dataset(source)


def _read_dataset(source: str) -> ForeignPacks:
    """Read files that `open_dataset` knows."""
    reader = open_dataset(source)

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        for pack in reader:
            yield clear_last_positions(pack, counts)

    return ForeignPacks(packs, len(reader))


def _read_bridge_rows(prefix: Path) -> ForeignPacks:
    """Read an indexed dataset whose items are whole packs."""
    from harness.indexed import BIN, IDX, read_lengths, with_suffix

    lengths = read_lengths(with_suffix(prefix, IDX))
    data = with_suffix(prefix, BIN)
    total = 4 * int(lengths.sum(dtype=np.int64))
    if data.stat().st_size != total:
        raise FormatError(f"has {data.stat().st_size:,} bytes, its index says {total:,}", where=str(data))

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        with data.open("rb") as file:
            for row, length in enumerate(lengths.tolist()):
                words = np.frombuffer(file.read(4 * length), "<i4")
                try:
                    pack = pack_of_bridge_row(words)
                except FormatError as error:
                    raise FormatError(f"item {row:,} {error.what}", where=str(data)) from None
                yield clear_last_positions(pack, counts)

    return ForeignPacks(packs, lengths.shape[0])


def _read_jsonl(source: str, pack_of: Callable[[dict[str, Any], Counter[str]], Pack]) -> ForeignPacks:
    """Read the rows of a file, or of all `.jsonl` files of a folder in natural order."""
    path = Path(source)
    paths = [path]
    if path.is_dir():
        paths = sorted(path.glob("*.jsonl"), key=lambda file: natural_key(file.name))
    if not paths or not paths[0].is_file():
        raise FormatError("no .jsonl file there", where=source, fix="check the path")

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        for file in paths:
            shard = JsonlShard(file)
            try:
                for row in range(shard.num_packs):
                    yield _pack_of_row(shard, row, pack_of, counts)
            finally:
                shard.close()

    num_packs = 0
    for file in paths:
        shard = JsonlShard(file)
        num_packs += shard.num_packs
        shard.close()
    return ForeignPacks(packs, num_packs)


def _pack_of_row(
    shard: JsonlShard, row: int, pack_of: Callable[[dict[str, Any], Counter[str]], Pack], counts: Counter[str]
) -> Pack:
    try:
        fields = json.loads(shard.line(row))
        if not isinstance(fields, dict):
            raise FormatError("is not a JSON object")
        pack = pack_of(fields, counts)
        problem = pack.problem()
        if problem is not None:
            raise FormatError(problem)
    except FormatError as error:
        raise FormatError(f"the row {error.what}", where=shard.where(row), fix=error.fix) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the row is not JSON: {str(error)[:200]}", where=shard.where(row)) from None
    return pack


def _read_ms_swift(source: str, _split: str) -> ForeignPacks:
    return _read_jsonl(source, pack_of_swift)


def _read_megatron_lm(source: str, _split: str) -> ForeignPacks:
    return _read_jsonl(source, pack_of_megatron_lm)


CONVENTIONS: dict[str, Callable[[str, str], ForeignPacks]] = {
    "megatron_bridge": _read_megatron_bridge,
    "nemotron": _read_nemotron,
    "ms_swift": _read_ms_swift,
    "megatron_lm": _read_megatron_lm,
}
