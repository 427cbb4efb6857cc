"""Guarantees of every scheduler, over the registry, and the measures of what they make."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError, ScheduleError
from harness.prep.packing import plan_packs
from harness.records import Schedule
from harness.schedule import (
    DYNAMIC,
    SCHEDULERS,
    GlobalBatch,
    ScheduleConfig,
    SequenceCost,
    measure_imbalance,
    most_sequences,
    schedule,
)
from harness.schedule.batch import check_lengths, largest_share
from harness.thd import padded_lengths


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(deadline=None, max_examples=100)
@given(
    packs=st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=3), min_size=1, max_size=30),
    dp_size=st.integers(1, 9),
    group_size=st.integers(1, 3),
)
def test_every_sequence_is_placed_once_in_equally_many_rows_within_capacity(
    name: str, packs: list[list[int]], dp_size: int, group_size: int
) -> None:
    lengths = [length for pack in packs for length in pack]
    offsets = np.cumsum([0, *[len(pack) for pack in packs]])
    placed = schedule(
        name, lengths, dp_size=dp_size, max_tokens_per_rank=30, group_size=group_size, pack_offsets=offsets
    )
    assert sorted(placed.order.tolist()) == list(range(len(lengths)))
    assert (placed.order.dtype, placed.row_offsets.dtype) == (np.int64, np.int64)
    assert placed.num_microbatches % group_size == 0
    assert placed.num_microbatches * dp_size == placed.row_offsets.shape[0] - 1
    for microbatch in range(placed.num_microbatches):
        for rank in range(dp_size):
            held = 30 * placed.ranks_of_row(microbatch, rank)
            size = {"max_tokens_per_row": held, "global_batch_size": len(packs)}
            assert len(placed.row(microbatch, rank)) <= most_sequences(name, np.asarray(lengths), offsets, **size)
            assert sum(lengths[index] for index in placed.row(microbatch, rank)) <= held


@pytest.mark.parametrize("name", ["cost_balanced", DYNAMIC])
def test_no_row_is_over_capacity_where_costs_do_not_follow_lengths(name: str) -> None:
    """Encoded media make short sequences costly, and packs are as costly as their longest sequence makes them."""
    costs = {"cost": SequenceCost(1.0, 0.0), "media_cost": np.array([11.0, 2, 19])}
    made = schedule(name, [3, 8, 5], dp_size=2, max_tokens_per_rank=10, **costs)
    assert max(map(len, (made.row(0, 0), made.row(0, 1)))) < 3
    for seed in [74, 134, 2079, *range(60)]:
        random = np.random.default_rng(seed)
        dp_size, multiple = int(random.choice([1, 2, 4, 8, 16])), int(random.choice([1, 2, 8, 16]))
        drawn = random.lognormal(np.log(4096 / 6), 1.0, int(random.choice([200, 1000, 4000])))
        stored = np.clip(drawn, 2, 4096 - multiple).astype(np.int64)
        plan = plan_packs(stored, pack_size=4096, seed=0)
        lengths = padded_lengths(stored[plan.sequence_ids], multiple)
        packs = random.permutation(plan.num_packs)[: int(random.choice([8, 64, 128, 256]))]
        lengths = np.concatenate([lengths[plan.pack_offsets[pack] : plan.pack_offsets[pack + 1]] for pack in packs])
        offsets = np.append(0, np.cumsum(np.diff(plan.pack_offsets)[packs]))
        options = {"dp_size": dp_size, "max_tokens_per_rank": int(random.choice([1, 2, 3, 4])) * 4096}
        media = np.where(random.random(len(lengths)) < 0.3, random.random(len(lengths)) * 4096, 0.0)
        for media_cost in (None, media):
            more = {"pack_offsets": offsets, "media_cost": media_cost, "pad_to_multiple": multiple}
            made = schedule(name, lengths, **more, **options)
            rows = np.repeat(np.arange(len(made.row_offsets) - 1), np.diff(made.row_offsets))
            tokens = np.bincount(rows, lengths[made.order])
            ranks = 1 if made.shared_by is None else made.shared_by[: len(tokens)]
            assert (tokens / ranks).max() <= options["max_tokens_per_rank"], (seed, media_cost is None)


@pytest.mark.parametrize(
    ("name", "changes", "most"),
    [
        ("as_packed", {}, 4),
        ("dp_balanced", {}, 5),  # 2 + 3 + 3 + 3 + 8 model tokens
        ("cost_balanced", {"max_tokens_per_row": 18}, 4),
        ("dp_balanced", {"repeats": True}, 8),  # twice the pack of four
        ("dp_balanced", {"repeats": True, "global_batch_size": 9}, 10),  # ten times the shortest
        ("dp_balanced", {"max_tokens_per_row": 99}, 6),  # the larger two of three packs
        ("dp_balanced", {"max_tokens_per_row": 99, "global_batch_size": 1}, 4),
        ("dp_balanced", {"max_tokens_per_row": 99, "repeats": True, "global_batch_size": 3}, 12),
        ("dp_balanced", {"max_tokens_per_row": 11, "repeats": True}, 5),  # five times the shortest, and a rest
    ],
)
def test_the_most_sequences_of_a_row_follow_from_the_index(name, changes, most) -> None:
    lengths, offsets = np.asarray([3, 8, 3, 9, 3, 2, 11]), np.asarray([0, 4, 5, 7])
    settings = {"max_tokens_per_row": 20, "global_batch_size": 2, **changes}
    assert most_sequences(name, lengths, offsets, **settings) == most


def test_an_unknown_schedule_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ConfigError, match="'dp_balancd' is not known") as caught:
        ScheduleConfig(name="dp_balancd")
    assert "dp_balanced" in caught.value.fix


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens_per_rank is 0"):
        ScheduleConfig(max_tokens_per_rank=0)
    for name, lengths, changes, message in (
        ("dp_balancd", [1], {}, "is not a schedule"),
        ("dp_balanced", [1], {"dp_size": 0}, "dp_size is 0"),
        ("dp_balanced", [1], {"group_size": 0}, "group_size is 0"),
        ("dynamic_context", [1], {"cp_size": 2}, "cp_size is 2"),
        ("dp_balanced", [], {}, "no sequences"),
        ("dp_balanced", [5, 8, 9], {}, "sequence 2 has 9 model tokens .* more than the 8 of a row"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedule(name, lengths, **{"dp_size": 1, "max_tokens_per_rank": 8, **changes})
    for linear, quadratic in ((-1.0, 2.0), (2.0, -1.0), (0.0, 0.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ConfigError, match=f"cannot cost {linear} per token and {quadratic} per squared token"):
            SequenceCost(linear=linear, quadratic=quadratic)
    for rate in (-1.0, math.nan):
        with pytest.raises(ConfigError, match=f"and {rate} per exchanged token"):
            SequenceCost(exchange=rate)
        with pytest.raises(ConfigError, match=f"and {rate} per swapped one"):
            SequenceCost(swap=rate)


def test_cost_grows_with_the_square_of_the_length() -> None:
    assert SequenceCost(linear=2.0, quadratic=0.5).of(np.asarray([1, 10])).tolist() == [2.5, 70.0]
    assert SequenceCost().of(np.asarray([8192])).tolist() == [16384.0]
    # Either part may be 0, and both small.
    for linear, quadratic, cost in ((0.0, 0.25, 1.0), (0.25, 0.0, 0.5), (0.25, 0.5, 2.5)):
        assert SequenceCost(linear=linear, quadratic=quadratic).of(np.asarray([2])).tolist() == [cost]
    # Each of two ranks has half of the tokens, and the encoders of all.
    lengths, media_cost = np.asarray([4, 8]), np.asarray([0.0, 5.0])
    batch = GlobalBatch(lengths, 2, 8, 1, None, SequenceCost(linear=1.0, quadratic=0.0), media_cost)
    assert (batch.costs().tolist(), batch.costs(np.asarray([1, 2])).tolist()) == ([4.0, 13.0], [4.0, 9.0])


@pytest.mark.parametrize("name", ["cost_balanced", "dynamic_context"])
@pytest.mark.parametrize("unit", [2.0**-20, 2.0**20])
def test_costs_have_any_unit(name: str, unit: float) -> None:
    numbers = np.arange(300)
    for lengths in (numbers % 7 * 300 + 1, np.where(numbers % 9, numbers * 7919 % 101 + 1, 2048), numbers % 5 + 2):
        costs = [SequenceCost(one, one / 1024, exchange=one / 2) for one in (1.0, unit)]
        options = {"dp_size": 8, "max_tokens_per_rank": 2048 if name == "cost_balanced" else 1024}
        ours, theirs = (schedule(name, lengths, cost=cost, **options) for cost in costs)
        assert ours.order.tolist() == theirs.order.tolist()
        assert ours.row_offsets.tolist() == theirs.row_offsets.tolist()


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
    # Encoders of media add their own.
    media, linear = np.asarray([0.0, 1.0, 0.0, 2.0]), SequenceCost(linear=1.0, quadratic=0.0)
    found = measure_imbalance(placed, np.asarray([4, 2, 2, 4]), max_tokens_per_row=6, cost=linear, media_cost=media)
    assert found.rank_cost.tolist() == [7.0, 8.0]


def test_ranks_that_share_a_row_have_an_equal_part_of_it_and_wait_for_its_keys() -> None:
    # First, two ranks share 8 tokens, one trains 4 + 2 and one 6; then all four share 16.
    lengths, order = np.asarray([16, 8, 2, 4, 6]), np.asarray([1, 3, 2, 4, 0])
    shared_by = np.asarray([2, 2, 1, 1, 4, 4, 4, 4])
    placed = Schedule(4, order, np.asarray([0, 1, 1, 3, 4, 5, 5, 5, 5]), shared_by)
    cost = SequenceCost(linear=1.0, quadratic=0.5, exchange=3.0)
    found = measure_imbalance(placed, lengths, max_tokens_per_row=8, cost=cost)
    assert found.rank_tokens.tolist() == [8, 8, 10, 10]
    # Scores of 8 tokens take longer than their keys to one other rank, those of 16 less than theirs to three.
    assert found.rank_cost.tolist() == [20 + 40, 20 + 40, 12 + 4 + 40, 24 + 40]
    assert (found.token_ratio, found.cost_ratio, found.fill) == (10 / 9, 64 / 60, 36 / 64)


@pytest.mark.parametrize(("dp_size", "ranks"), [(1, 1), (2, 2), (6, 2), (7, 1), (12, 4), (16, 16)])
def test_the_most_ranks_that_share_a_row_are_the_largest_power_of_two_that_divides_them(dp_size, ranks) -> None:
    assert largest_share(dp_size) == ranks


FOUR_OF_TWELVE = "4, the largest power of two that divides 12 data-parallel ranks"


@pytest.mark.parametrize(
    ("name", "dp_size", "cp_size", "changes", "fits", "ranks", "least"),
    [
        ("dp_balanced", 4, 2, {}, 18, "cp_size", 11),
        # Rows are a multiple of 12 tokens, and ranks of 6.
        ("dp_balanced", 4, 2, {"pad_to_multiple": 12}, 18, "cp_size", 12),
        # Settings require two equal chunks of every rank.
        ("dynamic_context", 3, 1, {}, 9, "1, the largest power of two that divides 3 data-parallel ranks", 14),
        # Each of four ranks holds two equal chunks of 4 tokens.
        ("dynamic_context", 12, 1, {}, 32, FOUR_OF_TWELVE, 10),
        ("dynamic_context", 12, 1, {"most_ranks": 2}, 16, "2, the most ranks that can divide the heads of a scan", 10),
        # Chunks of ranks that share a sequence are multiples of 4 together.
        ("dynamic_context", 12, 1, {"pad_to_multiple": 4}, 32, FOUR_OF_TWELVE, 12),
    ],
)
def test_a_sequence_that_its_ranks_cannot_hold_is_refused_with_what_would(
    name, dp_size, cp_size, changes, fits, ranks, least
) -> None:
    layout = {"dp_size": dp_size, "cp_size": cp_size, **changes}
    check_lengths(np.asarray([fits, 1]), None, name, 9, **layout)
    long = np.asarray([1, fits + 1, fits + 4])
    for offsets, where in ((None, "schedule.max_tokens_per_rank"), ([0, 1, 3], "pack 1, its sequence 0")):
        with pytest.raises(ScheduleError) as caught:
            check_lengths(long, offsets and np.asarray(offsets), name, 9, **layout)
        assert caught.value.what == (
            f"sequence 1 has {fits + 1} model tokens after padding, more than the {fits} of a row "
            f"(max_tokens_per_rank * {ranks}); 2 of 3 sequences are that long"
        )
        assert caught.value.where == where
        fix = f"raise schedule.max_tokens_per_rank to {least} or more, or prepare the data with a smaller limit"
        assert caught.value.fix == fix
    check_lengths(long, None, name, least, **layout)


def test_a_pack_that_no_row_holds_is_refused_where_packs_are_rows_and_an_empty_sequence_everywhere() -> None:
    lengths, offsets = np.asarray([8, 4, 5]), np.asarray([0, 1, 3])
    check_lengths(lengths, offsets, "dp_balanced", 8, dp_size=1, cp_size=1)
    check_lengths(lengths, offsets, "as_packed", 9, dp_size=1, cp_size=1)
    check_lengths(lengths, None, "as_packed", 8, dp_size=1, cp_size=1)
    with pytest.raises(
        ScheduleError, match=r"^pack 1 of a set has 9 .* than the 8 .*; 1 of 2 packs are that"
    ) as caught:
        check_lengths(lengths, offsets, "as_packed", 8, dp_size=1, cp_size=1, of=" of a set")
    assert caught.value.where == "pack 1"
    assert caught.value.fix.endswith("to 9 or more, or prepare smaller packs, or choose the dp_balanced schedule")
    with pytest.raises(ScheduleError, match=r"^sequence 2 of a set has 0 model tokens") as caught:
        check_lengths(np.asarray([8, 1, 0]), offsets, "dp_balanced", 8, dp_size=1, cp_size=1, of=" of a set")
    assert caught.value.where == "pack 1, its sequence 1"
