from __future__ import annotations

import numpy as np
import pytest

from harness.errors import ScheduleError
from harness.records import Schedule
from harness.schedule import schedule


def place(lengths: list[int], offsets: list[int] | None, *, dp_size: int, max_tokens_per_rank: int = 8) -> Schedule:
    pack_offsets = None if offsets is None else np.asarray(offsets, dtype=np.int64)
    return schedule(
        "as_packed", lengths, dp_size=dp_size, max_tokens_per_rank=max_tokens_per_rank, pack_offsets=pack_offsets
    )


def test_one_pack_is_one_row() -> None:
    placed = place([1, 2, 3, 4, 5, 6], [0, 1, 3, 4, 6], dp_size=2, max_tokens_per_rank=16)
    assert placed.row(0, 0).tolist() == [0]
    assert placed.row(0, 1).tolist() == [1, 2]
    assert placed.row(1, 0).tolist() == [3]
    assert placed.row(1, 1).tolist() == [4, 5]
    assert placed.num_microbatches == 2
    # Missing rows at the end are empty, and a pack may fill its row.
    placed = place([1, 2, 8], [0, 1, 2, 3], dp_size=2)
    assert [placed.row(m, d).tolist() for m in range(2) for d in range(2)] == [[0], [1], [2], []]


@pytest.mark.parametrize("offsets", [None, [0], [0, 1], [1, 2], [0, 0, 2], [0, 2, 1, 2], [0, 3]])
def test_offsets_that_are_unknown_or_do_not_cut_the_lengths_are_refused(offsets: list[int] | None) -> None:
    with pytest.raises(ScheduleError, match="do not cut 2 sequences" if offsets else "stored packs"):
        place([1, 2], offsets, dp_size=1)
