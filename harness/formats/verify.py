"""Checking a stored dataset as a whole, and finding where two datasets differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from harness.errors import ConfigError, FormatError, HarnessError, Problem
from harness.formats import PackReader, load_format, open_dataset
from harness.formats.base import Format
from harness.formats.digest import dataset_fingerprint, pack_digest
from harness.formats.folders import DatasetFolder, LocalFolder, list_file_problems
from harness.formats.kept_fingerprint import KeptFingerprint
from harness.formats.manifest import Manifest, load_manifest
from harness.formats.parts import Totals
from harness.records import Pack
from harness.storage import is_uri

FIELDS = ("input_ids", "loss_mask", "seq_start_id")


@dataclass(frozen=True)
class Difference:
    """The first place where two datasets differ.

    Attributes:
        pack: its number; None where the datasets differ in their number of packs.
        field: `num_packs`, `input_ids`, `loss_mask` or `seq_start_id`; with `.length` after it for arrays of unequal
            length that agree as far as the shorter one goes.
        position: in that array; None for lengths.
        a, b: both values.
    """

    pack: int | None
    field: str
    position: int | None
    a: int
    b: int

    def __str__(self) -> str:
        place = "" if self.pack is None else f"pack {self.pack:,}, "
        position = "" if self.position is None else f"[{self.position:,}]"
        return f"{place}{self.field}{position}: {self.a:,} and {self.b:,}"


def verify_dataset(path: str | PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Everything that is wrong with a dataset; an empty list where nothing is.

    Checks existence, size and hash of every file of the manifest, that no other shard is there, the checksum and the
    invariants of every pack, the manifest's counts, and the fingerprint. Files without a manifest have only the
    invariants to keep.

    Args:
        path: as for `open_dataset`.
        progress: called with packs checked and packs in all.
    """
    problems: list[Problem] = []
    try:
        folder, manifest = _find_folder(str(path))
        if folder is None or manifest is None:
            reader = open_dataset(path)
        else:
            format = load_format(manifest.format)
            problems += _file_problems(folder, manifest, format)
            reader = folder.open_unchecked(manifest, format)
    except (ConfigError, FormatError) as error:
        known = {problem.what for problem in problems}
        return problems if error.what in known else [*problems, _problem_of(error)]
    try:
        problems += _pack_problems(reader, progress)
    finally:
        reader.close()
    return problems


def _find_folder(path: str) -> tuple[DatasetFolder | None, Manifest | None]:
    """A dataset folder and its manifest, or None where a path is no folder or has none."""
    if is_uri(path):
        from harness.formats.remote import RemoteFolder

        remote = RemoteFolder.find(path)
        return remote, None if remote is None else remote.load_manifest()
    local = Path(path)
    return (LocalFolder(local), load_manifest(local)) if local.is_dir() else (None, None)


def _file_problems(folder: DatasetFolder, manifest: Manifest, format: Format) -> Iterator[Problem]:
    broken = set()
    for error in list_file_problems(folder, manifest, format):
        broken.add(error.where)
        yield _problem_of(error)
    for stored in [file for shard in manifest.shards for file in shard.files] + list(manifest.index):
        where = folder.where(stored.path)
        if where in broken:
            continue
        try:
            found = folder.digest(stored.path)
        except OSError as error:
            yield Problem(f"cannot be read: {error.strerror}", where)
            continue
        except FormatError as error:
            yield _problem_of(error)
            continue
        if found != stored.xxh3:
            yield Problem(f"the file has the hash {found}, the manifest says {stored.xxh3}", where)


def _pack_problems(reader: PackReader, progress: Callable[[int, int], None] | None) -> Iterator[Problem]:
    totals = Totals()
    seen: set[str] = set()
    # Eight bytes a pack, where a list of digests would take a hundred.
    digests = np.zeros(len(reader), np.uint64)
    whole = True
    for pack_id in range(len(reader)):
        try:
            pack = reader[pack_id]
        except FormatError as error:
            whole = False
            # A shard that cannot be opened says the same for each of its packs.
            if str(error) not in seen:
                seen.add(str(error))
                yield _problem_of(error)
            continue
        problem = pack.problem(reader.pack_size)
        if problem is not None:
            yield Problem(f"pack {pack_id:,} {problem}", reader.where(pack_id))
        # Batches are planned from the index's lengths; no digest of a pack tells that these are another's.
        first, last = int(reader.pack_offsets[pack_id]), int(reader.pack_offsets[pack_id + 1])
        if not np.array_equal(reader.sequence_lengths[first:last], pack.sequence_lengths):
            yield Problem(f"pack {pack_id:,} holds sequences of other lengths than the index", reader.where(pack_id))
        digests[pack_id] = pack_digest(pack)
        totals += Totals(1, pack.num_sequences, len(pack), int(np.count_nonzero(pack.loss_mask)))
        if progress is not None:
            progress(pack_id + 1, len(reader))
    manifest = reader.manifest
    if manifest is None or not whole:
        return
    for name in ("num_packs", "num_sequences", "num_tokens", "num_trained_tokens"):
        found, said = getattr(totals, name), getattr(manifest, name)
        if found != said:
            yield Problem(f"the manifest has {name} {said:,}, the packs make {found:,}", reader.path)
    fingerprint = dataset_fingerprint([digests])
    # That of a plan is not in its manifest.
    known = manifest.fingerprint or KeptFingerprint(Path(reader.path)).load()
    if known is not None and fingerprint != known:
        yield Problem(f"the manifest has the fingerprint {known}, the packs {fingerprint}", reader.path)


def _problem_of(error: HarnessError) -> Problem:
    return Problem(error.what, error.where)


def diff_datasets(a: str | PathLike[str], b: str | PathLike[str]) -> Difference | None:
    """The first difference between two datasets, or None. Reads every pack of both up to there.

    Raises:
        FormatError: either cannot be opened, or a pack of it cannot be read.
    """
    first, second = open_dataset(a), open_dataset(b)
    try:
        return diff_readers(first, second)
    finally:
        first.close()
        second.close()


def diff_readers(
    a: PackReader, b: PackReader, *, progress: Callable[[int, int], None] | None = None
) -> Difference | None:
    """`diff` of open datasets; `progress` is called with packs compared and packs in all."""
    count = min(len(a), len(b))
    for pack_id, (one, other) in enumerate(zip(a, b, strict=False)):
        found = _pack_difference(pack_id, one, other)
        if found is not None:
            return found
        if progress is not None:
            progress(pack_id + 1, count)
    if len(a) != len(b):
        return Difference(None, "num_packs", None, len(a), len(b))
    return None


def _pack_difference(pack_id: int, a: Pack, b: Pack) -> Difference | None:
    for field in FIELDS:
        one, other = getattr(a, field), getattr(b, field)
        count = min(one.shape[0], other.shape[0])
        differs = one[:count] != other[:count]
        if differs.any():
            at = int(np.argmax(differs))
            return Difference(pack_id, field, at, int(one[at]), int(other[at]))
        if one.shape[0] != other.shape[0]:
            return Difference(pack_id, f"{field}.length", None, one.shape[0], other.shape[0])
    return None
