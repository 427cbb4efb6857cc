"""The most sequences that a row of a dataset can have, known from the index before anything is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def most_sequences(
    name: str,
    lengths: npt.NDArray[Any],
    pack_offsets: npt.NDArray[Any],
    *,
    max_tokens_per_row: int,
    global_batch_size: int,
    repeats: bool = False,
) -> int:
    """Return a number of sequences that no row exceeds under a schedule.

    `as_packed` trains packs as they are. The others may put any sequences of a global batch together: as many of the
    shortest as a row holds, and no more than the packs of a batch have.

    Args:
        name: a key of `SCHEDULERS`.
        lengths: [sequences] integers above 0, model tokens of each sequence of the dataset after padding.
        pack_offsets: [packs + 1] integers, the bounds of its packs in `lengths`.
        global_batch_size: packs of a batch.
        repeats: a batch may have a pack more than once, as blends may.
    """
    by_pack = np.diff(pack_offsets)
    if name == "as_packed":
        return int(by_pack.max())
    counts = np.bincount(lengths)
    rest, fit = max_tokens_per_row, 0
    for length in np.flatnonzero(counts).tolist():
        taken = rest // length if repeats else min(int(counts[length]), rest // length)
        rest, fit = rest - taken * length, fit + taken
    largest = np.sort(by_pack)[-global_batch_size:]
    return min(fit, int(largest[-1]) * global_batch_size if repeats else int(largest.sum()))
