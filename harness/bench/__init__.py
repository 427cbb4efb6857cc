"""Benchmarks of `harness bench`: every figure is measured against something else in the same run.

Read `figures` first (sides take turns, and a report holds what they give), then one bench, such as `step`. A bench is a
line of `BENCHES`: a function, and its sizes as two presets of `Sizes`. Modules are imported when a bench runs, because
each needs other packages. Only the command line imports this package. Benches for developers and against other packages
are in `tests/benchmarks`, which adds its own to `BENCHES`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.bench.sizes import Sizes
from harness.errors import ConfigError

if TYPE_CHECKING:
    from harness.bench.figures import BenchReport, Progress
    from harness.bench.workspace import Workspace


@dataclass(frozen=True)
class Bench:
    """One bench.

    Attributes:
        place: `module:function` of `package`; called with sizes, a workspace and a progress, it returns a report.
        full: the settings of `Sizes` that this bench has, with their values.
        quick: those that differ in sizes that take seconds: they show that the bench works, not how fast anything is.
        uses_megatron: the process must be prepared for Megatron-Core before the module is imported.
    """

    place: str
    about: str
    full: Mapping[str, Any]
    quick: Mapping[str, Any] = field(default_factory=dict)
    uses_megatron: bool = False
    package: str = __name__

    def sizes(self, *, quick: bool = False, **others: Any) -> Sizes:
        """Return a preset with `others` in place of its own values."""
        return Sizes(**{**self.full, **(self.quick if quick else {}), **others})

    def measure(self, sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
        """Measure in this process; data is made in the workspace."""
        function = load(f"{self.package}.{self.place}", uses_megatron=self.uses_megatron)
        report: BenchReport = function(sizes, workspace, progress)
        report.settings = {name: getattr(sizes, name) for name in self.full}
        return report


def load(place: str, *, uses_megatron: bool = False) -> Callable[..., Any]:
    """Return the function at `module:function`; raises ConfigError if torch or megatron-core is not installed."""
    module, _, name = place.partition(":")
    try:
        if uses_megatron:
            from harness.megatron import prepare_process
            from harness.plan import ParallelConfig

            prepare_process(ParallelConfig())
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "megatron"):
            raise
        what = f"{module} requires {error.name}"
        raise ConfigError(what, where=sys.executable, fix="install the `train` extra") from None
    return function


BENCHES = {
    "step": Bench(
        "step:bench_step",
        "the training loop compared with Megatron's bare step, and its wait for data",
        # Of a larger model, the noise of a step is more than what the loop adds to it.
        {"device": "auto", "layers": 2, "hidden": 64, "packs": 96, "pack_size": 256, "max_tokens_per_rank": 512}
        | {"global_batch": 8, "workers": (2,), "steps": 40, "peak_tflops": 0.0},
        {"packs": 16, "steps": 4},
        uses_megatron=True,
    ),
    "gpu": Bench(
        "gpu.parts:bench_gpu",
        "attention, layouts and speed on GPUs; to continue after an interruption, run the command again",
        {"out": "gpu-report", "device": "auto", "size": "full", "parts": (), "ranks": 0}
        | {"part_limit_s": 480.0, "total_limit_s": 0.0},
        {"size": "tiny"},
    ),
}

__all__ = ["BENCHES", "Bench"]
