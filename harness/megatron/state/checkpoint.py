"""Checkpoints by Megatron-Core's `dist_checkpointing`: any layout can load what another wrote.

A checkpoint holds model, optimizer, learning-rate schedule, and in `run.json` the step and the loader's state. There is
no random state to keep: nothing draws from a generator once the weights are made (dropout is not offered).
`checkpoint_writer` writes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from harness.errors import CheckpointError, LoaderError
from harness.loader import LoaderState
from harness.megatron.job import is_about_ranks
from harness.megatron.state import optimizer as optimizer_state
from harness.megatron.step import MegatronStep
from harness.train import RUN_FILE, whole_checkpoints


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done, and what the loader gives next."""

    step: int
    loader: LoaderState


def _weights(step: MegatronStep) -> dict[str, Any]:
    names = ["model"] if len(step.chunks) == 1 else [f"model{index}" for index in range(len(step.chunks))]
    return {name: chunk.module.sharded_state_dict() for name, chunk in zip(names, step.chunks, strict=True)}


def model_state(
    step: MegatronStep, *, is_loading: bool
) -> tuple[dict[str, Any], list[optimizer_state.OptimizerTensors]]:
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


def read_progress(path: Path) -> Progress:
    """The progress that a checkpoint holds.

    Raises:
        CheckpointError: it is cut short or damaged: a file is missing, or has another size than was written.
    """

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(
            what, where=str(path), fix="remove this folder; an older checkpoint beside it is used then"
        )

    try:
        document = json.loads((path / RUN_FILE).read_text())
        progress = Progress(int(document["step"]), LoaderState.from_json(document["loader"]))
        sizes = {str(name): int(size) for name, size in document.get("files", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(f"the checkpoint's {RUN_FILE} cannot be read: {error}") from error
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            now = "is missing" if found is None else f"has {found:,} bytes"
            raise damaged(f"the checkpoint's file {name} {now}, {size:,} were written")
    return progress


def find_newest(folder: Path) -> tuple[Path | None, list[CheckpointError]]:
    """The newest whole checkpoint below `folder`, and why newer ones are passed over.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    passed_over: list[CheckpointError] = []
    for path in reversed(whole_checkpoints(folder)):
        try:
            read_progress(path)
        except CheckpointError as error:
            passed_over.append(error)
        else:
            return path, passed_over
    if passed_over:
        raise passed_over[0]
    return None, []


def load(path: Path, step: MegatronStep) -> None:
    """Load model, optimizer and learning-rate schedule; every rank takes part.

    Raises:
        CheckpointError: it does not fit this model.
        LoaderError: it cannot be read, which may go better at the next try.
        RuntimeError: another rank is gone.
    """
    wanted, tensors = model_state(step, is_loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(path))
    # Megatron and torch raise many kinds, one of them no Exception; the reader needs one sentence.
    except (Exception, CheckpointException) as error:
        if is_about_ranks(error):
            raise
        causes = [error, *(cause for cause, _ in getattr(error, "failures", {}).values())]
        unread = next((cause for cause in causes if isinstance(cause, OSError)), None)
        if unread is not None:
            raise LoaderError(
                f"the checkpoint cannot be read: {unread}", where=str(path), fix="look at the file system of that node"
            ) from error
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
