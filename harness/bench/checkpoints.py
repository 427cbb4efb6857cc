"""`harness bench checkpoint`: cost of hashing a checkpoint, of checking it at resume, and of saving it on each rank."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.bench.figures import BenchReport, Figure, Progress, take_turns
from harness.bench.workspace import Workspace
from harness.checks import bounded, check_numbers
from harness.errors import HarnessError
from harness.loader import LoaderState, RankLayout
from harness.megatron import MegatronStep
from harness.megatron.job import join, runtime
from harness.megatron.state import CheckpointWriter, find_damage, load_checkpoint
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.storage import StoredFile
from harness.train import Progress as RunPosition

_VOCABULARY = 8192
_SAMPLE_S = 0.02
# Above this multiple of what a rank owns, saving needs too much of its host.
_MOST_MEMORY = 1.3
# Training may wait as long as one copy of that takes.
_MOST_WAIT = 1.0
# The wait for a smaller state is the cost of a few calls.
_LEAST_OWNED = 1e9


@dataclass(frozen=True)
class CheckpointSettings:
    """Sizes of the bench.

    Attributes:
        layers: layers of the model.
        hidden: width of the model, a multiple of 64; heads are 32 wide, the feed-forward is three times as wide.
        rounds: turns of each side of a comparison; figures are medians over them.
        most_ranks: ranks of the largest job; 2, 4 and so on are measured up to it.
    """

    layers: int = bounded(8, lowest=1, highest=10_000)
    hidden: int = bounded(512, lowest=64, highest=1_000_000)
    rounds: int = bounded(5, lowest=1)
    most_ranks: int = bounded(8, lowest=1, highest=1024)

    def __post_init__(self) -> None:
        check_numbers(self, "")


QUICK = CheckpointSettings(layers=1, hidden=64, rounds=1, most_ranks=2)


class _NoHashes:
    """Takes no hashes, and claims those of the weights as known, so that nobody takes them later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of_files_written_by(self, request: Any) -> Any:
        return request

    def take(self) -> list[StoredFile]:
        files = self._folder.glob("*.unfinished-*/*.distcp")
        return [StoredFile(path.name, path.stat().st_size, "") for path in files]


def bench_checkpoint(settings: CheckpointSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure on a CPU: hashes and checks on one rank, memory and waiting on the ranks of jobs of several sizes.

    Saving lasts until a checkpoint is complete; loading reads the machine's cache.
    """
    report = BenchReport("checkpoint", asdict(settings))
    folder = workspace.folder / "checkpoints"
    with runtime.start("cpu") as job:
        parallel = ParallelConfig()
        layout = join(parallel, job.world_size)
        step = make_step(settings.layers, settings.hidden, parallel, layout, job.device, dtype="float32")
        hashed = CheckpointWriter(folder / "hashed", step, keep=1, in_background=False)
        no_hashes: Any = _NoHashes(folder / "plain")
        plain = CheckpointWriter(folder / "plain", step, keep=1, in_background=False, hashes=no_hashes)

        def seconds_of(action: Any, *arguments: Any) -> float:
            start = time.perf_counter()
            action(*arguments)
            return time.perf_counter() - start

        def save(writer: CheckpointWriter, number: int) -> float:
            return seconds_of(writer.start, RunPosition(number + 2, LoaderState(0)))

        progress("saving with and without hashes, in turns")
        sides = {"save": lambda number: save(hashed, number), "save without hashes": lambda number: save(plain, number)}
        for name, samples in take_turns(sides, rounds=settings.rounds).items():
            report.add_samples(name, [1e3 * sample for sample in samples], "ms")
        path = folder / "hashed" / f"step-{settings.rounds + 1:08d}"
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        progress("checking and loading, in turns")
        sides = {
            "check before loading": lambda number: seconds_of(find_damage, path),
            "load": lambda number: seconds_of(load_checkpoint, path, step),
        }
        for name, samples in take_turns(sides, rounds=settings.rounds).items():
            report.add_samples(name, [1e3 * sample for sample in samples], "ms")
    report.add_ratio("saving with hashes over without", "save", "save without hashes")
    report.add_ratio("checking over loading", "check before loading", "load")
    report.add(Figure("checked", num_bytes / 1e6 / report.figure("check before loading").value, "GB/s"))
    ranks = 2
    while ranks <= settings.most_ranks:
        progress(f"saving on {ranks} ranks")
        _add_ranks(report, ranks, settings, workspace.folder / f"ranks-{ranks}")
        ranks *= 2
    report.notes.append(f"a checkpoint of {num_bytes / 1e6:,.1f} MB; each rank of a job checks a share of the files")
    return report


def _add_ranks(report: BenchReport, ranks: int, settings: CheckpointSettings, folder: Path) -> None:
    """Measure a job of that many ranks; the figures are those of the rank that is worst off."""
    folder.mkdir()
    sizes = [str(number) for number in (settings.layers, settings.hidden, settings.rounds)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = ["-m", "harness.bench.checkpoints", str(folder), *sizes]
    done = subprocess.run([*torchrun, *program], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(
            f"measuring a checkpoint on {ranks} ranks failed: {done.stderr.strip()[-2000:]}",
            where=" ".join(program),
            fix="start it with torchrun to see it alone, or measure fewer with most_ranks=",
        )
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]

    def most(name: str, divisor: str) -> float:
        return max(float(rank[name] / rank[divisor]) for rank in found)

    owned = max(rank["owned_bytes"] for rank in found)
    report.add(Figure(f"a rank's own bytes, {ranks} ranks", owned / 1e6, "MB"))
    wait = _MOST_WAIT if owned >= _LEAST_OWNED else None
    made = most("made_bytes", "owned_bytes")
    report.add(Figure(f"tensors made to save over own, {ranks} ranks", made, "x", at_most=_MOST_MEMORY))
    # With what each of the three processes of a rank that write for it needs for itself.
    memory = max(rank["memory_bytes"] for rank in found)
    report.add(Figure(f"memory to save, {ranks} ranks", memory / 1e6, "MB"))
    report.add(Figure(f"training waits, {ranks} ranks", 1e3 * max(rank["blocked_s"] for rank in found), "ms"))
    waits = most("blocked_s", "copy_s")
    report.add(Figure(f"training waits over one copy of own, {ranks} ranks", waits, "x", at_most=wait))


def make_step(
    layers: int,
    hidden: int,
    parallel: ParallelConfig,
    layout: RankLayout,
    device: torch.device,
    *,
    dtype: str,
    optimizer: OptimizerConfig | None = None,
) -> MegatronStep:
    """Return a step whose optimizer has a state; heads are 32 wide, the feed-forward is three times as wide."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=hidden // 32,
        num_query_groups=hidden // 64,
        vocab_size=_VOCABULARY,
        dtype=dtype,
    )
    step = MegatronStep.build(model, parallel, layout, device=device, vocab_size=_VOCABULARY, optimizer=optimizer)
    # A step without gradients: an optimizer that has made none has no state to save.
    for chunk in step.chunks:
        chunk.zero_grad_buffer()
    step.optimizer.step()
    return step


def owned_tensors(step: MegatronStep, ranks: int) -> list[torch.Tensor]:
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
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


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
        owned = owned_tensors(step, job.world_size)
        blocked, copies = [], []
        writer = CheckpointWriter(folder / "checkpoints", step, keep=1)
        for number in range(rounds + 1):  # the first also decides who writes what
            torch.distributed.barrier()
            start = time.perf_counter()
            writer.start(RunPosition(number + 1, LoaderState(0)))
            blocked.append(time.perf_counter() - start)
            writer.finish()
            torch.distributed.barrier()
            start = time.perf_counter()
            copied = [tensor.clone() for tensor in owned]
            copies.append(time.perf_counter() - start)
            del copied
        with _Memory() as memory:
            writer.start(RunPosition(rounds + 2, LoaderState(0)))
            writer.finish()
        with HeldBytes() as held:
            writer.start(RunPosition(rounds + 3, LoaderState(0)))
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
