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


EXPERTS = replace(MODEL, family="qwen3_moe", num_experts=8, expert_ffn_hidden_size=16, vocab_size=1)


def test_what_is_hidden_or_sent_once_is_not_waited_for_and_the_last_stage_is() -> None:
    def exchange(kernels: Kernels = PLAIN, **layout) -> float:
        parallel = ParallelConfig(expert_parallel_size=8, **layout)
        return seconds(parallel, ranks=8, model=EXPERTS, kernels=kernels)["expert"]

    assert exchange() > exchange(expert_dispatcher="flex")
    hidden = exchange(Kernels(overlap_experts=True))
    assert exchange() > hidden >= exchange() / WORK.microbatches > 0
    tp = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, static_rows=True)
    quick, hidden = replace(MACHINE, node_bytes_per_s=1e9), replace(tp, overlap_tensor_parallel=True)
    waits, some = (seconds(one, ranks=2, model=WIDE, machine=quick)["tensor"] for one in (tp, hidden))
    assert 0 < some < waits
    pp, four = ParallelConfig(pipeline_parallel_size=2, static_rows=True), replace(MODEL, num_layers=4)
    plain = seconds(pp, ranks=2, model=replace(four, vocab_size=12800))["pipeline"]
    assert plain > seconds(pp, ranks=2, model=four)["pipeline"]
    more = replace(pp, virtual_pipeline_parallel_size=2)
    assert plain > seconds(more, ranks=2, model=replace(four, vocab_size=12800))["pipeline"]
