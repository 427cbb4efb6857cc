"""Find the sources of a preparation, on a disk, in object storage or on the hub, and the schema of their records."""

from __future__ import annotations

import errno
import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.errors import ConfigError, PrepError
from harness.paths import explain_path, is_run, is_there, near_paths
from harness.prep.chat import NUM_DETECTION_RECORDS, RecordReader, detect_schema, record_of_row
from harness.prep.chat.values import json_or
from harness.prep.sources import hub
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.hub import SPLITS_FILE, STATE_FILE, choose_split, data_files, split_of
from harness.prep.sources.reading import (
    JSON,
    SUFFIXES,
    TEXT_SUFFIXES,
    SourceChunk,
    SourceFiles,
    SourceShard,
    columns_of,
    cut_shards,
    for_each_file,
    is_compressed,
    read_chunks,
    suffix_of,
)
from harness.prep.sources.text import COMPRESSED, SEPARATORS
from harness.storage import ObjectPath, Place, is_uri, natural_key, stamp_of
from harness.storage.files import Stamp
from harness.storage.inputs import list_objects, match_objects, open_stream

_UNREAD_SUFFIXES = (".xz", ".zip", ".7z", ".lz4")
_MAX_STATE_BYTES = 16 << 20

Show = Callable[[str], None]


@dataclass
class PreparedSource:
    """One source of a preparation; `name` is the title of its row in the report, empty for one row per file."""

    config: SourceConfig
    found: SourceFiles
    epochs: float = 1.0
    name: str = ""
    reader: RecordReader = field(default_factory=RecordReader)

    def chunks(self, limit: int) -> Iterator[SourceChunk]:
        """Yield the records, at most `limit` (0 for no limit) and at most as many as the settings allow."""
        most = min(filter(None, (limit, self.config.limit)), default=0)
        return read_chunks(self.found.files, limit=most, reader=self.reader)

    def shards(self, shard_bytes: int) -> Iterator[SourceShard]:
        return cut_shards(self.found.files, shard_bytes=shard_bytes, limit=self.config.limit, reader=self.reader)


def find_sources(source: SourceConfig, show: Show) -> list[PreparedSource]:
    """Find the files of every source like `find_files`; raise PrepError if a file belongs to two sources."""
    sources = [PreparedSource(config, find_files(config, show=show)) for config in source.each()]
    for one, mixed in zip(sources, source.mix, strict=bool(source.mix)):
        one.epochs = mixed.epochs
        words = [mixed.path, mixed.subset, mixed.split, "" if mixed.epochs == 1 else f"({mixed.epochs:g} epochs)"]
        one.name = " ".join(filter(None, words))
    places = [file for one in sources for file in one.found.files]
    files = Counter(os.path.abspath(file) if isinstance(file, Path) else str(file) for file in places)  # noqa: PTH100
    if source.mix and (twice := [file for file, count in files.items() if count > 1]):
        fix = "remove it from one of them; use epochs to repeat a source"
        raise PrepError("the file belongs to two sources of source.mix", where=twice[0], fix=fix)
    return sources


def list_files(path: str) -> list[Place]:
    """Return the chat files that `path` selects, as in `find_files`, in natural order (`part-2` before `part-10`)."""
    return list(find_files(SourceConfig(path=path)).files)


def find_files(source: SourceConfig, *, show: Show = lambda line: None) -> SourceFiles:
    """Find the files of a source, and download those of a dataset on the hub.

    Raises PrepError if there are no files, a file's compression is not supported, or the selection is ambiguous,
    ConfigError if a setting would not be used, and FormatError if object storage refuses the request.
    """
    if not source.path:
        return SourceFiles((), ())
    path = str(source.path)
    name = hub.parse_name(path)
    if name is not None:
        found = hub.fetch(name, split=source.split, subset=source.subset, show=show)
    elif source.subset:
        fix = "omit it; use a folder or glob to select files"
        raise ConfigError("only datasets of the hub have subsets", where="source.subset", fix=fix)
    else:
        found = _find_objects(path, source) if is_uri(path) else _find_local(path, source)
    if not found.files:
        what = "there are no chat files"
        fix = f"specify a file, a glob or a folder with files that end in {' '.join(SUFFIXES)}"
        fix += f"; text may be compressed ({' '.join(COMPRESSED)})"
        if name is None and not is_uri(path) and not glob.has_magic(path) and not is_there(Path(path)):
            what = "the file or folder does not exist"
            fix = near_paths(Path(path)) or "check the path and the working folder"
        raise PrepError(what, where=path, fix=fix)
    if source.split and not found.facts:
        fix = "omit it: the path already selects the files"
        raise ConfigError(f"{source.split!r} would not be used", where="source.split", fix=fix)
    for file in found.files:
        suffix = PurePosixPath(str(file)).suffix.lower()
        inner = suffix_of(file) if is_compressed(file) else ""
        if suffix in _UNREAD_SUFFIXES or inner not in (*TEXT_SUFFIXES, ""):
            what, fix = "this kind of compressed file is not supported", "decompress it first"
            raise PrepError(what, where=str(file), fix=fix)
    if found.skipped:
        show(f"{len(found.skipped):,} other files of the source are ignored:")
        show("  " + ", ".join(found.skipped[:5]) + (", ..." if len(found.skipped) > 5 else ""))
    return found


def _find_local(path: str, source: SourceConfig) -> SourceFiles:
    place = Path(path).expanduser()
    if place.is_dir():
        if is_run(place) and (explained := explain_path(place, expected="chats")):
            raise PrepError(explained[0], where=path, fix=explained[1])
        return _choose(place, _names_below(place), source, lambda name: stamp_of(place / name))
    if place.is_file():
        files = [place]
    else:
        found = glob.glob(str(place), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        files = sorted((Path(name) for name in found if Path(name).is_file()), key=lambda one: natural_key(str(one)))
    return SourceFiles(tuple(files), tuple(map(stamp_of, files)))


def _names_below(folder: Path) -> list[str]:
    """Return the names of all files below a folder; raise PrepError if a folder inside it cannot be listed."""

    def refuse(error: OSError) -> None:
        if error.errno == errno.ENOENT or Path(error.filename).name.startswith((".", "_", "lost+found")):
            return  # it contains no data, or is gone
        fix = "check its permissions, or select files with a glob"
        raise PrepError(f"the folder cannot be listed: {error.strerror}", where=str(error.filename), fix=fix) from error

    files = (Path(above) / name for above, _, names in os.walk(folder, onerror=refuse) for name in names)
    return [file.relative_to(folder).as_posix() for file in files if file.is_file()]


def _find_objects(path: str, source: SourceConfig) -> SourceFiles:
    folder = ObjectPath.parse(path)
    if glob.has_magic(folder.key):
        matching = sorted(match_objects(folder).items(), key=lambda item: natural_key(str(item[0])))
        return SourceFiles(tuple(place for place, _ in matching), tuple(stamp for _, stamp in matching))
    stamps = list_objects(folder)
    if not stamps:
        return SourceFiles((folder,), (stamp_of(folder),))
    return _choose(folder, list(stamps), source, stamps.__getitem__)


def _choose(root: Place, names: Sequence[str], source: SourceConfig, stamp: Callable[[str], Stamp]) -> SourceFiles:
    """Choose the chat files of a folder, given the names of all of its files."""
    split = source.split
    for name in sorted(names):
        if PurePosixPath(name).name == SPLITS_FILE:
            above = PurePosixPath(name).parent
            inside = [PurePosixPath(other).relative_to(above) for other in names if _is_below(other, above)]
            splits = sorted({parts.parts[0] for parts in inside if len(parts.parts) > 1})
            if split not in splits:
                what = f"the folder contains the splits {', '.join(splits)} of a dataset"
                fix = "set source.split, or specify the folder of one split: test data must not be trained on"
                raise PrepError(what, where=str(root / str(above)) if above.name else str(root), fix=fix)
            names = [other for other in names if not _is_below(other, above) or _is_below(other, above / split)]
            return replace(_choose(root, names, replace(source, split=""), stamp), facts={"split": split})
    data = _without_caches(root, names, data_files(names, (*SUFFIXES, *COMPRESSED, *_UNREAD_SUFFIXES)))
    unsure = [name for name in data if suffix_of(Path(name)) in (JSON, *SEPARATORS)]
    others = {name for name in unsure if not holds_chats(root / name, source)}
    # A folder with only CSV files is refused with the names of their columns.
    tables = [name for name in data if suffix_of(Path(name)) in SEPARATORS]
    data = [name for name in data if name not in others] or tables
    facts = {}
    named = {one for name in data if (one := split_of(name)) is not None}
    if split:
        data, _ = choose_split(data, split, where=str(root))
        facts = {"split": split}
    elif "train" in named and len(named) > 1:
        explained = explain_path(root, expected="chats") if isinstance(root, Path) else None
        what = f"the folder contains files of the splits {', '.join(sorted(named))}"
        what, fix = explained or (what, "set source.split=train; a glob reads every file that it matches")
        raise PrepError(what, where=str(root), fix=fix)
    skipped = tuple(str(root / name) for name in sorted(set(names) - set(data)))
    return SourceFiles(tuple(root / name for name in data), tuple(map(stamp, data)), skipped, facts)


def _is_below(name: str, folder: PurePosixPath) -> bool:
    return folder in PurePosixPath(name).parents


def _without_caches(root: Place, names: Iterable[str], data: list[str]) -> list[str]:
    """Leave out files that `datasets` cached next to a saved dataset, whose state lists the dataset's own files."""
    for name in names:
        if PurePosixPath(name).name != STATE_FILE:
            continue
        above = PurePosixPath(name).parent
        with open_stream(root / name) as stream:
            text = stream.read(_MAX_STATE_BYTES)
        try:
            own = {str(above / entry["filename"]) for entry in json.loads(text)["_data_files"]}
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # a file of another tool
        missing = sorted(own - set(names))
        if missing:
            what = f"the saved dataset lacks {missing[0]}, which its {STATE_FILE} lists"
            raise PrepError(what, where=str(root), fix="copy the whole folder again")
        data = [one for one in data if PurePosixPath(one).parent != above or one in own or not one.endswith(".arrow")]
    return data


def _reader(source: SourceConfig) -> RecordReader:
    return RecordReader(source.schema, source.columns, source.ignore_fields, source.drop_media, source.tool_calls)


def find_schema(files: Iterable[Place], source: SourceConfig) -> tuple[RecordReader, list[str]]:
    """Return the parser for the records of all files, and the names of the fields that it does not read, in order."""
    reader = _reader(source)
    found: dict[str, str] = {}
    unused: dict[str, None] = {}
    for place, schema, records, names in for_each_file(lambda file: _sample(file, reader), files):
        if schema:
            found.setdefault(schema, place)
        if len(found) > 1:
            (one, one_place), (other, other_place) = found.items()
            what = f"the files use two schemas, {one} and {other}"
            fix = "prepare the files of each schema separately, or convert some of them"
            raise PrepError(what, where=f"{one_place}\n         {other_place}", fix=fix)
        mine = replace(reader, schema=schema)
        for record in records:
            unused |= dict.fromkeys(sorted(mine.unused_keys(record)))
        unused |= dict.fromkeys(unread_columns(names, mine))
    return replace(reader, schema=next(iter(found), source.schema)), list(unused)


def unread_columns(names: list[str], reader: RecordReader) -> list[str]:
    """Return the names of a table's columns that are neither read nor ignored."""
    used = {*reader.columns_to_read(names), *reader.ignore_fields}
    return [name for name in names if name not in used]


def _sample(file: Place, reader: RecordReader) -> tuple[str, str, list[Any], list[str]]:
    """Return the place and schema of a file's first records, the records, and the column names if it is a table."""
    first = _first_chunk(file, reader, NUM_DETECTION_RECORDS)
    if first is None:
        return str(file), "", [], []
    records = [record for raw in first.records if (record := _decoded(raw)) is not None]
    names = columns_of(file)
    if records and names:
        # Columns that no schema reads are missing from the rows; add them, since messages list all fields.
        records[0] = {**dict.fromkeys(names), **records[0]}
    schema = reader.schema or detect_schema(
        records, columns=reader.columns, ignore_fields=reader.ignore_fields, where=str(file)
    )
    return f"{file}, {first.unit} {first.first}", schema, records, names


def holds_chats(file: Place, source: SourceConfig) -> bool:
    """Return True if a `.json` or `.csv` file in a folder seems to contain chats, by its first record's fields."""
    reader = _reader(source)
    try:
        first = _first_chunk(file, reader, 1)
    except PrepError as error:
        # A list that is broken in its first item is not skipped, nor is a file that cannot be read.
        return ", item 0" in error.where or error.__cause__ is not None
    # Blank lines may come before it.
    record = _decoded(first.records[-1]) if first is not None else None
    return isinstance(record, Mapping) and bool(reader.columns_to_read(map(str, record)))


def _first_chunk(file: Place, reader: RecordReader, limit: int) -> SourceChunk | None:
    return next((chunk for chunk in read_chunks([file], limit=limit, reader=reader) if chunk.records), None)


def _decoded(raw: Any) -> Any:
    """Return a decoded record; None if it is not JSON."""
    if isinstance(raw, bytes):
        return json_or(raw, None)
    return record_of_row(raw) if isinstance(raw, Mapping) else None
