"""TODO."""

from __future__ import annotations

from harness.megatron.run.opening import Task
from harness.megatron.run.training import run_training

__all__ = [
    "Task",
    "run_training",
]
