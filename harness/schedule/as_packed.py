"""One stored pack is one row, in the order of the batch."""

from __future__ import annotations

import numpy as np

from harness.errors import ScheduleError
from harness.records import Schedule
from harness.schedule.batch import GlobalBatch, row_offsets


def place_as_packed(batch: GlobalBatch) -> Schedule:
    """Place each stored pack in a row of its own, then empty rows; raise ScheduleError if the packs are unknown."""
    if batch.pack_offsets is None:
        fix = "pass pack_offsets, or use another schedule for a source without packs"
        raise ScheduleError("as_packed requires the bounds of the stored packs", where="schedule.name", fix=fix)
    counts = np.diff(batch.pack_offsets)
    return Schedule(
        batch.dp_size,
        np.arange(batch.lengths.shape[0], dtype=np.int64),
        row_offsets(counts.tolist(), batch.rows_per_group),
    )
