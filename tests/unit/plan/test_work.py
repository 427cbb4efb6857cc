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
    parallel: ParallelConfig | None = None, *, ranks: int = 1, model: ModelConfig = MODEL, machine: Machine = MACHINE
) -> dict[str, float]:
    return estimate_step(
        model, parallel or ParallelConfig(), WORK, ranks=ranks, weights=1000, layer_bytes=100.0, machine=machine
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


def test_a_rank_alone_multiplies_moves_memory_and_updates_its_weights() -> None:
    parts = seconds()
    assert parts == pytest.approx(
        {
            "matrix products": 3 * 4000 * LINEAR / 0.5e9,
            "attention": 3 * 1e6 / 0.25e9,
            "memory": 4000 * (3 * 2 * 100 + 20 * 128) / 1e6,
            "tensor": 0.0,
            "context": 0.0,
            "expert": 0.0,
            "launches": 0.0,
            "pipeline": 0.0,
            "data": 0.0,
            "optimizer": 30 * 1000 / 1e6,
        }
    )


def test_recomputation_takes_time() -> None:
    none, selective, full = (
        seconds(model=ModelConfig(**{**vars(MODEL), "recompute": how})) for how in ("none", "selective", "full")
    )
    assert selective["attention"] == pytest.approx(4 / 3 * none["attention"])
    assert selective["matrix products"] == none["matrix products"]
    assert full["matrix products"] == pytest.approx(4 / 3 * none["matrix products"])


def test_ranks_that_share_a_layer_send_its_hidden_states() -> None:
    # 4,000 tokens of 8 float32, half of them to the other rank, 4 times a layer and pass.
    assert seconds(ParallelConfig(tensor_parallel_size=2), ranks=2)["tensor"] == pytest.approx(
        2 * 4 * 2 * 4000 * 8 * 4 / 2 / 1e5
    )


def test_a_pipeline_waits_for_its_first_microbatch() -> None:
    parts = seconds(ParallelConfig(pipeline_parallel_size=2), ranks=2)
    busy = parts["matrix products"] + parts["attention"] + parts["memory"]
    # The last stage has the output matrix, too.
    output = parts["matrix products"] * 2 * 1024 / LINEAR
    assert parts["pipeline"] == pytest.approx(busy / 4 + output + 2 * 4000 * 8 * 4 / 1e5)


def test_gradients_overlap_the_last_microbatch_and_weights_the_first() -> None:
    split = seconds(ParallelConfig(distributed_optimizer=True), ranks=4)
    assert split["data"] == 0  # of weights too
    apart = seconds(ParallelConfig(distributed_optimizer=True, overlap_weights=False), ranks=4)
    assert apart["data"] == pytest.approx(4 * 1000 * 3 / 4 / 1e5)
    assert split["optimizer"] == pytest.approx(30 * 1000 / 4 / 1e6)
    assert seconds(ranks=4)["data"] == 0  # all of it overlaps the backward pass
    alone = {"distributed_optimizer": True, "overlap_gradients": False, "overlap_weights": False}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        found = seconds(ParallelConfig(gradient_dtype=dtype, **alone), ranks=4)["data"]
        assert found == pytest.approx((size + 4) * 1000 * 3 / 4 / 1e5)


def test_a_device_waits_between_kernels_and_for_a_host_that_is_slower_than_it() -> None:
    kernels = 4 * (2 * 93 + 87)  # of four microbatches of two layers
    gaps = seconds(machine=replace(MACHINE, gap_s=1e-3))
    assert gaps["launches"] == pytest.approx(kernels * 1e-3)
    busy = sum(gaps[name] for name in ("matrix products", "attention", "memory"))
    fast, slow = (seconds(machine=replace(MACHINE, launch_s=share * busy / kernels)) for share in (0.99, 1.5))
    assert fast["launches"] == 0
    assert slow["launches"] == pytest.approx(busy / 2)
    graphs = ParallelConfig(static_rows=True, cuda_graphs=True)
    assert seconds(graphs, machine=replace(MACHINE, launch_s=1.5 * busy / kernels))["launches"] == 0


def test_products_of_layers_are_faster_in_8_bits_and_the_output_matrix_is_not() -> None:
    fast = seconds(model=ModelConfig(**{**vars(MODEL), "fp8": "tensorwise"}), machine=replace(MACHINE, fp8_speedup=2.0))
    slow = seconds()["matrix products"]
    share = 2 * 1024 / LINEAR
    assert fast["matrix products"] == pytest.approx(slow * ((1 - share) / 2 + share))


def test_small_messages_cost_as_much_as_their_number() -> None:
    machine = replace(MACHINE, message_s=1.0)

    def waits(name: str, parallel: ParallelConfig) -> float:
        return seconds(parallel, ranks=2, machine=machine)[name] - seconds(parallel, ranks=2)[name]

    # Four microbatches of two layers: four collectives a layer and pass; two exchanges of a ring in three passes.
    assert waits("tensor", ParallelConfig(tensor_parallel_size=2)) == pytest.approx(4 * 2 * 2 * 4)
    assert waits("context", ParallelConfig(context_parallel_size=2)) == pytest.approx(4 * 2 * 3)
    # A send and a receive, each after the size of its row, unless all rows have one.
    assert waits("pipeline", ParallelConfig(pipeline_parallel_size=2)) == pytest.approx(4 * 2 * 2)
    static = ParallelConfig(pipeline_parallel_size=2, static_rows=True)
    assert waits("pipeline", static) == pytest.approx(4 * 2)


def test_the_kernels_of_a_layer_are_those_that_the_bench_counts() -> None:
    counted = json.loads((Path(__file__).parents[2] / "golden" / "kernels.json").read_text())
    one = ModelConfig(**{**vars(MODEL), "num_layers": 32})
    for version, figures in counted.items():
        whole = figures["8 sequences, 32 layers"]
        assert count_kernels(one, ParallelConfig()) == pytest.approx(whole, rel=0.01), version


def test_a_ring_over_nodes_uses_the_ports_of_its_ranks() -> None:
    assert MACHINE.link(4, 1) == 1e5  # within the node
    assert MACHINE.link(8, 1) == 4e4
    assert MACHINE.link(4, 2) == 2e4  # every second rank
    assert MACHINE.link(2, 4) == 1e4
