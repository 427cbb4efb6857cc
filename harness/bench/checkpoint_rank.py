"""Cost of a checkpoint on one rank: `torchrun ... -m harness.bench.checkpoint_rank FOLDER LAYERS HIDDEN ROUNDS`.

Each rank writes its figures to `FOLDER/rank-N.json`: bytes that it owns, tensors that saving makes on its host, memory
of it and of the processes that write for it, seconds for which training waits, and seconds of one copy of what it owns.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.megatron import prepare_process

prepare_process()

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from harness.loader import LoaderState, RankLayout  # noqa: E402
from harness.megatron import MegatronStep  # noqa: E402
from harness.megatron.job import join, runtime  # noqa: E402
from harness.megatron.model import build_model  # noqa: E402
from harness.megatron.state import CheckpointWriter  # noqa: E402
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig  # noqa: E402
from harness.train import Progress  # noqa: E402

VOCABULARY = 8192
_SAMPLE_S = 0.02


def make_step(
    layers: int, hidden: int, parallel: ParallelConfig, layout: RankLayout, device: torch.device, *, dtype: str
) -> MegatronStep:
    """Return a step whose optimizer has a state; heads are 32 wide, the feed-forward is three times as wide."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=hidden // 32,
        num_query_groups=hidden // 64,
        vocab_size=VOCABULARY,
        dtype=dtype,
    )
    step = MegatronStep(
        build_model(model, parallel, vocab_size=VOCABULARY, device=device),
        optimizer=OptimizerConfig(),
        parallel=parallel,
        layout=layout,
        device=device,
        vocab_size=VOCABULARY,
        decay_steps=1000,
    )
    # A step without gradients: an optimizer that has made none has no state to save.
    for chunk in step.chunks:
        chunk.zero_grad_buffer()
    step.optimizer.step()
    return step


def _owned_tensors(step: MegatronStep, ranks: int) -> list[torch.Tensor]:
    """Return views of as many bytes as a rank has to save: its optimizer state, and an equal part of the weights."""
    (part,) = getattr(step.optimizer, "chained_optimizers", [step.optimizer])
    mains = [main for group in part.optimizer.param_groups for main in group["params"]]
    states = [value for main in mains for value in part.optimizer.state[main].values() if value.dim()]
    weights = [weight for chunk in step.chunks for weight in chunk.parameters()]
    parts = [weight.detach().view(-1)[: weight.numel() // ranks] for weight in weights]
    return [*(main.detach() for main in mains), *states, *parts]


class HeldBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the host's tensors that operations make inside the block, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if _is_on_host(tensor)}
        for tensor in tree_leaves(made):
            if _is_on_host(tensor) and (storage := _storage(tensor)) not in known:
                known.add(storage)
                num_bytes = storage.nbytes()
                self.now += num_bytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._drop, num_bytes)
        return made

    def _drop(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _is_on_host(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def _tree_bytes(process: int) -> int:
    """Return the memory of a process and its children that no file backs; pages in common count once."""
    total = 0
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(_tree_bytes(int(child)) for child in (task / "children").read_text().split())
    return total


class _Memory:
    """The most memory of this process and its children inside the block, above that at its start, in bytes."""

    growth = 0

    def __enter__(self) -> _Memory:
        self._is_done = threading.Event()
        self._before = _tree_bytes(os.getpid())
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.wait(_SAMPLE_S):
            self.growth = max(self.growth, _tree_bytes(os.getpid()) - self._before)


def measure(folder: Path, *, layers: int, hidden: int, rounds: int) -> None:
    """Save checkpoints of a bfloat16 model with the distributed optimizer, and write what it cost this rank."""
    with runtime.start("cpu") as job:
        parallel = ParallelConfig(distributed_optimizer=True)
        layout = join(parallel, job.world_size)
        step = make_step(layers, hidden, parallel, layout, job.device, dtype="bfloat16")
        owned = _owned_tensors(step, job.world_size)
        blocked, copies = [], []
        writer = CheckpointWriter(folder / "checkpoints", step, keep=1)
        for number in range(rounds + 1):  # the first also decides who writes what
            torch.distributed.barrier()
            start = time.perf_counter()
            writer.start(Progress(number + 1, LoaderState(0)))
            blocked.append(time.perf_counter() - start)
            writer.finish()
            torch.distributed.barrier()
            start = time.perf_counter()
            copied = [tensor.clone() for tensor in owned]
            copies.append(time.perf_counter() - start)
            del copied
        with _Memory() as memory:
            writer.start(Progress(rounds + 2, LoaderState(0)))
            writer.finish()
        with HeldBytes() as held:
            writer.start(Progress(rounds + 3, LoaderState(0)))
        writer.finish()
        figures = {
            "owned_bytes": sum(tensor.nbytes for tensor in owned),
            "made_bytes": held.most,
            "memory_bytes": memory.growth,
            "blocked_s": statistics.median(blocked[1:]),
            "copy_s": statistics.median(copies[1:]),
        }
        (folder / f"rank-{job.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    measure(Path(sys.argv[1]), layers=int(sys.argv[2]), hidden=int(sys.argv[3]), rounds=int(sys.argv[4]))
