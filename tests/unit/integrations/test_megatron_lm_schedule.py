"""Megatron-LM's packing scheduler on one rank: its placement, the samples that it takes, and those that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import ConfigError, LoaderError, ScheduleError
from harness.integrations.megatron_lm.data_schedule import (
    BasePackingScheduler,
    DefaultDynamicCPScheduler,
    DpBalancedScheduler,
    get_batch_on_this_rank_for_sequence_packing,
    scheduler_map,
    wrap_data_iterator,
)
from harness.integrations.megatron_lm.data_schedule_utils import samples_of_pack
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.plan import ModelConfig, ParallelConfig
from harness.plan.work import sequence_cost
from harness.records import Pack
from harness.schedule import SequenceCost


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with runtime.start("cpu", timeout_s=60):
        join(ParallelConfig(), 1)
        yield


def config(**changes: Any) -> SimpleNamespace:
    stages = {"virtual_pipeline_model_parallel_size": None, "microbatch_group_size_per_vp_stage": None}
    settings = {**stages, "sequence_parallel": False, "mtp_num_layers": None}
    settings |= {"sequence_packing_scheduler": "dp_balanced", "max_seqlen_per_dp_cp_rank": 8}
    return SimpleNamespace(**{**settings, **changes})


def sample(*tokens: int, **changes: Any) -> dict[str, Any]:
    count = len(tokens)
    values = {
        "tokens": torch.tensor(tokens),
        "labels": torch.tensor(tokens) + 1,
        "loss_mask": torch.ones(count),
        "position_ids": torch.arange(count),
        "original_seq_len": torch.tensor([count]),
        "padded_seq_len": torch.tensor([count]),
    }
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


def numbered(*lengths: int) -> list[tuple[int, int]]:
    return list(enumerate(lengths))


def test_rows_are_filled_in_order_for_whole_groups_and_context_parallel_ranks_share_them() -> None:
    scheduler = DpBalancedScheduler(4, 2, 2, None)

    assert scheduler.get_groups_and_subsamples(numbered(5, 3, 6, 1, 8, 2)) == [
        [[0, 1], [0, 1], [2, 3], [2, 3]],
        [[4], [4], [5], [5]],
    ]
    scheduler = DpBalancedScheduler(2, 1, 1, 4)

    assert scheduler.get_groups_and_subsamples(numbered(1, 1, 1, 1, 2)) == [[[0, 1]], [[2]], [[4]], [[3]]]


def test_the_highest_number_of_sequences_is_that_of_the_config(one_rank: None) -> None:
    allowed = config(thd_max_packed_sequences=1)
    assert wrap_data_iterator(iter([sample(*range(6)), sample(*range(6))]), allowed, 2)[1] == 2
    with pytest.raises(ScheduleError, match=r"where: config\.thd_max_packed_sequences"):
        wrap_data_iterator(iter([sample(1), sample(2)]), allowed, 2)


def test_a_global_batch_of_samples_becomes_rows_with_their_bounds(one_rank: None) -> None:
    padded = sample(4, 5, 6, 0, original_seq_len=torch.tensor([3]), loss_mask=torch.tensor([1.0, 0, 1, 0]))

    rows, count, total, squared = wrap_data_iterator(iter([sample(1, 2, 3), [padded, sample(9)]]), config(), 2)

    assert (count, total, squared) == (1, 8.0, 26.0)
    microbatch = get_batch_on_this_rank_for_sequence_packing(rows)
    tokens, labels, loss_mask, attention_mask, position_ids, params, padding_mask = microbatch
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 6, 0, 9]]
    assert labels.tolist() == [[2, 3, 4, 5, 6, 7, 1, 10]]
    assert loss_mask.tolist() == [[1, 1, 1, 1, 0, 1, 0, 1]]
    assert attention_mask is None
    assert position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert params.cu_seqlens_q.tolist() == [0, 3, 6, 7]
    assert params.cu_seqlens_q_padded.tolist() == [0, 3, 7, 8]
    assert params.max_seqlen_q == 4
    assert padding_mask.tolist() == [[False, False, False, False, False, False, True, False]]


def test_a_pack_with_bounds_is_cut_into_its_sequences_and_stays_as_it_was(one_rank: None) -> None:
    pack = Pack(np.asarray([1, 2, 3, 7, 8, 9, 10], np.int32), np.asarray([1, 1, 0, 1, 1, 1, 0], np.uint8), [0, 3])
    whole = {
        "tokens": torch.tensor([[1, 2, 7, 8, 9]]),
        "labels": torch.tensor([[2, 3, 8, 9, 10]]),
        "loss_mask": torch.ones(1, 5),
        "position_ids": torch.tensor([[0, 1, 0, 1, 2]]),
        "cu_seqlens": torch.tensor([[0, 2, 5, 5]], dtype=torch.int32),
        "max_seqlen": torch.tensor([[3]]),
    }

    batches = []
    for item in (whole, samples_of_pack(pack)):
        rows, count, *_ = wrap_data_iterator(iter([item]), config(max_seqlen_per_dp_cp_rank=3), 1)
        assert count == 2
        batches.append([get_batch_on_this_rank_for_sequence_packing(rows)[0].tolist() for _ in range(count)])

    assert batches == [[[[1, 2]], [[7, 8, 9]]]] * 2
    assert whole["tokens"].shape == (1, 5)


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (sample(1, 2, labels=None), "is missing labels"),
        ([1, 2], "an item of the stream is a int"),
        (sample(1, 2, loss_mask=torch.ones(3)), "2 tokens, 2 position_ids, 2 labels, 3 loss_mask"),
        (sample(1, 2, padded_seq_len=torch.tensor([3])), "a sequence from 0 to 3 with 2 real tokens"),
        (sample(1, 2, original_seq_len=torch.tensor([3])), "a sequence from 0 to 2 with 3 real tokens"),
        (sample(1, 2, padded_seq_len=None, cu_seqlens=torch.tensor([0, 1])), "ending at 1"),
        (sample(1, 2, padded_seq_len=None, cu_seqlens=torch.tensor([1, 2])), "cu_seqlens begin"),
    ],
)
def test_an_item_that_is_no_sample_is_refused(one_rank: None, item: Any, problem: str) -> None:
    with pytest.raises(LoaderError, match=problem):
        wrap_data_iterator(iter([item]), config(), 1)


def test_a_stream_ends_after_a_whole_global_batch_and_its_rows_with_it(one_rank: None) -> None:
    stream = iter([sample(1), sample(2), sample(3)])
    wrap_data_iterator(stream, config(), 2)
    with pytest.raises(LoaderError, match="ended after 1 of 2 microbatches"):
        wrap_data_iterator(stream, config(), 2)
    with pytest.raises(StopIteration):
        wrap_data_iterator(stream, config(), 2)
    rows, count, *_ = wrap_data_iterator(iter([sample(1)]), config(), 1)
    assert count == 1
    get_batch_on_this_rank_for_sequence_packing(rows)
    with pytest.raises(LoaderError, match="is exhausted"):
        get_batch_on_this_rank_for_sequence_packing(rows)


def test_a_scheduler_of_ones_own_runs_by_its_name_and_may_lose_no_sample(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneRowEach(BasePackingScheduler):
        def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
            return [[[number]] for number, _ in sample_id_seqlens]

    class Forgetful(BasePackingScheduler):
        def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
            return [[[number]] for number, _ in sample_id_seqlens[1:]]

    monkeypatch.setitem(scheduler_map, "one_each", OneRowEach)
    monkeypatch.setitem(scheduler_map, "forgetful", Forgetful)

    assert wrap_data_iterator(iter([[sample(1), sample(2)]]), config(sequence_packing_scheduler="one_each"), 1)[1] == 2
    with pytest.raises(ScheduleError, match="placed 1 of 2 samples in 1 microbatches; sample 0 was not placed"):
        wrap_data_iterator(iter([[sample(1), sample(2)]]), config(sequence_packing_scheduler="forgetful"), 1)


@pytest.mark.parametrize("mixture", [False, True])
def test_sequences_cost_what_they_do_in_the_transformer_of_the_config(one_rank, monkeypatch, mixture) -> None:
    costs = []

    class Records(DpBalancedScheduler):
        def run(self, *parts):
            costs.append(self.cost)

    class HasItsOwn(Records):
        cost = SequenceCost(1.0, 2.0)

    monkeypatch.setitem(scheduler_map, "dp_balanced", Records)
    monkeypatch.setitem(scheduler_map, "own", HasItsOwn)
    ours = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}
    theirs = {**ours, "kv_channels": 16, "gated_linear_unit": True, "moe_layer_freq": 1, "num_moe_experts": None}
    if mixture:
        ours |= {"family": "mixtral", "num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 32}
        theirs |= {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
        theirs |= {"moe_shared_expert_intermediate_size": None}
    for changes in ({}, {"multi_latent_attention": True}, {"sequence_packing_scheduler": "own"}):
        wrap_data_iterator(iter(()), config(**theirs, **changes), 1)
    expected = sequence_cost(ModelConfig(**ours))
    linear = expected.linear - mixture * 2 * 2 * 64 * 8  # a router, which is not counted here
    assert costs[0].linear / costs[0].quadratic == pytest.approx(linear / expected.quadratic)
    assert costs[0].exchange / costs[0].quadratic == pytest.approx(expected.exchange / expected.quadratic)
    assert costs[1:] == [SequenceCost(), SequenceCost(1.0, 2.0)]
    # Half of the layers are dense, and those of experts have a shared one.
    if mixture:
        theirs |= {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 96}
        wrap_data_iterator(iter(()), config(**theirs), 1)
        assert costs[3].linear == 2 * 64 * (2 * (64 + 32) + 3 * (256 + 2 * 32 + 96) / 2)


def test_a_row_without_samples_is_padding_alone(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class OneMore(BasePackingScheduler):
        def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
            return [[[number for number, _ in sample_id_seqlens]], [[]]]

    monkeypatch.setitem(scheduler_map, "one_more", OneMore)
    rows, count, *_ = wrap_data_iterator(iter([sample(1, 2)]), config(sequence_packing_scheduler="one_more"), 1)

    masks = [get_batch_on_this_rank_for_sequence_packing(rows)[-1] for _ in range(count)]

    assert [mask.tolist() for mask in masks] == [[[False, False]], [[True]]]


def test_rows_of_another_scheduler_get_the_padding_of_their_bounds(one_rank: None) -> None:
    row = {**sample(1, 2, 3, 4, 5, 6), "max_seqlen": torch.tensor(4, dtype=torch.int32)}
    row["cu_seqlens"] = torch.tensor([0, 1, 4], dtype=torch.int32)
    row["cu_seqlens_padded"] = torch.tensor([0, 2, 6], dtype=torch.int32)

    mask = get_batch_on_this_rank_for_sequence_packing(iter([row]))[-1]

    assert mask.tolist() == [[False, True, False, False, False, True]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"return_context_parallel_batch": True}, "return_context_parallel_batch is not supported"),
        ({"pg_collection": False}, "pg_collection=False is not supported"),
        ({"config": config(cp_partition_mode="contiguous")}, "config.cp_partition_mode = 'contiguous'"),
    ],
)
def test_what_newer_versions_of_megatron_ask_for_is_refused_by_name(
    one_rank: None, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        get_batch_on_this_rank_for_sequence_packing(iter([sample(1)]), None, False, None, **arguments)


def test_the_call_of_newer_versions_of_megatron_is_accepted(one_rank: None) -> None:
    newer = config(dynamic_context_parallel=False, cp_partition_mode="zigzag", pad_packed_seq_alignment=None)
    rows, *_ = wrap_data_iterator(iter([sample(1, 2)]), newer, 1, pg_collection=None)

    got = get_batch_on_this_rank_for_sequence_packing(
        rows, vpp_size=None, mtp_on_this_rank=False, vp_stage=None, dynamic_cp=False, pg_collection=None, config=newer
    )

    assert got[0] is not None
    assert got[0].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dynamic_context_parallel": True}, "dp_balanced does not use dynamic context parallelism"),
        ({"hybrid_context_parallel": True}, "dp_balanced does not use dynamic context parallelism"),
        ({"sequence_packing_scheduler": "default_dynamic_cp", "dynamic_context_parallel": False}, "dynamic_cp needs"),
        ({"min_dynamic_context_parallel_size": 2}, "config.min_dynamic_context_parallel_size = 2 is not supported"),
        ({"pad_packed_seq_alignment": "max"}, "config.pad_packed_seq_alignment = 'max' is not supported"),
        ({"sequence_packing_scheduler": "other"}, "packing scheduler 'other' does not exist"),
        ({"max_seqlen_per_dp_cp_rank": None}, "max_seqlen_per_dp_cp_rank is None"),
    ],
)
def test_a_configuration_without_its_scheduler_or_size_is_refused(
    one_rank: None, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        wrap_data_iterator(iter([]), config(**changes), 1)


def test_the_phases_agree_on_a_context_parallel_size_of_each_row(one_rank: None) -> None:
    dynamic = config(sequence_packing_scheduler="default_dynamic_cp")
    rows, *_ = wrap_data_iterator(iter([sample(1, 2)]), dynamic, 1)
    with pytest.raises(LoaderError, match="a row has its own context-parallel size"):
        get_batch_on_this_rank_for_sequence_packing(rows, config=dynamic)
    rows, *_ = wrap_data_iterator(iter([sample(1, 2)]), config(), 1)
    with pytest.raises(LoaderError, match="a row is missing local_cp_size"):
        get_batch_on_this_rank_for_sequence_packing(rows, dynamic_cp=True)


def test_ranks_that_share_a_row_are_neighbors_and_samples_have_their_chunks(one_rank: None) -> None:
    scheduler = DefaultDynamicCPScheduler(8, 2, 2, None)
    placed = scheduler.get_groups_and_subsamples(numbered(32, 16, 8, 8))
    assert placed[0] == [[0]] * 4
    scheduler._check(placed, {0: 32, 1: 16, 2: 8, 3: 8}, {})
    for wrong in ([[0], [0], [0], [1]], [[1], [0], [0], [2]], [[0], [0], [1], [1, 2]], [[0]] * 3 + [[]]):
        with pytest.raises(ScheduleError, match="a power of two of neighbors share a row"):
            scheduler._check([wrong], {0: 16, 1: 8, 2: 8}, {})
    with pytest.raises(LoaderError, match=r"padded_seq_len of 30, .* the layout requires multiples of 8"):
        scheduler._check([[[0]] * 4], {0: 30}, {})


def test_short_samples_are_shared_where_they_are_padded_for_all_ranks_and_only_there() -> None:
    scheduler, lengths = DefaultDynamicCPScheduler(16384, 4, 1, None), [2144, 1800, 2384, 2320, 2528]
    assert {len(row) for row in scheduler.get_groups_and_subsamples(list(enumerate(lengths)))[0]} == {5}
    lengths[0] += 2
    groups = scheduler.get_groups_and_subsamples([*enumerate(lengths), (5, 40_000)])
    scheduler._check(groups, dict(enumerate([*lengths, 40_000])), {})
    assert sorted(len({*map(tuple, group)}) for group in groups) == [1, 4]


def test_an_error_of_a_stream_is_raised_as_it_is_and_padding_that_does_not_fit_is_refused(one_rank: None) -> None:
    def stream() -> Iterator[Any]:
        yield sample(1)
        raise ValueError("a reader failed")

    with pytest.raises(ValueError, match="a reader failed"):
        wrap_data_iterator(stream(), config(), 2)
    with pytest.raises(LoaderError, match="sample 1 of the global batch has a padded_seq_len of 6"):
        DpBalancedScheduler(8, 2, 1, None)._check([[[0, 1]] * 2], {0: 8, 1: 6}, {})
