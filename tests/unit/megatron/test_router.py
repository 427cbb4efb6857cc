"""Routers compute in float32, and are left as they are where settings freeze them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.errors import ConfigError
from harness.megatron.job import join, runtime
from harness.megatron.model.fusions import slow_parts
from harness.megatron.model.gpt import transformer_config
from harness.megatron.model.router import routers
from harness.megatron.step import MegatronStep
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.plan.settings import OptimizerConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch

ONE, CPU, VOCAB = ParallelConfig(), torch.device("cpu"), 128
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "router_score": "sigmoid",
    "expert_bias": True,
    "expert_bias_rate": 0.01,
}


def train_a_step(**settings) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.dtype]]:
    """Return the routers' weights, biases included, before and after a step, and the dtypes of scores and biases."""
    with runtime.start("cpu"):
        layout = join(ONE, 1)
        model, optimizer = ModelConfig(**{**SIZES, **settings}), OptimizerConfig(lr=0.01, warmup_steps=0)
        step = MegatronStep.build(model, ONE, layout, device=CPU, vocab_size=VOCAB, optimizer=optimizer)

        def state() -> dict[str, torch.Tensor]:
            found = list(routers(step.chunks))
            values = {f"{number} weight": router.weight for number, router in enumerate(found)}
            values |= {f"{number} bias": router.expert_bias for number, router in enumerate(found)}
            return {name: value.detach().clone() for name, value in values.items()}

        before, one = state(), next(routers(step.chunks))
        scores = one.gating(torch.zeros(3, 1, 32, dtype=one.weight.dtype))
        dtypes = [scores.dtype, one.expert_bias.dtype]
        ids = np.arange(65, dtype=np.int32) * 7 % VOCAB
        row = build_thd_batch([SequenceView(ids, np.ones(65, np.uint8))])
        for _ in range(2):  # the rate of the first step may be that of the warm-up
            step.train(SimpleNamespace(rows=[row]))
        return before, state(), dtypes


@pytest.mark.parametrize(
    ("settings", "moving"),
    [
        ({}, {"weight", "bias"}),
        ({"freeze_router": True}, {"bias"}),
        ({"expert_bias_rate": 0}, {"weight"}),
        # Adapters are for a model whose routers are as they were.
        ({"lora_rank": 2}, set()),
    ],
)
def test_a_router_moves_unless_it_is_frozen(settings, moving) -> None:
    before, after, _ = train_a_step(**settings)
    changed = {name.split()[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == moving


def test_a_dispatcher_without_its_kernels_is_refused() -> None:
    layout = ParallelConfig(expert_parallel_size=2, expert_dispatcher="flex")
    with pytest.raises(ConfigError, match="DeepEP's kernels need GPUs"):
        transformer_config(ModelConfig(**SIZES), layout, CPU)
    if find_spec("deep_ep") is None:
        with pytest.raises(ConfigError, match="deep_ep, with DeepEP's kernels, is not installed"):
            transformer_config(ModelConfig(**SIZES), layout, torch.device("cuda"))


def test_grouped_products_are_refused_where_they_cannot_run_and_left_out_where_they_may_be() -> None:
    def groups(**settings) -> bool:
        return bool(transformer_config(ModelConfig(**SIZES, **settings), ONE, CPU).moe_grouped_gemm)

    assert not groups()
    assert not groups(grouped_gemm="off")
    with pytest.raises(ConfigError, match="grouped_gemm is on, and layers are PyTorch's"):
        groups(grouped_gemm="on")
    for settings, reason in (({"lora_rank": 2}, "stands beside the matrices of one"), ({"attention": "torch"}, "only")):
        with pytest.raises(ConfigError, match=reason):
            ModelConfig(**SIZES, **settings, grouped_gemm="on")
    model = ModelConfig(**SIZES, dtype="bfloat16", fuse_weight_gradient="off")
    gpu = torch.device("cuda")
    assert slow_parts(model, ONE, gpu, has_engine=True) == []
    assert slow_parts(replace(model, grouped_gemm="off"), ONE, gpu, has_engine=True) == []
    (slow,) = slow_parts(replace(model, lora_rank=2), ONE, gpu, has_engine=True)
    assert slow.startswith("model.grouped_gemm is auto, and an adapter")
    assert slow.endswith("experts are computed one after another")
    assert "layers are not Transformer Engine's" in slow_parts(model, ONE, gpu, has_engine=False)[1]


def test_scores_and_biases_are_float32_in_a_bfloat16_model() -> None:
    """Biases also before the first step, when weights are read into them."""
    _, _, dtypes = train_a_step(dtype="bfloat16")
    assert dtypes == [torch.float32, torch.float32]
