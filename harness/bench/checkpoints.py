"""`harness bench checkpoint`: cost of hashing a checkpoint while it is written, and of checking it at resume."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.bench.figures import BenchReport, Figure, Progress, take_turns
from harness.bench.workspace import Workspace
from harness.checks import bounded, check_numbers
from harness.loader import LoaderState
from harness.megatron import MegatronStep
from harness.megatron.job import join, runtime
from harness.megatron.model import build_model
from harness.megatron.state import CheckpointWriter, find_damage, load_checkpoint
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.storage import StoredFile
from harness.train import Progress as RunPosition

_VOCABULARY = 8192


@dataclass(frozen=True)
class CheckpointSettings:
    """Sizes of the bench.

    Attributes:
        layers: layers of the model.
        hidden: width of the model, a multiple of 64; heads are 32 wide, the feed-forward is three times as wide.
        rounds: turns of each side of a comparison; figures are medians over them.
    """

    layers: int = bounded(8, lowest=1, highest=10_000)
    hidden: int = bounded(512, lowest=64, highest=1_000_000)
    rounds: int = bounded(5, lowest=1)

    def __post_init__(self) -> None:
        check_numbers(self, "")


QUICK = CheckpointSettings(layers=1, hidden=64, rounds=1)


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
    """Measure one rank on a CPU. Saving lasts until a checkpoint is complete; loading reads the machine's cache."""
    report = BenchReport("checkpoint", asdict(settings))
    folder = workspace.folder / "checkpoints"
    with runtime.start("cpu") as job:
        parallel = ParallelConfig()
        layout = join(parallel, job.world_size)
        model = ModelConfig(
            num_layers=settings.layers,
            hidden_size=settings.hidden,
            ffn_hidden_size=3 * settings.hidden,
            num_attention_heads=settings.hidden // 32,
            num_query_groups=settings.hidden // 64,
            vocab_size=_VOCABULARY,
        )
        step = MegatronStep(
            build_model(model, parallel, vocab_size=_VOCABULARY, device=job.device),
            optimizer=OptimizerConfig(),
            parallel=parallel,
            layout=layout,
            device=job.device,
            vocab_size=_VOCABULARY,
            decay_steps=1000,
        )
        # A step without gradients: an optimizer that has made none has no state to save.
        for chunk in step.chunks:
            chunk.zero_grad_buffer()
        step.optimizer.step()
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
    report.notes.append(f"a checkpoint of {num_bytes / 1e6:,.1f} MB; each rank of a job checks a share of the files")
    return report
