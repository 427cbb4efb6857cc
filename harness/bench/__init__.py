"""Benchmarks of `harness bench`: every figure is measured against something else in the same run.

Read `figures` first (how sides take turns, what a report holds), then one bench, such as `packing`. A bench is a
module with a settings dataclass, its `QUICK` sizes and a function that measures, named in `BENCHES`. Modules are
imported when a bench runs, because each needs other packages. Only the command line imports this package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.doors import names_on_first_use

if TYPE_CHECKING:
    from harness.bench.everything import render_benchmarks
    from harness.bench.figures import BenchReport, Progress, render_report
    from harness.bench.workspace import Workspace


@dataclass(frozen=True)
class Bench:
    """One bench: a module of this package with the function that measures, and the name of its quick settings.

    `measure(settings, workspace, progress)` returns a `BenchReport`; the settings are of `type(quick)`.
    """

    place: str
    about: str
    quick_name: str = "QUICK"
    uses_megatron: bool = False

    @property
    def quick(self) -> Any:
        """Sizes that take seconds: they show that the bench works, not how fast anything is."""
        return getattr(self._load(), self.quick_name)

    @property
    def measure(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._load(), self.place.partition(":")[2])
        return function

    def _load(self) -> Any:
        if self.uses_megatron:
            from harness.megatron import prepare_process

            prepare_process()
        return importlib.import_module(f"harness.bench.{self.place.partition(':')[0]}")


BENCHES = {
    "all": Bench(
        "everything:bench_everything",
        "every bench in a process of its own, and BENCHMARKS.md from them; takes 45 minutes",
    ),
    "formats": Bench("formats:bench_formats", "read, open and write each format, against plain numpy arrays"),
    "pack": Bench("packing:bench_packing", "plan packs of 13 million sequences, against plain best fit and trl"),
    "repack": Bench(
        "packing:bench_repacking",
        "plan again over 13 million stored sequences, and read through a plan",
        "QUICK_REPACK",
    ),
    "prepare": Bench(
        "preparing:bench_preparing", "tokenize, against the tokenizers library alone; memory as the input grows"
    ),
    "tokens": Bench("tokens:bench_tokens", "token shards to .bin and .idx, against Megatron-Core's builder"),
    "schedule": Bench("scheduling:bench_schedule", "balance of the schedulers on a dataset or simulated lengths"),
    "loader": Bench("loading:bench_loader", "THD batches a second, shares of a step, wait for the first batch"),
    "live": Bench(
        "loading:bench_live",
        "live data on several ranks: tokens a second and imbalance of windows, packs and the modulo reading",
        "QUICK_LIVE",
    ),
    "integrations": Bench(
        "integrations:bench_integrations",
        "rows for other trainers, against the data paths of TRL, Bridge and torchtitan",
    ),
    "soak": Bench("soaking:bench_soak", "memory, files and threads of a loader with workers, over 20 minutes"),
    "step": Bench(
        "step:bench_step", "the training loop against Megatron's bare step, and the wait for data", uses_megatron=True
    ),
    "kernels": Bench(
        "step:bench_kernels",
        "kernels, waits and copied bytes of one microbatch, counted on a CPU",
        "QUICK_KERNELS",
        uses_megatron=True,
    ),
    "gpu": Bench(
        "gpu:bench_gpu",
        "first contact with a machine of GPUs, in parts that a later call continues: attention, layouts, speed",
    ),
    "checkpoint": Bench(
        "checkpoints:bench_checkpoint",
        "save a checkpoint with and without hashes, and check it at resume against loading it",
        uses_megatron=True,
    ),
    "corpus": Bench(
        "corpus:bench_corpus", "start of pretraining on a blend of many .bin and .idx pairs", uses_megatron=True
    ),
}

__all__ = ["BENCHES", "Bench", "BenchReport", "Progress", "Workspace", "render_benchmarks", "render_report"]

__getattr__ = names_on_first_use(
    __name__,
    {
        "BenchReport": "figures",
        "Progress": "figures",
        "Workspace": "workspace",
        "render_benchmarks": "everything",
        "render_report": "figures",
    },
)
