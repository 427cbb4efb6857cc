"""Save and load the state of a run: checkpoints that any layout and either of Megatron's optimizers can load.

`checkpoint.py` writes and reads them; `optimizer.py` gives the optimizer's state one form on disk.
"""

from __future__ import annotations

from harness.megatron.state.checkpoint import CheckpointWriter, Progress, find_newest, load_checkpoint, read_progress

__all__ = ["CheckpointWriter", "Progress", "find_newest", "load_checkpoint", "read_progress"]
