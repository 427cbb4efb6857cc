from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.records import Schedule
from harness.schedule import schedule


def rows(placed: Schedule) -> list[list[int]]:
    return [
        placed.row(microbatch, rank).tolist()
        for microbatch in range(placed.num_microbatches)
        for rank in range(placed.dp_size)
    ]


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


def test_microbatches_are_a_multiple_of_the_group_and_rows_have_the_tokens_of_their_ranks() -> None:
    placed = schedule("dp_balanced", [2] * 10, dp_size=2, max_tokens_per_rank=4, group_size=4)
    assert placed.num_microbatches == 4
    # Five rows of two become eight: the last three rows give a sequence away each.
    assert rows(placed) == [[0, 1], [2, 3], [4], [6], [8], [9], [7], [5]]

    placed = schedule("dp_balanced", [8, 8, 8, 8], dp_size=1, cp_size=2, max_tokens_per_rank=8)
    assert rows(placed) == [[0, 1], [2, 3]]


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
    sizes = {"dp_size": dp_size, "max_tokens_per_rank": max_tokens_per_rank, "group_size": group_size}
    expected = rows_by_the_book(lengths, max_tokens_per_rank, dp_size * group_size)
    assert rows(schedule("dp_balanced", lengths, **sizes)) == expected
