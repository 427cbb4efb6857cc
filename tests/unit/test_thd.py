from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ScheduleError
from harness.records import SequenceView
from harness.thd import (
    RowMedia,
    ThdBatch,
    build_thd_batch,
    context_parallel_indices,
    loss_weights,
    needed_spans,
    pad_row,
    padded_lengths,
    padding_multiple,
    rows_from_arrays,
    rows_from_model_tokens,
    shared_multiple,
    static_row,
    tokens_ahead,
    zero_loss_row,
)


def view(ids: list[int], mask: list[int]) -> SequenceView:
    return SequenceView(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))


TWO = [view([11, 12, 13, 14], [0, 1, 1, 0]), view([21, 22, 23], [1, 0, 0])]


# Two sequences of 8 and 12 tokens: images of 2 by 2 tokens in the first, and of 1 by 2 and 3 by 2 in the second.
MEDIA_BOUNDS = np.array([0, 8, 20], np.int32)
MEDIA = RowMedia(
    sequences=np.array([0, 1, 1]),
    starts=np.array([2, 1, 5]),
    tokens=np.array([4, 2, 6]),
    digests=np.arange(3, dtype=np.uint64),
    arrays={"image_grid_thw": np.array([[1, 4, 4], [1, 2, 4], [1, 6, 4]]), "pixels": np.arange(24).reshape(24, 1)},
)


def test_media_have_the_places_of_their_tokens_in_the_padded_row() -> None:
    assert MEDIA.places(MEDIA_BOUNDS).tolist() == [2, 3, 4, 5, 9, 10, 13, 14, 15, 16, 17, 18]


def test_positions_follow_the_rows_and_columns_of_images_and_the_text_after_continues_at_the_longer_side() -> None:
    position_ids = np.concatenate([np.arange(8), np.arange(12)])
    expected = [
        [0, 1, 2, 2, 2, 2, 4, 5, 0, 1, 1, 3, 4, 5, 5, 5, 5, 5, 5, 8],
        [0, 1, 2, 2, 3, 3, 4, 5, 0, 1, 1, 3, 4, 5, 5, 6, 6, 7, 7, 8],
        [0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 8],
    ]
    found = MEDIA.positions(position_ids, MEDIA_BOUNDS)
    assert found is not None
    assert found.tolist() == expected
    assert position_ids.tolist() == [*range(8), *range(12)]
    assert replace(MEDIA, arrays={"pixels": MEDIA.arrays["pixels"]}).positions(position_ids, MEDIA_BOUNDS) is None


@pytest.mark.parametrize(
    ("media", "pixels"), [([], []), ([1], [*range(8, 12)]), ([0, 2], [*range(8), *range(12, 24)]), ([0, 1, 2], None)]
)
def test_some_of_the_media_have_their_own_grids_and_parts(media: list[int], pixels: list[int] | None) -> None:
    arrays = MEDIA.arrays_of(np.array(media, np.int64))
    assert list(arrays) == ["image_grid_thw", "pixels"]
    assert arrays["image_grid_thw"].tolist() == MEDIA.arrays["image_grid_thw"][media].tolist()
    assert arrays["pixels"].ravel().tolist() == ([*range(24)] if pixels is None else pixels)
    assert all(array.flags.c_contiguous for array in arrays.values())


def test_tokens_labels_and_mask_are_shifted_inside_each_sequence() -> None:
    batch = build_thd_batch(TWO)
    assert batch.tokens.tolist() == [11, 12, 13, 21, 22]
    assert batch.labels.tolist() == [12, 13, 14, 22, 23]
    assert batch.loss_mask.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == batch.cu_seqlens_padded.tolist() == [0, 3, 5]
    assert batch.max_seqlen == 3
    assert not batch.padding_mask.any()
    assert (batch.num_sequences, batch.num_tokens, batch.num_trained_tokens, len(batch)) == (2, 5, 3, 5)


def test_every_sequence_is_padded_at_its_end() -> None:
    batch = build_thd_batch(TWO, pad_to_multiple=4)
    assert batch.tokens.tolist() == [11, 12, 13, 0, 21, 22, 0, 0]
    assert batch.labels.tolist() == [12, 13, 14, 0, 22, 23, 0, 0]
    assert batch.loss_mask.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.padding_mask.tolist() == [False, False, False, True, False, False, True, True]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.cu_seqlens_padded.tolist() == [0, 4, 8]
    assert batch.max_seqlen == 4
    assert (batch.num_tokens, len(batch)) == (5, 8)
    for made in (batch, build_thd_batch(TWO)):
        assert made.tokens.dtype == made.labels.dtype == made.position_ids.dtype == np.int64
        assert made.cu_seqlens.dtype == made.cu_seqlens_padded.dtype == np.int32
        assert (made.loss_mask.dtype, made.padding_mask.dtype, type(made.max_seqlen)) == (np.float32, np.bool_, int)


@settings(deadline=None, max_examples=200)
@given(
    sequences=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=2, max_size=12), min_size=1, max_size=8
    ),
    pad_to_multiple=st.integers(1, 9),
)
def test_a_row_is_its_sequences_built_alone(sequences: list[list[tuple[int, int]]], pad_to_multiple: int) -> None:
    views = [view([i for i, _ in pairs], [m for _, m in pairs]) for pairs in sequences]
    row = build_thd_batch(views, pad_to_multiple=pad_to_multiple)
    alone = [build_thd_batch([one], pad_to_multiple=pad_to_multiple) for one in views]
    for field in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
        assert getattr(row, field).tolist() == np.concatenate([getattr(one, field) for one in alone]).tolist()
    count = row.num_sequences
    assert np.diff(row.cu_seqlens[: count + 1]).tolist() == [len(pairs) - 1 for pairs in sequences]
    lengths = np.asarray([len(pairs) for pairs in sequences])
    assert np.diff(row.cu_seqlens_padded[: count + 1]).tolist() == padded_lengths(lengths, pad_to_multiple).tolist()
    assert row.max_seqlen == max(one.max_seqlen for one in alone)
    assert row.padding_mask.sum() == len(row) - row.num_tokens


def test_padded_lengths_round_the_model_view_up() -> None:
    assert padded_lengths(np.asarray([2, 5, 6, 9], dtype=np.int32), 4).tolist() == [4, 4, 8, 8]
    for multiple in (1, 4):
        found = padded_lengths(np.asarray([2, 5, 6], dtype=np.int32), multiple)
        assert (found.tolist(), found.dtype) == ([1, 4, 5] if multiple == 1 else [4, 4, 8], np.int64)
    assert padded_lengths([2, 5, 6]).tolist() == [1, 4, 5]


def test_sequences_that_make_no_row_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"sequence 1 of the row has 1 stored token"):
        build_thd_batch([TWO[0], view([5], [0])])
    with pytest.raises(ScheduleError, match="no sequences"):
        build_thd_batch([])
    with pytest.raises(ScheduleError, match="4 tokens, 4 loss_mask entries and sequences of 5 tokens"):
        rows_from_arrays(np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.uint8), [np.asarray([2, 3])])


@pytest.mark.parametrize(
    ("cp_size", "tp_size", "sequence_parallel", "multiple"),
    [(1, 4, True, 4), (2, 1, False, 4), (2, 3, True, 12), (4, 8, False, 8)],
)
def test_the_multiple_lets_every_rank_hold_equal_parts(
    cp_size: int, tp_size: int, sequence_parallel: bool, multiple: int
) -> None:
    assert padding_multiple(cp_size=cp_size, tp_size=tp_size, sequence_parallel=sequence_parallel) == multiple
    if cp_size > 1:
        assert multiple % (2 * cp_size) == 0
    if sequence_parallel:
        assert multiple // cp_size % tp_size == 0


@pytest.mark.parametrize(
    ("multiple", "ranks", "shared"), [(1, 1, 1), (3, 1, 3), (1, 2, 4), (4, 2, 8), (3, 2, 12), (2, 3, 6)]
)
def test_ranks_that_share_a_row_hold_two_equal_chunks_of_every_sequence(multiple: int, ranks: int, shared: int) -> None:
    assert shared_multiple(multiple, ranks) == shared


def test_without_parallelism_nothing_is_padded_and_rows_without_sequences_are_laid_out() -> None:
    assert padding_multiple() == padding_multiple(tp_size=4) == padding_multiple(sequence_parallel=True) == 1
    assert padding_multiple(cp_size=2) == 4
    assert len(zero_loss_row()) == len(build_thd_batch([view([1, 2], [1, 0])])) == 1
    ids, mask = np.arange(6, dtype=np.int32), np.ones(6, np.uint8)
    assert [len(row) for row in rows_from_arrays(ids, mask, [np.asarray([2, 4])])] == [4]
    labeled = {"tokens": ids, "labels": ids, "loss_mask": mask}
    assert [len(row) for row in rows_from_model_tokens([np.asarray([1, 4]), np.asarray([1])], **labeled)] == [5, 1]
    none = np.zeros(0, dtype=np.int64)
    rows = rows_from_arrays(none.astype(np.int32), none.astype(np.uint8), [none, none], pad_to_multiple=2)
    assert [(len(row), row.num_trained_tokens) for row in rows] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("pad_to_multiple", [1, 4])
def test_rows_laid_out_together_are_those_laid_out_alone(pad_to_multiple: int) -> None:
    numbers = np.random.default_rng(0)
    sequences = [
        [view(numbers.integers(1, 99, n).tolist(), numbers.integers(0, 2, n).tolist()) for n in row]
        for row in ([2, 9, 4], [], [5], [2, 2, 17, 3])
    ]
    together = rows_from_arrays(
        np.concatenate([one.input_ids for row in sequences for one in row]),
        np.concatenate([one.loss_mask for row in sequences for one in row]),
        [np.asarray([len(one) for one in row], dtype=np.int64) for row in sequences],
        pad_to_multiple=pad_to_multiple,
    )
    for made, row in zip(together, sequences, strict=True):
        alone = build_thd_batch(row, pad_to_multiple=pad_to_multiple) if row else zero_loss_row(pad_to_multiple)
        for field in fields(ThdBatch):
            one, other = getattr(made, field.name), getattr(alone, field.name)
            assert np.array_equal(one, other), field.name
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None), field.name
    lengths = [np.asarray([2, 2]), np.asarray([3, 1])]
    with pytest.raises(ScheduleError, match=r"sequence 1 of the row has 1 stored token\(s\)"):
        rows_from_arrays(np.zeros(8, np.int32), np.zeros(8, np.uint8), lengths)


@pytest.mark.parametrize("pad_to_multiple", [1, 4])
def test_positions_may_begin_anywhere_but_those_of_padding_count_from_0(pad_to_multiple: int) -> None:
    (row,) = rows_from_model_tokens(
        [np.asarray([3, 2])],
        tokens=np.asarray([11, 12, 13, 21, 22], dtype=np.int32),
        labels=np.asarray([12, 13, 14, 22, 23], dtype=np.int32),
        loss_mask=np.asarray([0.0, 0.5, 1.0, 1.0, 0.0]),
        position_ids=np.asarray([7, 8, 9, 5, 6], dtype=np.int32),
        pad_to_multiple=pad_to_multiple,
    )
    is_padded = pad_to_multiple == 4
    assert row.position_ids.tolist() == ([7, 8, 9, 3, 5, 6, 2, 3] if is_padded else [7, 8, 9, 5, 6])
    assert row.loss_mask.tolist() == ([0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0] if is_padded else [0, 0.5, 1, 1, 0])
    assert (row.position_ids.dtype, row.loss_mask.dtype, row.tokens.dtype) == (np.int64, np.float32, np.int64)
    assert row.sources is None


def test_a_row_of_zero_loss_is_padding_alone() -> None:
    row = zero_loss_row(4)
    assert row.tokens.tolist() == row.labels.tolist() == row.loss_mask.tolist() == [0, 0, 0, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 3]
    assert row.padding_mask.tolist() == [True] * 4
    assert (row.cu_seqlens.tolist(), row.cu_seqlens_padded.tolist()) == ([0, 1, 1], [0, 4, 4])


def test_a_row_of_a_fixed_size_has_the_bounds_of_the_most_sequences() -> None:
    row = build_thd_batch(TWO, pad_to_multiple=2)
    fixed = static_row(row, total=10, num_sequences=2)
    assert (fixed.cu_seqlens.tolist(), fixed.cu_seqlens_padded.tolist()) == ([0, 3, 5, 5, 5], [0, 4, 6, 10, 10])
    assert (fixed.max_seqlen, fixed.tokens.tolist()) == (10, [*row.tokens.tolist(), 0, 0, 0, 0])
    assert static_row(row, total=6, num_sequences=4).cu_seqlens_padded.tolist() == [0, 4, 6, 6, 6, 6, 6]
    with pytest.raises(ScheduleError, match="has 2 sequences, and its CUDA graph is for 1 at most"):
        static_row(row, total=10, num_sequences=1)


def test_context_parallel_ranks_hold_a_chunk_from_each_end_of_sequences_that_can_be_cut() -> None:
    # One sequence of 8 and one of 4 tokens, two ranks: chunks of 2 and of 1.
    assert context_parallel_indices(np.asarray([0, 8, 12]), cp_size=2, cp_rank=0).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_parallel_indices(np.asarray([0, 8, 12]), cp_size=2, cp_rank=1).tolist() == [2, 3, 4, 5, 9, 10]
    assert context_parallel_indices(np.asarray([0, 3]), cp_size=1, cp_rank=0).tolist() == [0, 1, 2]
    for cp_size in (1, 2):
        assert context_parallel_indices(np.array([0, 4], np.int32), cp_size=cp_size, cp_rank=0).dtype == np.int64
    with pytest.raises(ScheduleError, match=r"sequence 1 has 6 padded tokens, not a multiple of 2 \* cp_size = 4"):
        context_parallel_indices(np.asarray([0, 8, 14]), cp_size=2, cp_rank=0)
    for rank in (2, -1):
        with pytest.raises(ScheduleError, match=f"rank {rank} does not exist among 2"):
            context_parallel_indices(np.asarray([0, 8]), cp_size=2, cp_rank=rank)


def test_a_row_padded_to_a_length_gains_one_sequence_of_padding_alone() -> None:
    row = replace(build_thd_batch(TWO, pad_to_multiple=2), sources=np.asarray([3, 1]))
    padded = pad_row(row, 10)
    assert len(row) == 6
    assert padded.sources is row.sources
    for name in ("tokens", "labels", "position_ids", "loss_mask", "padding_mask", "cu_seqlens", "cu_seqlens_padded"):
        assert getattr(padded, name).dtype == getattr(row, name).dtype
    assert padded.tokens.tolist() == [*row.tokens.tolist(), 0, 0, 0, 0]
    assert padded.labels[6:].tolist() == [0, 0, 0, 0]
    assert padded.loss_mask.tolist() == [*row.loss_mask.tolist(), 0, 0, 0, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    assert padded.cu_seqlens.tolist() == [0, 3, 5, 5]
    assert padded.cu_seqlens_padded.tolist() == [0, 4, 6, 10]
    assert padded.padding_mask.tolist() == [False, False, False, True, False, False, True, True, True, True]
    assert (padded.max_seqlen, padded.num_tokens, padded.num_trained_tokens) == (4, 5, row.num_trained_tokens)
    assert pad_row(padded, 10) is padded
    # Kernels size their buffers by the longest entry of cu_seqlens_padded.
    assert [pad_row(row, total).max_seqlen for total in (9, 11, 20)] == [4, 5, 14]
    with pytest.raises(ScheduleError, match="10 tokens and cannot be padded to 9"):
        pad_row(padded, 9)


def test_a_row_with_padding_only_at_its_end_ends_with_an_empty_sequence() -> None:
    chat = view([1] * 699, [1] * 698 + [0])
    row = build_thd_batch([chat], pad_to_multiple=8)
    assert (row.cu_seqlens.tolist(), row.cu_seqlens_padded.tolist()) == ([0, 698, 698], [0, 704, 704])
    assert (len(row), row.num_sequences, row.max_seqlen) == (704, 1, 704)
    # Padding between sequences is seen without it, and a row without padding has none to see.
    assert build_thd_batch([chat, chat], pad_to_multiple=8).cu_seqlens.tolist() == [0, 698, 1396]
    assert build_thd_batch([chat]).cu_seqlens.tolist() == [0, 698]
    full = pad_row(build_thd_batch([chat]), 704)
    assert (full.cu_seqlens.tolist(), full.cu_seqlens_padded.tolist()) == ([0, 698, 698, 698], [0, 698, 704, 704])
    assert context_parallel_indices(row.cu_seqlens_padded, cp_size=2, cp_rank=0).tolist() == [
        *range(176),
        *range(528, 704),
    ]


def shows_its_padding(row: ThdBatch) -> bool:
    """Transformer Engine's own comparison, up to 2.17.1."""
    return not np.array_equal(row.cu_seqlens_padded[:-1], row.cu_seqlens[:-1])


@settings(deadline=None, max_examples=300)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    cp_size=st.integers(1, 4),
    tp_size=st.integers(1, 4),
    sequence_parallel=st.booleans(),
    further=st.integers(0, 5),
)
def test_the_padding_of_every_row_is_visible_and_cut_by_whole_chunks(
    lengths: list[int], cp_size: int, tp_size: int, sequence_parallel: bool, further: int
) -> None:
    multiple = padding_multiple(cp_size=cp_size, tp_size=tp_size, sequence_parallel=sequence_parallel)
    built = build_thd_batch([view([1] * n, [1] * (n - 1) + [0]) for n in lengths], pad_to_multiple=multiple)
    total = len(built) + further * multiple
    fixed = [static_row(one, total=total, num_sequences=6) for one in (built, zero_loss_row(multiple))]
    assert len({row.cu_seqlens.shape for row in fixed}) == 1
    for row in (built, pad_row(built, total), zero_loss_row(multiple), *fixed):
        real, padded = np.diff(row.cu_seqlens), np.diff(row.cu_seqlens_padded)
        assert shows_its_padding(row) == (row.num_tokens < len(row))
        assert (real >= 0).all()
        assert (padded >= real).all()
        assert padded.max() <= row.max_seqlen
        # Kernels of scans number sequences by their chunks, of which an empty one before the padding has none.
        assert padded.tolist() == [*padded[padded > 0], *padded[padded == 0]]
        held = [context_parallel_indices(row.cu_seqlens_padded, cp_size=cp_size, cp_rank=r) for r in range(cp_size)]
        assert sorted(np.concatenate(held).tolist()) == list(range(len(row)))
        assert tokens_ahead(row, 1).tokens.shape == row.tokens.shape


def test_what_lies_ahead_of_a_token_is_of_its_own_sequence_wherever_padding_is() -> None:
    sequences = [
        SequenceView(np.array(ids, np.int32), np.array(mask, np.uint8))
        for ids, mask in (([5, 6, 7, 8], [0, 1, 1, 0]), ([30, 31], [1, 0]), ([9, 10, 11, 12], [1, 1, 0, 0]))
    ]
    ahead = tokens_ahead(build_thd_batch(sequences, pad_to_multiple=4), 1)
    assert ahead.tokens.tolist() == [6, 7, 0, 0, 0, 0, 0, 0, 10, 11, 0, 0]
    assert ahead.labels.tolist() == [7, 8, 0, 0, 0, 0, 0, 0, 11, 12, 0, 0]
    assert ahead.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    real = [True, True, False, False, False, False, False, False, True, True, False, False]
    assert (~ahead.padding_mask).tolist() == real
    further = tokens_ahead(build_thd_batch(sequences), 2)
    assert further.labels.tolist() == [8, 0, 0, 0, 12, 0, 0]
    assert (~further.padding_mask).tolist() == [True, False, False, False, True, False, False]
    # A row of nobody's tokens, and its padding, have nothing ahead.
    assert tokens_ahead(pad_row(zero_loss_row(2), 8), 1).padding_mask.all()


def test_a_conversation_s_weight_is_shared_by_its_trained_tokens_and_one_that_trains_nothing_has_none() -> None:
    three = [*TWO, view([31, 32, 33], [0, 0, 0])]
    row = build_thd_batch(three, pad_to_multiple=4)
    weights, divisor = loss_weights(row, "conversation")
    assert (weights.tolist(), divisor) == ([0, 0.5, 0.5, 0, 1, 0, 0, 0, 0, 0, 0, 0], 2)
    assert (weights.dtype, loss_weights(pad_row(row, 20), "conversation")[1]) == (np.float32, 2)
    assert (loss_weights(row)[0].tolist(), loss_weights(row)[1]) == (row.loss_mask.tolist(), 3)
    assert loss_weights(zero_loss_row(4), "conversation")[1] == loss_weights(zero_loss_row(4))[1] == 0
    # Weights are on any scale.
    for scale in (100, 0.25):
        again, same = loss_weights(replace(row, loss_mask=row.loss_mask * scale), "conversation")
        assert (again.tolist(), same) == (weights.tolist(), 2)
    row = replace(build_thd_batch(TWO), loss_mask=np.full(2**17 + 1, 255, dtype=np.float32))
    assert loss_weights(row)[1] == 255 * (2**17 + 1) > 2**24


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_spans_of_a_rank_are_its_own_stored_tokens_and_those_of_its_labels(cp_size: int, ahead: int) -> None:
    stored = np.array([2, 9, 12, 40])
    multiples = np.array([1, 1, 4, 1]) * padding_multiple(cp_size=cp_size)
    for rank in range(cp_size):
        sizes = np.full(4, cp_size)
        found = needed_spans(stored, multiples, cp_size=sizes, cp_rank=np.full(4, rank), ahead=ahead)
        assert found.shape == (4, 2, 2)
        for length, multiple, spans in zip(stored.tolist(), multiples.tolist(), found.tolist(), strict=True):
            bounds = [0, int(padded_lengths(np.array(length), multiple))]
            own = context_parallel_indices(bounds, cp_size=cp_size, cp_rank=rank).tolist()
            needed = {token + further for token in own for further in range(ahead + 1)}
            assert {token for first, end in spans for token in range(first, end)} == needed & {*range(length)}
