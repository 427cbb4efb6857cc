"""Save and load the state of a run: checkpoints that any layout and either of Megatron's optimizers can load.

`checkpoint.py` writes and reads them; `loading.py` makes sure that reading runs no code of theirs; `optimizer.py` gives
the optimizer's state one form on disk.
"""

from __future__ import annotations

from harness.megatron.state.checkpoint import (
    CheckpointWriter,
    count_sharded_tensors,
    find_damage,
    find_newest,
    load_checkpoint,
    stored_moments,
)
from harness.megatron.state.loading import load_tree, put_weights, reason_of, sharded_weights

__all__ = [
    "CheckpointWriter",
    "count_sharded_tensors",
    "find_damage",
    "find_newest",
    "load_checkpoint",
    "load_tree",
    "put_weights",
    "reason_of",
    "sharded_weights",
    "stored_moments",
]
