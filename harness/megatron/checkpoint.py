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

from harness.errors import CheckpointError
from harness.loader.state import LoaderState
from harness.megatron import compat
from harness.megatron.step import MegatronStep

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done, and what the loader gives next."""

    step: int
    loader: LoaderState


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def whole_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "" and (path / RUN_FILE).is_file())


def _state(step: MegatronStep, *, is_loading: bool) -> dict[str, Any]:
    sharding = {"distrib_optim_sharding_type": "fully_reshardable"}
    state: dict[str, Any] = {}
    if is_loading:
        compat.make_empty_adam_state(step.optimizer)
    for index, chunk in enumerate(step.chunks):
        key = "model" if len(step.chunks) == 1 else f"model{index}"
        state[key] = chunk.module.sharded_state_dict()
    weights = state["model"] if len(step.chunks) == 1 else dict(state)
    state["optimizer"] = step.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=sharding)
    state["scheduler"] = step.scheduler.state_dict()
    return state


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
        dist_checkpointing.save(_state(step, is_loading=False), str(unfinished), validate_access_integrity=False)
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
            shutil.rmtree(old)
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
    try:
        state = dist_checkpointing.load(_state(step, is_loading=True), str(path))
    except Exception as error:  # Megatron and torch raise many kinds; the reader needs one sentence
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"the checkpoint does not fit this run: {told}",
            where=str(path),
            fix="resume with the model's settings of the run that wrote it (its config.yaml)",
        ) from error
    for index, chunk in enumerate(step.chunks):
        chunk.module.load_state_dict(state["model" if len(step.chunks) == 1 else f"model{index}"])
    step.optimizer.load_state_dict(state["optimizer"])
    step.scheduler.load_state_dict(state["scheduler"])
