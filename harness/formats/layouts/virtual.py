"""`virtual`: sequences stored once, and packs that are plans over them. Both read as any other dataset.

A shard is a folder, of one of two kinds. A sequence store holds the sequences of its packs, one after another:

    input_ids.npy           int32  [tokens]          all sequences, end to end
    loss_mask.npy           uint8  [tokens]
    sequence_offsets.npy    int64  [sequences + 1]   where each begins in both
    sequence_checksums.npy  uint64 [sequences]       `sequence_digest` of each
    pack_offsets.npy        int64  [packs + 1]       pack p holds sequences pack_offsets[p] to pack_offsets[p + 1]

A plan holds which sequences of a store make a pack, and no token:

    plan.json               the store: its path from the dataset's folder, its hash, its shards
    sequence_ids.npy        int64  [sequences]       numbers of sequences in the store, pack after pack
    pack_offsets.npy        int64  [packs + 1]       where each pack begins in them
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.errors import ConfigError, FormatError, os_errors_as
from harness.formats.base import Format, ShardReader, ShardWriter, find_folders, make_pack, start_arrays
from harness.formats.index import INDEX_NAMES, IndexPart, check_offsets, load_index, sequence_digest, write_npy
from harness.formats.manifest import MANIFEST_NAME, Manifest, Shard, load_manifest
from harness.formats.media import INDEX, MEDIA_DTYPE
from harness.formats.opening import refuse_traces
from harness.formats.reader import HandleCache
from harness.formats.writer import FolderClaim
from harness.records import Int32Array, Int64Array, Pack, UInt8Array
from harness.settings import load
from harness.storage import Folder, LocalFolder, Place, file_digest, open_folder
from harness.storage.arrays import NpyStream, map_npy
from harness.storage.connections import relative_path, resolve_path
from harness.storage.files import explain_os_errors

NAME = "virtual"
_ARRAYS: dict[str, np.dtype[Any]] = {
    "input_ids.npy": np.dtype(np.int32),
    "loss_mask.npy": np.dtype(np.uint8),
    "sequence_offsets.npy": np.dtype(np.int64),
    "sequence_checksums.npy": np.dtype(np.uint64),
    "pack_offsets.npy": np.dtype(np.int64),
}
INPUT_IDS, LOSS_MASK, SEQUENCE_OFFSETS, SEQUENCE_CHECKSUMS, PACK_OFFSETS = _ARRAYS


class SequenceShard(ShardReader):
    """The open files of a shard that holds its sequences; mapped, so that processes share the pages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids, self._mask, offsets, checksums, packs = (
            map_npy(path / name, dtype) for name, dtype in _ARRAYS.items()
        )
        self.num_sequences, self.num_packs = checksums.shape[0], packs.shape[0] - 1
        if not self._ids.shape == self._mask.shape or offsets.shape[0] != self.num_sequences + 1:
            raise FormatError("the arrays have inconsistent lengths", where=str(path), fix="copy the dataset again")
        check_offsets(offsets, self._ids.shape[0], where=path / SEQUENCE_OFFSETS)
        check_offsets(packs, self.num_sequences, where=path / PACK_OFFSETS)
        self._starts = offsets
        # Indexing a memoryview gives a Python number in half the time of an array.
        self._offsets, self._checksums, self._packs = offsets.data, checksums.data, packs.data

    def read_row(self, row: int) -> Pack:
        first, last = self._packs[row], self._packs[row + 1]
        begin, end = self._offsets[first], self._offsets[last]
        starts = (self._starts[first:last] - begin).astype(np.int32)
        return make_pack(self._ids[begin:end].copy(), self._mask[begin:end].copy(), starts)

    def read_sequence(self, number: int) -> tuple[Int32Array, UInt8Array]:
        """Return input_ids and loss_mask of a sequence as views; raises FormatError if they were changed."""
        begin, end = self._offsets[number], self._offsets[number + 1]
        ids, mask = self._ids[begin:end], self._mask[begin:end]
        if sequence_digest(ids, mask) != self._checksums[number]:
            what = f"sequence {number:,} does not match its checksum"
            fix = "copy the store again; `harness verify` lists all damage"
            raise FormatError(what, where=str(self._path / INPUT_IDS), fix=fix)
        return ids, mask

    def contents(self) -> IndexPart:
        lengths = np.diff(self._starts)
        if lengths.max() > np.iinfo(np.int32).max:
            raise FormatError(f"a sequence has {int(lengths.max()):,} tokens", where=str(self._path))
        return IndexPart(np.diff(np.asarray(self._packs)), lengths.astype(np.int32))

    def where(self, row: int) -> str:
        return f"{self._path / INPUT_IDS}, pack {row:,}"


class SequenceShardWriter(ShardWriter[NpyStream]):
    def __init__(self, folder: Folder, name: str, _pack_size: int, _rows_per_group: int) -> None:
        self._num_tokens = self._num_sequences = 0
        streams = start_arrays(folder, name, _ARRAYS, {}, zeros=(SEQUENCE_OFFSETS, PACK_OFFSETS))
        super().__init__([f"{name}/{array}" for array in _ARRAYS], streams)

    def append(self, pack: Pack) -> None:
        ids, mask, offsets, checksums, packs = self._files
        ids.write(pack.input_ids)
        mask.write(pack.loss_mask)
        offsets.write(np.append(pack.seq_start_id[1:], len(pack)).astype(np.int64) + self._num_tokens)
        digests = [sequence_digest(sequence.input_ids, sequence.loss_mask) for sequence in pack.sequences()]
        checksums.write(np.array(digests, np.uint64))
        self._num_tokens += len(pack)
        self._num_sequences += pack.num_sequences
        packs.write(np.array([self._num_sequences], np.int64))


# ---- plans

SEQUENCE_IDS, PLAN = "sequence_ids.npy", "plan.json"
# Each holds five files open.
_OPEN_SHARDS = 64
_MAX_PLAN_BYTES = 64 << 20
_PLAN_AGAIN = "copy the whole folder again, or plan again: harness repack STORE DST data.pack_size=N"


class SequenceStore(NamedTuple):
    """A dataset whose sequences can be planned over; `lengths` are int32 [sequences], tokens of each, by its number."""

    folder: Folder
    manifest: Manifest
    lengths: Int32Array


def open_store(path: str | os.PathLike[str]) -> SequenceStore:
    """Open the store at a path or URI, or that of the plan there; FormatError if it is missing or damaged."""
    folder = open_folder(path)
    manifest = load_manifest(folder)
    is_there = not isinstance(folder, LocalFolder) or folder.place.is_dir()
    if manifest is None and is_there:
        refuse_traces(folder)
    if manifest is None or manifest.format != NAME:
        kind = "not a dataset" if manifest is None else f"a dataset of format {manifest.format}"
        what = f"{kind}, expected a sequence store"
        raise FormatError(what, where=str(path), fix=f"create one from a dataset: harness convert {path} STORE {NAME}")
    if (plan := _Plan.read(folder, manifest.shards[0].path)) is not None:
        return open_store(plan.find_store(folder).where())
    return SequenceStore(folder, manifest, load_index(folder, manifest).sequence_lengths)


@dataclass(frozen=True)
class _Plan:
    """The content of plan.json.

    Attributes:
        store: path of the store's folder from that of the dataset, or its URI.
        manifest_xxh3: hash of the store's manifest, and so of all that it holds.
        sequence_ids_xxh3: hash of the plan's own file, because a changed number would name another valid sequence.
        shards: path and number of sequences of each shard of the store.
    """

    store: str
    manifest_xxh3: str
    sequence_ids_xxh3: str
    shards: tuple[tuple[str, int], ...]

    @classmethod
    def read(cls, folder: Folder, shard: str) -> _Plan | None:
        """Read the plan of a shard; None where it holds sequences."""
        where = folder.where(f"{shard}/{PLAN}")
        with os_errors_as(FormatError, "the plan cannot be read", where=where, fix="check permissions and mounts"):
            text = folder.read(f"{shard}/{PLAN}", _MAX_PLAN_BYTES)
        return None if text is None else load(cls, text, where=where, fix=_PLAN_AGAIN, what="the plan is damaged")

    def find_store(self, folder: Folder) -> Folder:
        """Return the store of a plan in a dataset's folder; raises FormatError if it is missing or has changed."""
        store = open_folder(str(resolve_path(folder.place, self.store)))
        fix = f"restore the store at {self.store}, relative to the plan, or plan again: "
        fix += f"harness repack {store.where()} {folder.where()} --overwrite"
        with os_errors_as(FormatError, "the plan's sequence store cannot be read", where=store.where(), fix=fix):
            digest = store.digest(MANIFEST_NAME)
        if digest != self.manifest_xxh3:
            raise FormatError("this is not the sequence store of the plan", where=store.where(), fix=fix)
        return store


class PlanShard(ShardReader):
    """An open plan and its store, which it names from `folder`, that of the dataset; None for that of the files."""

    def __init__(self, path: Path, folder: Folder | None = None) -> None:
        self._path = path
        self._folder = LocalFolder(path.parent) if folder is None else folder
        plan = _Plan.read(LocalFolder(path.parent), path.name)
        if plan is None:
            raise FormatError("the plan is gone", where=str(path), fix=_PLAN_AGAIN)
        self._plan = plan
        self._store = plan.find_store(self._folder)
        self._shards = plan.shards
        # Of a store in a bucket; those of a store on a disk are opened where they are.
        manifest = None if isinstance(self._store, LocalFolder) else load_manifest(self._store)
        self._stored = {} if manifest is None else {shard.path: shard.files for shard in manifest.shards}
        self._first = np.cumsum([0, *(count for _, count in plan.shards)]).tolist()
        digest = file_digest(path / SEQUENCE_IDS)
        if digest != plan.sequence_ids_xxh3:
            what = f"the sequence ids of the plan have hash {digest}, expected {plan.sequence_ids_xxh3}"
            raise FormatError(what, where=str(path / SEQUENCE_IDS), fix="copy the plan again, or plan again")
        self._ids = map_npy(path / SEQUENCE_IDS, np.dtype(np.int64))
        packs = map_npy(path / PACK_OFFSETS, np.dtype(np.int64))
        check_offsets(packs, self._ids.shape[0], where=path / PACK_OFFSETS)
        self.num_packs = packs.shape[0] - 1
        self._packs = packs.data
        self._open: HandleCache[SequenceShard] = HandleCache(_OPEN_SHARDS)

    def read_row(self, row: int) -> Pack:
        ids, masks = [], []
        for number in self._ids[self._packs[row] : self._packs[row + 1]].tolist():
            shard = bisect_right(self._first, number) - 1
            if not 0 <= shard < len(self._shards):
                what = f"the plan refers to sequence {number:,} of {self._first[-1]:,}"
                raise FormatError(what, where=self.where(row), fix=_PLAN_AGAIN)
            sequence, mask = self._open.get(shard, self._open_shard).read_sequence(number - self._first[shard])
            ids.append(sequence)
            masks.append(mask)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        return make_pack(np.concatenate(ids), np.concatenate(masks), np.cumsum(lengths, dtype=np.int32) - lengths)

    def media_place(self, place: Place, shard: int) -> Place:
        if shard >= len(self._shards):
            what = f"the plan refers to media of shard {shard:,} of {len(self._shards):,}"
            raise FormatError(what, where=str(place), fix=_PLAN_AGAIN)
        return self._open.get(shard, self._open_shard).media_place(self._store.place / self._shards[shard][0], shard)

    def where(self, row: int) -> str:
        return f"{self._path}, pack {row:,} of a plan over {self._store.where()}"

    def close(self) -> None:
        self._open.close()

    def _open_shard(self, number: int) -> SequenceShard:
        name, count = self._shards[number]
        # Copies are compared with the hashes of the manifest, which is the one that was planned over.
        entry = self._store.fetch(self._stored.get(name, ()))
        shard = SequenceShard(entry.folder / name)
        shard.entry = entry
        if shard.num_sequences != count:
            what = f"contains {shard.num_sequences:,} sequences, but the plan lists {count:,}"
            raise FormatError(what, where=self._store.where(name), fix="copy the store again")
        if isinstance(self._store, LocalFolder):
            # A store that is replaced loses its manifest first: while that is there, the shard is of the planned one.
            self._plan.find_store(self._folder)
        return shard


def write_plan(
    path: str | os.PathLike[str],
    store: SequenceStore,
    *,
    pack_offsets: Int64Array,
    sequence_ids: Int64Array,
    pack_size: int,
    packer: str,
    seed: int,
    overwrite: bool = False,
) -> Manifest:
    """Write a dataset that is a plan over a store. Its fingerprint is computed when it is first needed.

    ConfigError if the plan does not fit this store, or cannot refer to it; FormatError if the destination is in use,
    holds something else or cannot be written.

    Args:
        path: a new or empty folder, on a disk or in object storage.
        store: holds the tokens, and must keep its place relative to `path`. A plan in object storage needs a store
            there; a plan on a disk may have one.
        pack_offsets, sequence_ids: as in a PackPlan; each sequence of the store once.
        pack_size: tokens that no pack exceeds.
    """
    folder, home = open_folder(path), store.folder.place
    if isinstance(home, Path) and not isinstance(folder.place, Path):
        what = "a plan in object storage requires its sequence store in object storage"
        fix = f"upload the store, then plan the copy: harness convert {home} {folder.where()}-store {NAME}"
        raise ConfigError(what, where=str(home), fix=fix)
    if relative_path(home, folder.place) == ".":
        raise ConfigError("the destination is the store itself", where=str(path), fix="choose another one")
    count = store.lengths.shape[0]
    if sequence_ids.shape[0] != count or (np.bincount(sequence_ids, minlength=count) != 1).any():
        what = f"the plan does not contain each of the {count:,} sequences exactly once"
        raise ConfigError(what, where=store.folder.where(), fix="plan all lengths of the store together")
    claim = FolderClaim(folder, overwrite=overwrite)
    whole = False
    with explain_os_errors(folder.where()):
        claim.enter()
        try:
            manifest = _write(folder, store, pack_offsets, sequence_ids)
            # A tokenizer's folder relative to the store becomes relative to the plan.
            tokenizer = manifest.provenance.tokenizer
            if tokenizer.startswith("."):
                tokenizer = relative_path(resolve_path(home, tokenizer), folder.place)
            provenance = replace(manifest.provenance, packer=packer, seed=seed, tokenizer=tokenizer)
            manifest = replace(manifest, pack_size=pack_size, provenance=provenance).sealed()
            manifest.save(folder)
            whole = True
        finally:
            claim.finish(whole=whole)
    return manifest


def _write(folder: Folder, store: SequenceStore, pack_offsets: Int64Array, sequence_ids: Int64Array) -> Manifest:
    """Write all but the manifest, which is the store's with the plan's own packs and files."""
    shard = FORMAT.shard_name(0)
    names = [f"{shard}/{name}" for name in (PACK_OFFSETS, PLAN, SEQUENCE_IDS)]
    for name, values in ((names[2], sequence_ids), (names[0], pack_offsets), (INDEX_NAMES[0], pack_offsets)):
        write_npy(folder, name, np.dtype("<i8"), len(values), [values])
    write_npy(folder, INDEX_NAMES[1], np.dtype("<i4"), len(sequence_ids), [store.lengths[sequence_ids]])
    stored = store.manifest.shards
    ends = np.cumsum([0, *(one.num_packs for one in stored)])
    index = load_index(store.folder, store.manifest)
    counts = np.diff(index.pack_offsets[ends]).tolist()
    index_names = [*INDEX_NAMES[:2]]
    if index.media is not None:
        rows = index.media.copy()
        rows["sequence"] = np.argsort(sequence_ids)[rows["sequence"]]
        rows = rows[np.argsort(rows["sequence"], kind="stable")]
        write_npy(folder, INDEX, MEDIA_DTYPE, len(rows), [rows])
        index_names.append(INDEX)
    plan = {
        "store": relative_path(store.folder.place, folder.place),
        "manifest_xxh3": store.folder.digest(MANIFEST_NAME),
        "sequence_ids_xxh3": folder.describe(names[2:])[0].xxh3,
        "shards": [[one.path, count] for one, count in zip(stored, counts, strict=True)],
    }
    folder.write(names[1], [(json.dumps(plan, indent=1) + "\n").encode()])
    return replace(
        store.manifest,
        num_packs=len(pack_offsets) - 1,
        fingerprint="",
        shards=(Shard(shard, len(pack_offsets) - 1, folder.describe(names)),),
        index=folder.describe(index_names),
    )


def open_shard(path: Path, _pack_size: int | None, folder: Folder | None = None) -> ShardReader:
    """Open the plan or the sequences of a folder; `folder` is the dataset's, where the files are copies."""
    return PlanShard(path, folder) if (path / PLAN).is_file() else SequenceShard(path)


def is_own(path: Path) -> bool:
    """Return whether a folder holds a plan or sequences; no other tool has such a layout."""
    return any((path / name).is_file() for name in (PLAN, SEQUENCE_IDS, SEQUENCE_OFFSETS, SEQUENCE_CHECKSUMS))


FORMAT = Format(
    name=NAME,
    # Stores hold millions of sequences, and few of their shards can be open at a time.
    packs_per_shard=1 << 18,
    files_per_shard=len(_ARRAYS),
    write_shard=SequenceShardWriter,
    open_shard=open_shard,
    find_bare=partial(find_folders, names=(INPUT_IDS, SEQUENCE_OFFSETS)),
    is_own=is_own,
    has_checksums=True,
)
