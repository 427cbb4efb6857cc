"""Weights that are gathered in the next forward pass, or during a step, are those of that step wherever they are read.

As a program on ranks, `FOLDER KIND DTYPE`: a CPU trains once as it does, and once as a GPU would, with exchanges behind
layers, or behind the optimizer; each rank writes its losses, and what its checkpoint has. `FOLDER sft SETTINGS...` is a
run of the recipe as on a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from harness.bench.step import give_state
from harness.config import compose_config
from harness.megatron.export.folder import export_checkpoint
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model import gpt
from harness.megatron.state.checkpoint import load_checkpoint
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig, SftConfig
from harness.recipes import sft
from harness.records import SequenceView
from harness.thd import build_thd_batch

from .checkpoint_ranks import save
from .conftest import found_by, overrides_of, read_metrics, run_here, run_ranks


def test_weights_gathered_behind_layers_train_evaluate_and_save_as_those_gathered_at_once(tmp_path) -> None:
    run_ranks(2, "test_overlaps", tmp_path, "layers")
    for found in found_by(tmp_path):
        for values in found.values():
            values.pop("gathering")
        assert found["behind"] == found["at once"]
        losses = found["behind"]["losses"]
        assert found["behind"]["resumed"] == losses[-1]
        assert len(set(losses)) == len(losses)


@pytest.mark.parametrize(("dtype", "nearness"), [("float32", (1e-6, 1e-5)), ("bfloat16", (1e-3, 1e-2))])
def test_weights_gathered_during_a_step_train_evaluate_and_save_as_those_of_one_rank(tmp_path, dtype, nearness) -> None:
    """In bfloat16, a rank has float32 weights of its own, and rounds them into those that are gathered."""
    for ranks in (1, 4):
        (tmp_path / str(ranks)).mkdir()
        run_ranks(ranks, "test_overlaps", tmp_path / str(ranks), "step", dtype)
    (one,) = found_by(tmp_path / "1", 1)
    for found in found_by(tmp_path / "4", 4):
        for name in ("at once", "behind"):
            assert found[name]["losses"] == pytest.approx(one["at once"]["losses"], rel=nearness[0])
            assert found[name]["norms"] == pytest.approx(one["at once"]["norms"], rel=nearness[1])
            assert found[name]["resumed"] == pytest.approx(found[name]["losses"][-1], rel=1e-7)
        assert found["behind"]["losses"] == pytest.approx(found["at once"]["losses"], rel=2e-6)
        assert found["behind"]["sum"] == pytest.approx(found["at once"]["sum"], rel=1e-7)
        # After a step, all of the first chunk is on its way, and nothing of the second is.
        first, second = found["behind"]["gathering"]
        assert all(first)
        assert not any(second)
        assert not any(map(any, found["at once"]["gathering"]))
    # The first stage has several buckets, the second has one.
    sizes = [len(found["behind"]["gathering"][0]) for found in found_by(tmp_path / "4", 4)]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3] == 1
    assert len(set(one["at once"]["losses"])) == len(one["at once"]["losses"])


CHUNKS = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}


def test_a_run_that_gathers_during_its_steps_resumes_and_exports_the_weights_of_one_rank(tmp_path, dataset) -> None:
    fixed = ("trainer.eval_interval=2", "trainer.eval_batches=1", "optimizer.eps=1e-4", "resume=auto")
    with_step = ("parallel=pp2_vpp2", "parallel.distributed_optimizer=true", "parallel.overlap_weights_with_step=true")
    for steps in (1, 7):  # layouts with stages draw other weights
        run_here(sft, SftConfig, overrides_of(dataset, tmp_path / "one", *fixed, f"trainer.steps={steps}"))
        if steps == 1:
            shutil.copytree(tmp_path / "one", tmp_path / "four")
    for steps in (4, 7):
        settings = overrides_of(dataset, tmp_path / "four", *fixed, *with_step, f"trainer.steps={steps}")
        run_ranks(4, "test_overlaps", tmp_path, "sft", *settings)
        assert [found["gathered"] for found in found_by(tmp_path, 4)] == [3] * 4
    one, four = (read_metrics(tmp_path / name) for name in ("one", "four"))
    for column, rel in (("loss", 1e-6), ("grad_norm", 1e-5)):
        assert [step[column] for step in four] == pytest.approx([step[column] for step in one], rel=rel)
    evaluated = [[loss for step in run if (loss := step["validation_loss"]) is not None] for run in (one, four)]
    assert len(evaluated[0]) == 5
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-6)
    weights = []
    for name in ("one", "four"):
        export_checkpoint(tmp_path / name, tmp_path / f"{name}-exported")
        (file,) = (tmp_path / f"{name}-exported").glob("*.safetensors")
        weights.append(load_file(file))
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-6, msg=name)


SIZES = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 2}
# Of the first stage's first chunk; others have none.
BUCKET = 3000


def rows_of(step: int, rank: int) -> list[Any]:
    ids = np.random.default_rng([step, rank]).integers(0, 100, 25).astype(np.int32)
    return [build_thd_batch([SequenceView(ids, np.r_[np.ones(24, np.uint8), [0]])])] * 2


@contextmanager
def as_on_a_gpu(*, overlaps: bool = True, bucket: int | None = BUCKET) -> Iterator[None]:
    """Let a CPU exchange behind what it computes, in buckets of so many weights or in one."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gpt.compat, "has_streams", return_value=overlaps))
        config = partial(gpt.DistributedDataParallelConfig, bucket_size=bucket)
        stack.enter_context(mock.patch.object(gpt, "DistributedDataParallelConfig", config))
        yield


def make(job: runtime.Runtime, *, kind: str, dtype: str, overlaps: bool) -> MegatronStep:
    parallel_state.destroy_model_parallel()
    of = {"distributed_optimizer": True}
    if kind == "step" and job.world_size > 1:
        of |= {**CHUNKS, "overlap_weights_with_step": overlaps}
    parallel = ParallelConfig(**of)
    layout = join(parallel, job.world_size)
    optimizer = OptimizerConfig(lr=0.05, min_lr_ratio=1, warmup_steps=0, eps=1e-3)
    with as_on_a_gpu(overlaps=overlaps, bucket=BUCKET if kind == "step" else None):  # buckets change how sums round
        model = ModelConfig(**SIZES, dtype=dtype)
        step = MegatronStep(model, parallel, layout, device=job.device, vocab_size=128, optimizer=optimizer)
    assert step.chunks[0].ddp_config.overlap_param_gather is overlaps
    return step


def groups_of(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def main(folder: Path, kind: str, dtype: str = "float32") -> None:
    with runtime.start("cpu") as job:
        found: dict[str, Any] = {}
        for name, overlaps in (("at once", False), ("behind", True)):
            if overlaps and job.world_size == 1:
                continue
            step = make(job, kind=kind, dtype=dtype, overlaps=overlaps)
            # One rank has the rows of both that have data of their own.
            ranks = [step.layout.dp_rank] if job.world_size > 1 else [0, 1]

            def batch_of(number: int, ranks: list[int] = ranks) -> Any:
                return SimpleNamespace(rows=[row for rank in ranks for row in rows_of(number, rank)])

            if kind == "step":
                # Layouts with stages draw other weights.
                start = folder.parent / "start"
                if not start.exists():
                    give_state(step)
                    save(folder, step, in_background=False).rename(start)
                load_checkpoint(start, step)
            losses, norms = [], []

            def train(number: int, step: MegatronStep = step, losses: Any = losses, norms: Any = norms) -> None:
                result = step.train(batch_of(number))
                losses.append(result.loss)
                norms.append(result.grad_norm)

            for number in range(3):
                train(number)
                losses.append(step.evaluate([batch_of(9)]).loss)
            # After a step, before anything gathers its weights.
            train(3)
            gathering = [[one.param_gather_handle is not None for one in groups_of(chunk)] for chunk in step.chunks]
            path = save(folder / name, step, in_background=False)
            train(4)
            again = make(job, kind=kind, dtype=dtype, overlaps=overlaps)
            load_checkpoint(path, again)
            total = sum(float(weight.double().sum()) for chunk in again.chunks for weight in chunk.parameters())
            resumed = again.train(batch_of(4)).loss
            found[name] = {"losses": losses, "norms": norms, "sum": total, "resumed": resumed, "gathering": gathering}
        (folder / f"rank-{job.rank}.json").write_text(json.dumps(found))


def run_recipe(folder: Path, *settings: str) -> None:
    """Run the recipe on this rank; write how often its step gathered weights."""
    gathered = 0
    start = gpt.DistributedDataParallel.start_param_sync

    def counted(chunk: Any, *arguments: Any, **options: Any) -> None:
        nonlocal gathered
        gathered += bool(options.get("force_dispatch"))
        start(chunk, *arguments, **options)

    with as_on_a_gpu(), mock.patch.object(gpt.DistributedDataParallel, "start_param_sync", counted):
        assert sft.main(compose_config("sft", SftConfig, settings)) == 0
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"gathered": gathered}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "sft":
        run_recipe(Path(sys.argv[1]), *sys.argv[3:])
    else:
        main(Path(sys.argv[1]), *sys.argv[2:])
