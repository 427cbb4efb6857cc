"""Train, save, load and export with Megatron-Core; the only package that imports it or Transformer Engine.

Rooms, in the order of imports: `job` (ranks, device, watchdog, signals), `weights` (Hugging Face names and shapes),
`model` (GPTModel, packed attention, LoRA), `data` (batches on every rank), `state` (checkpoints) and `run` (a whole
run, `run_training`). Read `batch.py` and `step.py` first: one packed row on a device, and one optimizer
step.

Importing these modules changes nothing in the process. A program calls `prepare_process` before it imports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use
from harness.megatron.process import prepare_process

if TYPE_CHECKING:
    from harness.megatron.batch import RowTensors, to_device
    from harness.megatron.export.folder import export_checkpoint
    from harness.megatron.run.rehearsal import rehearse
    from harness.megatron.step import MegatronStep

__all__ = ["MegatronStep", "RowTensors", "export_checkpoint", "prepare_process", "rehearse", "to_device"]

# Imported at first use: `prepare_process` comes before torch and Megatron-Core.
__getattr__ = names_on_first_use(
    __name__,
    {
        "RowTensors": "batch",
        "to_device": "batch",
        "export_checkpoint": "export.folder",
        "rehearse": "run.rehearsal",
        "MegatronStep": "step",
    },
)
