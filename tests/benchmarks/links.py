"""Large datasets on little disk: hard links to one shard."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import repeat
from pathlib import Path

import numpy as np

from harness.bench.workspace import Workspace, make_packs
from harness.errors import FormatError, os_errors_as
from harness.formats import Manifest, load_format, load_manifest, open_writer
from harness.formats.index import INDEX_NAMES, IndexPart, load_index, write_index
from harness.formats.manifest import Shard, Totals
from harness.storage import LocalFolder


def make_dataset(workspace: Workspace, format: str, *, packs: int, pack_size: int) -> Path:
    """Return a dataset of `packs` full packs in `format`; the packs are the same in every format."""
    path = workspace.folder / f"{format}-{packs}x{pack_size}"
    if not path.is_dir() or load_manifest(path) is None:
        with open_writer(path, format=format, pack_size=pack_size) as writer:
            for pack in make_packs(packs, pack_size):
                writer.append(pack)
    return path


def large_dataset(workspace: Workspace, format: str, *, packs: int, shard_packs: int, pack_size: int) -> Path:
    """Return at least `packs` packs on little disk: hard links to one shard of at most `shard_packs` packs."""
    shard_packs = min(shard_packs, load_format(format).packs_per_shard)
    path = workspace.folder / f"{format}-{packs}-links-of-{shard_packs}x{pack_size}"
    if not path.is_dir() or load_manifest(path) is None:
        source = make_dataset(workspace, format, packs=shard_packs, pack_size=pack_size)
        link_shards(source, path, copies=-(-packs // shard_packs))
    return path


def link_shards(source: Path, destination: Path, *, copies: int) -> Manifest:
    """Make a dataset of `copies` hard links to the first shard of `source`, with its own index and checksums.

    Raises:
        FormatError: the file system has no hard links.
    """
    manifest = load_manifest(source)
    assert manifest is not None
    shard = manifest.shards[0]
    index = load_index(LocalFolder(source), manifest)
    assert index.checksums is not None
    num_sequences = int(index.pack_offsets[shard.num_packs])
    counts = np.diff(index.pack_offsets[: shard.num_packs + 1]).astype(np.int32)
    part = IndexPart(counts, index.sequence_lengths[:num_sequences], index.checksums[: shard.num_packs])
    format = load_format(manifest.format)
    destination.mkdir()
    folder = LocalFolder(destination)
    shards = []
    for number in range(copies):
        name = format.shard_name(number)
        files = tuple(replace(stored, path=name + stored.path[len(shard.path) :]) for stored in shard.files)
        for stored, linked in zip(shard.files, files, strict=True):
            (destination / linked.path).parent.mkdir(exist_ok=True)
            _link(source / stored.path, destination / linked.path)
        shards.append(Shard(name, shard.num_packs, files))
    num_tokens = copies * int(part.sequence_lengths.sum(dtype=np.int64))
    # The manifest counts the trained tokens of the whole source, and nothing reads this count.
    totals = Totals(copies * shard.num_packs, copies * num_sequences, num_tokens, 0)
    manifest = replace(
        manifest,
        **asdict(totals),
        fingerprint=write_index(folder, lambda: repeat(part, copies), totals),
        shards=tuple(shards),
        index=folder.describe(INDEX_NAMES),
    )
    manifest.save(folder)
    return manifest


def _link(source: Path, destination: Path) -> None:
    with os_errors_as(
        FormatError,
        "a hard link cannot be made",
        where=destination,
        fix="choose a folder on another file system with --dir",
    ):
        destination.hardlink_to(source)
