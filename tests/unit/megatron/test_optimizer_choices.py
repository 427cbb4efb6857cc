"""An optimizer on the host, and what is refused: one rank, in this process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.errors import ConfigError
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.run.resuming import report_resume
from harness.megatron.state.checkpoint import load_checkpoint, stored_moments
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig, SftConfig, TrainerConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch
from harness.train.checkpoints import Identity
from tests.distributed.checkpoint_ranks import save

MODEL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=64, dtype="bfloat16")
SPLIT = ParallelConfig(distributed_optimizer=True)


@pytest.fixture
def make(job: runtime.Runtime) -> Callable[..., MegatronStep]:
    layout = join(SPLIT, 1)

    def build(**settings: float | str) -> MegatronStep:
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1, decay_steps=20, **settings)  # type: ignore[arg-type]
        return MegatronStep(MODEL, SPLIT, layout, device=job.device, vocab_size=64, optimizer=optimizer)

    return build


def row(seed: int) -> ThdBatch:
    ids = np.random.default_rng(seed).integers(0, 64, size=33).astype(np.int32)
    return build_thd_batch([SequenceView(ids, np.r_[np.ones(32, np.uint8), np.zeros(1, np.uint8)])])


def losses(step: MegatronStep, *seeds: int) -> list[tuple[float, float]]:
    results = [step.train([row(seed)]) for seed in seeds]
    return [(result.loss, result.grad_norm) for result in results]


def test_an_optimizer_on_the_host_trains_alike_and_its_checkpoints_are_those_of_any_other(make, tmp_path: Path) -> None:
    steps = {share: make(offload=share) for share in (0.0, 0.5, 1.0)}
    found = {share: losses(step, 1, 2, 3) for share, step in steps.items()}
    assert len(set(found[0.0])) == 3
    inner = steps[0.5].optimizer.chained_optimizers[0].optimizer
    assert inner.gpu_optimizer is not None
    assert 0 < len(inner.cpu_optimizers) < len(inner.param_to_inner_param)
    assert steps[1.0].optimizer.chained_optimizers[0].optimizer.gpu_optimizer is None
    paths = {share: save(tmp_path / str(share), step) for share, step in steps.items()}
    undisturbed = losses(steps[0.0], 4, 5)
    for before, after in ((0.0, 0.5), (0.5, 1.0), (1.0, 0.0)):
        step = make(offload=after)
        load_checkpoint(paths[before], step)
        assert found[before] + losses(step, 4, 5) == found[0.0] + undisturbed


def test_moments_of_another_dtype_are_converted_and_the_log_says_so(make, tmp_path: Path) -> None:
    step = make()
    losses(step, 1, 2)
    states = step.optimizer.chained_optimizers[0].optimizer.state.values()
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    whole = save(tmp_path / "whole", step)
    for state in states:  # as Transformer Engine's Adam has them
        state.update({name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})
    path = save(tmp_path / "small", step)
    assert [stored_moments(one) for one in (whole, path)] == ["float32", "bfloat16"]
    other = make(offload=0.5)
    load_checkpoint(path, other)
    found = other.optimizer.chained_optimizers[0].optimizer.state.values()
    loaded = [state[name] for state in found for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in loaded} == {torch.float32}
    rounded = [moment.bfloat16().float() for moment in moments]
    assert sorted(moment.sum().item() for moment in loaded) == sorted(moment.sum().item() for moment in rounded)
    assert any(not torch.equal(one, other) for one, other in zip(moments, rounded, strict=True))
    small = OptimizerConfig(moments_dtype="bfloat16")
    lines: list[str] = []
    for one, optimizer in product((whole, path), (OptimizerConfig(), small)):
        config = SftConfig(optimizer=optimizer, trainer=TrainerConfig(steps=9))
        report_resume(config, tmp_path, Identity("run", "attempt", "here"), one, [], lines.append)
    start = "its optimizer moments were stored as"
    assert [line if start in line else "resumed" for line in lines] == [
        "resumed",
        *("resumed", f"{start} float32 and converted to bfloat16"),
        *("resumed", f"{start} bfloat16 and converted to float32"),
        "resumed",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta2": 0.999}, "optimizer.beta2 is 0.999, and optimizer.moments_dtype is bfloat16"),
        ({"beta1": 0.998}, "optimizer.beta1 is 0.998"),
        ({"offload": 0.5}, "optimizer.moments_dtype is bfloat16, and optimizer.offload is 0.5"),
    ],
)
def test_moments_that_bfloat16_would_freeze_or_megatron_ignore_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(moments_dtype="bfloat16", **settings)
    OptimizerConfig(**settings)
    # The smallest change that is never rounded away, and one that is.
    largest, one = 1 - 2**-8, torch.tensor(1.0, dtype=torch.bfloat16)
    OptimizerConfig(moments_dtype="bfloat16", beta2=largest)
    for value in torch.linspace(1, 2, 129).bfloat16():
        assert (value.float() * (largest - 1e-6)).bfloat16() < value
    assert ((1.9 * one).float() * 0.999).bfloat16() == 1.9 * one


def test_a_machine_without_transformer_engine_refuses_moments_in_bfloat16_by_name(make) -> None:
    with pytest.raises(ConfigError, match="moments_dtype is bfloat16, but Adam of torch") as refused:
        make(moments_dtype="bfloat16")
    assert refused.value.where == "optimizer.moments_dtype"
