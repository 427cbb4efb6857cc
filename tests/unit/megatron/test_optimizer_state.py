"""The optimizer's state on disk: a range of a weight's elements as boxes of the weight."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness.megatron.state.optimizer import boxes


@pytest.mark.parametrize("shape", [(12,), (4, 5), (1, 7), (5, 1), (3, 2, 4), (2, 1, 3, 2)])
def test_boxes_of_any_range_hold_exactly_its_elements_in_order(shape) -> None:
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(weight.numel() + 1), 2):
        found = []
        for offset, size in boxes(shape, start, stop):
            place = tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))
            found += weight[place].flatten().tolist()
        assert found == list(range(start, stop))


def test_a_range_is_few_boxes_and_whole_rows_are_one() -> None:
    assert list(boxes((4, 10), 10, 30)) == [((1, 0), (2, 10))]
    assert list(boxes((4, 10), 12, 17)) == [((1, 2), (1, 5))]
    assert max(len(list(boxes((6, 5, 4), start, stop))) for start in range(120) for stop in range(start, 121)) == 5
