"""Digests of packs, files and datasets: the same content has the same digest in every format."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from harness.records import Int32Array, Pack, UInt8Array

UInt64Array = npt.NDArray[np.uint64]

_LENGTHS = struct.Struct("<qq")
_READ_BYTES = 1 << 20


def content_digest(input_ids: Int32Array, loss_mask: UInt8Array, seq_start_id: Int32Array) -> int:
    """xxh3_64 of a pack's canonical content.

    The content is the numbers of tokens and of sequences (int64 each), then input_ids int32, loss_mask uint8 and
    seq_start_id int32, all little-endian. The arrays must be contiguous.
    """
    digest = xxhash.xxh3_64(_LENGTHS.pack(input_ids.shape[0], seq_start_id.shape[0]))
    digest.update(input_ids.data)
    digest.update(loss_mask.data)
    digest.update(seq_start_id.data)
    return int(digest.intdigest())


def pack_digest(pack: Pack) -> int:
    """`content_digest` of a pack whose arrays may be strided views."""
    return content_digest(
        np.ascontiguousarray(pack.input_ids),
        np.ascontiguousarray(pack.loss_mask),
        np.ascontiguousarray(pack.seq_start_id),
    )


def dataset_fingerprint(digests: Iterable[UInt64Array]) -> str:
    """xxh3_128 (hexadecimal) over the per-pack digests in dataset order, given in any number of pieces."""
    total = xxhash.xxh3_128()
    for piece in digests:
        total.update(np.ascontiguousarray(piece, dtype="<u8").data)
    return str(total.hexdigest())


def file_digest(path: Path) -> str:
    """xxh3_64 (hexadecimal) of a file's bytes."""
    total = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            total.update(block)
    return str(total.hexdigest())
