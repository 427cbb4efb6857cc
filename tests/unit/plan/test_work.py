"""Work and time of a step equal sums done by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.plan.layout import ParallelConfig
from harness.plan.memory import Kernels
from harness.plan.model import ModelConfig
from harness.plan.work import OTHER_KERNELS, Machine, Work, count_kernels, count_microbatches, estimate_step, plan_work

MODEL = ModelConfig(num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=128)
# Of a forward pass and token: 2 layers of 2 * 8 * (8 + 8) + 3 * 8 * 16 weights and 8 * 128 of the output, 2 FLOPs each.
LINEAR = 2 * (2 * (256 + 384) + 1024)
WIDE = replace(MODEL, hidden_size=2048, ffn_hidden_size=4096, num_attention_heads=16, num_query_groups=16)
WORK = Work(steps=10, microbatches=4, tokens=4000, linear_flops=4000 * LINEAR, attention_flops=1e6)
MACHINE = Machine(
    peak_flops=1e9,
    matmul_share=0.5,
    attention_share=0.25,
    memory_bytes_per_s=1e6,
    node_bytes_per_s=1e5,
    fabric_bytes_per_s=1e4,
    ranks=4,
    launch_s=0,
    gap_s=0,
    message_s=0,
    multiprocessors=1,
    tile_s=0,
)


PLAIN = Kernels()


def seconds(
    parallel: ParallelConfig | None = None,
    *,
    ranks: int = 1,
    model: ModelConfig = MODEL,
    machine: Machine = MACHINE,
    work: Work = WORK,
    kernels: Kernels = PLAIN,
) -> dict[str, float]:
    return estimate_step(model, parallel or ParallelConfig(), work, ranks=ranks, machine=machine, kernels=kernels)


def test_an_epochs_work_is_the_sum_over_its_sequences() -> None:
    work = plan_work(MODEL, np.array([100, 300, 50, 50]), num_packs=5, global_batch_size=2)
    assert (work.steps, work.tokens) == (3, 500 / 3)
    assert count_microbatches(work.tokens, 120, 1) == 2  # 167 tokens per step, 120 of them in one of all ranks
    assert work.linear_flops == pytest.approx(500 / 3 * LINEAR)
    # Half of the L x L scores: 2 layers, 2 heads of 4, and 2 FLOPs for a score and for its value.
    assert work.attention_flops == pytest.approx(2 * 2 * 8 * (100**2 + 300**2 + 2 * 50**2) / 3)
    assert work.model_flops == pytest.approx(3 * (work.linear_flops + work.attention_flops))
    assert work.mfu(2.0, ranks=4, peak_flops=1e6) == pytest.approx(work.model_flops / 8e6)


def test_more_work_more_messages_and_slower_hosts_take_longer() -> None:
    def longer(name: str, before: dict[str, float], after: dict[str, float]) -> bool:
        return sum(after.values()) > sum(before.values()) and after[name] > before[name]

    alone, tp, pp = seconds(), ParallelConfig(tensor_parallel_size=2), ParallelConfig(pipeline_parallel_size=2)
    assert longer("attention", alone, seconds(model=replace(MODEL, recompute="selective")))
    real = replace(Machine(), launch_s=0)
    in_8_bits, in_16 = (seconds(model=replace(WIDE, fp8=fp8), machine=real) for fp8 in ("tensorwise", "off"))
    assert longer("matrix products", in_8_bits, in_16)
    assert in_8_bits["memory"] > in_16["memory"]  # the casts
    assert seconds(tp, ranks=2)["tensor"] > 0
    assert longer("tensor", seconds(tp, ranks=2), seconds(tp, ranks=2, machine=replace(MACHINE, message_s=1.0)))
    # Rows of one size need no message with it before each.
    waits = [
        seconds(one, ranks=2, machine=replace(MACHINE, message_s=1.0)) for one in (replace(pp, static_rows=True), pp)
    ]
    assert longer("pipeline", *waits)
    # Rows that are padded to one length have more tokens to multiply, move and send, and as many to attend to.
    quick = replace(MACHINE, memory_bytes_per_s=1e30)
    padded, whole = (seconds(pp, ranks=2, work=work, machine=quick) for work in (replace(WORK, padding=0.5), WORK))
    assert padded["matrix products"] == 2 * whole["matrix products"]
    padded, whole = (seconds(pp, ranks=2, work=work) for work in (replace(WORK, padding=0.5), WORK))
    assert padded["memory"] == 2 * whole["memory"]
    assert padded["attention"] == whole["attention"]
    assert longer("pipeline", whole, padded)
    split = ParallelConfig(distributed_optimizer=True)
    assert longer("data", seconds(split, ranks=4), seconds(replace(split, overlap_weights=False), ranks=4))
    assert longer("launches", alone, seconds(machine=replace(MACHINE, launch_s=1.0)))
    graphs = ParallelConfig(static_rows=True, cuda_graphs=True)
    assert seconds(graphs, machine=replace(MACHINE, launch_s=1.0))["launches"] == 0
    assert MACHINE.link(4, 1) > MACHINE.link(8, 1) > MACHINE.link(4, 2)


def test_the_kernels_of_a_layer_are_those_that_the_bench_counts() -> None:
    counted = json.loads((Path(__file__).parents[2] / "golden" / "kernels.json").read_text())
    for version, figures in counted.items():
        whole = 32 * count_kernels(MODEL, ParallelConfig()) + OTHER_KERNELS
        assert whole == pytest.approx(figures["8 sequences, 32 layers"], rel=0.01), version


def test_a_product_takes_as_many_rounds_as_its_tiles_fill_of_a_gpu() -> None:
    def products(num_tokens: int, **settings) -> float:
        work = replace(WORK, microbatches=1, tokens=num_tokens)
        machine = replace(MACHINE, memory_bytes_per_s=1e30, multiprocessors=64)
        return seconds(model=replace(WIDE, lora_rank=1, **settings), work=work, machine=machine)["matrix products"]

    # Outputs of 2,048 have 8 tiles for every 128 tokens, so 1,024 tokens fill 64 multiprocessors once.
    assert products(1024) == products(900) < products(1025) / 1.25
    # The output matrix is not in 8 bits.
    assert products(1024) / 2 < products(1024, fp8="tensorwise") < products(1024)


def test_what_products_hide_is_not_waited_for() -> None:
    layout = {"tensor_parallel_size": 2, "sequence_parallel": True, "static_rows": True}
    tp, hidden = (ParallelConfig(**layout, overlap_tensor_parallel=overlaps) for overlaps in (False, True))
    quick = replace(MACHINE, node_bytes_per_s=1e9)
    waits, some = (seconds(one, ranks=2, model=WIDE, machine=quick)["tensor"] for one in (tp, hidden))
    assert some == pytest.approx(waits / 2)  # the first of two parts
    assert seconds(hidden, ranks=2, model=WIDE)["tensor"] > some
    # Inputs in 8 bits are gathered in 8 bits, and outputs scattered in four bytes.
    in_8_bits = seconds(tp, ranks=2, model=replace(WIDE, fp8="tensorwise"), machine=quick)["tensor"]
    assert in_8_bits == pytest.approx(waits * 5 / 8)


def test_stages_wait_for_the_last_which_has_the_output_matrix_and_less_with_more_chunks() -> None:
    pp = ParallelConfig(pipeline_parallel_size=2, static_rows=True)
    four = replace(MODEL, num_layers=4, vocab_size=12800)
    plain = seconds(pp, ranks=2, model=four)["pipeline"]
    assert plain > seconds(pp, ranks=2, model=replace(four, vocab_size=1))["pipeline"]
    assert plain > seconds(replace(pp, virtual_pipeline_parallel_size=2), ranks=2, model=four)["pipeline"]


EXPERTS = replace(MODEL, family="qwen3_moe", num_experts=8, expert_ffn_hidden_size=16, vocab_size=1)


def test_tokens_go_to_a_node_once_with_deepep_and_wait_less_behind_another_microbatch() -> None:
    def exchange(kernels: Kernels = PLAIN, **layout) -> float:
        parallel = ParallelConfig(expert_parallel_size=8, **layout)
        return seconds(parallel, ranks=8, model=EXPERTS, kernels=kernels)["expert"]

    plain = exchange()
    assert exchange(expert_dispatcher="flex") < plain
    assert exchange(Kernels(overlap_experts=True)) < plain
    # Half of two experts' tokens go to the other node, at its share of the port, in two passes of two layers.
    away = 4000 / 8 * 8 * 4 * 2 / 2 / (1e4 * MACHINE.all_to_all_share)
    assert plain == pytest.approx(2 * 2 * 2 * away)


def test_the_host_is_not_ahead_of_the_forward_pass_of_layers_with_experts() -> None:
    slow = replace(MACHINE, launch_s=1.0)
    kernels = 4 * (2 * count_kernels(EXPERTS, ParallelConfig(), parts="*E") + OTHER_KERNELS)
    parts = seconds(model=EXPERTS, machine=replace(slow, launch_s=(launch_s := 1e3)))
    busy = sum(parts[name] for name in ("matrix products", "attention", "memory"))
    assert parts["launches"] == pytest.approx(kernels * launch_s - busy)
    # The GPU's work is a little longer than the launches: a third of it comes too fast for the host.
    launch_s = 0.95 * busy / kernels
    assert seconds(model=EXPERTS, machine=replace(slow, launch_s=launch_s))["launches"] > 0
    assert seconds(model=MODEL, machine=replace(slow, launch_s=0.1 * launch_s))["launches"] == 0
    assert (
        count_kernels(replace(EXPERTS, family="gpt_oss", sliding_window=9), ParallelConfig(), parts="*E") > kernels / 8
    )


def test_keys_of_short_sequences_are_waited_for_beside_long_ones_and_longer_between_nodes() -> None:
    parallel = ParallelConfig(context_parallel_size=2)

    def waited(lengths: list[int], cp_size: int = 2) -> float:
        work = plan_work(WIDE, np.array(lengths), num_packs=1, global_batch_size=1)
        sizes = {"ranks": cp_size, "machine": Machine(ranks=4, message_s=0), "kernels": PLAIN}
        return estimate_step(WIDE, replace(parallel, context_parallel_size=cp_size), work, **sizes)["context"]

    # The first of two ranks' keys come before any attention, which hides the others in a long sequence alone.
    long, short = waited([1 << 20]), waited([64] * (1 << 14))
    assert 1.5 * long < short < 2 * long
    assert waited([1 << 20, *[64] * (1 << 14)]) == pytest.approx(long + 2 * long, rel=0.02)
    # Of eight ranks each sends its eighth seven times, at 40 GB/s for 340.
    assert waited([64] * (1 << 14), 8) == pytest.approx(2 * long * 7 / 4 * 340 / 40, rel=0.02)
