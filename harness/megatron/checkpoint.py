"""Checkpoints by Megatron-Core's `dist_checkpointing`: any layout can load what another wrote.

A checkpoint is written beside its final name and renamed when every rank is done, so a folder `step-...` is whole.
It holds model, optimizer, learning-rate schedule, and in `run.json` the step and the loader's state. There is no random
state to keep: nothing draws from a generator once the weights are made (dropout is not offered).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from harness.errors import CheckpointError
from harness.loader.state import LoaderState
from harness.megatron import compat, optimizer_state
from harness.megatron.step import MegatronStep
from harness.report.run_folder import RUN_FILE, whole_checkpoints


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done, and what the loader gives next."""

    step: int
    loader: LoaderState


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _weights(step: MegatronStep) -> dict[str, Any]:
    names = ["model"] if len(step.chunks) == 1 else [f"model{index}" for index in range(len(step.chunks))]
    return {name: chunk.module.sharded_state_dict() for name, chunk in zip(names, step.chunks, strict=True)}


def _state(step: MegatronStep, *, is_loading: bool) -> tuple[dict[str, Any], list[optimizer_state.OptimizerTensors]]:
    """What `dist_checkpointing` saves or loads, and the optimizer's share of it."""
    weights = _weights(step)
    tensors = [
        optimizer_state.sharded_tensors(
            part,
            weights["model"] if len(weights) == 1 else weights,
            is_float32=step.config.params_dtype == torch.float32,
            is_loading=is_loading,
        )
        for part in optimizer_state.parts_of(step.optimizer)
    ]
    state = {
        **weights,
        "optimizer": {str(number): part.by_number for number, part in enumerate(tensors)},
        "optimizer_steps": max(map(optimizer_state.steps_taken, optimizer_state.parts_of(step.optimizer))),
        "scheduler": step.scheduler.state_dict(),
    }
    return state, tensors


def save(folder: Path, step: MegatronStep, progress: Progress, *, keep: int) -> Path:
    """Write a checkpoint of `progress` and remove all but the newest `keep`; every rank takes part.

    Returns:
        The folder of the new checkpoint.
    """
    path = checkpoint_path(folder, progress.step)
    unfinished = path.with_suffix(".unfinished")
    is_rank_0 = torch.distributed.get_rank() == 0
    if is_rank_0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    with compat.main_module_hidden():
        dist_checkpointing.save(_state(step, is_loading=False)[0], str(unfinished), validate_access_integrity=False)
    torch.distributed.barrier()
    if is_rank_0:
        document = {
            "step": progress.step,
            "loader": progress.loader.to_json(),
            "megatron_core": compat.MEGATRON_VERSION,
            "torch": torch.__version__,
            "world_size": torch.distributed.get_world_size(),
        }
        with (unfinished / RUN_FILE).open("w") as file:
            json.dump(document, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():  # of an earlier run of the same step that was resumed from before it
            shutil.rmtree(path)
        unfinished.rename(path)
        for old in whole_checkpoints(folder)[:-keep]:
            # Renamed first: killed half-way, what is left must not pass for whole.
            removed = old.rename(old.with_suffix(".removed"))
            shutil.rmtree(removed)
    torch.distributed.barrier()
    return path


def read_progress(path: Path) -> Progress:
    """The progress that a whole checkpoint holds; raises CheckpointError for one that is cut short."""
    try:
        document = json.loads((path / RUN_FILE).read_text())
        return Progress(int(document["step"]), LoaderState.from_json(document["loader"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint's {RUN_FILE} cannot be read: {error}",
            where=str(path),
            fix="remove this folder; an older checkpoint beside it is used then",
        ) from error


def load(path: Path, step: MegatronStep) -> None:
    """Load model, optimizer and learning-rate schedule; every rank takes part.

    Raises:
        CheckpointError: it does not fit this model.
    """
    wanted, tensors = _state(step, is_loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(path))
    # Megatron and torch raise many kinds, one of them no Exception; the reader needs one sentence.
    except (Exception, CheckpointException) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"the checkpoint does not fit this run: {told}",
            where=str(path),
            fix="resume with the model's settings of the run that wrote it (its config.yaml)",
        ) from error
    for index, chunk in enumerate(step.chunks):
        chunk.module.load_state_dict(state["model" if len(step.chunks) == 1 else f"model{index}"])
    parts = optimizer_state.parts_of(step.optimizer)
    for number, (part, asked) in enumerate(zip(parts, tensors, strict=True)):
        optimizer_state.put_back(part, asked, state["optimizer"][str(number)], state["optimizer_steps"])
    step.scheduler.load_state_dict(state["scheduler"])
