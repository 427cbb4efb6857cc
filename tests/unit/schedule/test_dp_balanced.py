from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ScheduleError
from harness.records import Schedule
from harness.schedule import schedule


def rows(placed: Schedule) -> list[list[int]]:
    return [
        placed.row(microbatch, rank).tolist()
        for microbatch in range(placed.num_microbatches)
        for rank in range(placed.dp_size)
    ]


def place(lengths: list[int], *, dp_size: int, max_tokens_per_rank: int, group_size: int = 1) -> list[list[int]]:
    return rows(
        schedule(
            "dp_balanced", lengths, dp_size=dp_size, max_tokens_per_rank=max_tokens_per_rank, group_size=group_size
        )
    )


def rows_by_the_book(lengths: list[int], max_tokens_per_rank: int, multiple: int) -> list[list[int]]:
    """The rule as one states it, a list at a time."""
    filled: list[list[int]] = [[]]
    for index, length in enumerate(lengths):
        if sum(lengths[i] for i in filled[-1]) + length > max_tokens_per_rank:
            filled.append([])
        filled[-1].append(index)
    while len(filled) % multiple:
        splittable = [row for row in filled if len(row) > 1]
        filled.append([splittable[-1].pop()] if splittable else [])
    return filled


def test_rows_are_filled_in_order_up_to_capacity() -> None:
    assert place([4, 4, 3, 5, 8, 1], dp_size=1, max_tokens_per_rank=8) == [[0, 1], [2, 3], [4], [5]]


def test_equal_lengths_fill_rows_exactly() -> None:
    assert place([4] * 8, dp_size=2, max_tokens_per_rank=8) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_last_sequence_of_the_last_row_gets_a_row_of_its_own() -> None:
    # Three rows on two ranks: row 2 holds 4, 5 and gives 5 away.
    assert place([4, 4, 4, 4, 4, 4], dp_size=2, max_tokens_per_rank=8) == [[0, 1], [2, 3], [4], [5]]


def test_rows_with_one_sequence_are_skipped_when_splitting() -> None:
    assert place([3, 3, 2, 8, 8], dp_size=4, max_tokens_per_rank=8) == [[0, 1], [3], [4], [2]]


def test_the_first_row_gives_sequences_away_too() -> None:
    assert place([1, 1, 1, 1], dp_size=4, max_tokens_per_rank=8) == [[0], [3], [2], [1]]


def test_fewer_sequences_than_ranks_leave_empty_rows_at_the_end() -> None:
    assert place([5, 5], dp_size=4, max_tokens_per_rank=8) == [[0], [1], [], []]


def test_one_sequence_on_three_ranks() -> None:
    assert place([8], dp_size=3, max_tokens_per_rank=8) == [[0], [], []]


def test_the_number_of_microbatches_is_a_multiple_of_the_group() -> None:
    placed = schedule("dp_balanced", [2] * 10, dp_size=2, max_tokens_per_rank=4, group_size=4)
    assert placed.num_microbatches == 4
    # Five rows of two become eight: the last three rows give a sequence away each.
    assert rows(placed) == [[0, 1], [2, 3], [4], [6], [8], [9], [7], [5]]


def test_a_row_of_context_parallel_ranks_holds_as_many_times_the_tokens() -> None:
    placed = schedule("dp_balanced", [8, 8, 8, 8], dp_size=1, cp_size=2, max_tokens_per_rank=8)
    assert rows(placed) == [[0, 1], [2, 3]]


def test_a_sequence_over_capacity_is_refused_by_its_index_and_length() -> None:
    with pytest.raises(ScheduleError, match=r"sequence 2 has 9,001 model tokens.*8,192") as caught:
        schedule("dp_balanced", [5, 8192, 9001], dp_size=2, max_tokens_per_rank=8192)
    assert "9,001" in caught.value.fix


def test_a_first_sequence_over_capacity_is_refused_and_leaves_no_empty_row() -> None:
    with pytest.raises(ScheduleError, match="sequence 0 has 10 model tokens"):
        place([10, 1], dp_size=1, max_tokens_per_rank=8)


def test_no_sequences_and_empty_sequences_are_refused() -> None:
    with pytest.raises(ScheduleError, match="no sequences"):
        place([], dp_size=1, max_tokens_per_rank=8)
    with pytest.raises(ScheduleError, match="sequence 1 has 0 model tokens"):
        place([3, 0], dp_size=1, max_tokens_per_rank=8)


@settings(deadline=None, max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60),
    dp_size=st.integers(1, 9),
    group_size=st.integers(1, 3),
    max_tokens_per_rank=st.integers(12, 40),
)
def test_the_placement_is_the_stated_rule(
    lengths: list[int], dp_size: int, group_size: int, max_tokens_per_rank: int
) -> None:
    assert place(
        lengths, dp_size=dp_size, max_tokens_per_rank=max_tokens_per_rank, group_size=group_size
    ) == rows_by_the_book(lengths, max_tokens_per_rank, dp_size * group_size)


def test_8192_sequences_are_placed_the_same_every_time() -> None:
    lengths = np.random.default_rng(0).integers(1, 8192, 8192)
    first = schedule("dp_balanced", lengths, dp_size=64, max_tokens_per_rank=8192)
    again = schedule("dp_balanced", lengths.tolist(), dp_size=64, max_tokens_per_rank=8192)
    assert np.array_equal(first.order, again.order)
    assert np.array_equal(first.row_offsets, again.row_offsets)
