"""`harness bench all`: every bench in a process of its own, and `BENCHMARKS.md` from what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.bench.figures import BenchReport, list_versions, read_figures
from harness.bench.output import Bench, Outcome, Say
from harness.errors import HarnessError

_TIMEOUT_S = 7200.0


@dataclass(frozen=True)
class Section:
    """One bench of the page.

    Attributes:
        title: of the page's section.
        arguments: of `harness bench`.
        about: what is held against what.
        peers: packages that the other sides are of.
        has_data: whether it takes `--dir` and `--keep`, to share data with other sections.
    """

    title: str
    arguments: tuple[str, ...]
    about: str
    peers: tuple[str, ...] = ()
    has_data: bool = False

    @property
    def command(self) -> str:
        return " ".join(("harness", "bench", *self.arguments))


def _part(title: str, part: str, about: str, *peers: str) -> Section:
    return Section(f"Formats: {title}", ("formats", "--part", part), about, peers, has_data=True)


SECTIONS = (
    _part(
        "random reads", "random", "Against numpy's `np.memmap` and plain `pread` of the same rows, unchecked.", "numpy"
    ),
    _part("the loader's order", "order", "Formats against one another, in the order in which a loader reads."),
    _part(
        "against other readers",
        "peer",
        "Fully random reads. Megatron-Bridge's Parquet is what its `GPTSFTPackedParquetDataset` does, written out for "
        "this bench (the package itself needs CUDA); Arrow is Hugging Face's `datasets`, which decompresses nothing.",
        "pyarrow",
        "datasets",
    ),
    _part("what checking costs", "checks", "Against the same reader without comparing checksums."),
    _part("opening", "open", "Millions of packs opened, each time in a new process."),
    _part("writing", "write", "Against the same bytes written to one plain file and forced to disk."),
    _part(
        "the legacy .npy",
        "legacy",
        "Opening Parquet against `numpy.load(allow_pickle=True)` of the same packs.",
        "numpy",
    ),
    Section("Packing", ("pack",), "Against a plain best-fit decreasing and trl's `pack_dataset`.", ("trl", "datasets")),
    Section(
        "Preparing",
        ("prepare",),
        "Chat files to tokens on disk, against the tokenizers library on text in memory; memory as the input grows.",
        ("tokenizers",),
    ),
    Section(
        "Planning again",
        ("repack",),
        "A plan over stored sequences, written in whole; and packs read through one, against the same packs in rows.",
        has_data=True,
    ),
    Section(
        "Token shards",
        ("tokens",),
        "Parquet to Megatron's `.bin` and `.idx`, against Megatron-Core's `IndexedDatasetBuilder`.",
        ("megatron-core",),
    ),
    Section(
        "Scheduling",
        ("schedule",),
        "Simulated batches on 8 ranks. `next fit` is the placement of Megatron-LM's `DpBalancedScheduler` (in no wheel "
        "on PyPI) and of packs made in order; `as_packed` is training packs as they are stored.",
    ),
    Section(
        "Loader",
        ("loader",),
        "Finished THD batches from each format, and the wait for the first one.",
        has_data=True,
    ),
    Section(
        "A corpus of many files",
        ("corpus",),
        "Opening a blend of 1,000 `.bin` and `.idx` pairs through Megatron-Core's builder, with its fast options.",
        ("megatron-core",),
    ),
    Section(
        "Step",
        ("step",),
        "The training loop against Megatron-Core's bare step on the same batches.",
        ("megatron-core",),
    ),
)


def bench_everything(folder: Path, *, quick: bool, failed: list[str]) -> list[Bench]:
    """A bench for every section; data is shared in `folder`.

    One that cannot be measured is a report with a note, and its title is added to `failed`: what the others took an
    hour to measure is not lost.
    """
    return [_bench(section, folder, quick=quick, failed=failed) for section in SECTIONS]


def _bench(section: Section, folder: Path, *, quick: bool, failed: list[str]) -> Bench:
    shown = (*section.arguments, *(("--quick",) if quick else ()))

    def bench(say: Say) -> Outcome:
        say(f"{section.title}: harness bench {' '.join(shown)}")
        data = ("--dir", str(folder), "--keep") if section.has_data else ()
        try:
            report = _measure((*shown, *data, "--json"))
        except HarnessError as error:
            failed.append(section.title)
            report = BenchReport(section.arguments[0], {}, notes=[f"this could not be measured: {error.what}"])
        report.command = " ".join(("harness", "bench", *shown))
        report.title, report.about = section.title, section.about
        if section.peers:
            versions = list_versions()
            peers = [f"{name} {versions.get(name, '(not installed, not measured)')}" for name in section.peers]
            report.about += f" Measured against {', '.join(peers)}."
        return report, None

    return bench


def _measure(arguments: tuple[str, ...]) -> BenchReport:
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli.app", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    try:
        return read_figures(json.loads(done.stdout[done.stdout.index("{") :])["reports"][0])
    except (ValueError, KeyError, IndexError):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise HarnessError(
            f"exit code {done.returncode}: {' '.join(said[-3:])[-500:] or 'nothing was said'}",
            where=" ".join(arguments),
            fix="run it alone to see all that it says",
        ) from None
