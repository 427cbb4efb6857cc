"""Plans over a sequence store: datasets that hold which sequences make a pack, and no token."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import ConfigError, FormatError
from harness.formats.base import make_pack
from harness.formats.handles import HandleCache
from harness.formats.index import INDEX_FOLDER, PACK_OFFSETS, SEQUENCE_LENGTHS, load_index, write_npy
from harness.formats.manifest import MANIFEST_NAME, Manifest, Provenance, Shard, load_manifest
from harness.formats.parts import stored_files
from harness.formats.virtual.store import FORMAT, NAME, PLAN, SEQUENCE_IDS, SequenceShard, check_offsets, map_array
from harness.formats.writer_local import LocalPackWriter
from harness.records import Int32Array, Int64Array, Pack
from harness.storage import file_digest, sync_folder, write_atomically

# Each holds five files open.
_OPEN_SHARDS = 64


@dataclass(frozen=True, eq=False)
class SequenceStore:
    """A dataset whose sequences can be planned over.

    Attributes:
        path: its folder.
        manifest: of the dataset.
        lengths: int32 [sequences], tokens of each, in the order of their numbers.
    """

    path: Path
    manifest: Manifest
    lengths: Int32Array


def open_store(path: str | os.PathLike[str]) -> SequenceStore:
    """The store at a path, or the one that the plan at a path is over.

    Raises:
        FormatError: there is none, or it is damaged.
    """
    folder = Path(path)
    manifest = load_manifest(folder) if folder.is_dir() else None
    if manifest is None or manifest.format != NAME:
        kind = "no dataset" if manifest is None else f"a dataset of format {manifest.format}"
        raise FormatError(
            f"{kind}, expected a sequence store",
            where=str(path),
            fix=f"make one of a dataset, once: harness convert {path} STORE --to {NAME}",
        )
    plan = folder / manifest.shards[0].path / PLAN
    if plan.is_file():
        return open_store(_read_plan(plan).find_store(folder))
    return SequenceStore(folder, manifest, load_index(folder, manifest).sequence_lengths)


@dataclass(frozen=True)
class _Plan:
    """What plan.json says.

    Attributes:
        store: path of the store's folder from that of the dataset.
        manifest_xxh3: hash of the store's manifest, and so of all that it holds.
        sequence_ids_xxh3: hash of the plan's own file: a number changed in it would be another good sequence.
        shards: path and number of sequences of each shard of the store.
    """

    store: str
    manifest_xxh3: str
    sequence_ids_xxh3: str
    shards: tuple[tuple[str, int], ...]

    def find_store(self, folder: Path) -> Path:
        """The store of a plan in a dataset's folder; FormatError where it is not there or has changed."""
        store = Path(os.path.normpath(folder.resolve() / self.store))
        try:
            found = file_digest(store / MANIFEST_NAME)
        except OSError as error:
            raise FormatError(
                f"the plan's sequence store cannot be read: {error.strerror}",
                where=str(store),
                fix=f"put the store at {self.store} of the plan's folder, or plan again: harness repack STORE {folder}",
            ) from None
        if found != self.manifest_xxh3:
            raise FormatError(
                "the sequence store is not the one that was planned over",
                where=str(store),
                fix=f"put the right store there, or plan over this one: harness repack {store} {folder} --overwrite",
            )
        return store


def _read_plan(path: Path) -> _Plan:
    try:
        values = json.loads(path.read_bytes())
        shards = tuple((str(name), int(count)) for name, count in values["shards"])
        plan = _Plan(str(values["store"]), str(values["manifest_xxh3"]), str(values["sequence_ids_xxh3"]), shards)
    except OSError as error:
        raise FormatError(f"the plan cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"the plan is damaged: {error!r}"[:200], where=str(path)) from None
    return plan


class PlanShard:
    """An open plan and the store that it is over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        plan = _read_plan(path / PLAN)
        self._store = plan.find_store(path.parent)
        self._shards = plan.shards
        self._first = np.cumsum([0, *(count for _, count in plan.shards)]).tolist()
        found = file_digest(path / SEQUENCE_IDS)
        if found != plan.sequence_ids_xxh3:
            what = f"the plan's sequences have the hash {found}, expected {plan.sequence_ids_xxh3}"
            raise FormatError(what, where=str(path / SEQUENCE_IDS), fix="copy the plan again, or plan again")
        self._ids = map_array(path / SEQUENCE_IDS, np.dtype(np.int64))
        packs = map_array(path / PACK_OFFSETS, np.dtype(np.int64))
        check_offsets(packs, self._ids.shape[0], where=path / PACK_OFFSETS)
        self.num_packs = packs.shape[0] - 1
        self._packs = packs.data
        self._open: HandleCache[SequenceShard] = HandleCache(_OPEN_SHARDS)

    def read(self, rows: Sequence[int]) -> list[Pack]:
        return [self.read_row(row) for row in rows]

    def read_row(self, row: int) -> Pack:
        ids, masks = [], []
        for number in self._ids[self._packs[row] : self._packs[row + 1]].tolist():
            shard = bisect_right(self._first, number) - 1
            if not 0 <= shard < len(self._shards):
                raise FormatError(f"sequence {number:,} of {self._first[-1]:,} is planned", where=self.where(row))
            one, mask = self._open.get(shard, self._open_shard).read_sequence(number - self._first[shard])
            ids.append(one)
            masks.append(mask)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        return make_pack(np.concatenate(ids), np.concatenate(masks), starts)

    def where(self, row: int) -> str:
        return f"{self._path}, pack {row:,} of a plan over {self._store}"

    def close(self) -> None:
        """Close the store; the maps end with their last array."""
        self._open.close()
        del self._ids, self._packs

    def _open_shard(self, number: int) -> SequenceShard:
        name, count = self._shards[number]
        shard = SequenceShard(self._store / name)
        if shard.num_sequences != count:
            what = f"holds {shard.num_sequences:,} sequences, the plan counts {count:,}"
            raise FormatError(what, where=str(self._store / name), fix="copy the store again")
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
    """Write a dataset that is a plan over a store. Its fingerprint is taken when it is first asked for.

    Args:
        path: a new or empty folder.
        store: holds the tokens, and must stay where it is, seen from `path`.
        pack_offsets, sequence_ids: as in a PackPlan; each sequence of the store once.
        pack_size: tokens that no pack exceeds.
        packer, seed: stored in the manifest.
        overwrite: replace a dataset that is there.

    Raises:
        ConfigError: the plan is none of this store.
        FormatError: the destination is in use, holds something else or cannot be written.
    """
    if Path(path).resolve() == store.path.resolve():
        raise ConfigError("the destination is the store itself", where=str(path), fix="name another destination")
    count = store.lengths.shape[0]
    if sequence_ids.shape[0] != count or (np.bincount(sequence_ids, minlength=count) != 1).any():
        raise ConfigError(f"the plan does not hold each of {count:,} sequences once", where=str(store.path))
    provenance = replace(
        store.manifest.provenance, packer=packer, seed=seed, tokenizer=_tokenizer_from(Path(path), store)
    )
    writer = _PlanWriter(Path(path), store, pack_offsets, sequence_ids, pack_size, provenance, overwrite=overwrite)
    with writer:
        pass
    assert writer.manifest is not None
    return writer.manifest


def _tokenizer_from(path: Path, store: SequenceStore) -> str:
    """The tokenizer's name; where it is a folder named from the store's, as named from the plan's."""
    name = store.manifest.provenance.tokenizer
    if name.startswith(".") and (store.path / name).is_dir():
        return Path(os.path.relpath((store.path / name).resolve(), path.resolve())).as_posix()
    return name


class _PlanWriter(LocalPackWriter):
    """Claims the destination as any writer does; what is written is known from the start."""

    def __init__(
        self,
        path: Path,
        store: SequenceStore,
        pack_offsets: Int64Array,
        sequence_ids: Int64Array,
        pack_size: int,
        provenance: Provenance,
        *,
        overwrite: bool,
    ) -> None:
        super().__init__(
            path,
            format=FORMAT,
            pack_size=pack_size,
            provenance=provenance,
            packs_per_shard=1,
            rows_per_group=1,
            overwrite=overwrite,
            resume_key=None,
        )
        self._store = store
        self._pack_offsets = pack_offsets
        self._sequence_ids = sequence_ids

    def _end(self) -> None:
        shard, index = self.path / FORMAT.shard_name(0), self.path / INDEX_FOLDER
        for folder in (shard, index):
            folder.mkdir(exist_ok=True)
        offsets, ids = self._pack_offsets, self._sequence_ids
        write_npy(shard / SEQUENCE_IDS, np.dtype("<i8"), len(ids), iter([ids]))
        write_npy(shard / PACK_OFFSETS, np.dtype("<i8"), len(offsets), iter([offsets]))
        write_npy(index / PACK_OFFSETS, np.dtype("<i8"), len(offsets), iter([offsets]))
        write_npy(index / SEQUENCE_LENGTHS, np.dtype("<i4"), len(ids), iter([self._store.lengths[ids]]))
        write_atomically(shard / PLAN, (json.dumps(self._describe(shard), indent=1) + "\n").encode())
        for folder in (shard, index):
            sync_folder(folder)
        stored = replace(
            self._store.manifest,
            pack_size=self.pack_size,
            num_packs=len(offsets) - 1,
            fingerprint="",
            shards=(Shard(shard.name, len(offsets) - 1, stored_files(self.path, sorted(shard.glob("*.*")))),),
            index=stored_files(self.path, [index / PACK_OFFSETS, index / SEQUENCE_LENGTHS]),
            provenance=self.provenance,
        )
        stored.save(self.path)
        self.manifest = stored

    def _describe(self, shard: Path) -> dict[str, Any]:
        store, manifest = self._store.path, self._store.manifest
        offsets = load_index(store, manifest).pack_offsets
        ends = np.cumsum([0, *(one.num_packs for one in manifest.shards)])
        counts = np.diff(offsets[ends]).tolist()
        return {
            "store": Path(os.path.relpath(store.resolve(), self.path.resolve())).as_posix(),
            "manifest_xxh3": file_digest(store / MANIFEST_NAME),
            "sequence_ids_xxh3": file_digest(shard / SEQUENCE_IDS),
            "shards": [[one.path, count] for one, count in zip(manifest.shards, counts, strict=True)],
        }
