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
from harness.plan.dispatch import dispatch_bytes
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
    even, busy = (plan_run(config, packs=packs, expert_load=load) for load in (1.0, 1.5))
    # Of each token more: itself and its indices, and inside of the expert three vectors of 768, twice, in bfloat16.
    more = busy.memory.activations - even.memory.activations
    a_token = 2 * 2048 + 32 + 6 * 2 * 768
    assert more == pytest.approx(48 * config.schedule.max_tokens_per_rank * 4 * a_token, rel=1e-6)
    assert busy.memory.dispatch == pytest.approx(1.5 * even.memory.dispatch, rel=1e-6)
    assert (busy.memory.weights, busy.memory.optimizer) == (even.memory.weights, even.memory.optimizer)
    assert busy.parts["matrix products"] > even.parts["matrix products"]
    assert busy.parts["expert"] > 1.3 * even.parts["expert"]
    # One rank with all experts computes every token, wherever it goes.
    alone = compose_config("sft", SftConfig, [*changes, "parallel.expert_parallel_size=1"])
    assert plan_run(alone, packs=packs, expert_load=1.5) == plan_run(alone, packs=packs)
