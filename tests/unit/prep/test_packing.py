"""Packing: valid plans, the same packs as the textbook algorithms, and the same plan on every machine."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError, PrepError
from harness.prep import packing
from harness.prep.packing import PACKERS, PackingConfig, plan_packs, shuffled

LENGTHS = st.integers(2, 40).flatmap(
    lambda pack_size: st.tuples(st.just(pack_size), st.lists(st.integers(2, pack_size), max_size=60))
)


def rooms_left(lengths, pack_size, *, is_best):
    """Place each sequence into the fullest pack that has room for it, or into the first opened."""
    rooms: list[int] = []
    for length in lengths:
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda index: rooms[index]) if is_best else fitting[0]] -= length
        else:
            rooms.append(pack_size - length)
    return sorted(rooms)


def pack_lengths(plan, lengths):
    return [[lengths[i] for i in plan.pack(p)] for p in range(plan.num_packs)]


def lognormal_lengths(count, pack_size):
    return np.clip(np.random.default_rng(5).lognormal(np.log(600), 1, count), 2, pack_size).astype(np.int64)


@pytest.mark.parametrize("algorithm", PACKERS)
@settings(max_examples=60, deadline=None)
@given(case=LENGTHS, seed=st.integers(0, 2**70))
@example(case=(5, []), seed=0)
def test_every_sequence_is_in_one_pack_and_no_pack_is_too_long(algorithm, case, seed):
    pack_size, lengths = case
    plan = plan_packs(lengths, pack_size=pack_size, algorithm=algorithm, seed=seed)
    assert sorted(plan.sequence_ids.tolist()) == list(range(len(lengths)))
    assert (plan.sequence_ids.dtype, plan.pack_offsets.dtype) == (np.int64, np.int64)
    assert all(0 < sum(pack) <= pack_size for pack in pack_lengths(plan, lengths))


@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "first_fit_decreasing", "first_fit"])
@settings(max_examples=200, deadline=None)
@given(case=LENGTHS, seed=st.integers(0, 9))
def test_packs_have_the_same_room_as_those_of_the_plain_algorithm(algorithm, case, seed):
    pack_size, lengths = case
    plan = plan_packs(lengths, pack_size=pack_size, algorithm=algorithm, seed=seed)
    order = [lengths[i] for i in shuffled(len(lengths), seed=seed, stream=0)]
    given = order if algorithm == "first_fit" else sorted(lengths, reverse=True)
    rooms = sorted(pack_size - sum(pack) for pack in pack_lengths(plan, lengths))
    assert rooms == rooms_left(given, pack_size, is_best=algorithm.startswith("best"))


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"over_long": "leave"}, "data.over_long", "'leave'"),
        ({"packed_storage": "pickle"}, "data.packed_storage", "'pickle'"),
        ({"algorithm": "best"}, "data.algorithm", "'best'"),
        ({"pack_size": 1}, "data.pack_size", "1"),
        ({"seed": -1}, "data.seed", "-1"),
        ({"path": ""}, "data.path", "no output folder"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "data.validation_fraction and data.test_fraction", "left"),
    ],
)
def test_settings_of_packing_and_plans_are_refused_by_name(changes, where, words):
    of_plans = {"algorithm", "pack_size", "seed"}.issuperset(changes)
    for made in (PackingConfig, lambda **given: plan_packs([4, 4], **{"pack_size": 10, **given}))[: 1 + of_plans]:
        with pytest.raises(ConfigError) as caught:
            made(**changes)
        assert caught.value.where == where
        assert words in caught.value.what


def test_a_plan_is_that_of_seed_0_and_storage_may_have_its_name_of_other_tools():
    default, zero = plan_packs([5] * 100, pack_size=10), plan_packs([5] * 100, pack_size=10, seed=0)
    assert default.sequence_ids.tolist() == zero.sequence_ids.tolist()
    assert PackingConfig(packed_storage="legacy_npy_pickle").packed_storage == "legacy_npy_pickle"


@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "first_fit_decreasing", "first_fit"])
def test_the_seed_shuffles_equal_sequences_and_packs_but_not_their_number(algorithm):
    lengths = lognormal_lengths(3000, 4096)
    one = plan_packs(lengths, pack_size=4096, algorithm=algorithm, seed=1)
    again = plan_packs(lengths, pack_size=4096, algorithm=algorithm, seed=1)
    two = plan_packs(lengths, pack_size=4096, algorithm=algorithm, seed=2)
    np.testing.assert_array_equal(one.sequence_ids, again.sequence_ids)
    np.testing.assert_array_equal(one.pack_offsets, again.pack_offsets)
    assert not np.array_equal(one.pack_offsets, two.pack_offsets)
    assert not np.array_equal(one.sequence_ids, two.sequence_ids)
    if algorithm != "first_fit":
        assert one.num_packs == two.num_packs


def test_equally_long_sequences_are_paired_at_random():
    plan = plan_packs([5] * 1000, pack_size=10, seed=0)
    together = np.abs(plan.sequence_ids[::2] - plan.sequence_ids[1::2])
    assert 200 < together.mean() < 470  # 333 for random pairs, 1 for neighbours


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        ("best_fit_decreasing", "9376d203bacca39a"),
        ("first_fit_decreasing", "96e194ac63c1ec2e"),
        ("first_fit", "eaf62fa4f6011835"),
        ("next_fit", "86104f4448f9445b"),
    ],
)
def test_the_plan_is_the_same_on_every_machine(algorithm, digest):
    # Lengths by arithmetic: numpy's own distributions may change between its versions.
    lengths = 2 + (np.arange(5000) * 7919 % 1009) * (np.arange(5000) % 4 + 1)
    plan = plan_packs(lengths, pack_size=4096, algorithm=algorithm, seed=7)
    stored = plan.pack_offsets.astype("<i8").tobytes() + plan.sequence_ids.astype("<i8").tobytes()
    assert hashlib.sha256(stored).hexdigest()[:16] == digest


def test_pack_sizes_above_16_bits_work():
    # In 16 bits, the room beside 34,000 and 20,000 tokens would seem the least.
    for lengths, packs in (
        ([70_000, 30_000, 66_000, 34_000, 2], [[2], [30_000, 70_000], [34_000, 66_000]]),
        ([70_000, 20_000, 66_000, 34_000, 2], [[2, 20_000, 70_000], [34_000, 66_000]]),
    ):
        assert sorted(map(sorted, pack_lengths(plan_packs(lengths, pack_size=100_000), lengths))) == packs


def test_a_million_sequences_are_planned_by_their_distinct_lengths_and_fill_the_packs(monkeypatch):
    lengths = lognormal_lengths(1_000_000, 4096)
    insertions = []
    insort = packing.insort
    monkeypatch.setattr(packing, "insort", lambda rooms, room: (insertions.append(room), insort(rooms, room)))
    plan = plan_packs(lengths, pack_size=4096)
    # A few steps for each of 4,095 lengths; item by item it would be a million.
    assert len(insertions) < 4 * 4096
    lower_bound = -(-int(lengths.sum()) // 4096)
    assert plan.num_packs - lower_bound <= lower_bound * 1e-4


@pytest.mark.parametrize(
    ("lengths", "words", "fix"),
    [
        ([5, 11, 12], "2 of 3 sequences are longer than pack_size 10; sequence 1 has 11", "increase data.pack_size"),
        ([5, 1], "1 of 2 sequences have fewer than 2 tokens; sequence 1 has 1", "omit them"),
        ([5, -3], "sequence 1 has -3", "omit them"),
        ([5.0], "float64", "pass one number of tokens"),
        ([[5]], "2 dimensions", "pass one number of tokens"),
    ],
)
def test_invalid_lengths_are_reported_by_number(lengths, words, fix):
    with pytest.raises(PrepError, match=words) as caught:
        plan_packs(lengths, pack_size=10)
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize("algorithm", PACKERS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int32", "uint64"])
def test_lengths_of_every_integer_type_have_the_same_plan(algorithm, dtype):
    lengths = [5, 100, 7, 100, 90] * 3
    expected = plan_packs(lengths, pack_size=70_000, algorithm=algorithm)
    made = plan_packs(np.array(lengths, dtype), pack_size=70_000, algorithm=algorithm)
    assert made.sequence_ids.tolist() == expected.sequence_ids.tolist()
    assert made.pack_offsets.tolist() == expected.pack_offsets.tolist()


def test_the_memory_of_a_plan_does_not_grow_with_the_size_of_its_packs():
    tracemalloc.start()
    plan = plan_packs([5, 5], pack_size=1 << 24)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.num_packs == 1
    assert peak < 1 << 20
