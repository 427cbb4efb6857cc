"""`harness plan` compares a context-parallel size for each row with one for all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from long_tails import COST, TOKENS, lengths_of

from harness.config import compose_config
from harness.errors import ConfigError, ScheduleError
from harness.plan import ParallelConfig, SftConfig
from harness.plan.run_plan import AssumedPacks, compare_context_sizes, plan_run
from harness.plan.search import search_layouts
from harness.plan.work import Machine
from harness.schedule.batch import check_lengths
from harness.thd import padded_lengths

LONG = ["model=llama3_8b", "schedule=dynamic_context", "parallel.ranks=8", "schedule.max_tokens_per_rank=32768"]


def test_one_size_that_holds_a_million_tokens_costs_chats_more_than_a_size_for_each() -> None:
    lengths = lengths_of("a tail to 1M tokens", 5000, 1 << 20)
    found = compare_context_sizes(lengths, sequences=2000, ranks=128, max_tokens_per_rank=TOKENS, cost=COST)
    # The longest needs 64 ranks, and with 32 it has no row.
    assert list(found) == ["64", "128", "dynamic_context"]
    assert found["128"] > found["64"] > 1.4
    assert 1 <= found["dynamic_context"] < 1.1


def test_ranks_of_a_node_wait_less_for_each_other_and_the_predicted_step_agrees_with_the_comparison() -> None:
    # Tensor parallelism fills a node, so that rows are shared between nodes, or leaves a quarter of it.
    for tp_size, ratios in ((8, (1.1, 2.0)), (2, (1.0, 1.1))):
        settings = ["model=llama3_8b", f"parallel.tensor_parallel_size={tp_size}", "parallel.sequence_parallel=true"]
        settings += [f"parallel.ranks={8 * tp_size}", "schedule.max_tokens_per_rank=16384"]
        packs = AssumedPacks(640, 16_384, sequence_tokens=2048)
        whole = plan_run(compose_config("sft", SftConfig, settings), packs=packs)
        four = compose_config("sft", SftConfig, [*settings, "parallel.context_parallel_size=4"])
        shared = plan_run(four, packs=packs)
        of_small_nodes = plan_run(four, packs=packs, machine=Machine(ranks=4)).context
        assert of_small_nodes["4"] / of_small_nodes["1"] > 1.1
        assert ratios[0] < shared.context["4"] / shared.context["1"] < ratios[1]
        assert shared.step_s / whole.step_s == pytest.approx(shared.context["4"] / shared.context["1"], rel=0.15)


def test_stages_of_a_pipeline_wait_for_the_costliest_row_of_each_microbatch_and_at_both_ends() -> None:
    sizes = {"ranks": 4, "max_tokens_per_rank": TOKENS, "cost": COST}
    # Two rows of each rank, all equal.
    even = np.full(8, TOKENS)
    pipeline = ParallelConfig(pipeline_parallel_size=4)
    assert compare_context_sizes(even, sequences=8, **sizes)["1"] == pytest.approx(1)
    assert compare_context_sizes(even, sequences=8, parallel=pipeline, **sizes)["1"] == pytest.approx(1 + 3 / 2)
    pipeline = replace(pipeline, virtual_pipeline_parallel_size=2)
    assert compare_context_sizes(even, sequences=16, parallel=pipeline, **sizes)["1"] == pytest.approx(1 + 3 / 4 / 2)

    # On eight ranks, a document leaves the other rows of its microbatch with less than its own.
    lengths = lengths_of("chats and 1% documents", 4000, TOKENS * 16)
    plain, waiting = (
        compare_context_sizes(lengths, sequences=64, **sizes | {"ranks": 16}, parallel=parallel)
        for parallel in (None, ParallelConfig(pipeline_parallel_size=4))
    )
    assert sorted(plain, key=plain.__getitem__) == ["dynamic_context", "8", "16"]
    assert sorted(waiting, key=waiting.__getitem__) == ["dynamic_context", "16", "8"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel=cp2"], "context_parallel_size is 2: this schedule decides how many ranks"),
        (["model.fp8=tensorwise"], "fp8 is tensorwise: no test covers it"),
        (["model=qwen3_30b_a3b"], "aux_loss is 0.001, and model.aux_loss_scope is row: the tokens of a row"),
        (["parallel.expert_dispatcher=allgather"], "dispatcher is allgather: no test covers it"),
        (["data.live.path=chunks"], "sequences that are still being generated"),
        (["schedule.max_tokens_per_rank=4095"], "4,095, and ranks that share a sequence"),
        (["model.dtype=float32", "model.attention=transformer_engine"], "does not support float32 attention"),
    ],
)
def test_settings_that_rows_of_several_ranks_do_not_have_are_refused(settings: list[str], message: str) -> None:
    config = compose_config("sft", SftConfig, ["schedule=dynamic_context", "model.vocab_size=300", *settings])
    with pytest.raises(ConfigError, match=message):
        config.check(4)


def test_a_sequence_that_no_row_holds_is_refused_with_tokens_of_a_rank_that_do() -> None:
    settings = [*LONG, "parallel=tp4_sp", "parallel.ranks=16"]
    packs = AssumedPacks(120, 131_081, 131_081)
    with pytest.raises(ConfigError, match=r"131,080 model tokens .* more than the 32,768 \* 4 of rows") as caught:
        plan_run(compose_config("sft", SftConfig, settings), packs=packs)
    # A fourth is 32,770, of which each rank could not hold two chunks.
    assert caught.value.fix.startswith("raise it to 32,772 or more")
    plan_run(compose_config("sft", SftConfig, [*settings, "schedule.max_tokens_per_rank=32772"]), packs=packs)


@pytest.mark.parametrize(
    "settings",
    [["parallel=tp4_sp", "schedule=dynamic_context"], ["parallel=tp4_sp"], ["parallel=cp2", "schedule=cost_balanced"]],
)
def test_the_size_that_is_suggested_for_a_sequence_is_one_that_settings_accept(settings: list[str]) -> None:
    parts = ["model=llama3_8b", "parallel.ranks=16", *settings]
    config = compose_config("sft", SftConfig, parts)
    layout = {"dp_size": config.parallel.dp_size(16), "cp_size": config.parallel.context_parallel_size}
    padding = config.parallel.pad_to_multiple
    lengths = padded_lengths(np.array([131_090]), padding)
    with pytest.raises(ScheduleError) as caught:
        check_lengths(lengths, None, config.schedule.name, 4096, pad_to_multiple=padding, **layout)
    found = re.search(r"max_tokens_per_rank to ([\d,]+) or more", caught.value.fix)
    assert found is not None
    least = found[1].replace(",", "")
    compose_config("sft", SftConfig, [*parts, f"schedule.max_tokens_per_rank={least}"]).check(16)
    check_lengths(lengths, None, config.schedule.name, int(least), pad_to_multiple=padding, **layout)


def test_layouts_of_a_search_hold_the_longest_sequence_and_each_is_planned_once() -> None:
    config = compose_config("sft", SftConfig, [*LONG, "loader.global_batch_size=16"])
    found = search_layouts(config, machine=Machine(), packs=AssumedPacks(100, 131_072, 131_072), gpu_bytes=None)
    assert {one.plan.dp_size for one in found.fitting} == {4, 8}
    found = search_layouts(config, machine=Machine(), packs=AssumedPacks(100, 8192, 1024), gpu_bytes=None)
    assert found.considered == 3 * len(found.fitting)  # with each kind of recomputation


def test_the_command_draws_a_batch_of_every_schedule_but_packs_as_they_are(harness, tmp_path: Path) -> None:
    usual = ["plan", "llama3_8b_1node", "packs=100", f"waves={tmp_path}/waves.png"]
    code, printed, _ = harness(*usual)
    assert (code, (tmp_path / "waves.png").exists()) == (0, True)
    assert "a batch on its ranks" in printed
    code, _, error = harness(*usual, "schedule=as_packed")
    assert code == 2
    assert "schedule=as_packed trains packs as they are" in error


@pytest.mark.parametrize(("batch", "sequences"), [(16, 16 * 8), (4096, 4096 * 8), (100_000, 16_384 * 8)])
def test_the_rows_of_a_plan_hold_the_tokens_of_a_step_however_many_sequences_are_placed(batch, sequences) -> None:
    settings = [
        "model=tiny",
        "schedule=dynamic_context",
        "parallel.static_rows=true",
        f"loader.global_batch_size={batch}",
    ]
    config = compose_config("sft", SftConfig, [*settings, "schedule.max_tokens_per_rank=1024"])
    planned = plan_run(config, ranks=2, packs=AssumedPacks(16_384, 1024, sequence_tokens=128))
    assert planned.work is not None
    assert planned.work.tokens == sequences * 127
    # Eight sequences fill a row, and its padding is that of the rows which are counted.
    assert planned.work.microbatches == pytest.approx(sequences / 8 / 2, rel=0.01)
    padding = 1 - planned.work.tokens / (planned.work.microbatches * 2 * 1024)
    assert planned.work.padding == pytest.approx(padding) != 0
