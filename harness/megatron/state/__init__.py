"""Save and load the state of a run: checkpoints that any layout and either of Megatron's optimizers can load.

`checkpoint.py` writes and reads them; `local.py` keeps some on the nodes' own disks, which `peers.py` copies from node
to node; `loading.py` makes sure that reading runs no code of theirs; `optimizer.py` gives
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
from harness.megatron.state.local import LocalCopies, LocalStore

__all__ = [
    "CheckpointWriter",
    "LocalCopies",
    "LocalStore",
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
