"""A plan over a sequence store: a dataset that holds which sequences make a pack, and no token. A shard is a folder:

plan.json               the store: its path from the dataset's folder, its hash, its shards
sequence_ids.npy        int64  [sequences]       numbers of sequences in the store, pack after pack
pack_offsets.npy        int64  [packs + 1]       where each pack begins in them
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.errors import ConfigError, FormatError, os_errors_as
from harness.formats.base import ShardContents, ShardReader, make_pack
from harness.formats.incomplete import find_traces, incomplete_error
from harness.formats.index import PACK_OFFSETS as INDEX_PACK_OFFSETS
from harness.formats.index import SEQUENCE_LENGTHS, load_index, write_npy
from harness.formats.manifest import MANIFEST_NAME, Manifest, Shard, load_manifest
from harness.formats.reader import HandleCache
from harness.formats.virtual.store import NAME, PACK_OFFSETS, SHARD_TEMPLATE, SequenceShard, check_offsets
from harness.formats.writer import FolderClaim, explain_os_errors
from harness.records import Int32Array, Int64Array, Pack
from harness.settings import load
from harness.storage import Folder, LocalFolder, StoredFile, file_digest, open_folder
from harness.storage.arrays import map_npy
from harness.storage.uris import relative_path, resolve_path

SEQUENCE_IDS, PLAN = "sequence_ids.npy", "plan.json"
# Each holds five files open.
_OPEN_SHARDS = 64
_MAX_PLAN_BYTES = 64 << 20
_PLAN_AGAIN = "copy the whole folder again, or plan again: harness repack STORE DST data.pack_size=N"


@dataclass(frozen=True, eq=False)
class SequenceStore:
    """A dataset whose sequences can be planned over.

    Attributes:
        folder: on a disk or in object storage.
        manifest: of the dataset.
        lengths: int32 [sequences], tokens of each sequence, by its number.
    """

    folder: Folder
    manifest: Manifest
    lengths: Int32Array


def open_store(path: str | os.PathLike[str]) -> SequenceStore:
    """Open the store at a path or URI, or the store of the plan there.

    Raises:
        FormatError: there is none, or it is incomplete or damaged.
    """
    folder = open_folder(path)
    manifest = load_manifest(folder)
    is_there = not isinstance(folder, LocalFolder) or folder.place.is_dir()
    if manifest is None and is_there and (traces := find_traces(folder)):
        raise incomplete_error(folder, traces)
    if manifest is None or manifest.format != NAME:
        kind = "no dataset" if manifest is None else f"a dataset of format {manifest.format}"
        raise FormatError(
            f"{kind}, expected a sequence store",
            where=str(path),
            fix=f"make one of a dataset, once: harness convert {path} STORE {NAME}",
        )
    name = f"{manifest.shards[0].path}/{PLAN}"
    text = folder.read(name, _MAX_PLAN_BYTES)
    if text is not None:
        return open_store(_parse_plan(text, folder.where(name)).find_store(folder).where())
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

    def find_store(self, folder: Folder) -> Folder:
        """Return the store of a plan in a dataset's folder; raises FormatError if it is missing or has changed."""
        store = open_folder(str(resolve_path(folder.place, self.store)))
        with os_errors_as(
            FormatError,
            "the plan's sequence store cannot be read",
            where=store.where(),
            fix=f"put the store at {self.store} of the plan's folder, or plan again: "
            f"harness repack STORE {folder.where()}",
        ):
            digest = store.digest(MANIFEST_NAME)
        if digest != self.manifest_xxh3:
            raise FormatError(
                "the sequence store is not the one that was planned over",
                where=store.where(),
                fix="put the right store there, or plan over this one: "
                f"harness repack {store.where()} {folder.where()} --overwrite",
            )
        return store


def _parse_plan(text: bytes, where: str) -> _Plan:
    return load(_Plan, text, where=where, fix=_PLAN_AGAIN, what="the plan is damaged")


class PlanShard(ShardReader):
    """An open plan and its store.

    Args:
        path: the plan's files, on a disk.
        folder: of the dataset, from which the plan names its store; None for that of the files.
    """

    def __init__(self, path: Path, folder: Folder | None = None) -> None:
        self._path = path
        self._folder = LocalFolder(path.parent) if folder is None else folder
        with os_errors_as(
            FormatError, "the plan cannot be read", where=path / PLAN, fix="check permissions and mounts"
        ):
            text = (path / PLAN).read_bytes()
        plan = self._plan = _parse_plan(text, str(path / PLAN))
        self._store = plan.find_store(self._folder)
        self._stored: Sequence[Shard] | None = None
        self._shards = plan.shards
        self._first = np.cumsum([0, *(count for _, count in plan.shards)]).tolist()
        digest = file_digest(path / SEQUENCE_IDS)
        if digest != plan.sequence_ids_xxh3:
            what = f"the plan's sequences have the hash {digest}, expected {plan.sequence_ids_xxh3}"
            raise FormatError(what, where=str(path / SEQUENCE_IDS), fix="copy the plan again, or plan again")
        self._ids = map_npy(path / SEQUENCE_IDS, np.dtype(np.int64))
        packs = map_npy(path / PACK_OFFSETS, np.dtype(np.int64))
        check_offsets(packs, self._ids.shape[0], where=path / PACK_OFFSETS)
        self.num_packs = packs.shape[0] - 1
        self._packs = packs.data
        self._open: HandleCache[_StoreShard] = HandleCache(_OPEN_SHARDS)

    def read_row(self, row: int) -> Pack:
        ids, masks = [], []
        for number in self._ids[self._packs[row] : self._packs[row + 1]].tolist():
            shard = bisect_right(self._first, number) - 1
            if not 0 <= shard < len(self._shards):
                what = f"sequence {number:,} of {self._first[-1]:,} is planned"
                raise FormatError(what, where=self.where(row), fix=_PLAN_AGAIN)
            sequence, mask = self._open.get(shard, self._open_shard).read_sequence(number - self._first[shard])
            ids.append(sequence)
            masks.append(mask)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        return make_pack(np.concatenate(ids), np.concatenate(masks), starts)

    def contents(self) -> ShardContents:
        raise FormatError("a plan cannot be opened without its manifest", where=str(self._path), fix=_PLAN_AGAIN)

    def where(self, row: int) -> str:
        return f"{self._path}, pack {row:,} of a plan over {self._store.where()}"

    def close(self) -> None:
        self._open.close()

    def _open_shard(self, number: int) -> _StoreShard:
        name, count = self._shards[number]
        shard = _StoreShard(self._store, self._listed(name), name)
        if shard.num_sequences != count:
            what = f"holds {shard.num_sequences:,} sequences, the plan counts {count:,}"
            raise FormatError(what, where=self._store.where(name), fix="copy the store again")
        if isinstance(self._store, LocalFolder):
            # A store that is replaced loses its manifest first: while that is there, the shard is of the planned one.
            self._plan.find_store(self._folder)
        return shard

    def _listed(self, name: str) -> Sequence[StoredFile]:
        """Return the files of a shard of the store; those of a store on a disk are opened where they are."""
        if isinstance(self._store, LocalFolder):
            return ()
        if self._stored is None:
            manifest = load_manifest(self._store)
            self._stored = () if manifest is None else manifest.shards
        return next((shard.files for shard in self._stored if shard.path == name), ())


class _StoreShard(SequenceShard):
    """A shard of a store, whose local copy is not evicted while it is open."""

    def __init__(self, store: Folder, files: Sequence[StoredFile], name: str) -> None:
        # Copies are compared with the hashes of the manifest, which is the one that was planned over.
        self._entry = store.fetch(files)
        super().__init__(self._entry.folder / name)

    def close(self) -> None:
        super().close()
        self._entry.release()


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

    Args:
        path: a new or empty folder, on a disk or in object storage.
        store: holds the tokens, and must keep its place relative to `path`. A plan in object storage needs a store
            there; a plan on a disk may have one.
        pack_offsets, sequence_ids: as in a PackPlan; each sequence of the store once.
        pack_size: tokens that no pack exceeds.
        packer, seed: stored in the manifest.
        overwrite: replace an existing dataset.

    Raises:
        ConfigError: the plan does not fit this store, or cannot refer to it.
        FormatError: the destination is in use, holds something else or cannot be written.
    """
    folder, home = open_folder(path), store.folder.place
    if isinstance(home, Path) and not isinstance(folder.place, Path):
        raise ConfigError(
            "a plan in object storage needs its sequence store there",
            where=str(home),
            fix=f"copy it, then plan over the copy: harness convert {home} {folder.where()}-store {NAME}",
        )
    if relative_path(home, folder.place) == ".":
        raise ConfigError("the destination is the store itself", where=str(path), fix="name another destination")
    count = store.lengths.shape[0]
    if sequence_ids.shape[0] != count or (np.bincount(sequence_ids, minlength=count) != 1).any():
        what = f"the plan does not hold each of {count:,} sequences once"
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
            claim.release(whole=whole)
    return manifest


def _write(folder: Folder, store: SequenceStore, pack_offsets: Int64Array, sequence_ids: Int64Array) -> Manifest:
    """Write all but the manifest, which is the store's with the plan's own packs and files."""
    shard = SHARD_TEMPLATE.format(0)
    names = [f"{shard}/{name}" for name in (PACK_OFFSETS, PLAN, SEQUENCE_IDS)]
    write_npy(folder, names[2], np.dtype("<i8"), len(sequence_ids), [sequence_ids])
    write_npy(folder, names[0], np.dtype("<i8"), len(pack_offsets), [pack_offsets])
    write_npy(folder, INDEX_PACK_OFFSETS, np.dtype("<i8"), len(pack_offsets), [pack_offsets])
    write_npy(folder, SEQUENCE_LENGTHS, np.dtype("<i4"), len(sequence_ids), [store.lengths[sequence_ids]])
    stored = store.manifest.shards
    ends = np.cumsum([0, *(one.num_packs for one in stored)])
    counts = np.diff(load_index(store.folder, store.manifest).pack_offsets[ends]).tolist()
    plan = {
        "store": relative_path(store.folder.place, folder.place),
        "manifest_xxh3": store.folder.digest(MANIFEST_NAME),
        "sequence_ids_xxh3": folder.describe(names[2:])[0].xxh3,
        "shards": [[one.path, count] for one, count in zip(stored, counts, strict=True)],
    }
    folder.write(names[1], [(json.dumps(plan, indent=1) + "\n").encode()])
    index_names = [INDEX_PACK_OFFSETS, SEQUENCE_LENGTHS]
    return replace(
        store.manifest,
        num_packs=len(pack_offsets) - 1,
        fingerprint="",
        shards=(Shard(shard, len(pack_offsets) - 1, folder.describe(names)),),
        index=folder.describe(index_names),
    )
