"""`python -m tests.benchmarks checkpoint`: cost of hashing a checkpoint, checking it at resume, saving it by ranks."""

from __future__ import annotations

import os
import statistics
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.bench.apart import measure_apart
from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.gpu.training import SavingRank
from harness.bench.sizes import Sizes
from harness.bench.step import give_state, small_model
from harness.bench.workspace import Workspace
from harness.loader import LoaderState, RankLayout
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.state.checkpoint import CheckpointWriter, find_damage, load_checkpoint
from harness.megatron.step import MegatronStep
from harness.plan import OptimizerConfig, ParallelConfig
from harness.storage import StoredFile
from harness.train import Progress as RunPosition
from tests.benchmarks.clocks import milliseconds

_VOCABULARY = 8192
# Above this multiple of what a rank owns, saving needs too much of its host.
_MOST_MEMORY = 1.3
# Training may wait as long as one copy of that takes; with less than this to copy, it waits for a few calls.
_MOST_WAIT, _LEAST_OWNED, _MOST_WAIT_MS = 1.0, 1e9, 100.0


class _NoHashes:
    """Takes no hashes, and claims those of the weights as known, so that nobody takes them later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of_files_written_by(self, request: Any) -> Any:
        return request

    def take(self) -> list[StoredFile]:
        files = self._folder.glob("*.unfinished-*/*.distcp")
        return [StoredFile(path.name, path.stat().st_size, "") for path in files]


def bench_checkpoint(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure on a CPU: hashes and checks on one rank, memory and waiting on the ranks of jobs of several sizes.

    Saving lasts until a checkpoint is complete; loading reads the machine's cache.
    """
    report = BenchReport("checkpoint")
    folder = workspace.folder / "checkpoints"
    with runtime.start("cpu") as job:
        layout = join(ParallelConfig(), job.world_size)
        step = make_step(sizes.layers, sizes.hidden, ParallelConfig(), layout, job.device, dtype="float32")
        hashed = CheckpointWriter(folder / "hashed", step, keep=1, in_background=False)
        plain: Any = CheckpointWriter(folder / "plain", step, keep=1, in_background=False)
        plain._hashes = _NoHashes(folder / "plain")

        def save(writer: CheckpointWriter, number: int) -> None:
            writer.start(RunPosition(number + 2, LoaderState(0)))

        progress("saving with and without hashes, in turns")
        sides = {"save": partial(save, hashed), "save without hashes": partial(save, plain)}
        timed = {name: milliseconds(work) for name, work in sides.items()}
        report.compare("saving with hashes over without", timed, sizes.rounds, "ms")
        path = folder / "hashed" / f"step-{sizes.rounds + 1:08d}"
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        progress("checking and loading, in turns")
        timed = {
            "check before loading": milliseconds(lambda number: find_damage(path)),
            "load": milliseconds(lambda number: load_checkpoint(path, step)),
        }
        report.compare("checking over loading", timed, sizes.rounds, "ms")
    report.add(Figure("checked", num_bytes / 1e6 / report.figure("check before loading").value, "GB/s"))
    for ranks in (count for count in (2, 4, 8, 16, 32, 64) if count <= sizes.ranks):
        progress(f"saving on {ranks} ranks")
        arguments = (workspace.folder / f"ranks-{ranks}", sizes.layers, sizes.hidden, sizes.rounds)
        _add_ranks(report, ranks, measure_apart("tests.benchmarks.probes:measure_saving", *arguments, ranks=ranks))
    report.notes.append(f"a checkpoint of {num_bytes / 1e6:,.1f} MB; each rank of a job checks a share of the files")
    return report


def _add_ranks(report: BenchReport, ranks: int, found: list[dict[str, float]]) -> None:
    """Add the figures of a job of that many ranks, which are those of the rank that is worst off."""
    of, owned = f", {ranks} ranks", max(rank["owned_bytes"] for rank in found)
    report.add(Figure(f"a rank's own bytes{of}", owned / 1e6, "MB"))
    made = max(rank["made_bytes"] / rank["owned_bytes"] for rank in found)
    report.add(Figure(f"tensors made to save over own{of}", made, "x", at_most=_MOST_MEMORY))
    is_large = owned >= _LEAST_OWNED
    # Ranks that share a core wait for one another.
    most_ms = _MOST_WAIT_MS if not is_large and ranks <= (os.cpu_count() or 1) else None
    blocked = max(rank["blocked_s"] for rank in found)
    report.add(Figure(f"training waits{of}", 1e3 * blocked, "ms", at_most=most_ms))
    waits = max(rank["blocked_s"] / rank["copy_s"] for rank in found)
    most = _MOST_WAIT if is_large else None
    report.add(Figure(f"training waits over one copy of own{of}", waits, "x", at_most=most))


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
    model = small_model(layers, hidden, _VOCABULARY, dtype=dtype)
    step = MegatronStep(model, parallel, layout, device=device, vocab_size=_VOCABULARY, optimizer=optimizer)
    give_state(step)
    return step


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of the host's tensors that operations make inside the block, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
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


def measure_saving(folder: str, layers: str, hidden: str, rounds: str) -> list[dict[str, float]]:
    """Save a bfloat16 model with the distributed optimizer; return what it cost every rank."""
    with runtime.start("cpu") as job:
        parallel = ParallelConfig(distributed_optimizer=True)
        layout = join(parallel, job.world_size)
        step = make_step(int(layers), int(hidden), parallel, layout, job.device, dtype="bfloat16")
        rank = SavingRank(step, Path(folder, "checkpoints"), job)
        blocked, copies = [], []
        for _ in range(int(rounds) + 1):  # the first also decides who writes what
            blocked.append(rank.begin())
            rank.finish()
            copies.append(rank.copy())
        with HeldBytes() as held:
            rank.begin()
        rank.finish()
        own = {
            "owned_bytes": rank.owned_bytes,
            "made_bytes": held.most,
            "blocked_s": statistics.median(blocked[1:]),
            "copy_s": statistics.median(copies[1:]),
        }
        found: list[Any] = [None] * job.world_size
        torch.distributed.all_gather_object(found, own)
        return found
