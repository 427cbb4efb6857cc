"""Survey datasets without an intact manifest, and repair them if every shard is intact."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field

import numpy as np

from harness.errors import ConfigError, FormatError, Problem
from harness.formats.base import Format, load_format
from harness.formats.index import INDEX_NAMES, PACK_CHECKSUMS, IndexBuilder, IndexPart, write_index
from harness.formats.manifest import Manifest, Provenance, Shard, Totals
from harness.formats.media import INDEX, SHARDS
from harness.formats.opening import MARKER_NAME, find_gaps, find_traces
from harness.formats.reader import explained
from harness.records import HUNDREDTHS
from harness.storage import LocalFolder, Marker, natural_key, open_folder
from harness.storage.arrays import map_npy
from harness.storage.files import TEMPORARY_SUFFIX

_ROWS = 64
_LISTED = ("sequence_counts", "sequence_lengths", "checksums")
_UNKNOWN = "provenance (tokenizer, chat template, packer, seed, mask) is lost; prepare again if a run requires it"


@dataclass
class Survey:
    """The state of an incomplete dataset, after reading all of its packs, as far as it is whole.

    A repair is possible if there are no `problems`; `notes` list what a repair cannot restore or check.
    """

    folder: LocalFolder
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    format: str = ""
    pack_size: int = 0
    max_weight: int = 1
    shards: list[Shard] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    parts: list[IndexPart] = field(default_factory=list)

    def note(self, what: str, name: str = "", fix: str = "") -> Survey:
        self.problems.append(Problem(what, self.folder.where(name), fix))
        return self


def survey_folder(folder: LocalFolder, progress: Callable[[int, int], None] | None = None) -> Survey:
    """Read all shards of a folder without a whole manifest, and compare them with what is left of the index."""
    survey, names, traces = Survey(folder), folder.names(), find_traces(folder)
    if MARKER_NAME in names:
        survey.note("a write is in progress or was interrupted", MARKER_NAME)
    for name in [*names, *traces.index]:
        if name.endswith((TEMPORARY_SUFFIX, ".part")):
            survey.note("a file left by an interrupted write", name)
    if media := [name for name in [*names, *traces.index] if name == INDEX or re.fullmatch(SHARDS, name)]:
        what = "the dataset has media, whose manifest and index cannot be made again"
        return survey.note(what, media[0], "copy the dataset again, or prepare it again")
    if len(traces.shards) != 1:
        what = f"shards of {len(traces.shards)} formats were found ({', '.join(traces.shards)})"
        return survey.note(what if traces.shards else "no shards were found")
    [(survey.format, shards)] = traces.shards.items()
    format = load_format(survey.format)
    for number in find_gaps(shards):
        survey.note(f"shard {number:,} is missing, but shards up to {max(shards):,} exist", format.shard_name(number))
    known = {name for shard in shards.values() for name in (shard + end for end in format.shard_files)}
    for name in names:
        if name not in known and not name.startswith(".") and re.fullmatch(format.shard_pattern, name):
            survey.note("a file that looks like a shard, with another name", name)
    for count, number in enumerate(sorted(shards), start=1):
        _survey_shard(survey, format, shards[number])
        if progress is not None:
            progress(count, len(shards))
    _compare_index(survey, format)
    return survey


def _survey_shard(survey: Survey, format: Format, name: str) -> None:
    place, builder = survey.folder.place / name, IndexBuilder()
    try:
        with closing(format.open_shard(place, None)) as handle:
            for start in range(0, handle.num_packs, _ROWS):
                rows = range(start, min(start + _ROWS, handle.num_packs))
                for row, (pack, _) in zip(rows, handle.read(rows), strict=True):
                    if problem := pack.problem(max_weight=HUNDREDTHS):
                        raise FormatError(f"the pack {problem}", where=handle.where(row))
                    survey.pack_size = max(survey.pack_size, len(pack))
                    survey.max_weight = max(survey.max_weight, int(pack.loss_mask.max()))
                    builder.append(pack)
            if not len(builder):
                raise FormatError("the shard contains no packs")
            survey.pack_size = max(survey.pack_size, int(getattr(handle, "pack_size", 0)))
        paths = [name + end for end in format.shard_files]
        if place.is_dir():
            inside = [one.name for one in place.iterdir() if one.is_file() and not one.name.startswith(".")]
            paths = [f"{name}/{file}" for file in sorted(inside, key=natural_key)]
        files = survey.folder.describe(paths)
    except (OSError, MemoryError, FormatError) as error:
        known = explained(error, place)
        survey.problems.append(Problem(known.what, known.where))
    else:
        totals, part = builder.totals(), builder.build()
        survey.totals += totals
        survey.parts.append(part)
        survey.shards.append(Shard(name, totals.num_packs, files))


def _compare_index(survey: Survey, format: Format) -> None:
    """Compare the packs with the files of the index, which cover order and number of packs."""
    folder = survey.folder
    if not survey.parts:
        return
    counts, *others = (np.concatenate([getattr(part, name) for part in survey.parts]) for name in _LISTED)
    arrays = dict(zip(INDEX_NAMES, (np.append(0, np.cumsum(counts, dtype=np.int64)), *others), strict=True))
    if not folder.exists(PACK_CHECKSUMS) and format.has_checksums:
        last = survey.shards[-1].path
        survey.notes.append(f"without {PACK_CHECKSUMS}, nothing shows whether {last} was the last shard")
    elif not folder.exists(PACK_CHECKSUMS):
        survey.note(f"missing, and {format.name} shards contain no checksums to check them with", PACK_CHECKSUMS)
    for name, found in arrays.items():
        try:
            stored = map_npy(folder.place / name, found.dtype) if folder.exists(name) else found
            if stored.shape != found.shape:
                raise FormatError(f"the index has {len(stored):,} entries, but the shards have {len(found):,}")
            if (stored != found).any():
                raise FormatError(f"the index differs from the shards at entry {int(np.argmax(stored != found)):,}")
        except FormatError as error:
            survey.note(error.what, name)


def repair_manifest(
    path: str, *, progress: Callable[[int, int], None] | None = None
) -> tuple[Manifest | None, list[Problem], list[str]]:
    """Write index and manifest again from whole shards; nothing is written unless every pack is whole.

    A pack is whole if it has the checksum that the index has for it, or if its format keeps checksums in the shards.
    Returns the manifest, None if it was not written; the problems that prevent it; what could not be restored.

    Args:
        path: folder on a disk (ConfigError for others) of a dataset whose manifest is missing or damaged.
        progress: called with shards read and shards in total.
    """
    folder = open_folder(path)
    if not isinstance(folder, LocalFolder) or not folder.place.is_dir():
        what = "a manifest can be repaired only in a local folder"
        raise ConfigError(what, where=str(path), fix="download the dataset, repair it, and upload it again")
    survey = survey_folder(folder, progress)
    if survey.problems:
        return None, survey.problems, survey.notes
    marker = Marker(folder.place / MARKER_NAME)
    marker.acquire()
    try:
        fingerprint = write_index(folder, lambda: iter(survey.parts), survey.totals)
        notes, pack_size = [*survey.notes, _UNKNOWN], survey.pack_size
        if survey.format != "memmap":
            notes.append(f"{survey.format} does not store pack_size; it was set to the longest pack, {pack_size:,}")
        manifest = Manifest(
            format=survey.format,
            pack_size=pack_size,
            fingerprint=fingerprint,
            shards=tuple(survey.shards),
            index=folder.describe(INDEX_NAMES),
            # Without it, loss masks that contain weights would be refused.
            provenance=Provenance(mask={"weights": "hundredths"} if survey.max_weight > 1 else {}),
            **asdict(survey.totals),
        ).sealed()
        manifest.save(folder)
        return manifest, [], notes
    finally:
        marker.release(remove=True)
