"""One stored pack is one row, in the order of the batch."""

from __future__ import annotations

import numpy as np

from harness.errors import ScheduleError
from harness.records import Schedule
from harness.schedule.batch import GlobalBatch, row_offsets


def place_as_packed(batch: GlobalBatch) -> Schedule:
    """Place each stored pack in a row of its own; missing rows at the end are empty.

    Raises:
        ScheduleError: the packs are unknown, or one has more tokens than a row holds.
    """
    if batch.pack_offsets is None:
        raise ScheduleError(
            "as_packed requires the bounds of the stored packs",
            where="schedule.name",
            fix="pass pack_offsets, or use another schedule for a source without packs",
        )
    counts = np.diff(batch.pack_offsets)
    tokens = np.add.reduceat(batch.lengths, batch.pack_offsets[:-1])
    if tokens.max() > batch.max_tokens_per_row:
        at = int(np.argmax(tokens))
        raise ScheduleError(
            f"pack {at} of the batch takes {tokens[at]:,} tokens after padding its sequences, "
            f"more than the {batch.max_tokens_per_row:,} of a row (max_tokens_per_rank * cp_size)",
            where="schedule.max_tokens_per_rank",
            fix="raise max_tokens_per_rank, prepare smaller packs, or choose the dp_balanced schedule",
        )
    return Schedule(
        batch.dp_size,
        np.arange(batch.lengths.shape[0], dtype=np.int64),
        row_offsets(counts.tolist(), batch.rows_per_group),
    )
