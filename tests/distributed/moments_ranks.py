"""Train and save with Transformer Engine's Adam and moments in bfloat16: -m tests.distributed.moments_ranks FOLDER."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.megatron import prepare_process

prepare_process()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from harness.megatron import compat  # noqa: E402
from harness.megatron.job import runtime  # noqa: E402
from harness.megatron.job.runtime import join  # noqa: E402
from harness.megatron.state.checkpoint import load_checkpoint, stored_moments  # noqa: E402
from harness.megatron.step import MegatronStep  # noqa: E402
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig, plan_memory  # noqa: E402
from harness.records import SequenceView  # noqa: E402
from harness.thd import build_thd_batch  # noqa: E402

from .checkpoint_ranks import save  # noqa: E402

MODEL = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=96, dtype="bfloat16")
SMALL = OptimizerConfig(lr=1e-2, warmup_steps=1, moments_dtype="bfloat16")
# A constant rate: loading adds to the steps of a schedule, and some of these have trained before.
FLOAT = OptimizerConfig(warmup_steps=1, decay="constant")
MOMENTS = ("exp_avg", "exp_avg_sq")


def states(step: MegatronStep) -> list[dict[str, torch.Tensor]]:
    """Return the moments and main weight of each weight, in an order that all optimizers share."""
    (part,) = getattr(step.optimizer, "chained_optimizers", [step.optimizer])
    inner, found = part.optimizer, []
    for weight in step.chunks[0].parameters():
        if weight in part.model_param_group_index_map:
            group, place = part.model_param_group_index_map[weight]
            main = inner.param_groups[group]["params"][place]
            found.append({"master_param": main, **inner.state[main]})
    return found


def same(one: MegatronStep, other: MegatronStep, dtype: torch.dtype) -> bool:
    """Compare the moments after `dtype`, and the main weights as they are."""
    pairs = list(zip(states(one), states(other), strict=True))
    moments = (torch.equal(a[name].to(dtype), b[name].to(dtype)) for a, b in pairs for name in MOMENTS)
    return all(moments) and all(torch.equal(a["master_param"], b["master_param"]) for a, b in pairs)


def main(folder: Path) -> None:
    # A CPU would get PyTorch's Adam, and this is about Transformer Engine's.
    for module in (compat.optimizer, compat.distrib_optimizer):
        del compat._OF_A_CPU[module]
    with runtime.start("cpu") as job:
        split, plain = ParallelConfig(distributed_optimizer=True), ParallelConfig()
        narrow = ParallelConfig(distributed_optimizer=True, gradient_dtype="bfloat16")
        layout = join(split, job.world_size)

        def make(optimizer: OptimizerConfig, parallel: ParallelConfig = split) -> MegatronStep:
            optimizer = replace(optimizer, decay_steps=20)
            return MegatronStep(MODEL, parallel, layout, device=job.device, vocab_size=64, optimizer=optimizer)

        def train(step: MegatronStep, *seeds: int) -> list[float]:
            results = []
            for seed in seeds:
                ids = np.random.default_rng((seed, job.rank)).integers(0, 64, size=33).astype(np.int32)
                row = build_thd_batch([SequenceView(ids, np.r_[np.ones(32, np.uint8), np.zeros(1, np.uint8)])])
                result = step.train([row])
                results += [result.loss, result.grad_norm]
            return results

        small, whole = make(SMALL), make(OptimizerConfig(lr=1e-2, warmup_steps=1))
        losses, precise = train(small, 1, 2, 3), train(whole, 1, 2, 3)
        path, of_whole = save(folder / "small", small), save(folder / "whole", whole)
        kept = [{name: value.clone() for name, value in one.items()} for one in states(small)]
        planned = plan_memory(
            MODEL, split, vocab_size=64, dp_size=job.world_size, max_tokens_per_rank=1, optimizer=SMALL
        ).optimizer
        found: dict[str, Any] = {
            "adam": type(small.optimizer.chained_optimizers[0].optimizer).__module__.partition(".")[0],
            "stored": [stored_moments(path), stored_moments(of_whole)],
            "dtypes": {name: str(value.dtype) for one in kept for name, value in one.items()},
            "bytes": [sum(value.nbytes for one in kept for value in one.values()), planned],
            "differ": max(abs(a - b) / b for a, b in zip(losses, precise, strict=True)),
        }
        undisturbed = train(small, 4, 5)
        again = make(SMALL)
        load_checkpoint(path, again)
        found["resumed"] = train(again, 4, 5) == undisturbed
        # Its weights and moments are in bfloat16, in float32, on the host, in an optimizer that is not distributed.
        third = make(SMALL)
        load_checkpoint(path, third)
        found["loaded"] = all(
            torch.equal(one[name], was[name]) for one, was in zip(states(third), kept, strict=True) for name in was
        )
        others, following = {}, {}
        for name, optimizer, parallel in (
            ("float32", FLOAT, split),
            ("host", replace(FLOAT, offload=0.5), split),
            ("bfloat16 gradients", SMALL, narrow),
            ("plain", FLOAT, plain),
        ):
            other, back = make(optimizer, parallel), make(SMALL)
            if name != "float32":  # of an optimizer that has a state already, and of one that has none
                train(other, 7)
            load_checkpoint(path, other)
            load_checkpoint(save(folder / name, other), back)
            others[name] = same(back, third, torch.bfloat16)
            following[name] = train(other, 4, 5)
        found["others"], found["following"] = others, following
        rounded = make(SMALL)
        load_checkpoint(of_whole, rounded)
        found["rounded"] = same(rounded, whole, torch.bfloat16) and not same(rounded, whole, torch.float32)
    (folder / f"rank-{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
