"""Work and time of a step equal sums done by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.plan.work import Machine, Work, count_kernels, estimate_step, plan_work

MODEL = ModelConfig(num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=128)
# Of a forward pass and token: 2 layers of 2 * 8 * (8 + 8) + 3 * 8 * 16 weights and 8 * 128 of the output, 2 FLOPs each.
LINEAR = 2 * (2 * (256 + 384) + 1024)
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
)


def seconds(
    parallel: ParallelConfig | None = None,
    *,
    ranks: int = 1,
    model: ModelConfig = MODEL,
    machine: Machine = MACHINE,
    work: Work = WORK,
) -> dict[str, float]:
    return estimate_step(
        model, parallel or ParallelConfig(), work, ranks=ranks, weights=1000, layer_bytes=100.0, machine=machine
    )


def test_an_epochs_work_is_the_sum_over_its_sequences() -> None:
    work = plan_work(
        MODEL, np.array([100, 300, 50, 50]), num_packs=5, global_batch_size=2, dp_size=2, max_tokens_per_row=60
    )
    assert (work.steps, work.tokens) == (3, 500 / 3)
    assert work.microbatches == 2  # 167 tokens per step, 120 of them in a microbatch of both ranks
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
    assert longer("matrix products", seconds(model=replace(MODEL, fp8="tensorwise")), alone)
    assert seconds(tp, ranks=2)["tensor"] > 0
    assert longer("tensor", seconds(tp, ranks=2), seconds(tp, ranks=2, machine=replace(MACHINE, message_s=1.0)))
    # Rows of one size need no message with it before each.
    waits = [
        seconds(one, ranks=2, machine=replace(MACHINE, message_s=1.0)) for one in (replace(pp, static_rows=True), pp)
    ]
    assert longer("pipeline", *waits)
    # Rows that are padded to one length have more tokens to multiply, move and send, and as many to attend to.
    padded = seconds(pp, ranks=2, work=replace(WORK, padding=0.5))
    whole = seconds(pp, ranks=2)
    assert padded["matrix products"] == 2 * whole["matrix products"]
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
    one = ModelConfig(**{**vars(MODEL), "num_layers": 32})
    for version, figures in counted.items():
        whole = figures["8 sequences, 32 layers"]
        assert count_kernels(one, ParallelConfig()) == pytest.approx(whole, rel=0.01), version
