"""The learning rate is that of the updates which were made."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch


def test_a_skipped_step_leaves_the_learning_rate_where_it_was() -> None:
    parallel, batch = (
        ParallelConfig(),
        SimpleNamespace(rows=[build_thd_batch([SequenceView(np.arange(17, dtype=np.int32), np.ones(17, np.uint8))])]),
    )
    with runtime.start("cpu"):
        layout = join(parallel, 1)
        step = MegatronStep(
            ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16),
            parallel,
            layout,
            device=torch.device("cpu"),
            vocab_size=32,
            optimizer=OptimizerConfig(lr=0.4, min_lr=0.0, warmup_steps=4),
            decay_steps=100,
        )
        results = [step.train(batch) for _ in range(2)]
        # As Megatron answers where gradients are not finite.
        with mock.patch.object(step.optimizer, "step", return_value=(False, float("inf"), None)):
            results += [step.train(batch) for _ in range(2)]
        results.append(step.train(batch))
    assert [result.skipped for result in results] == [False, False, True, True, False]
    np.testing.assert_allclose([result.learning_rate for result in results], [0, 0.1, 0.2, 0.2, 0.2])
