"""A step is one of AdamW by the settings; the learning rate is that of the updates which were made."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from harness.errors import ConfigError, FormatError
from harness.plan import ModelConfig, OptimizerConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch

from .conftest import one_rank


def test_a_skipped_step_leaves_the_learning_rate_where_it_was() -> None:
    batch = [build_thd_batch([SequenceView(np.arange(17, dtype=np.int32), np.ones(17, np.uint8))])]
    model = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16)
    optimizer = OptimizerConfig(lr=0.4, min_lr_ratio=0, warmup_steps=4, decay_steps=100)
    with one_rank(model, vocab_size=32, optimizer=optimizer) as step:
        results = [step.train(batch) for _ in range(2)]
        # As Megatron answers where gradients are not finite.
        with mock.patch.object(step.optimizer, "step", return_value=(False, float("inf"), None)):
            results += [step.train(batch) for _ in range(2)]
        results.append(step.train(batch))
    assert [result.skipped for result in results] == [False, False, True, True, False]
    np.testing.assert_allclose([result.learning_rate for result in results], [0, 0.1, 0.2, 0.2, 0.2])


def test_steps_are_those_of_adamw_with_the_settings() -> None:
    """Clipped, decayed and scheduled: a weight of the model after each step, against plain arithmetic."""
    rows = [build_thd_batch([SequenceView(np.arange(9 + n) * n % 32, np.ones(9 + n, np.uint8))]) for n in range(1, 8)]
    model = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16, init_std=0.3)
    betas, rates = (0.8, 0.7), {"lr": 0.02, "min_lr_ratio": 0.25, "warmup_steps": 2, "decay": "linear"}
    others = {"weight_decay": 0.5, "beta1": betas[0], "beta2": betas[1], "eps": 1e-2, "clip_grad": 0.5}
    with one_rank(model, vocab_size=32, optimizer=OptimizerConfig(decay_steps=6, **rates, **others)) as step:
        weight = step.chunks[0].module.decoder.layers[0].mlp.linear_fc2.weight
        moments = [torch.zeros_like(weight) for _ in betas]
        for number, row in enumerate(rows):
            before = weight.detach().clone()
            result = step.train([row])
            rate = 0.01 * number if number < 2 else max(0.02 - (number - 2) * 0.015 / 4, 0.005)
            assert result.learning_rate == pytest.approx(rate)
            gradients = [one.main_grad for one in step.chunks[0].parameters()]
            norm = math.sqrt(sum(float(one.square().sum()) for one in gradients))
            assert (result.grad_norm > 0.5, norm) == (True, pytest.approx(0.5, rel=1e-4))
            mean, square = moments
            mean.lerp_(weight.main_grad, 1 - betas[0])
            square.lerp_(weight.main_grad.square(), 1 - betas[1])
            corrected = [one / (1 - beta ** (number + 1)) for one, beta in zip(moments, betas, strict=True)]
            expected = before * (1 - rate * 0.5) - rate * corrected[0] / (corrected[1].sqrt() + 1e-2)
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)


def test_losses_are_means_over_the_trained_tokens_of_all_rows_in_training_and_validation() -> None:
    masks = [np.ones(17, np.uint8), (np.arange(30) % 4 == 0).astype(np.uint8), np.zeros(9, np.uint8)]
    rows = [build_thd_batch([SequenceView(np.arange(len(mask)) % 32, mask)]) for mask in masks]
    model = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16, init_std=0.3)
    with one_rank(model, vocab_size=32, optimizer=OptimizerConfig(lr=1e-30, warmup_steps=0)) as step:
        both = step.train(rows)
        alone = [step.train([row]) for row in rows]
        seen = step.evaluate([SimpleNamespace(rows=[row]) for row in rows])
        step.check_drift(1)
        for odd, kind in ((32, ConfigError), (-1, FormatError)):
            for name in ("labels", "tokens"):
                ids = np.arange(len(rows[1]))
                row = replace(rows[1], **{name: np.where(ids == 3, odd, getattr(rows[1], name))})
                with pytest.raises(kind, match=f"a token id is {odd}"):
                    step.evaluate([SimpleNamespace(rows=[row])])
    assert [one.trained_tokens for one in alone] == [16, 8, 0]
    mean = (16 * alone[0].loss + 8 * alone[1].loss) / 24
    assert (both.loss, both.trained_tokens, alone[2].loss) == (pytest.approx(mean, rel=1e-6), 24, 0)
    assert (both.mtp_losses, both.mtp_tokens) == ([], 0)
    assert (seen.loss, seen.trained_tokens, seen.expert_load) == (pytest.approx(mean, rel=1e-6), 24, None)


def test_without_a_last_step_the_rate_stays_after_the_warm_up_and_a_fill_replaces_the_weights() -> None:
    batch = [build_thd_batch([SequenceView(np.arange(17), np.ones(17, np.uint8))])]
    model = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16, tie_embeddings=False)
    courses = {"inverse-square-root": [0, 0.2, 0.4, 0.4 * math.sqrt(2 / 3)], "cosine": [0, 0.2, 0.4, 0.4]}

    @torch.no_grad()
    def fill(models: list[torch.nn.Module]) -> None:
        models[0].output_layer.weight.zero_()

    for decay, expected in courses.items():
        optimizer = OptimizerConfig(lr=0.4, min_lr_ratio=0, warmup_steps=2, decay=decay)
        with one_rank(model, vocab_size=128, optimizer=optimizer, fill=fill) as step:
            results = [step.train(batch) for _ in expected]
        assert results[0].loss == pytest.approx(math.log(128), rel=1e-5)
        np.testing.assert_allclose([result.learning_rate for result in results], expected, rtol=1e-6)
    # A warm-up that is longer than the run ends a step before it.
    long = OptimizerConfig(lr=0.4, min_lr_ratio=0, warmup_steps=9, decay_steps=3)
    with one_rank(model, vocab_size=128, optimizer=long) as step:
        rates = [step.train(batch).learning_rate for _ in range(4)]
    np.testing.assert_allclose(rates, [0, 0.2, 0.4, 0], atol=1e-9)
