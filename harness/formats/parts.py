"""What a writer remembers of each finished shard: kept on disk, so that memory is bounded and a write can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from harness.formats.digest import content_digest
from harness.formats.index import IndexPart
from harness.formats.manifest import Shard
from harness.records import Int32Array, Pack
from harness.storage import StoredFile, file_digest, write_atomically

PART_SUFFIX = ".part"


@dataclass(frozen=True)
class Totals:
    """Counts over packs."""

    num_packs: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.num_packs + other.num_packs,
            self.num_sequences + other.num_sequences,
            self.num_tokens + other.num_tokens,
            self.num_trained_tokens + other.num_trained_tokens,
        )


class PartBuilder:
    """Collects the index entries of one shard as packs are appended."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._lengths: list[Int32Array] = []
        self._digests: list[int] = []
        self._num_sequences = 0
        self._num_tokens = 0
        self._num_trained = 0

    def append(self, pack: Pack) -> None:
        starts = np.ascontiguousarray(pack.seq_start_id)
        # A fifth of what np.diff with `append` takes, once a pack.
        lengths = np.empty_like(starts)
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[-1] = len(pack) - starts[-1]
        self._counts.append(lengths.shape[0])
        self._lengths.append(lengths)
        ids, mask = np.ascontiguousarray(pack.input_ids), np.ascontiguousarray(pack.loss_mask)
        self._digests.append(content_digest(ids, mask, starts))
        self._num_sequences += lengths.shape[0]
        self._num_tokens += len(pack)
        self._num_trained += int(np.count_nonzero(pack.loss_mask))

    def __len__(self) -> int:
        return len(self._counts)

    def totals(self) -> Totals:
        return Totals(len(self._counts), self._num_sequences, self._num_tokens, self._num_trained)

    def build(self) -> IndexPart:
        return IndexPart(
            np.array(self._counts, np.int32),
            np.concatenate(self._lengths).astype(np.int32, copy=False),
            np.array(self._digests, np.uint64),
        )


@dataclass(frozen=True)
class FinishedShard:
    """A shard whose files have their names."""

    shard: Shard
    totals: Totals


def stored_files(folder: Path, paths: list[Path]) -> tuple[StoredFile, ...]:
    """Size and hash of files, with paths relative to the dataset's folder."""
    return tuple(
        StoredFile(path.relative_to(folder).as_posix(), path.stat().st_size, file_digest(path)) for path in paths
    )


def save_part(path: Path, finished: FinishedShard, part: IndexPart) -> None:
    """Write a part: a line of JSON, then the three arrays."""
    body = part.sequence_counts.tobytes() + part.sequence_lengths.tobytes() + part.checksums.tobytes()
    head = {**asdict(finished), "body_xxh3": xxhash.xxh3_64_hexdigest(body)}
    write_atomically(path, json.dumps(head).encode() + b"\n" + body)


def load_part(path: Path) -> tuple[FinishedShard, IndexPart] | None:
    """Read a part, or None where it is missing or not whole."""
    try:
        with path.open("rb") as file:
            head: dict[str, Any] = json.loads(file.readline())
            body = file.read()
        if xxhash.xxh3_64_hexdigest(body) != head["body_xxh3"]:
            return None
        totals = Totals(**head["totals"])
        shard = Shard(
            head["shard"]["path"],
            head["shard"]["num_packs"],
            tuple(StoredFile(**stored) for stored in head["shard"]["files"]),
        )
        ends = [4 * totals.num_packs, 4 * (totals.num_packs + totals.num_sequences)]
        part = IndexPart(
            np.frombuffer(body[: ends[0]], np.int32),
            np.frombuffer(body[ends[0] : ends[1]], np.int32),
            np.frombuffer(body[ends[1] :], np.uint64),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return FinishedShard(shard, totals), part


def is_whole(folder: Path, shard: Shard) -> bool:
    """Whether a shard's files are there with their sizes and hashes."""
    for stored in shard.files:
        path = folder / stored.path
        try:
            if path.stat().st_size != stored.num_bytes or file_digest(path) != stored.xxh3:
                return False
        except OSError:
            return False
    return True


def pack_index_bytes(part: IndexPart) -> bytes:
    """A part as bytes for the metadata of a dataset's only file; `unpack_index_bytes` is the way back."""
    head = np.array([part.sequence_counts.shape[0], part.sequence_lengths.shape[0]], np.int64)
    return b"".join(a.tobytes() for a in (head, part.sequence_counts, part.sequence_lengths, part.checksums))


def unpack_index_bytes(data: bytes) -> IndexPart:
    """Raises ValueError where the bytes are not those of `pack_index_bytes`."""
    num_packs, num_sequences = (int(value) for value in np.frombuffer(data[:16], np.int64))
    ends = np.cumsum([16, 4 * num_packs, 4 * num_sequences, 8 * num_packs])
    if min(num_packs, num_sequences) < 0 or ends[-1] != len(data):
        raise ValueError(f"{len(data)} bytes for {num_packs} packs of {num_sequences} sequences")
    return IndexPart(
        np.frombuffer(data[ends[0] : ends[1]], np.int32),
        np.frombuffer(data[ends[1] : ends[2]], np.int32),
        np.frombuffer(data[ends[2] : ends[3]], np.uint64),
    )


def settings_of(values: Mapping[str, object]) -> bytes:
    """What a writer that goes on must share with the one that was interrupted, as comparable bytes."""
    return json.dumps(values, sort_keys=True).encode()
