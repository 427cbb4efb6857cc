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
    """One bench: its module in this package, and what that names the quick settings and the function that measures.

    `measure(settings, workspace, progress)` returns a `BenchReport`; the settings are of `type(quick)`.
    """

    about: str
    module: str
    measure_name: str
    quick_name: str = "QUICK"
    uses_megatron: bool = False

    @property
    def quick(self) -> Any:
        """Sizes that take seconds: they show that the bench works, not how fast anything is."""
        return getattr(self._load(), self.quick_name)

    @property
    def measure(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._load(), self.measure_name)
        return function

    def _load(self) -> Any:
        if self.uses_megatron:
            from harness.megatron import prepare_process

            prepare_process()
        return importlib.import_module(f"harness.bench.{self.module}")


BENCHES = {
    "all": Bench(
        "every bench in a process of its own, and BENCHMARKS.md from them; takes half an hour",
        "everything",
        "bench_everything",
    ),
    "formats": Bench("read, open and write each format, against plain numpy arrays", "formats", "bench_formats"),
    "pack": Bench("plan packs of 13 million sequences, against plain best fit and trl", "packing", "bench_packing"),
    "repack": Bench(
        "plan again over 13 million stored sequences, and read through a plan",
        "packing",
        "bench_repacking",
        "QUICK_REPACK",
    ),
    "prepare": Bench(
        "tokenize, against the tokenizers library alone; memory as the input grows", "preparing", "bench_preparing"
    ),
    "tokens": Bench("token shards to .bin and .idx, against Megatron-Core's builder", "tokens", "bench_tokens"),
    "schedule": Bench("balance of the schedulers on a dataset or simulated lengths", "scheduling", "bench_schedule"),
    "loader": Bench("THD batches a second, shares of a step, wait for the first batch", "loading", "bench_loader"),
    "step": Bench(
        "the training loop against Megatron's bare step, and the wait for data",
        "step",
        "bench_step",
        uses_megatron=True,
    ),
    "corpus": Bench(
        "start of pretraining on a blend of many .bin and .idx pairs", "corpus", "bench_corpus", uses_megatron=True
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
