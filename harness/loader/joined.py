"""Several datasets read as one, in whatever formats they are."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from harness.errors import ConfigError
from harness.formats import PackReader
from harness.records import Int32Array, Int64Array, Pack


class JoinedReader:
    """The packs of the first dataset, then those of the second, and so on.

    Picklable as its readers are. Its index is a copy of theirs: 8 bytes a pack and 4 a sequence, in every process that
    is not forked.

    Attributes:
        path: of all, for messages.
        pack_size: the largest.
        readers: as given.

    Raises:
        ConfigError: they are of different pack sizes or tokenizers, or one holds nothing.
    """

    def __init__(self, readers: Sequence[PackReader]) -> None:
        _check_alike(readers)
        self.readers = tuple(readers)
        self.path = ", ".join(reader.path for reader in readers)
        self.pack_size = max(reader.pack_size for reader in readers)
        self._starts = [0, *np.cumsum([len(reader) for reader in readers]).tolist()]
        self._join_index()

    @property
    def pack_offsets(self) -> Int64Array:
        """int64 [packs + 1], as of `PackReader`."""
        return self._pack_offsets

    @property
    def sequence_lengths(self) -> Int32Array:
        """int32 [sequences], as of `PackReader`."""
        return self._sequence_lengths

    @property
    def fingerprint(self) -> str:
        """Digest of the datasets' fingerprints, in order: equal for any formats."""
        return xxhash.xxh3_128_hexdigest(" ".join(reader.fingerprint for reader in self.readers).encode())

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, pack_id: int) -> tuple[PackReader, int]:
        """The dataset that holds a pack, and the pack's number in it."""
        if not 0 <= pack_id < len(self):
            raise IndexError(f"pack {pack_id} of {len(self)} in {self.path}")
        source = bisect.bisect_right(self._starts, pack_id) - 1
        return self.readers[source], pack_id - self._starts[source]

    def where(self, pack_id: int) -> str:
        """File and position in it of a pack, for error messages."""
        reader, inside = self.place(pack_id)
        return reader.where(inside)

    def __getitem__(self, index: int) -> Pack:
        return self.read([index])[0]

    def read(self, indices: list[int]) -> list[Pack]:
        """Packs in the order asked for; each dataset is asked once.

        Raises:
            IndexError: past the end.
            FormatError: as the reader of the dataset does.
        """
        places = [self.place(index) for index in indices]
        found: dict[int, Pack] = {}
        for reader in self.readers:
            asked = [number for number, (owner, _) in enumerate(places) if owner is reader]
            if asked:
                found.update(zip(asked, reader.read([places[number][1] for number in asked]), strict=True))
        return [found[number] for number in range(len(indices))]

    def close(self) -> None:
        """Close all files; reading opens them again."""
        for reader in self.readers:
            reader.close()

    def _join_index(self) -> None:
        counts = np.cumsum([0, *(reader.sequence_lengths.shape[0] for reader in self.readers)])
        self._sequence_lengths: Int32Array = np.concatenate([reader.sequence_lengths for reader in self.readers])
        self._pack_offsets: Int64Array = np.concatenate(
            [np.zeros(1, dtype=np.int64)]
            + [reader.pack_offsets[1:] + before for reader, before in zip(self.readers, counts[:-1], strict=True)]
        )
        for array in (self._sequence_lengths, self._pack_offsets):
            array.flags.writeable = False

    def __getstate__(self) -> dict[str, Any]:
        # Joined again from the mapped files, faster than it is sent.
        return {name: value for name, value in self.__dict__.items() if name not in _INDEX}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._join_index()


_INDEX = ("_sequence_lengths", "_pack_offsets")


def _check_alike(readers: Sequence[PackReader]) -> None:
    if not readers:
        raise ConfigError("there is no source", where="data.blend", fix="name at least one")
    first: dict[str, tuple[str, PackReader]] = {}
    for reader in readers:
        if len(reader) == 0:
            raise ConfigError("the source has no packs", where=f"data.blend, {reader.path}", fix="leave it out")
        if reader.manifest is None:  # bare files do not say
            continue
        provenance = reader.manifest.provenance
        known = {
            "pack_size": (str(reader.pack_size), "prepare all sources with one data.pack_size"),
            "tokenizer": (provenance.tokenizer_hash, "prepare all sources with one tokenizer"),
        }
        for name, (value, fix) in known.items():
            if not value:
                continue
            before, owner = first.setdefault(name, (value, reader))
            if before != value:
                raise ConfigError(
                    f"sources of a blend must have one {name}: {owner.path} has {before}, {reader.path} has {value}",
                    where=f"data.blend, {reader.path}",
                    fix=fix,
                )
