"""Models of full size train a step of fake tensors, which have shapes and no memory; their bytes are those of the plan.

Everything but the values is real: Megatron's layers, its schedule and its optimizer, of one rank of a job of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import megatron.core.optimizer.optimizer as megatron_optimizer
import numpy as np
import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

import harness.megatron.step
from harness.config import compose_config
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.step import MegatronStep
from harness.plan.memory import plan_stage_memory
from harness.plan.settings import SftConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch
from tests.benchmarks.checkpoints import HeldBytes

SEQUENCES = 16


def _really(function: Any) -> Any:
    """Let a function make and read real tensors, where it is given no fake one."""

    def call(*arguments: Any, **options: Any) -> Any:
        if any(isinstance(one, FakeTensor) for one in arguments):
            return function(*arguments, **options)
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return call


def _convert(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """Do what `Module._apply` does, which cannot exchange fake parameters."""
    for child in module.children():
        _convert(child, function)
    for name, weight in module._parameters.items():
        if weight is not None and (new := function(weight.detach())).dtype != weight.dtype:
            module._parameters[name] = torch.nn.Parameter(new, weight.requires_grad)
            vars(module._parameters[name]).update(vars(weight))
    for name, value in module._buffers.items():
        module._buffers[name] = None if value is None else function(value)
    return module


@pytest.fixture
def without_values(monkeypatch) -> None:
    """Leave out what reads values of fake tensors, and give the lengths of sequences real ones."""
    monkeypatch.setattr(torch.nn.Module, "_apply", _convert)
    read = torch.ops.aten._local_scalar_dense.default
    one = {torch.bool: False, torch.float32: 1.0, torch.float64: 1.0}
    answers = {**fake_impls.op_implementations_dict, read: lambda mode, function, value: one.get(value.dtype, 1)}
    monkeypatch.setattr(fake_impls, "op_implementations_dict", answers)
    for owner, name in (
        (harness.megatron.step, "to_device"),
        (torch, "diff"),
        (torch.Tensor, "tolist"),
        *((torch.distributed, name) for name in ("all_gather_object", "broadcast_object_list", "gather_object")),
    ):
        monkeypatch.setattr(owner, name, _really(getattr(owner, name)))
    for name in ("start_grad_sync", "finish_grad_sync", "start_param_sync", "finish_param_sync"):
        monkeypatch.setattr(BucketGroup, name, lambda *arguments, **options: None)
    for optimizer in (megatron_optimizer.MegatronOptimizer, megatron_optimizer.ChainedOptimizer):
        monkeypatch.setattr(optimizer, "get_grad_norm", lambda self: 1.0)
    monkeypatch.setattr(megatron_optimizer, "clip_grad_by_total_norm_fp32", lambda *arguments, **options: None)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _state_bytes(step: MegatronStep, without: set[int]) -> int:
    parts = getattr(step.optimizer, "chained_optimizers", [step.optimizer])
    states = [(main, *state.values()) for part in parts for main, state in part.optimizer.state.items()]
    tensors = {_storage(one): one for state in states for one in state if one.dim()}
    return sum(one.nbytes for key, one in tensors.items() if key not in without)


@contextmanager
def _until(step: MegatronStep, live: HeldBytes) -> Iterator[None]:
    """Count up to the optimizer's step, which makes state that stays."""
    update = step.optimizer.step

    def stop() -> Any:
        live.__exit__(None, None, None)
        return update()

    step.optimizer.step = stop
    live.__enter__()
    yield


@pytest.mark.parametrize(
    ("experiment", "ranks", "rank", "layers"),
    [
        ("llama3_8b_1node", 8, 0, 2),
        pytest.param("llama3_8b_1node", 8, 0, 32, marks=pytest.mark.nightly),
        pytest.param("qwen3_8b_1node", 8, 0, 36, marks=pytest.mark.nightly),
        pytest.param("llama3_70b_8nodes", 64, 0, 80, marks=pytest.mark.nightly),
        pytest.param("llama3_70b_8nodes", 64, 32, 80, marks=pytest.mark.nightly),
        pytest.param("llama3_70b_8nodes", 64, 63, 80, marks=pytest.mark.nightly),
    ],
)
def test_a_step_of_a_full_size_model_has_the_bytes_of_its_plan(without_values, experiment, ranks, rank, layers) -> None:
    config = compose_config("sft", SftConfig, [f"experiment={experiment}"])
    model = replace(config.model.on("cuda"), attention="torch", init_from=None, num_layers=layers)
    parallel = config.parallel
    static = parallel.static_rows or parallel.pipeline_parallel_size > 1
    parallel = replace(parallel, static_rows=static, ranks=None)
    tokens = config.schedule.max_tokens_per_rank
    length = tokens * parallel.context_parallel_size // SEQUENCES
    mask = np.r_[np.ones(length, np.uint8), np.zeros(1, np.uint8)]
    sequence = SequenceView(np.ones(length + 1, np.int32), mask)
    row = build_thd_batch([sequence] * SEQUENCES, pad_to_multiple=parallel.pad_to_multiple)
    microbatches = 2 * parallel.pipeline_parallel_size
    with runtime.alone(rank, ranks) as job, FakeTensorMode(allow_non_fake_inputs=True):
        layout = join(parallel, ranks)
        step = MegatronStep(
            model,
            parallel,
            layout,
            device=job.device,
            vocab_size=model.vocab_size,
            pad_rows_to=tokens * parallel.context_parallel_size if static else None,
        )
        weights = [weight for chunk in step.chunks for weight in chunk.parameters()]
        gradients = [weight.main_grad for weight in weights]
        live = HeldBytes()
        with _until(step, live):
            step.train([row] * microbatches)
        plan = plan_stage_memory(
            model,
            parallel,
            stage=layout.pp_rank,
            vocab_size=model.vocab_size,
            dp_size=layout.dp_size,
            max_tokens_per_rank=tokens,
            microbatches=microbatches,
        )
        held = sum(weight.nbytes for weight in weights), sum(gradient.nbytes for gradient in gradients)
        state = _state_bytes(step, {_storage(one) for one in (*weights, *gradients)})
    assert held == (plan.weights, plan.gradients)
    assert state == pytest.approx(plan.optimizer, rel=1e-3)
    # Also what else lives for a moment only: gradients of activations, and what a layer computes in float32.
    assert sum(held) + state + live.most == pytest.approx(plan.total, rel=0.02)
