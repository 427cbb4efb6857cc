"""Planned buffers of dispatchers are what a layer of experts allocates; those of kernels are those of their sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from harness.config import compose_config
from harness.errors import ConfigError
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_model
from harness.plan.dispatch import GROUPED_GEMM_BYTES, deepep_bytes, dispatch_bytes
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.plan.run_plan import AssumedPacks, plan_run
from harness.plan.search import search_layouts
from harness.plan.settings import SftConfig
from harness.plan.work import Machine

TOKENS, HIDDEN = 256, 512


def allocations(profile: torch.profiler.profile) -> list[int]:
    """Return the bytes that PyTorch holds after each allocation and release on this CPU."""

    def walk(nodes: list[Any]) -> Iterator[Any]:
        for node in nodes:
            yield node
            yield from walk(node.children)

    events = walk(profile.profiler.kineto_results.experimental_event_tree())
    sizes = [(one.start_time_ns, one.extra_fields.alloc_size) for one in events if "Allocation" in str(one.tag)]
    held, total = [], 0
    for _, size in sorted(sizes):
        total += size
        held.append(total)
    return held


@pytest.mark.parametrize(
    ("dispatcher", "ep", "etp", "tp", "experts", "dtype"),
    [
        ("alltoall", 1, 1, 1, 4, "bfloat16"),
        pytest.param("alltoall", 2, 1, 1, 4, "float32", marks=pytest.mark.nightly),
        # One expert on each rank, whose tokens need no order.
        pytest.param("alltoall", 4, 1, 1, 4, "bfloat16", marks=pytest.mark.nightly),
        ("alltoall", 2, 2, 2, 4, "bfloat16"),
        ("allgather", 2, 1, 1, 4, "float32"),
        pytest.param("allgather", 4, 1, 1, 4, "bfloat16", marks=pytest.mark.nightly),
        ("allgather", 2, 2, 2, 4, "bfloat16"),
    ],
)
def test_buffers_of_a_dispatcher_are_what_a_layer_allocates(dispatcher, ep, etp, tp, experts, dtype) -> None:
    """Every token goes to every expert, so that routing is even; the ranks beside this one do not exist."""
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": 16, "num_experts": experts, "dtype": dtype}
    model = ModelConfig(**sizes, experts_per_token=experts)
    parallel = ParallelConfig(
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        tensor_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_dispatcher=dispatcher,
        static_rows=True,
    )
    with runtime.alone(0, ep * etp) as job:
        join(parallel, ep * etp)
        layer = build_model(model, parallel, vocab_size=128, device=job.device)[0].module.decoder.layers[0].mlp
        own = {one.untyped_storage().data_ptr() for one in layer.parameters()}
        tokens = torch.randn(TOKENS // tp, 1, HIDDEN, dtype=getattr(torch, dtype)).requires_grad_()
        own.add(tokens.untyped_storage().data_ptr())
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = tensor
            return tensor

        def compute() -> None:
            layer(tokens, padding_mask=torch.zeros(1, TOKENS // tp, dtype=torch.bool))

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            compute()
        saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        kept.clear()
        parallel_state.get_global_memory_buffer().buffer.clear()
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            compute()
    assert dispatch_bytes(model, parallel, tokens=TOKENS) == pytest.approx(max(allocations(profile)) - saved, rel=0.04)


def test_kernels_of_a_gpu_have_the_buffers_of_their_sources() -> None:
    model = ModelConfig(
        hidden_size=2048, num_experts=128, experts_per_token=8, expert_ffn_hidden_size=768, dtype="bfloat16"
    )
    eight = ParallelConfig(expert_parallel_size=8, expert_dispatcher="flex")
    # Ten channels, eight ranks: signals, and 256 tokens of 4,096 bytes with their source, 128 experts and 256 scales.
    assert deepep_bytes(model, eight) == 10 * 8 * (5 * 4 + 256 * (4096 + 8 + 128 * 16)) + 64
    sixteen = ParallelConfig(expert_parallel_size=16, expert_dispatcher="flex")
    assert deepep_bytes(model, sixteen) == 141_744_384 + 35_592_320
    # 8 of 128 experts on 8 ranks: a token comes to 0.667 of them, and not to 8 of 8.
    whole = dispatch_bytes(model, eight, tokens=8192)
    arrived, given = (
        8192
        * 8
        * (1 - 112 * 111 * 110 * 109 * 108 * 107 * 106 * 105 / (128 * 127 * 126 * 125 * 124 * 123 * 122 * 121)),
        8192 * 8,
    )
    expected = 2 * 2048 * (arrived + 2 * given) + arrived * (96 + 80) + 5 * 8192 * 128
    assert whole == pytest.approx(deepep_bytes(model, eight) + expected, abs=1)
    grouped = dispatch_bytes(model, eight, tokens=8192, is_grouped=True)
    assert grouped == pytest.approx(whole - 2 * 2048 * (given - arrived) + GROUPED_GEMM_BYTES, abs=1)
    assert GROUPED_GEMM_BYTES == 128 * 2**20
    assert dispatch_bytes(ModelConfig(), ParallelConfig(), tokens=8192) == 0


def test_a_dispatcher_that_needs_other_ranks_of_experts_is_refused_and_passed_over_by_a_search() -> None:
    with pytest.raises(ConfigError, match=r"DeepEP supports experts on 2, 4, 8, .* but the layout has 256"):
        ParallelConfig(expert_parallel_size=256, expert_dispatcher="flex")
    config = compose_config("sft", SftConfig, ["experiment=qwen3_30b_a3b_1node", "parallel.expert_dispatcher=flex"])
    packs = AssumedPacks(1000, pack_size=8192, sequence_tokens=1024)
    planned = plan_run(config, packs=packs)
    assert planned.memory.dispatch == dispatch_bytes(config.model, config.parallel, tokens=8192, is_grouped=True)
    found = search_layouts(config, machine=Machine(), packs=packs, gpu_bytes=80 * 2**30)
    assert {one.parallel.expert_parallel_size for one in found.fitting} <= {2, 4, 8}
    assert found.fitting


def test_the_busiest_rank_of_experts_needs_more_memory_and_all_wait_for_it() -> None:
    packs = AssumedPacks(1000, pack_size=8192, sequence_tokens=1024)
    changes = ["experiment=qwen3_30b_a3b_1node", "model.recompute=none", "model.grouped_gemm=off"]
    changes += ["parallel.tensor_parallel_size=1", "parallel.sequence_parallel=false"]
    config = compose_config("sft", SftConfig, changes)
    model, parallel = config.model, config.parallel
    even, busy = (plan_run(config, packs=packs, expert_load=load) for load in (1.0, 1.5))
    assert (model.num_layers, model.experts_per_token, parallel.expert_parallel_size) == (48, 8, 8)
    assert parallel.pipeline_parallel_size == 1
    # Of each token more: itself and its indices, and inside of the expert three vectors of 768, twice, in bfloat16.
    a_token = 2 * 2048 + 32 + 6 * 2 * 768
    more = busy.memory.activations - even.memory.activations
    assert more == pytest.approx(48 * config.schedule.max_tokens_per_rank * 4 * a_token, rel=1e-6)
    assert busy.memory.dispatch == pytest.approx(1.5 * even.memory.dispatch, rel=1e-6)
    assert (busy.memory.weights, busy.memory.optimizer) == (even.memory.weights, even.memory.optimizer)
    assert busy.work is not None
    assert even.work is not None
    # Three products of 2,048 by 768 for each of half as many tokens again, in three passes.
    flops = 3 * 48 * 4 * 3 * 2 * 2048 * 768 * even.work.tokens
    added = flops / (even.machine.peak_flops * even.machine.matmul_share * 8)
    # And rounds of tiles that are not full: 192 tiles of 1,536 columns in two of 132, and 288 in three.
    assert added < busy.parts["matrix products"] - even.parts["matrix products"] < 2 * added
    assert busy.parts["expert"] > 1.3 * even.parts["expert"]
    assert busy.mfu < even.mfu
    # One rank with all experts computes every token, wherever it goes.
    alone = compose_config("sft", SftConfig, [*changes, "parallel.expert_parallel_size=1"])
    assert plan_run(alone, packs=packs, expert_load=1.5) == plan_run(alone, packs=packs)
