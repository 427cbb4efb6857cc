"""Routers choose and weigh experts with Transformer Engine's functions as with Megatron-Core's plain operations.

The functions are PyTorch's here (`tests/samples/engine_router.py`).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from harness.bench.figures import BenchReport
from harness.bench.gpu import agreement
from harness.bench.gpu.environment import SIZES as BENCH_SIZES
from harness.bench.workspace import Workspace
from harness.errors import ConfigError
from harness.loader.datasets import Sources
from harness.megatron.model import fusions
from harness.megatron.model.fusions import choose_fusions, slow_parts
from harness.megatron.model.gpt import transformer_config
from harness.megatron.model.router import routers
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch
from tests.samples import engine_router

from .conftest import one_rank

CPU, GPU, VOCAB, EXPERTS = torch.device("cpu"), torch.device("cuda"), 128, 8
SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_experts": EXPERTS, "init_std": 0.3}
LATENT = {"num_attention_heads": 2, "num_query_groups": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 4, "v_head_dim": 8, "rope_scaling": "none"}
BIASED = {"router_score": "sigmoid", "expert_bias": True, "expert_bias_rate": 0.02, "router_scale": 2.5}
# The routers of families, with the losses that they are trained with.
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral, qwen3_moe": {"aux_loss": 0.1, "z_loss": 0.01},
    "gpt_oss": {"family": "gpt_oss", "sliding_window": 8, "num_query_groups": 2, "experts_per_token": 4},
    "olmoe": {"router_normalize": False, "experts_per_token": 3, "aux_loss": 0.1},
    "a single softmax": {"router_normalize": False, "experts_per_token": 1, "aux_loss": 0.1},
    "deepseek_v2": {
        **{"family": "deepseek_v2", **LATENT, "router_normalize": False, "router_scale": 16.0},
        **{"experts_per_token": 3, "aux_loss": 0.1, "aux_loss_scope": "sequence"},
    },
    "deepseek_v3": {
        **{"family": "deepseek_v3", **LATENT, **BIASED, "experts_per_token": 4},
        **{"router_groups": 4, "router_top_groups": 2, "aux_loss": 0.1, "aux_loss_scope": "sequence"},
    },
    "glm4_moe": {**BIASED, "aux_loss": 0.1, "z_loss": 0.01},
    "a single sigmoid": {**BIASED, "experts_per_token": 1, "aux_loss": 0.1},
    "recomputed": {**BIASED, "aux_loss": 0.1, "recompute": "full"},
    "routers recomputed": {**BIASED, "aux_loss": 0.1, "recompute": "selective", "recompute_modules": ["moe"]},
    "frozen": {**BIASED, "aux_loss": 0.1, "freeze_router": True},
    "adapters": {"lora_rank": 2, "aux_loss": 0.1},
}


@pytest.fixture
def engine(monkeypatch) -> None:
    """Give Megatron-Core the functions, and let a CPU have the kernels."""
    engine_router.CALLS.update(choose=0, score=0)
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    for name in ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"):
        monkeypatch.setattr(moe_utils, name, getattr(engine_router, name), raising=False)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    monkeypatch.setattr(fusions, "_why_not", lambda *_: None)


def row_of(lengths: tuple[int, ...], step: int, *, padded: bool) -> Any:
    random = np.random.default_rng([step, *lengths])
    views = [SequenceView(random.integers(0, VOCAB, n).astype(np.int32), np.ones(n, np.uint8)) for n in lengths]
    return build_thd_batch(views, pad_to_multiple=16 if padded else 1)


def train(model: ModelConfig, *, bias: float) -> dict[str, Any]:
    """Return what three steps on rows of two sources give, and validations between them."""
    # Of gradients that are nearly 0, Adam would make whole steps of their rounding.
    optimizer = OptimizerConfig(lr=0.01, min_lr_ratio=1, warmup_steps=0, eps=0.01)
    losses, gradients, loads, statistics = [], [], [], []
    with one_rank(model, vocab_size=VOCAB, optimizer=optimizer) as step:
        assert all(one.config.moe_router_fusion == (model.fuse_router == "on") for one in routers(step.chunks))
        step.sources = Sources(["a", "b"], np.array([0, 2, 4]))
        for router in routers(step.chunks):
            if bias:
                router.expert_bias += bias + torch.linspace(-0.1, 0.1, EXPERTS)
        for number in range(3):
            rows = [row_of((21, 40), number, padded=True), row_of((33, 9), number, padded=number == 1)]
            batch = SimpleNamespace(rows=rows, sequence_ids=[np.array([0, 2]), np.array([1, 3])])
            result = step.train(batch)
            losses += [result.loss, result.grad_norm, step.evaluate([SimpleNamespace(rows=rows)]).loss]
            losses += [*result.source_losses.values()]
            statistics += [*result.experts.values()]
            loads += [*result.source_expert_loads.values()]
            trained = [one for one in step.chunks[0].parameters() if one.requires_grad]
            gradients.append(torch.cat([one.main_grad.flatten() for one in trained]).clone())
        biases = [one.expert_bias.clone() for one in routers(step.chunks) if one.expert_bias is not None]
    return {"losses": losses, "statistics": statistics, "loads": loads, "gradients": gradients, "biases": biases}


@pytest.mark.parametrize(
    ("kind", "bias"),
    [*((kind, 0.0) for kind in ROUTERS), *((kind, 6.0) for kind in ROUTERS if "expert_bias" in ROUTERS[kind])],
)
def test_fused_routers_train_as_plain_ones(engine, kind, bias) -> None:
    model = ModelConfig(**{**SIZES, **ROUTERS[kind]})
    plain = train(replace(model, fuse_router="off"), bias=bias)
    assert engine_router.CALLS == {"choose": 0, "score": 0}
    fused = train(replace(model, fuse_router="on"), bias=bias)
    assert engine_router.CALLS["choose"] > 0
    # The scores of a single sigmoid are not those that the loss is defined by.
    assert bool(engine_router.CALLS["score"]) == (kind != "a single sigmoid")
    # Beside a bias of DeepSeek-V3's size, a weight has 2^-22 of rounding.
    rel = 2e-5 if bias else 1e-6
    assert fused["losses"] == pytest.approx(plain["losses"], rel=rel)
    assert fused["statistics"] == pytest.approx(plain["statistics"], rel=rel)
    assert fused["loads"] == plain["loads"]
    assert all(map(torch.equal, fused["biases"], plain["biases"]))
    for one, other in zip(fused["gradients"], plain["gradients"], strict=True):
        assert float(other.norm()) > 0.1
        assert float((one - other).norm() / other.norm()) < 10 * rel


def test_a_first_contact_shows_whether_kernels_of_routers_compute_what_plain_operations_do(
    engine, monkeypatch, tmp_path
) -> None:
    of_routers = {title: case for title, case in agreement.FUSIONS.items() if case[0] == "fuse_router"}
    monkeypatch.setattr(agreement, "FUSIONS", of_routers)

    def measure() -> BenchReport:
        with Workspace(tmp_path) as workspace:
            return agreement.measure_fusions(replace(BENCH_SIZES["tiny"], device="cpu"), workspace, "")

    report = measure()
    assert [figure.name for figure in report.missed] == []
    assert len(report.figures) == 2 * len(of_routers) == 6
    plain = engine_router.fused_topk_with_score_function

    def scaled(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = plain(**options)
        return weights * 1.01, chosen

    monkeypatch.setattr(moe_utils, "fused_topk_with_score_function", scaled)
    assert len(measure().missed) == 6


def test_routers_are_fused_on_a_gpu_that_has_the_kernels_and_a_run_is_told_why_not(monkeypatch) -> None:
    model = ModelConfig(**SIZES, dtype="bfloat16", fuse_weight_gradient="off", fuse_permutation="off")

    def reasons(model: ModelConfig) -> list[str]:
        found = slow_parts(model, ParallelConfig(), GPU, has_engine=True)
        return [one for one in found if one.startswith("model.fuse_router is auto, but ")]

    def is_fused(model: ModelConfig, device: torch.device) -> bool:
        return choose_fusions(model, device)["moe_router_fusion"]

    assert "Transformer Engine is not installed: each router" in reasons(model)[0]
    monkeypatch.setattr(fusions.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(moe_utils, "fused_topk_with_score_function", None, raising=False)
    assert "has no kernels for routers, which 2.7 and later have" in reasons(model)[0]
    assert not is_fused(model, GPU)
    with pytest.raises(ConfigError, match=r"fuse_router is on, but this Transformer Engine has no kernels for routers"):
        choose_fusions(replace(model, fuse_router="on"), GPU)
    monkeypatch.setattr(moe_utils, "fused_topk_with_score_function", print, raising=False)
    assert reasons(model) == []
    assert [is_fused(model, GPU), is_fused(model, CPU)] == [True, False]
    assert transformer_config(model, ParallelConfig(), GPU).moe_router_fusion
    assert not is_fused(replace(model, fuse_router="off"), GPU)
    assert not is_fused(replace(model, num_experts=0), GPU)
    with pytest.raises(ConfigError, match="fuse_router is on, but there is no GPU"):
        choose_fusions(replace(model, fuse_router="on"), CPU)
    # The most that fit, and one more.
    for experts, fits in ((945, True), (946, False)):
        many = replace(model, num_experts=experts)
        assert is_fused(many, GPU) is fits
        assert bool(reasons(many)) is not fits
    with pytest.raises(ConfigError, match="the kernels have room for 945 experts, and the model has 946"):
        choose_fusions(replace(model, num_experts=946, fuse_router="on"), GPU)
