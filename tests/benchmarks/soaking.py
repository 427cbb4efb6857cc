"""Memory, files and threads that a loader with workers holds, pass after pass over a dataset."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from dataclasses import asdict, dataclass

from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.workspace import Workspace
from harness.checks import bounded, check_numbers, require_choice
from harness.errors import ConfigError
from harness.formats import FORMATS
from tests.benchmarks.probes import MIN_PASSES, measure_apart

# Less is no growth: allocators keep some pages more or less, and batches on their way are open files.
_NOISE = {"megabytes": 4.0, "files": 4.0, "threads": 0.0}


@dataclass(frozen=True)
class SoakSettings:
    """Sizes of the bench.

    Attributes:
        packs, pack_size: size of the dataset; npy and jsonl get a quarter of the packs.
        formats: formats of the dataset; each is soaked in a process of its own.
        workers: worker processes of the loader.
        global_batch: packs of a global batch.
        seconds: of each format, 20 minutes in all; passes are counted until it is over, at least 12.
    """

    packs: int = bounded(1024, lowest=1)
    pack_size: int = bounded(1024, lowest=2)
    formats: tuple[str, ...] = tuple(FORMATS)
    workers: int = bounded(4, highest=1024)
    global_batch: int = bounded(32, lowest=1)
    seconds: float = bounded(200.0, highest=86_400)

    def __post_init__(self) -> None:
        for name in self.formats:
            require_choice(name, FORMATS, setting="formats")
        check_numbers(self, "")


QUICK = SoakSettings(packs=64, pack_size=128, formats=("memmap", "parquet"), workers=2, global_batch=8, seconds=0)


def bench_soak(settings: SoakSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Soak each format, and compare the last quarter of its passes with the second.

    Raises:
        ConfigError: torch is not installed, or this system does not report the memory of a process.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the loader needs torch", where=sys.executable, fix="install the extra `train`")
    report = BenchReport("soak", asdict(settings))
    for name in settings.formats:
        progress(f"soaking {name}")
        packs = max(1, settings.packs // 4) if name in ("npy", "jsonl") else settings.packs
        path = workspace.dataset(name, packs=packs, pack_size=settings.pack_size)
        sizes = (settings.workers, settings.global_batch, settings.pack_size, settings.seconds)
        add_soak(report, name, measure_apart("soak", str(path), *map(str, sizes)))
    grown = sum(figure.value > 0 for figure in report.figures if ", growth of " in figure.name)
    report.add(Figure("what grows, of all formats", grown, "", at_most=0))
    report.notes.append(
        f"the loader's process and its {settings.workers} workers together, at the end of each pass; shared pages are "
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
