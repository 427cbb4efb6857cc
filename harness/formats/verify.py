"""Verification of a stored dataset as a whole, and the first difference between two datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, FormatError, Problem
from harness.formats.base import FIELDS
from harness.formats.incomplete import survey_folder
from harness.formats.index import KeptFingerprint, dataset_fingerprint, pack_digest
from harness.formats.manifest import Manifest, Totals, load_manifest
from harness.formats.media import media_rows
from harness.formats.opening import find_traces, list_file_problems, open_dataset, open_unchecked
from harness.formats.reader import PackReader
from harness.records import Pack
from harness.storage import LocalFolder, open_folder


@dataclass(frozen=True)
class PackDifference:
    """The first difference between two datasets.

    Attributes:
        pack: its number; None if the datasets differ in their number of packs.
        field: `num_packs`, `input_ids`, `loss_mask`, `seq_start_id` or `media.` and a column of the index of media;
            with `.length` after it for arrays of unequal length that agree as far as the shorter one goes.
        position: in that array; None for lengths.
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
    """Return all problems of the dataset at a path that `open_dataset` accepts.

    Checks that every file in the manifest exists with its size and hash, that there are no other shards, the checksum
    and invariants of every pack, the manifest's counts, and the fingerprint. Without an intact manifest, reads every
    shard and compares it against the remains of its index. Files from other tools only need to satisfy the invariants.
    `progress` is called with the number of packs checked and the total number of packs.
    """
    problems: list[Problem] = []
    manifest = None
    try:
        folder = open_folder(path)
        is_folder = not isinstance(folder, LocalFolder) or folder.place.is_dir()
        manifest = load_manifest(folder) if is_folder else None
        if manifest is None:
            reader = open_dataset(path)
        else:
            problems += [Problem(one.what, one.where) for one in list_file_problems(folder, manifest, hashes=True)]
            reader = open_unchecked(folder, manifest)
    except (ConfigError, FormatError) as error:
        known = {problem.what for problem in problems}
        if error.what not in known:
            problems.append(Problem(error.what, error.where, error.fix))
        with suppress(ConfigError, FormatError, OSError):  # reported already
            folder = open_folder(path)
            if manifest is None and isinstance(folder, LocalFolder) and folder.place.is_dir() and find_traces(folder):
                problems += survey_folder(folder, progress).problems
        return problems
    with closing(reader):
        return [*problems, *_pack_problems(reader, progress)]


def describe_checks(manifest: Manifest | None) -> list[str]:
    """Return sentences that describe the checks that the manifest does not allow."""
    if manifest is None:
        return ["without a manifest, only the invariants of packs were checked, as for files of other tools"]
    if not manifest.checksum:
        return ["the manifest has no checksum, because it was written by an earlier version"]
    return []


def _pack_problems(reader: PackReader, progress: Callable[[int, int], None] | None) -> Iterator[Problem]:
    totals = Totals()
    seen: set[str] = set()
    # Eight bytes per pack; a list of digests would take about a hundred.
    digests = np.zeros(len(reader), np.uint64)
    whole = True
    for pack_id in range(len(reader)):
        try:
            pack = reader[pack_id]
        except FormatError as error:
            whole = False
            # A shard that cannot be opened raises the same error for each of its packs.
            if str(error) not in seen:
                seen.add(str(error))
                yield Problem(error.what, error.where)
            continue
        if problem := pack.problem(reader.pack_size, max_weight=reader.max_weight):
            yield Problem(f"pack {pack_id:,} {problem}", reader.where(pack_id))
        # Batches are planned from the index's lengths, which no digest of a pack covers.
        first, last = int(reader.pack_offsets[pack_id]), int(reader.pack_offsets[pack_id + 1])
        if not np.array_equal(reader.sequence_lengths[first:last], pack.sequence_lengths):
            yield Problem(f"pack {pack_id:,} contains sequences of other lengths than the index", reader.where(pack_id))
        digests[pack_id] = pack_digest(pack)
        totals += Totals(1, pack.num_sequences, len(pack), int(np.count_nonzero(pack.loss_mask)), len(pack.media))
        if progress is not None:
            progress(pack_id + 1, len(reader))
    manifest = reader.manifest
    if manifest is None or not whole:
        return
    for name, counted in asdict(totals).items():
        claimed = getattr(manifest, name)
        if counted != claimed:
            yield Problem(f"the manifest has {name} {claimed:,}, but the packs have {counted:,}", reader.path)
    fingerprint = dataset_fingerprint([digests])
    # The manifest of a plan contains no fingerprint.
    known = manifest.fingerprint or KeptFingerprint.of(open_folder(reader.path), manifest).load()
    if known is not None and fingerprint != known:
        yield Problem(f"the manifest has fingerprint {known}, but the packs have {fingerprint}", reader.path)


def diff_datasets(a: str | PathLike[str], b: str | PathLike[str]) -> PackDifference | None:
    """Return the first difference between two datasets, or None; raise FormatError for damage in the packs read."""
    with closing(open_dataset(a)) as first, closing(open_dataset(b)) as second:
        return diff_readers(first, second)


def _fields(pack: Pack) -> dict[str, npt.NDArray[Any]]:
    rows = media_rows(pack)
    columns = {f"media.{name}": rows[name] for name in ("sequence", "start", "tokens", "kind", "xxh3")}
    return {name: getattr(pack, name) for name in FIELDS} | columns


def first_difference(values: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Return the index of the first difference, or the length of the shorter array if there is none."""
    count = min(values.shape[0], other.shape[0])
    differs = values[:count] != other[:count]
    return int(np.argmax(differs)) if differs.any() else count


def diff_readers(a: PackReader, b: PackReader) -> PackDifference | None:
    for pack_id, packs in enumerate(zip(a, b, strict=False)):
        first, second = map(_fields, packs)
        for name, one in first.items():
            other = second[name]
            at = first_difference(one, other)
            if at < min(one.shape[0], other.shape[0]):
                return PackDifference(pack_id, name, at, int(one[at]), int(other[at]))
            if one.shape[0] != other.shape[0]:
                return PackDifference(pack_id, f"{name}.length", None, one.shape[0], other.shape[0])
    return PackDifference(None, "num_packs", None, len(a), len(b)) if len(a) != len(b) else None
