"""A whole training run: open its data, model and checkpoint, train, record every step, and save.

`fine_tuning` and `pretraining` open their kind of data as a `Task`; `training` takes it from the meeting of the ranks
to the last step, and `records` writes what each step leaves behind. `rehearsal` is a step of single ranks of a job
that does not run. Read `training.py` first.
"""

from __future__ import annotations

from harness.megatron.run.fine_tuning import open_fine_tuning
from harness.megatron.run.pretraining import open_pretraining
from harness.megatron.run.rehearsal import RankRehearsal, rehearse
from harness.megatron.run.training import Task, run_training

__all__ = ["RankRehearsal", "Task", "open_fine_tuning", "open_pretraining", "rehearse", "run_training"]
