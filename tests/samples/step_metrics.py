"""Metrics of a step, for tests that change some of them."""

from __future__ import annotations

from typing import Any

from harness.train.metrics import StepMetrics


def metrics(step: int, loss: float = 2.0, **changes: Any) -> StepMetrics:
    """Return the metrics of `step` with `changes`."""
    plain = {"epoch": 0, "validation_loss": None, "learning_rate": 1e-3, "grad_norm": 1.5, "num_microbatches": 2}
    plain |= {"tokens": 1000, "trained_tokens": 600, "tokens_per_s": 500.0, "fill": 0.9, "packs_consumed": 8 * step}
    plain |= {"step_s": 2.0, "data_wait_s": 0.1, "imbalance_tokens": 1.1, "imbalance_cost": 1.2}
    return StepMetrics(step=step, loss=loss, **{**plain, **changes})
