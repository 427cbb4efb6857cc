"""Layers that predict further tokens train alike however conversations are packed and padded, and cross no end."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from harness.errors import ConfigError
from harness.megatron.batch import run_row, to_device
from harness.megatron.compat import predicting_layer
from harness.megatron.model.attention import RMSNorm
from harness.megatron.model.mtp import own_tokens, predicted_losses
from harness.plan.model import ModelConfig
from harness.plan.settings import OptimizerConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch
from harness.train import StepResult

from .conftest import one_rank

VOCAB, CPU = 128, torch.device("cpu")
SIZES = {"family": "glm4_moe", "qk_norm": False, "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48}
SIZES |= {"num_experts": 4, "shared_ffn_hidden_size": 48, "router_score": "sigmoid", "expert_bias": True}
SIZES |= {"expert_bias_rate": 0, "z_loss": 0.01, "tie_embeddings": False, "mtp_layers": 2, "init_std": 0.2}


def conversations() -> list[SequenceView]:
    random = np.random.default_rng(4)
    made = []
    for length in (5, 18, 3, 9):
        mask = np.append(random.integers(0, 2, length - 1), 0).astype(np.uint8)
        made.append(SequenceView(random.integers(0, VOCAB, length).astype(np.int32), mask))
    return made


def train_each(rows: Sequence[Sequence[ThdBatch]], **settings) -> list[StepResult]:
    """Return the result of a step on each of `rows`, from the same weights."""
    still = OptimizerConfig(lr=1e-30, min_lr_ratio=0, warmup_steps=0, weight_decay=0.0)
    with one_rank(ModelConfig(**{**SIZES, **settings}), vocab_size=VOCAB, optimizer=still) as step:
        return [step.train(SimpleNamespace(rows=list(each))) for each in rows]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_further_tokens_train_alike_packed_padded_and_alone(recompute) -> None:
    sequences = conversations()
    packed, padded = build_thd_batch(sequences), build_thd_batch(sequences, pad_to_multiple=8)
    alone = [build_thd_batch([sequence]) for sequence in sequences]
    expected, *others = train_each([alone, [packed], [padded]], recompute=recompute)
    # Each layer trains what a token of its own conversation that many further has a loss for.
    masks = [sequence.loss_mask[:-1] for sequence in sequences]
    assert expected.mtp_tokens == sum(int(mask[further:].sum()) for mask in masks for further in (1, 2))
    assert all(loss > 1 for loss in expected.mtp_losses)
    # A router counts the tokens that have one ahead: that many further in layers after the model's own two.
    sizes = [max(0, len(mask) - further) for mask in masks for further in (0, 0, 1, 2)]
    assert expected.experts["routed_tokens"] == sum(sizes)
    for other in others:
        assert other.mtp_tokens == expected.mtp_tokens
        np.testing.assert_allclose(other.mtp_losses, expected.mtp_losses, rtol=1e-6)
        np.testing.assert_allclose(
            [other.loss, other.grad_norm, other.experts["entropy"]],
            [expected.loss, expected.grad_norm, expected.experts["entropy"]],
            rtol=1e-6,
        )
        assert other.experts["routed_tokens"] == expected.experts["routed_tokens"]
        assert other.experts["shared_tokens"] == other.experts["routed_tokens"]


def test_each_layer_counts_by_its_part_of_the_coefficient_and_leaves_the_loss_of_the_model_as_it_is() -> None:
    """A step against the gradient of the last layer's own norm lowers its loss by what the gradient is the slope of."""
    row = build_thd_batch(conversations())
    still = OptimizerConfig(lr=1e-30, min_lr_ratio=0, warmup_steps=0, weight_decay=0.0, clip_grad=0.0)
    with one_rank(ModelConfig(**{**SIZES, "mtp_loss": 0.3}), vocab_size=VOCAB, optimizer=still) as step:
        last = step.chunks[0].module.mtp.layers[-1]
        assert {type(last.enorm), type(last.hnorm), type(last.final_layernorm)} == {RMSNorm}
        norm, angles = last.final_layernorm.weight, []
        for layer in (step.chunks[0].module.decoder.layers[0], predicting_layer(last)):
            layer.register_forward_pre_hook(lambda *given: angles.append(given[2]["rotary_pos_emb"]), with_kwargs=True)
        weighted = step.train(SimpleNamespace(rows=[row]))
        assert torch.equal(angles[0], angles[1])
        slope, losses = norm.main_grad.clone(), []
        for sign in (-1, 1):
            with torch.no_grad():
                norm.add_(slope, alpha=sign * 1e-2 / float(slope.norm()))
            losses.append(step.train(SimpleNamespace(rows=[row])).mtp_losses[-1])
            with torch.no_grad():
                norm.sub_(slope, alpha=sign * 1e-2 / float(slope.norm()))
        logits = run_row(step.chunks[0], to_device(row, CPU, mtp_layers=2), with_labels=False)
        own = torch.nn.functional.cross_entropy(logits[0], torch.from_numpy(row.labels), reduction="none")
        mask = torch.from_numpy(row.loss_mask)
        assert float((own * mask).sum() / mask.sum()) == pytest.approx(weighted.loss, rel=1e-6)
        many = 2**24 + 1  # float32 has no such number
        step.chunks[0].module.predicted = torch.full((2, 3), many, dtype=torch.float64)
        # Two tensor-parallel ranks, which have the same sums.
        with mock.patch.object(parallel_state, "get_tensor_model_parallel_world_size", return_value=2):
            assert predicted_losses(step.chunks, 2, CPU) == ([1.0, 1.0], many)
    masks = [sequence.loss_mask[:-1] for sequence in conversations()]
    tokens, trained = sum(int(mask[2:].sum()) for mask in masks), sum(int(mask.sum()) for mask in masks)
    found = (losses[1] - losses[0]) / 2e-2 * tokens / trained * 0.3 / 2
    assert found == pytest.approx(float(slope.norm()), rel=0.01)
    (unweighted,) = train_each([[row]], mtp_loss=0.0)
    assert (unweighted.loss, unweighted.mtp_losses) == (weighted.loss, weighted.mtp_losses)


def test_a_rank_of_sequence_parallelism_has_its_part_of_the_tokens(monkeypatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    values = torch.arange(12).reshape(2, 6)
    for shared, expected in ((True, [[2, 3], [8, 9]]), (False, values.tolist())):
        config = SimpleNamespace(sequence_parallel=shared, tensor_model_parallel_size=3)
        assert own_tokens(values, config).tolist() == expected


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_rank": 4}, "LoRA does not support MTP"),
        ({"tie_embeddings": True}, "MTP layers do not support tied embeddings"),
    ],
)
def test_models_that_cannot_predict_further_tokens_are_refused(settings, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        ModelConfig(**{**SIZES, **settings})
