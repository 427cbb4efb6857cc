"""Benchmarks of `harness bench`: every figure is measured against something else in the same run.

Read `figures` first (how sides take turns, what a report holds), then one bench, such as `loading`. A bench is a
module with a settings dataclass, its `QUICK` sizes and a function that measures, named in `BENCHES`. Modules are
imported when a bench runs, because each needs other packages. Only the command line imports this package. Benches
against other packages are in `tests/benchmarks`, which adds its own to `BENCHES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.doors import names_on_first_use

if TYPE_CHECKING:
    from harness.bench.figures import BenchReport, Progress, render_report
    from harness.bench.workspace import Workspace


@dataclass(frozen=True)
class Bench:
    """One bench: `module:function` of a package, which measures, and the name of its quick settings in that module.

    `measure(settings, workspace, progress)` returns a `BenchReport`; the settings are of `type(quick)`.
    """

    place: str
    about: str
    quick_name: str = "QUICK"
    uses_megatron: bool = False
    package: str = __name__

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
        return importlib.import_module(f"{self.package}.{self.place.partition(':')[0]}")


BENCHES = {
    "schedule": Bench("scheduling:bench_schedule", "balance of the schedulers on a dataset or simulated lengths"),
    "loader": Bench("loading:bench_loader", "THD batches a second, shares of a step, wait for the first batch"),
    "live": Bench(
        "loading:bench_live",
        "live data on several ranks: tokens a second and imbalance of windows, packs and the modulo reading",
        "QUICK_LIVE",
    ),
    "step": Bench(
        "step:bench_step",
        "the training loop against Megatron's bare step, and the wait for data",
        uses_megatron=True,
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
}

__all__ = ["BENCHES", "Bench", "BenchReport", "Progress", "Workspace", "render_report"]

__getattr__ = names_on_first_use(
    __name__,
    {
        "BenchReport": "figures",
        "Progress": "figures",
        "Workspace": "workspace",
        "render_report": "figures",
    },
)
