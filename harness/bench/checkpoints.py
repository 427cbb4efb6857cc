"""`harness bench checkpoint`: cost of hashing a checkpoint, of checking it at resume, and of saving it on each rank."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.bench.checkpoint_rank import make_step
from harness.bench.figures import BenchReport, Figure, Progress, take_turns
from harness.bench.workspace import Workspace
from harness.checks import bounded, check_numbers
from harness.errors import HarnessError
from harness.loader import LoaderState
from harness.megatron.job import join, runtime
from harness.megatron.state import CheckpointWriter, find_damage, load_checkpoint
from harness.plan import ParallelConfig
from harness.storage import StoredFile
from harness.train import Progress as RunPosition

# Above this multiple of what a rank owns, saving needs too much of its host.
_MOST_MEMORY = 1.3


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
    program = ["-m", "harness.bench.checkpoint_rank", str(folder), *sizes]
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
    made = most("made_bytes", "owned_bytes")
    report.add(Figure(f"tensors made to save over own, {ranks} ranks", made, "x", at_most=_MOST_MEMORY))
    # With what each of the three processes of a rank that write for it needs for itself.
    memory = max(rank["memory_bytes"] for rank in found)
    report.add(Figure(f"memory to save, {ranks} ranks", memory / 1e6, "MB"))
    report.add(Figure(f"training waits, {ranks} ranks", 1e3 * max(rank["blocked_s"] for rank in found), "ms"))
    waits = most("blocked_s", "copy_s")
    report.add(Figure(f"training waits over one copy of own, {ranks} ranks", waits, "x"))
