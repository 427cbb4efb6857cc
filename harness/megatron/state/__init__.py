"""TODO."""

from __future__ import annotations

from harness.megatron.state.checkpoint import Progress
from harness.megatron.state.writer import CheckpointWriter

__all__ = [
    "CheckpointWriter",
    "Progress",
]
