"""Save and load checkpoints on the ranks of a job: torchrun ... -m tests.distributed.checkpoint_ranks FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from harness.loader import LoaderState
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.state.checkpoint import CheckpointWriter, load_checkpoint
from harness.megatron.step import MegatronStep
from harness.plan import OptimizerConfig, ParallelConfig
from harness.train import Progress
from tests.benchmarks.checkpoints import HeldBytes, make_step


def tensors_of(step: MegatronStep) -> list[torch.Tensor]:
    """Return the weights and what this rank has of the optimizer's state."""
    parts = [part.optimizer for part in getattr(step.optimizer, "chained_optimizers", [step.optimizer])]
    parts = [adam for part in parts for adam in getattr(part, "sub_optimizers", [part])]
    mains = [(part, main) for part in parts for group in part.param_groups for main in group["params"]]
    states = [part.state[main][name] for part, main in mains for name in ("exp_avg", "exp_avg_sq")]
    return [
        *(weight.data for chunk in step.chunks for weight in chunk.parameters()),
        *(main.data for _, main in mains),
        *states,
    ]


def forget(step: MegatronStep) -> None:
    for tensor in tensors_of(step):
        tensor.fill_(-1)


def save(folder: Path, step: MegatronStep, **options: Any) -> Path:
    """Write a checkpoint of a step, and return its folder."""
    writer = CheckpointWriter(folder, step, keep=1, **options)
    writer.start(Progress(1, LoaderState(0)))
    writer.finish()
    return folder / "step-00000001"


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with runtime.start("cpu") as job:
        split, plain = ParallelConfig(distributed_optimizer=True), ParallelConfig()
        layout = join(split, job.world_size)
        for dtype in ("float32", "bfloat16"):
            step = make_step(1, 64, split, layout, job.device, dtype=dtype)
            # Ranks have different parts of the state, and the same weights.
            torch.manual_seed(job.rank)
            weights = sum(1 for chunk in step.chunks for _ in chunk.parameters())
            for tensor in tensors_of(step)[weights:]:
                tensor.copy_(torch.randn_like(tensor))
            kept = [tensor.clone() for tensor in tensors_of(step)]
            if dtype == "float32":  # its main weights are the model's own, which are the same on all ranks
                for chunk in step.chunks:
                    for weight in chunk.parameters():
                        torch.distributed.broadcast(weight.data, 0)
                kept = [tensor.clone() for tensor in tensors_of(step)]
            with HeldBytes() as held:
                path = save(folder / f"{dtype}-split", step)
            own = sum(tensor.nbytes for tensor in kept[weights:])
            shared = sum(tensor.nbytes for tensor in kept[:weights]) // job.world_size
            if dtype == "float32":  # the main weights are counted as weights
                own -= shared
            forget(step)
            load_checkpoint(path, step)
            same = all(map(torch.equal, tensors_of(step), kept))
            other = make_step(1, 64, plain, layout, job.device, dtype=dtype)
            forget(other)
            load_checkpoint(path, other)
            path = save(folder / f"{dtype}-plain", other)
            forget(step)
            load_checkpoint(path, step)
            same_again = all(map(torch.equal, tensors_of(step), kept))
            if dtype == "bfloat16":
                half = OptimizerConfig(offload=0.5)
                other = make_step(1, 64, split, layout, job.device, dtype=dtype, optimizer=half)
                forget(other)
                load_checkpoint(path, other)
                path = save(folder / "hosted", other)
                forget(step)
                load_checkpoint(path, step)
                same_again = same_again and all(map(torch.equal, tensors_of(step), kept))
            written = sum(file.stat().st_size for file in (folder / f"{dtype}-split").rglob(f"__{job.rank}_*"))
            found[dtype] = {"own": own + shared, "made": held.most, "written": written, "same": [same, same_again]}
    (folder / f"rank-{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
