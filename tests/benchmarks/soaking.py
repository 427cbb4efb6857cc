"""Memory, files and threads that a loader with workers holds, pass after pass over a dataset."""

from __future__ import annotations

import statistics

from harness.bench.apart import measure_apart
from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.formats import FORMATS
from tests.benchmarks.links import make_dataset
from tests.benchmarks.probes import MIN_PASSES

# Less is no growth: allocators keep some pages more or less, and batches on their way are open files.
_NOISE = {"megabytes": 4.0, "files": 4.0, "threads": 0.0}


def bench_soak(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Soak each format, and compare the last quarter of its passes with the second."""
    report, (workers,) = BenchReport("soak"), sizes.first("workers", 1)
    for name in sizes.choose(FORMATS):
        progress(f"soaking {name}")
        packs = max(1, sizes.packs // 4) if name in ("npy", "jsonl") else sizes.packs
        path = make_dataset(workspace, name, packs=packs, pack_size=sizes.pack_size)
        arguments = (path, workers, sizes.global_batch, sizes.pack_size, sizes.part_limit_s)
        add_soak(report, name, measure_apart("tests.benchmarks.probes:soak", *arguments))
    grown = sum(figure.value > 0 for figure in report.figures if ", growth of " in figure.name)
    report.add(Figure("what grows, of all formats", grown, "", at_most=0))
    report.notes.append(
        f"the loader's process and its {workers} workers together, at the end of each pass; shared pages are "
        "counted once. Growth is from the median of the second quarter of the passes to that of the last, and "
        f"less than {_NOISE['megabytes']:.0f} MB of memory or {_NOISE['files']:.0f} files are noise."
    )
    return report


def add_soak(report: BenchReport, name: str, passes: dict[str, list[float]]) -> None:
    """Add the figures of one format.

    Args:
        passes: `megabytes`, `files` and `threads` at the end of each pass.
    """
    report.add(Figure(f"{name}, passes", len(passes["megabytes"]), ""))
    report.add_samples(f"{name}, memory", _last_quarter(passes["megabytes"]), "MB")
    report.add(Figure(f"{name}, growth of memory", _growth(passes, "megabytes"), "MB"))
    for what, text in (("files", "open files"), ("threads", "threads")):
        report.add(Figure(f"{name}, {text}", statistics.median(_last_quarter(passes[what])), ""))
        report.add(Figure(f"{name}, growth of {text}", _growth(passes, what), ""))


def _last_quarter(values: list[float]) -> list[float]:
    return values[-(len(values) // 4) :]


def _growth(passes: dict[str, list[float]], what: str) -> float:
    """Return the median of the last quarter less that of the second, when everything has been used once."""
    values = passes[what]
    assert len(values) >= MIN_PASSES
    quarter = len(values) // 4
    grown = statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])
    return 0.0 if abs(grown) < _NOISE[what] else grown
