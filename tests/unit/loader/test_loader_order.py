from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.loader import Blend, EpochOrder, LoaderConfig
from harness.loader.order import _hash, derive_seed, epochs_after, shuffle_in_windows, steps_per_epoch, steps_until


def config(size: int = 4, *, seed: int = 0, block: int = 2, window: int = 2, **other: bool) -> LoaderConfig:
    return LoaderConfig(seed=seed, global_batch_size=size, block_packs=block, window_blocks=window, **other)


def test_the_order_of_a_seed_and_epoch_never_changes() -> None:
    # Runs that are resumed years later, with another numpy, continue in this order.
    order = config(12, seed=1234, block=3, window=2)
    assert EpochOrder(order, 12, 0).packs(0, 12).tolist() == [1, 2, 10, 11, 0, 9, 7, 8, 3, 5, 6, 4]
    assert EpochOrder(order, 12, 1).packs(0, 12).tolist() == [5, 10, 3, 11, 4, 9, 2, 8, 7, 1, 0, 6]
    found = [shuffle_in_windows(8, 8, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert found == [[1, 0, 2, 7, 6, 5, 3, 4], [5, 2, 7, 0, 3, 1, 6, 4], [7, 0, 3, 1, 4, 6, 2, 5]]


@settings(deadline=None, max_examples=200)
@given(
    num_packs=st.integers(1, 200),
    block=st.integers(1, 20),
    window=st.integers(1, 12),
    seed=st.integers(-5, 2**64 - 1),
    epoch=st.integers(0, 5),
)
def test_an_epoch_holds_every_pack_once(num_packs: int, block: int, window: int, seed: int, epoch: int) -> None:
    order = EpochOrder(config(seed=seed, block=block, window=window), num_packs, epoch)
    assert sorted(order.packs(0, num_packs).tolist()) == list(range(num_packs))


@settings(deadline=None, max_examples=200)
@given(
    num_packs=st.integers(1, 120), cuts=st.lists(st.integers(1, 119), max_size=6), shuffle=st.booleans(), data=st.data()
)
def test_an_epoch_cut_anywhere_is_the_same_epoch(
    num_packs: int, cuts: list[int], shuffle: bool, data: st.DataObject
) -> None:
    order = config(block=data.draw(st.integers(1, 9)), window=data.draw(st.integers(1, 9)), shuffle=shuffle)
    whole = EpochOrder(order, num_packs, 3).packs(0, num_packs).tolist()
    bounds = sorted({0, num_packs, *(cut for cut in cuts if cut < num_packs)})
    pieces = list(itertools.pairwise(bounds))
    again = EpochOrder(order, num_packs, 3)
    read = {piece: again.packs(*piece).tolist() for piece in data.draw(st.permutations(pieces))}
    assert [pack for piece in pieces for pack in read[piece]] == whole


@settings(deadline=None, max_examples=100)
@given(count=st.integers(0, 60), window=st.integers(1, 20), seed=st.integers(-2, 2**64 - 1), epoch=st.integers(0, 3))
def test_a_shuffle_in_windows_moves_numbers_within_them_alone(count: int, window: int, seed: int, epoch: int) -> None:
    shuffled = shuffle_in_windows(count, window, seed, epoch)
    assert shuffled.dtype == np.int64
    assert (shuffled // window).tolist() == [number // window for number in range(count)]
    assert sorted(shuffled.tolist()) == list(range(count))


def test_epochs_seeds_and_sources_of_a_blend_differ_and_blocks_are_mixed() -> None:
    orders = [
        EpochOrder(config(seed=seed, block=4, window=8), 1000, epoch).packs(0, 1000).tolist()
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert len({tuple(order) for order in orders}) == 4
    # Neighbours stay neighbours about once in a window of 32, not in every block.
    steps = np.diff(np.asarray(orders[0]))
    assert np.count_nonzero(steps == 1) < 100
    assert derive_seed(7, 0) == 7
    assert len({derive_seed(seed, source) for seed in (7, 8) for source in range(5)}) == 10


def test_without_shuffle_packs_come_as_stored_and_an_order_knows_its_epoch() -> None:
    assert EpochOrder(config(4, shuffle=False), 10, 5).packs(8, 10).tolist() == [8, 9]
    assert [EpochOrder(config(shuffle=shuffle), 10, 3).epoch for shuffle in (True, False)] == [3, 3]


def test_the_ragged_end_is_kept_unless_dropped_and_steps_go_on_from_any_position() -> None:
    assert steps_per_epoch(config(4), 10) == 3
    assert steps_per_epoch(config(4, drop_last=True), 10) == 2
    kept = list(itertools.islice(Blend.of_one(10).steps(config(4), epoch=0, packs_consumed=0), 4))
    assert [(step.epoch, step.index, step.start, step.stop) for step in kept] == [
        (0, 0, 0, 4),
        (0, 1, 4, 8),
        (0, 2, 8, 10),
        (1, 0, 0, 4),
    ]
    dropped = list(itertools.islice(Blend.of_one(10).steps(config(4, drop_last=True), epoch=0, packs_consumed=0), 3))
    assert [(step.epoch, step.start, step.stop) for step in dropped] == [(0, 0, 4), (0, 4, 8), (1, 0, 4)]
    steps = itertools.islice(Blend.of_one(10).steps(config(4), epoch=2, packs_consumed=3), 3)
    assert [(step.epoch, step.index, step.start, step.stop) for step in steps] == [
        (2, 1, 3, 7),
        (2, 2, 7, 10),
        (3, 0, 0, 4),
    ]


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(1, 9),
    drop_last=st.booleans(),
    epochs=st.integers(1, 3),
    epoch=st.integers(0, 3),
    consumed=st.integers(0, 35),
)
def test_the_steps_to_the_end_of_epochs_are_those_that_the_order_yields(
    size: int, drop_last: bool, epochs: int, epoch: int, consumed: int
) -> None:
    made = config(size, drop_last=drop_last)
    batches = Blend.of_one(10).steps(made, epoch=epoch, packs_consumed=consumed)
    steps = len(list(itertools.takewhile(lambda batch: batch.epoch < epochs, batches)))
    assert steps_until(made, 10, epochs, epoch=epoch, packs_consumed=consumed) == steps


def test_steps_in_epochs_count_the_ragged_batch_as_what_it_holds() -> None:
    assert epochs_after(config(4), 10, 1, epoch=0, packs_consumed=0) == 0.4
    assert epochs_after(config(4), 10, 3, epoch=0, packs_consumed=0) == 1
    assert epochs_after(config(4), 10, 4, epoch=0, packs_consumed=0) == 1.4
    assert epochs_after(config(4), 10, 1, epoch=2, packs_consumed=3) == 2.7
    assert epochs_after(config(4), 10, 2, epoch=2, packs_consumed=3) == 3
    assert epochs_after(config(4), 4, 3, epoch=0, packs_consumed=0) == 3
    assert epochs_after(config(4), 10, 3, epoch=0, packs_consumed=25) == 2


def test_a_dataset_that_never_fills_a_dropped_batch_and_settings_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 packs cannot fill a global batch of 4"):
        next(Blend.of_one(3).steps(config(4, drop_last=True), epoch=0, packs_consumed=0))
    with pytest.raises(ConfigError, match="window_blocks is 0"):
        config(window=0)


def test_a_block_larger_than_the_dataset_is_all_of_it_and_takes_no_more_memory() -> None:
    tracemalloc.start()
    try:
        packs = EpochOrder(config(block=1_000_000), 100, 0).packs(0, 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert packs.tolist() == EpochOrder(config(block=100), 100, 0).packs(0, 100).tolist()
    assert peak < 100_000


@pytest.mark.parametrize(("start", "stop"), [(8, 11), (-1, 4), (8, 8)])
def test_positions_past_either_end_and_none_at_all_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        EpochOrder(config(), 10, 0).packs(start, stop)


def test_opening_two_million_packs_hashes_blocks_and_a_batch_hashes_its_window(monkeypatch) -> None:
    hashed = 0
    plain = _hash

    def count(numbers: np.ndarray, key: int) -> np.ndarray:
        nonlocal hashed
        hashed += numbers.size
        return plain(numbers, key)

    monkeypatch.setattr("harness.loader.order._hash", count)
    epoch = EpochOrder(LoaderConfig(seed=0, global_batch_size=256), 2_000_000, 0)
    num_blocks, window = -(-2_000_000 // 64), 64 * 16
    assert hashed < num_blocks + 10
    hashed = 0
    for start in range(0, 256 * 100, 256):
        epoch.packs(start, start + 256)
    # Each window is hashed once, for its first batch.
    assert hashed == -(-256 * 100 // window) * window
