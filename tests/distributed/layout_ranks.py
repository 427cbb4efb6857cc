"""`python -m tests.distributed.forked RANKS tests.distributed.layout_ranks LAYOUTS`: layouts against one rank.

LAYOUTS is a pickled list of a layout's name, its kind of model and its settings, in a folder with a dataset, `data`.
Each trains two steps from the weights of its kind's reference, which the first run of the kind on one rank draws, and
adds a line of JSON beside the list: the largest differences from the reference on any rank, and where they are.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed import PrefixStore

from harness.formats import open_dataset
from harness.loader import Loader, RankLayout
from harness.megatron import prepare_process
from harness.megatron.data.feed import Feed, readable
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.state import checkpoint
from harness.megatron.state.loading import sharded_weights
from harness.megatron.step import MegatronStep
from harness.plan import SftConfig

# Momentum without memory: Adam's first moment is the gradient of the step.
GRADIENT = "optimizer.state.exp_avg."
# Of what a rank waits for another, so that a rank that failed alone does not hold the others up.
PATIENCE_S = 60


def pieces(tree: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...], ShardedTensor]]:
    """Yield name, place in the whole and piece of each tensor of a tree for `dist_checkpointing`."""
    for value in nested_values(tree):
        built = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for piece in built:
            if isinstance(piece, ShardedTensor) and piece.key.startswith(prefix):
                yield piece.key.removeprefix(prefix), piece.global_slice(), piece


def whole(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a tree by name, on a rank that has all of them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, place, piece in pieces(tree, prefix):
        tensors.setdefault(name, torch.full(piece.global_shape, math.nan))[place] = piece.data
    return tensors


def numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield every number of a step's result, by name."""
    if isinstance(value, dict | tuple | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, float(value)


class Run:
    """A run on one layout, and the one that it is compared with: the first of its kind, on one rank.

    Attributes:
        covered: by the name of a parameter, True at the numbers of its gradient that this rank has.
        worst: the largest relative difference of a number that a step reports, of a parameter's gradient relative to
            the norm of the whole gradient (`gradient`) and to its own (`own`), and where each is.
    """

    def __init__(self, settings: SftConfig, reference: Path) -> None:
        self.settings, self.path = settings, reference
        self.reference = torch.load(reference) if reference.exists() else None
        self.covered: dict[str, torch.Tensor] = {}
        self.worst: dict[str, tuple[float, str]] = {"step": (0.0, ""), "gradient": (0.0, ""), "own": (0.0, "")}

    def train(self, data: Path, layout: RankLayout, device: torch.device) -> dict[str, tuple[float, str]]:
        """Train two steps; return `worst`, in which there is nothing for the reference itself."""
        config, reader = self.settings, open_dataset(data)
        made: dict[str, Any] = {"steps": [], "gradients": []}

        def fill(chunks: Sequence[Any]) -> None:
            generator = torch.Generator().manual_seed(30)
            for chunk in chunks:
                for name, place, piece in pieces(sharded_weights(chunk)):
                    if self.reference is None:  # small matrices of adapters, norms and biases differ from their start
                        piece.data += 0.1 * torch.randn(piece.data.shape, generator=generator)
                    else:
                        piece.data.copy_(self.reference["weights"][name][place])
                if self.reference is None:
                    made["weights"] = whole(sharded_weights(chunk))

        step = MegatronStep(
            config.model,
            config.parallel,
            layout,
            device=device,
            vocab_size=config.model.vocab_size,
            optimizer=config.optimizer,
            fill=torch.no_grad()(fill),
        )

        def load() -> Loader:
            return Loader(readable(reader, layout), config.loader, schedule=config.schedule, layout=layout, num_steps=2)

        with Feed(load, layout, device=device) as batches:
            for number, batch in enumerate(batches):
                made["steps"].append(dict(numbers(asdict(step.train(batch)), "")))
                state, _ = checkpoint._run_state(step, is_loading=False)
                if self.reference is None:
                    made["gradients"].append(whole(state["optimizer"], GRADIENT))
                else:
                    self._compare(number, made["steps"][number], state["optimizer"])
        if self.reference is None:
            torch.save(made, self.path)
        return self.worst

    @torch.no_grad()
    def _compare(self, number: int, found: dict[str, float], optimizer: Any) -> None:
        assert self.reference is not None
        for name, expected in self.reference["steps"][number].items():
            self._note("step", abs(found[name] - expected) / max(abs(expected), 1e-12), f"step {number + 1}: {name}")
        gradients = self.reference["gradients"][number]
        if not self.covered:
            self.covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in gradients.items()}
        for name, place, piece in pieces(optimizer, GRADIENT):
            self.covered[name][place] = True
            error = torch.linalg.vector_norm(piece.data - gradients[name][place])
            where = f"step {number + 1}: {name}{_text(place)}"
            self._note("gradient", float(error) / found["grad_norm"], where)
            self._note("own", float(error / torch.linalg.vector_norm(gradients[name])), where)

    def _note(self, kind: str, error: float, name: str) -> None:
        if not error <= self.worst[kind][0]:  # NaN too
            self.worst[kind] = (error if math.isfinite(error) else math.inf, name)


def _text(place: tuple[Any, ...]) -> str:
    """Return the numbers of the layer and expert in a place, if the tensor on disk has them."""
    return str([axis for axis in place if isinstance(axis, int)] or "")


def train_layout(number: int, layout: tuple[str, str, SftConfig], path: Path) -> None:
    """Train one layout on this rank; rank 0 adds its line when every rank has reported."""
    name, kind, config = layout
    rank, size = map(runtime.place_in_job, ("RANK", "WORLD_SIZE"))
    store = runtime._open_store(rank, size, timedelta(seconds=600)) if size > 1 else torch.distributed.HashStore()
    # One store for all: each job has a part of it for itself.
    own = PrefixStore(f"job {number}", store)
    began = time.process_time()
    try:
        with (
            mock.patch.object(runtime, "_open_store", return_value=own),
            runtime.start("cpu", timeout_s=PATIENCE_S) as started,
        ):
            place = join(config.parallel, size, timeout_s=PATIENCE_S)
            run = Run(config, path.with_name(f"{kind}.pt"))
            outcome: dict[str, Any] = {**run.train(path.with_name("data") / "train", place, started.device)}
        outcome["covered"] = {of: mask.numpy() for of, mask in run.covered.items()}
    except Exception as error:  # of any kind: it is the result of this layout, and others follow
        outcome = {"error": f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"}
    outcome["cpu_s"] = time.process_time() - began
    own.set(f"result of {rank}", pickle.dumps(outcome))
    if rank == 0:
        everyone = [pickle.loads(own.get(f"result of {other}")) for other in range(size)]
        with path.with_suffix(".jsonl").open("a") as file:
            file.write(json.dumps({"layout": name, **summary(everyone)}) + "\n")


def main(path: Path) -> int:
    """Train each layout in a process of its own: threads of gloo's process groups end with their process only."""
    open_dataset(path.with_name("data") / "train").read([0])  # imports what every process needs
    for number, layout in enumerate(pickle.loads(path.read_bytes())):
        if (pid := os.fork()) == 0:
            try:
                train_layout(number, layout, path)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            return 1
    return 0


def summary(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst of what the ranks found: an error, a part that no rank has, or the largest differences."""
    spent = {"cpu_s": sum(one["cpu_s"] for one in everyone)}
    if failed := next((one for one in everyone if "error" in one), None):
        return {"error": failed["error"], **spent}
    for name in everyone[0]["covered"]:
        if not np.logical_or.reduce([one["covered"][name] for one in everyone]).all():
            return {"error": f"no rank has all of the gradient of {name}", **spent}
    return {kind: max(one[kind] for one in everyone) for kind in ("step", "gradient", "own")} | spent


if __name__ == "__main__":
    prepare_process()
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1])))
