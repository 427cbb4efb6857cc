"""Digests of packs, files and datasets: the same content has the same digest in every format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from harness.records import Int32Array, Pack, UInt8Array

UInt64Array = npt.NDArray[np.uint64]

# Typed loosely, because numpy arrays are buffers only to type checkers of Python 3.12 and later.
_xxh3: Callable[..., int] = xxhash.xxh3_64_intdigest


def content_digest(input_ids: Int32Array, loss_mask: UInt8Array, seq_start_id: Int32Array) -> int:
    """Digest of a pack's content: xxh3_64 of each array's little-endian bytes, each seeded with the one before.

    In this order: input_ids int32, loss_mask uint8, seq_start_id int32; the first with seed 0. The arrays must be
    contiguous. Measured: half the time of one digest fed in pieces.
    """
    return _xxh3(seq_start_id, _xxh3(loss_mask, _xxh3(input_ids)))


def sequence_digest(input_ids: Int32Array, loss_mask: UInt8Array) -> int:
    """Digest of one sequence, of contiguous arrays: xxh3_64 of its loss_mask, seeded with that of its input_ids."""
    return _xxh3(loss_mask, _xxh3(input_ids))


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
