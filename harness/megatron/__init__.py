"""Train, save, load and export with Megatron-Core; the only package that imports it or Transformer Engine.

Modules, in the order of imports: `job` (ranks, device, watchdog, signals), `weights` (Hugging Face names and shapes),
`model` (GPTModel, packed attention, LoRA), `data` (batches on every rank), `state` (checkpoints) and `run` (a whole
run, `run_training`). Read `batch.py` (one packed row on a device) and `step.py` (one optimizer step) first.

Importing these modules changes nothing in the process. A program calls `prepare_process` before it imports them.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from contextlib import nullcontext
from unittest import mock

from harness.plan import ParallelConfig

__all__ = ["prepare_process"]


def prepare_process(parallel: ParallelConfig | None = None, *, shares_rows: bool = False) -> None:
    """Silence Megatron-Core's warnings about optional packages, and import it without loading the compiler on a CPU.

    Call it first in a program that trains, exports or measures, before importing other modules of `harness.megatron`.
    If Megatron-Core is already imported, it only sets the warning filters. CUDA_DEVICE_MAX_CONNECTIONS is set for the
    layout of a run unless it is already set.
    """
    if parallel is not None:
        # The driver reads it once, at the first CUDA call, which an import may make.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(parallel.device_connections(shares_rows)))
    # On import it warns a dozen times about optional packages (Apex, flash-attention) that nothing here needs.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")
    # Its checkpoints use parts of PyTorch that warn at each load, with the caller as the source.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, message="Please use DTensor instead")
    if "megatron.core" in sys.modules:
        return
    # Objects created by imports stay, and searching them for garbage would take a quarter of the import time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch

        # On import, Megatron-Core passes its fused functions to torch.compile, which loads the compiler: a second or
        # two of every start. Nothing calls these functions on a CPU, so leave them uncompiled.
        uncompiled = mock.patch.object(torch, "compile", lambda function, **options: function)
        with uncompiled if torch.version.cuda is None else nullcontext():
            import megatron.core  # noqa: F401
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
