"""`virtual`: sequences stored once, and packs that are plans over them.

A shard is a folder, of one of two kinds: `store` holds the sequences of its packs, and a dataset of such shards is a
sequence store; `plan` holds which sequences of a store make a pack, and no token. Both read as any other dataset.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.formats.base import Format, ShardReader, find_folders
from harness.formats.virtual.plan import PLAN, SEQUENCE_IDS, PlanShard
from harness.formats.virtual.store import (
    FILES_PER_SHARD,
    INPUT_IDS,
    NAME,
    SEQUENCE_CHECKSUMS,
    SEQUENCE_OFFSETS,
    SHARD_TEMPLATE,
    SequenceShard,
    SequenceShardWriter,
)
from harness.storage import Folder

__all__ = ["FORMAT"]


def open_shard(path: Path, _pack_size: int | None, folder: Folder | None = None) -> ShardReader:
    """Open the plan or the sequences of a folder; `folder` is the dataset's, where the files are copies."""
    return PlanShard(path, folder) if (path / PLAN).is_file() else SequenceShard(path)


def is_own(path: Path) -> bool:
    """Return whether a folder holds a plan or sequences; no other tool has such a layout."""
    return any((path / name).is_file() for name in (PLAN, SEQUENCE_IDS, SEQUENCE_OFFSETS, SEQUENCE_CHECKSUMS))


FORMAT = Format(
    name=NAME,
    shard_template=SHARD_TEMPLATE,
    suffixes=(),
    shard_pattern=r"shard_\d+",
    # Stores hold millions of sequences, and few of their shards can be open at a time.
    packs_per_shard=1 << 18,
    files_per_shard=FILES_PER_SHARD,
    write_shard=SequenceShardWriter,
    open_shard=open_shard,
    find_bare=partial(find_folders, names=(INPUT_IDS, SEQUENCE_OFFSETS)),
    is_own=is_own,
    has_checksums=True,
)
