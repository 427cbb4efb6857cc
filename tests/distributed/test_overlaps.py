"""Weights that are gathered in the next forward pass are those of the last step wherever they are read.

As a program on ranks, `FOLDER`: a CPU trains once as it does, and once as a GPU would, with exchanges behind layers;
each rank writes its losses, and what its checkpoint has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state

from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model import gpt
from harness.megatron.state.checkpoint import load_checkpoint
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch

from .checkpoint_ranks import save
from .conftest import found_by, run_ranks


def test_weights_gathered_behind_layers_train_evaluate_and_save_as_those_gathered_at_once(tmp_path) -> None:
    run_ranks(2, "test_overlaps", tmp_path)
    for found in found_by(tmp_path):
        assert found["behind"] == found["at once"]
        losses = found["behind"]["losses"]
        assert found["behind"]["resumed"] == losses[-1]
        assert len(set(losses)) == len(losses)


MODEL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, num_query_groups=2)


def batch_of(step: int, rank: int) -> Any:
    ids = np.random.default_rng([step, rank]).integers(0, 100, 25).astype(np.int32)
    return SimpleNamespace(rows=[build_thd_batch([SequenceView(ids, np.r_[np.ones(24, np.uint8), [0]])])] * 2)


def make(job: runtime.Runtime, *, overlaps: bool) -> MegatronStep:
    parallel_state.destroy_model_parallel()
    parallel = ParallelConfig(distributed_optimizer=True)
    layout = join(parallel, job.world_size)
    optimizer = OptimizerConfig(lr=0.05, min_lr_ratio=1, warmup_steps=0)
    with mock.patch.object(gpt.compat, "has_streams", return_value=overlaps):
        step = MegatronStep(MODEL, parallel, layout, device=job.device, vocab_size=128, optimizer=optimizer)
    assert step.chunks[0].ddp_config.overlap_param_gather is overlaps
    return step


def main(folder: Path) -> None:
    with runtime.start("cpu") as job:
        found: dict[str, Any] = {}
        for name, overlaps in (("at once", False), ("behind", True)):
            step = make(job, overlaps=overlaps)
            losses = []
            for number in range(3):
                losses.append(step.train(batch_of(number, job.rank)).loss)
                losses.append(step.evaluate([batch_of(9, 0)]).loss)
            # After a step, before anything gathers its weights.
            losses.append(step.train(batch_of(3, job.rank)).loss)
            path = save(folder / name, step, in_background=False)
            losses.append(step.train(batch_of(4, job.rank)).loss)
            again = make(job, overlaps=overlaps)
            load_checkpoint(path, again)
            total = sum(float(weight.double().sum()) for weight in again.chunks[0].parameters())
            found[name] = {"losses": losses, "sum": total, "resumed": again.train(batch_of(4, job.rank)).loss}
        (folder / f"rank-{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
