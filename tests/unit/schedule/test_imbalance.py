from __future__ import annotations

import numpy as np
import pytest

from harness.records import Schedule
from harness.schedule import SequenceCost, measure_imbalance


def test_ratios_compare_the_busiest_rank_with_the_mean() -> None:
    # Microbatch 0: rank 0 trains 4 + 2 tokens, rank 1 trains 2; microbatch 1: rank 0 nothing, rank 1 trains 4.
    placed = Schedule(2, np.asarray([0, 1, 2, 3]), np.asarray([0, 2, 3, 3, 4]))
    found = measure_imbalance(
        placed, np.asarray([4, 2, 2, 4]), max_tokens_per_row=6, cost=SequenceCost(linear=0.0, quadratic=1.0)
    )
    assert found.rank_tokens.tolist() == [6, 6]
    assert found.rank_tokens.dtype == np.int64
    assert found.rank_cost.tolist() == [20.0, 20.0]
    assert found.token_ratio == 1.0
    assert found.cost_ratio == 1.0
    # 20 in the first microbatch and 16 in the second, where 20 would do.
    assert found.sync_ratio == pytest.approx(36 / 20)
    assert found.fill == pytest.approx(12 / 24)
    assert found.num_microbatches == 2


def test_a_rank_without_work_shows() -> None:
    found = measure_imbalance(
        Schedule(2, np.asarray([0]), np.asarray([0, 1, 1])), np.asarray([5]), max_tokens_per_row=5
    )
    assert found.cost_ratio == 2.0
    assert found.rank_tokens.tolist() == [5, 0]


def test_one_rank_is_always_even() -> None:
    found = measure_imbalance(
        Schedule(1, np.asarray([0, 1]), np.asarray([0, 1, 2])), np.asarray([5, 1]), max_tokens_per_row=5
    )
    assert (found.token_ratio, found.cost_ratio, found.sync_ratio) == (1.0, 1.0, 1.0)
