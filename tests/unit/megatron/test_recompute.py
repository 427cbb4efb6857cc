"""Recomputed activations change no gradient."""

from __future__ import annotations

import pytest
import torch

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


def run(recompute: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, dict[str, torch.Tensor], int]:
    calls = 0
    forward = VarlenAttention.forward

    def counted(self: VarlenAttention, *args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(VarlenAttention, "forward", counted)
    row = build_thd_batch([make_sequence(length, length) for length in (9, 40, 2)])
    with runtime.start("cpu"):
        join(ParallelConfig(), 1)
        model = ModelConfig(num_layers=3, hidden_size=64, ffn_hidden_size=128, init_std=0.2, recompute=recompute)
        chunks = build_model(model, ParallelConfig(), vocab_size=VOCAB, device=torch.device("cpu"))
        loss, gradients = summed_loss_and_gradients(chunks, [row])
    monkeypatch.undo()
    return loss, gradients, calls


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_bit_identical_where_each_layers_attention_is_computed_twice(monkeypatch, recompute) -> None:
    loss, gradients, calls = run("none", monkeypatch)
    assert calls == 3
    again, same, twice = run(recompute, monkeypatch)
    assert (again, twice) == (loss, 6)
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)


def test_an_unknown_recomputation_is_refused() -> None:
    with pytest.raises(ConfigError, match="'some' is not known"):
        ModelConfig(recompute="some")
