"""What a format provides; `reader` and `writer` do everything that formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.formats.digest import UInt64Array
from harness.formats.manifest import Manifest
from harness.records import Int32Array, Int64Array, Pack, UInt8Array
from harness.storage import ObjectPath


@dataclass(frozen=True)
class ShardInfo:
    """A shard to open.

    Attributes:
        place: its file, or what its files' names start with.
        num_packs: packs it must hold.
        pack_size: tokens that none of its packs exceeds: what a file claims is held against it before memory is spent.
    """

    place: Path | ObjectPath
    num_packs: int
    pack_size: int

    @property
    def path(self) -> Path:
        """The place of a shard on a disk; formats that are not read in object storage get no other."""
        assert isinstance(self.place, Path)
        return self.place


# A frozen dataclass refuses `pack.input_ids = ...`; its slots take a value in half the time of `object.__setattr__`.
_set_input_ids: Callable[[Pack, Int32Array], None] = vars(Pack)["input_ids"].__set__
_set_loss_mask: Callable[[Pack, UInt8Array], None] = vars(Pack)["loss_mask"].__set__
_set_seq_start_id: Callable[[Pack, Int32Array], None] = vars(Pack)["seq_start_id"].__set__
_new_pack: Callable[[type[Pack]], Pack] = object.__new__


def make_pack(input_ids: Int32Array, loss_mask: UInt8Array, seq_start_id: Int32Array) -> Pack:
    """A pack of arrays that already have its dtypes. Skips its conversions: a fifth of what a mapped read takes."""
    pack = _new_pack(Pack)
    _set_input_ids(pack, input_ids)
    _set_loss_mask(pack, loss_mask)
    _set_seq_start_id(pack, seq_start_id)
    return pack


class ShardReader(Protocol):
    """The open files of one shard, used by one process only."""

    def read(self, rows: Sequence[int]) -> list[Pack]:
        """Packs at these rows, in this order, with arrays of their own. Rows are within bounds.

        Raises FormatError for what cannot be read; checksums are compared by the caller.
        """

    def read_row(self, row: int) -> Pack:
        """`read` of one row: lists of one cost a tenth of what a mapped pack takes."""

    def where(self, row: int) -> str:
        """Where a row is, for error messages: file and position in it."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class ShardOptions:
    """How to write a shard.

    Attributes:
        pack_size: tokens that no pack exceeds.
        rows_per_group: packs of one Parquet row group; other formats have no groups.
    """

    pack_size: int
    rows_per_group: int


class ShardFile(Protocol):
    """A file under way, as `AtomicFile` is one: nothing is there before `finish`."""

    path: Path

    def write(self, data: bytes | memoryview) -> int: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class ShardWriter(Protocol):
    """The files of one shard while they are written under temporary names."""

    def append(self, pack: Pack) -> None:
        """Add a pack that was found to keep the invariants."""

    def finish(self, metadata: Mapping[str, bytes], /) -> list[Path]:
        """Force the files to disk, give them their names and return these.

        `metadata` is not empty only for a dataset of a single file, which stores it inside if it can.
        """

    def abort(self) -> None:
        """Drop the temporary files."""


@dataclass(frozen=True, eq=False)
class BareShard:
    """A shard without a manifest, as found by looking at it.

    Attributes:
        path: its file, or what its files' names start with.
        sequence_counts: int64 [packs].
        sequence_lengths: int32 [sequences].
        pack_size: as stored, or None where the files do not say.
        checksums: uint64 [packs] where the file holds its own index.
        manifest: where the file holds its own.
        reader: the opened shard where finding out took reading it, else None.
    """

    path: Path | ObjectPath
    sequence_counts: Int64Array
    sequence_lengths: Int32Array
    pack_size: int | None = None
    checksums: UInt64Array | None = None
    manifest: Manifest | None = None
    reader: ShardReader | None = None


@dataclass(frozen=True)
class Format:
    """A storage format.

    Attributes:
        name: its key in the registry.
        shard_name: path of shard number i inside a dataset folder.
        suffixes: of files that `open_dataset` takes, for error messages.
        shard_pattern: regular expression for names in a dataset folder that look like (part of) a shard.
        packs_per_shard: default.
        files_per_shard: file descriptors that an open shard holds.
        write_shard: start a shard at a path.
        open_shard: open a shard.
        find_bare: shards (in natural order) of a file, folder or prefix without a manifest; empty if it is not this
            format's layout.
        inspect_bare: look at one of them.
        single_file_suffix: a destination that ends with it is written as one file without a folder; "" if never.
        write_remote: start a shard in object storage; None where the format cannot be written there.
        inspect_remote: as `inspect_bare`, in object storage; None where shards are copied to a disk to be read.
    """

    name: str
    shard_name: Callable[[int], str]
    suffixes: tuple[str, ...]
    shard_pattern: str
    packs_per_shard: int
    files_per_shard: int
    write_shard: Callable[[Path, ShardOptions], ShardWriter]
    open_shard: Callable[[ShardInfo], ShardReader]
    find_bare: Callable[[Path], list[Path]]
    inspect_bare: Callable[[Path], BareShard]
    single_file_suffix: str = ""
    write_remote: Callable[[ShardFile, ShardOptions], ShardWriter] | None = None
    inspect_remote: Callable[[ObjectPath], BareShard] | None = None
