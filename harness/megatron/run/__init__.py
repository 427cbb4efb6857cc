"""A whole training run: open its data, model and checkpoint, train, record every step, and save.

`sft` and `pretrain` open their kind of data as a `Task`; `opening` brings a run to its next step, `training` takes it
to its last one, and `records` writes what each step leaves behind. Read `training.py` first.
"""

from __future__ import annotations

from harness.megatron.run.opening import Task
from harness.megatron.run.pretrain import pretrain
from harness.megatron.run.sft import fine_tune
from harness.megatron.run.training import run_training

__all__ = ["Task", "fine_tune", "pretrain", "run_training"]
