"""A pack keeps its dtypes and reports what breaks its invariants."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from harness.errors import FormatError, ScheduleError
from harness.records import Medium, Pack, Schedule


def pack(**changes) -> Pack:
    fields = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [1, 1, 0, 1, 0], "seq_start_id": [0, 3]}
    return Pack(**{**fields, **changes})


def test_a_pack_has_the_dtypes_of_the_contract_whatever_it_is_made_from():
    made = Pack(
        input_ids=np.array([5, 6], dtype=np.int64),
        loss_mask=np.array([1.0, 0.0]),
        seq_start_id=np.array([0], np.uint16),
    )
    assert (made.input_ids.dtype, made.loss_mask.dtype, made.seq_start_id.dtype) == (np.int32, np.uint8, np.int32)
    assert made == Pack([5, 6], [1, 0], [0])
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("input_ids", [2**31], "input_ids holds values from 2147483648"),
        ("loss_mask", [300], "loss_mask holds values from 300"),
        ("loss_mask", [0.5], "float64 values, expected whole numbers"),
        ("input_ids", [[1, 2]], "2 dimensions"),
        ("input_ids", ["a"], "expected whole numbers"),
    ],
)
def test_values_that_would_change_are_refused(field, values, message):
    with pytest.raises(FormatError, match=message):
        pack(**{field: values})


def test_a_pack_falls_into_its_sequences():
    made = pack()
    assert len(made) == 5
    assert made.num_sequences == 2
    assert made.sequence_lengths.tolist() == [3, 2]
    first, second = made.sequences()
    assert (first.input_ids.tolist(), first.loss_mask.tolist()) == ([5, 6, 7], [1, 1, 0])
    assert (second.input_ids.tolist(), second.loss_mask.tolist()) == ([8, 9], [1, 0])
    assert made.problem(5) is None
    assert pack().problem(4) == "has 5 tokens, more than pack_size 4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [], "loss_mask": [], "seq_start_id": []}, "has no tokens"),
        ({"loss_mask": [1, 1, 0, 1]}, "has 5 tokens but 4 loss_mask entries"),
        ({"loss_mask": [1, 1, 2, 1, 0]}, "has loss_mask 2 at position 2, expected 0 or 1"),
        ({"input_ids": [5, -6, 7, 8, 9]}, "negative token id -6 at position 1"),
        ({"seq_start_id": []}, "no seq_start_id entries"),
        ({"seq_start_id": [1, 3]}, "seq_start_id[0] == 1, expected 0"),
        ({"seq_start_id": [0, 3, 3]}, "seq_start_id[2] == 3, not above seq_start_id[1] == 3"),
        ({"seq_start_id": [0, 2**31 - 1, -(2**31)]}, "seq_start_id[2] == -2147483648"),
        ({"seq_start_id": [0, 5]}, "start at 5, at or after its 5 tokens"),
    ],
)
def test_a_broken_invariant_is_reported_with_its_numbers(changes, message):
    assert message in (pack(**changes).problem() or "")


def test_a_schedule_gives_rows_by_microbatch_and_rank():
    schedule = Schedule(2, np.array([4, 0, 1, 3, 2]), np.array([0, 1, 3, 4, 5]))
    assert schedule.num_microbatches == 2
    assert [schedule.row(m, d).tolist() for m in range(2) for d in range(2)] == [[4], [0, 1], [3], [2]]
    with pytest.raises(IndexError):
        schedule.row(2, 0)
    with pytest.raises(IndexError):
        schedule.row(0, -1)
    with pytest.raises(ScheduleError, match="3 rows cannot be divided evenly among 2"):
        Schedule(2, np.array([0]), np.array([0, 1, 1, 1]))


INSIDE = "not after the one before, inside one sequence and before its last token"


@pytest.mark.parametrize(
    ("mask", "start", "tokens", "problem"),
    [
        ([1, 1, 0, 0, 0, 0], 3, 2, None),  # the mask before a sequence is of the sequence before it
        ([0, 0, 0, 0, 1, 0], 3, 1, None),
        ([1, 0, 0, 0, 0, 0], 1, 1, "trains placeholder tokens of medium 0 in tokens 1 to 2"),
        ([0, 0, 0, 1, 0, 0], 3, 2, "trains placeholder tokens of medium 0 in tokens 3 to 5"),
        ([0, 0, 0, 0, 0, 0], 2, 2, f"has medium 0 in tokens 2 to 4, {INSIDE}"),
        # The model does not read the last token of a sequence.
        ([0, 0, 0, 0, 0, 0], 2, 1, f"has medium 0 in tokens 2 to 3, {INSIDE}"),
        ([0, 0, 0, 0, 0, 0], 4, 0, "has medium 0 of kind 'image' and 0 tokens"),
    ],
)
def test_media_are_untrained_placeholders_inside_one_sequence(mask, start, tokens, problem) -> None:
    assert Pack([1, 2, 3, 4, 5, 6], mask, [0, 3], (Medium("image", start, tokens, b""),)).problem() == problem
