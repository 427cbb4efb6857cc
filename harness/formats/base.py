"""The interface and registry of formats. `reader` and `writer` contain all code that the formats share."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError
from harness.formats.index import IndexPart
from harness.formats.media import media_name
from harness.records import Int32Array, Int64Array, Pack, UInt8Array
from harness.storage import Folder, Place, natural_key
from harness.storage.arrays import NpyStream
from harness.storage.bucket import Entry
from harness.storage.files import OutputFile

FIELDS = ("input_ids", "loss_mask", "seq_start_id")

# Each names a module of `layouts` that defines `FORMAT`; to add a format, add a module and its name. Files without a
# manifest are tried in this order; parquet is last because pyarrow takes longest to import.
FORMATS = ("npy", "memmap", "binidx", "jsonl", "virtual", "parquet")

File = TypeVar("File", OutputFile, NpyStream)


class PackPart(NamedTuple):
    """The tokens needed from a pack of `num_tokens`: `spans`, int64 [n, 2], the start and end of each span."""

    num_tokens: int
    spans: Int64Array

    def segments(self, size: int) -> Int64Array:
        """Return the indices of the segments of `size` tokens that overlap a span, int64, ascending."""
        counts = np.zeros(self.num_tokens // size + 2, np.int64)
        np.add.at(counts, self.spans[:, 0] // size, 1)
        np.add.at(counts, (self.spans[:, 1] - 1) // size + 1, -1)
        return np.flatnonzero(np.cumsum(counts))


class ShardReader(ABC):
    """The open files of one shard, used by one process only.

    `entry` holds the local copies if the files are cached, and keeps them from eviction; None for other files.
    """

    num_packs: int
    entry: Entry | None = None

    @abstractmethod
    def read_row(self, row: int) -> Pack:
        """Read the pack of a row, which must be within bounds, into newly allocated arrays.

        Raises FormatError for unreadable data; the caller compares checksums.
        """

    def read(self, rows: Sequence[int], parts: Sequence[PackPart] = ()) -> list[tuple[Pack, int | None]]:
        """Read packs in the order of `rows`: at least `parts` of them, all of each if none are given.

        Each has -1 for the ids that were not read, and then the digest that all its ids should have; None if whole.
        """
        return [(self.read_row(row), None) for row in rows]

    def contents(self) -> IndexPart:
        """Gather index entries, for files without a manifest; by default from every pack."""
        lengths = [self.read_row(row).sequence_lengths for row in range(self.num_packs)]
        counts = np.array([len(one) for one in lengths], np.int64)
        return IndexPart(counts, np.concatenate([np.zeros(0, np.int32), *lengths]))

    @abstractmethod
    def where(self, row: int) -> str:
        """Return the file and position of a row, for error messages."""

    def media_place(self, place: Place, _shard: int) -> Place:
        """Return the file with the media of the shard at `place`; a plan returns the file in its store."""
        place = place if self.entry is None else self.entry.folder / place.name
        return place.parent / media_name(place.name)

    def close(self) -> None:  # noqa: B027
        """Close the files. Memory maps need no call, because they are freed with the reader's arrays."""


class ShardWriter(ABC, Generic[File]):
    """The files of one shard, which exist under their names only once it is finished.

    `files` creates them in the order of `names`; if one cannot be created, the earlier ones are discarded.
    """

    def __init__(self, names: Sequence[str], files: Iterable[File]) -> None:
        self._names = list(names)
        self._files: list[File] = []
        try:
            self._files.extend(files)
        except BaseException:
            self.abort()
            raise

    @abstractmethod
    def append(self, pack: Pack) -> None:
        """Add a pack that satisfies the invariants."""

    def finish(self, _metadata: Mapping[str, bytes], /) -> list[str]:
        """Finish the files and return their names in the folder.

        The metadata is nonempty only for a single-file dataset, which stores it in the file if the format allows it.
        """
        for file in self._files:
            file.finish()
        return self._names

    def abort(self) -> None:
        for file in self._files:
            file.abort()


def start_arrays(
    folder: Folder, name: str, arrays: Mapping[str, npt.DTypeLike], widths: Mapping[str, int], *, zeros: Sequence[str]
) -> Iterator[NpyStream]:
    """Start the arrays of a shard that is a folder; those of `widths` have rows, and those of `zeros` begin with 0."""
    for array, dtype in arrays.items():
        stream = NpyStream(folder.create_file(f"{name}/{array}"), np.dtype(dtype), width=widths.get(array))
        if array in zeros:
            stream.write(np.zeros(1, dtype))
        yield stream


@dataclass(frozen=True)
class Format:
    """A storage format.

    Attributes:
        name: its key in the registry.
        shard_template: path of a shard inside a dataset folder, to be formatted with its number.
        suffixes: of files that `open_dataset` takes.
        files_per_shard: file descriptors that an open shard holds.
        write_shard: start the shard of a name in a folder, given the tokens that no pack exceeds, and the packs of a
            Parquet row group, which other tools decode at once; other formats have none.
        open_shard: open a shard at its file, or at the common prefix of its files' names: a Path, or with `in_buckets`
            any Place. The number, if known, is the pack size, which bounds how much memory damaged files can claim. The
            format of plans also takes `folder`, that of the dataset.
        find_bare: shards (in natural order) of a file, folder or prefix without a manifest; empty if it is not this
            format's layout.
        is_own: whether this package wrote the shard at a place that has the name of one; other tools use such names.
        shard_files: endings of the files of a shard after its path.
        has_checksums: whether shards carry checksums of their own content.
        single_file_suffix: a destination with this suffix is written as one file without a folder; "" if never.
        in_buckets: whether shards are read from object storage by ranges, and go there as they are written; if not,
            they are read from local copies, and uploaded once they are whole.
    """

    name: str
    write_shard: Callable[[Folder, str, int, int], ShardWriter[Any]]
    open_shard: Callable[..., ShardReader]
    find_bare: Callable[[Path], list[Path]]
    is_own: Callable[[Any], bool]
    shard_template: str = "shard_{:06d}"
    packs_per_shard: int = 16384
    suffixes: tuple[str, ...] = ()
    files_per_shard: int = 1
    shard_files: tuple[str, ...] = ("",)
    has_checksums: bool = False
    single_file_suffix: str = ""
    in_buckets: bool = False

    def shard_name(self, number: int) -> str:
        return self.shard_template.format(number)

    @property
    def shard_pattern(self) -> str:
        """Regular expression for names in a dataset folder that look like (part of) a shard."""
        return rf".*({'|'.join(map(re.escape, self.suffixes))})" if self.suffixes else r"shard_\d+"

    def find_shards(self, names: Iterable[str]) -> dict[int, str]:
        """Return the shards among the names of a dataset folder, by number."""
        shards: dict[int, str] = {}
        start, _, rest = self.shard_template.partition("{")
        pattern = re.compile(f"({re.escape(start)}([0-9]{{5,18}}){re.escape(rest.partition('}')[2])})(.*)", re.DOTALL)
        for name in names:
            match = pattern.fullmatch(name)
            if match and match[3] in self.shard_files and self.shard_name(int(match[2])) == match[1]:
                shards[int(match[2])] = match[1]
        return shards


def load_format(name: str) -> Format:
    """Return the format with this name; raise ConfigError if it is unknown."""
    name = "npy" if name == "legacy_npy_pickle" else name  # its name in other tools
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}", where="format", fix=f"use one of {', '.join(FORMATS)}")
    format: Format = importlib.import_module(f"harness.formats.layouts.{name}").FORMAT
    return format


def find_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file, or the files of the folder in natural order, with one of these suffixes."""
    found = list(path.iterdir()) if path.is_dir() else [path]
    found = [entry for entry in found if entry.name.endswith(suffixes) and entry.is_file()]
    return sorted(found, key=lambda entry: natural_key(entry.name))


def find_folders(path: Path, names: Sequence[str]) -> list[Path]:
    """Return the folder, or its subfolders in natural order, that contain files with all of these names."""

    def has_all(folder: Path) -> bool:
        return all((folder / name).is_file() for name in names)

    if has_all(path) or not path.is_dir():
        return [path] if has_all(path) else []
    return sorted(filter(has_all, path.iterdir()), key=lambda entry: natural_key(entry.name))


def make_pack(input_ids: Int32Array, loss_mask: UInt8Array, seq_start_id: Int32Array) -> Pack:
    """Build a pack without conversions, which take half the time of a mapped read; dtypes must match already."""
    pack: Pack = object.__new__(Pack)
    object.__setattr__(pack, "input_ids", input_ids)
    object.__setattr__(pack, "loss_mask", loss_mask)
    object.__setattr__(pack, "seq_start_id", seq_start_id)
    object.__setattr__(pack, "media", ())
    return pack
