"""The learning rate is that of the updates which were made."""

from __future__ import annotations

from unittest import mock

import numpy as np

from harness.plan import ModelConfig, OptimizerConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch

from .conftest import one_rank


def test_a_skipped_step_leaves_the_learning_rate_where_it_was() -> None:
    batch = [build_thd_batch([SequenceView(np.arange(17, dtype=np.int32), np.ones(17, np.uint8))])]
    model = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16)
    optimizer = OptimizerConfig(lr=0.4, min_lr_ratio=0, warmup_steps=4)
    with one_rank(model, vocab_size=32, optimizer=optimizer, decay_steps=100) as step:
        results = [step.train(batch) for _ in range(2)]
        # As Megatron answers where gradients are not finite.
        with mock.patch.object(step.optimizer, "step", return_value=(False, float("inf"), None)):
            results += [step.train(batch) for _ in range(2)]
        results.append(step.train(batch))
    assert [result.skipped for result in results] == [False, False, True, True, False]
    np.testing.assert_allclose([result.learning_rate for result in results], [0, 0.1, 0.2, 0.2, 0.2])
