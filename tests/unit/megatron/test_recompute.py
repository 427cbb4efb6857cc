"""Recomputed activations change no gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from harness.errors import ConfigError
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.attention import VarlenAttention
from harness.megatron.model.gpt import build_model
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.thd import build_thd_batch

from .conftest import VOCAB, make_sequence
from .test_packed_attention import summed_loss_and_gradients

PARTS = {"attention": VarlenAttention, "mlp": MLP, "router": TopKRouter, "shared": SharedExpertMLP}


def run(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[float, dict[str, torch.Tensor], Counter[str]]:
    calls: Counter[str] = Counter()

    def count(name: str, forward: Any) -> Any:
        def counted(self: Any, *args: object, **kwargs: object) -> Any:
            calls[name] += name != "mlp" or type(self) is MLP
            return forward(self, *args, **kwargs)

        return counted

    for name, part in PARTS.items():
        monkeypatch.setattr(part, "forward", count(name, part.forward))
    row = build_thd_batch([make_sequence(length, length) for length in (9, 40, 2)])
    with runtime.start("cpu"):
        join(ParallelConfig(), 1)
        model = ModelConfig(num_layers=3, hidden_size=64, ffn_hidden_size=128, init_std=0.2, **EXPERTS, **settings)
        chunks = build_model(model, ParallelConfig(), vocab_size=VOCAB, device=torch.device("cpu"))
        loss, gradients = summed_loss_and_gradients(chunks, [row])
    monkeypatch.undo()
    return loss, gradients, calls


# The first layer has an MLP, the others experts.
EXPERTS = {"dense_layers": 1, "num_experts": 4, "shared_ffn_hidden_size": 64, "grouped_gemm": "off"}
ONCE = {"attention": 3, "mlp": 1 + 2 * 4, "router": 2, "shared": 2}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"recompute": "full"}, ONCE),
        ({"recompute": "selective"}, {"attention": 3}),
        ({"recompute": "selective", "recompute_modules": ["mlp", "shared_experts"]}, {"mlp": 1, "shared": 2}),
        ({"recompute": "selective", "recompute_modules": ["moe"]}, {"mlp": 2 * 4, "router": 2, "shared": 2}),
    ],
)
def test_gradients_are_bit_identical_where_parts_of_each_layer_are_computed_twice(monkeypatch, settings, more) -> None:
    loss, gradients, calls = run(monkeypatch)
    assert calls == ONCE
    again, same, twice = run(monkeypatch, **settings)
    assert (again, twice) == (loss, Counter(ONCE) + Counter(more))
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"recompute": "some"}, "'some' is not known"),
        ({"recompute": "full", "recompute_modules": ["mlp"]}, "mlp, with recompute=full"),
        ({"recompute": "selective", "recompute_modules": []}, "recompute_modules are none"),
        ({"recompute": "selective", "recompute_modules": ["moe"]}, "some of core_attn, mlp, which this model can"),
        ({"recompute": "selective", "recompute_modules": ["moe", "shared_experts"], **EXPERTS}, "moe includes"),
    ],
)
def test_a_recomputation_that_is_not_supported_is_refused(settings, named) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig(**settings)
