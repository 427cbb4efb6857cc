"""Every bench in a process of its own, and `BENCHMARKS.md` from what they measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from harness.bench.figures import (
    BenchReport,
    Progress,
    count_targets,
    describe_machine,
    figure_row,
    list_versions,
    read_figures,
)
from harness.bench.workspace import Workspace
from harness.cli.bench import run_measurement
from harness.errors import HarnessError, exit_on_error
from harness.tables import Table, TableCell
from tests.benchmarks.__main__ import PEERS

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 7200.0
# Benches whose datasets are the same, and made once.
_SHARING = ("formats", "repack", "loader", "reading", "integrations")
_HEAD = """# Benchmarks

`python -m tests.benchmarks all` runs all benchmarks and writes this page, with fifteen of the figures. The command of
each section prints all of them. Figures are medians of rounds in which both sides alternate on the same data. A ratio
is the figure of this project divided by the figure of the peer. We set the targets; missed ones stay on the page.
On another machine, expect similar ratios.

We make no claim about the step time of large models. For a model of 30B parameters, a published comparison of bin/idx
and Parquet found no difference (104.7 s against 103.8 s), because a step waits for the model and not for the data. The
claims are about startup, memory, balance, safety and verification.
"""
_BUSY = """
Other processes were running: more than the {} cores of this machine can execute at once. Times are too long and rates
too low; ratios and processor times are affected less."""


@dataclass(frozen=True)
class Section:
    """One bench of the page: its title, the arguments of its command, the comparison, and the packages compared with.

    A bench of GPUs is not measured where there are none.
    """

    title: str
    arguments: str
    about: str
    peers: tuple[str, ...] = ()


SECTIONS = (
    Section("Formats: random reads", "formats parts=random", "against `np.memmap` of the same rows.", ("numpy",)),
    Section("Formats: the loader's order", "formats parts=order", "all formats."),
    Section(
        "Formats: against other readers",
        "formats parts=peer",
        "random reads, against a copy of Megatron-Bridge's reading code.",
        ("pyarrow",),
    ),
    Section("Formats: what checking costs", "formats parts=checks", "with and without checksums."),
    Section("Formats: opening", "formats parts=open", "millions of packs, in a new process."),
    Section("Formats: writing", "formats parts=write", "against the same bytes in a plain file."),
    Section("Formats: the legacy .npy", "formats parts=legacy", "Parquet against `numpy.load`.", ("numpy",)),
    Section("Packing", "pack", "against TRL.", ("trl", "datasets")),
    Section("Preparing", "prepare", "against the tokenizers library in memory.", ("tokenizers",)),
    Section("Planning again", "repack", "writing a plan."),
    Section("Token shards", "tokens", "Parquet to `.bin` and `.idx`.", ("megatron-core",)),
    Section("Scheduling", "schedule", "simulated batches on 8 ranks."),
    Section("Planning of batches", "planning", "processor time on 8 to 4,096 ranks."),
    Section(
        "Context parallelism",
        "context",
        "a size for each row, against one for all and Megatron-Core's planner.",
        ("megatron-core",),
    ),
    Section("Loader", "loader", "THD batches from each format."),
    Section("Reading", "reading", "bytes that many ranks read and decode, the first batch of 2 million packs."),
    Section("Live data", "live", "one stream on 8 ranks."),
    Section("Integrations", "integrations", "against TRL's own data path.", ("trl", "datasets")),
    Section("Soak", "soak", "memory of a loader with 4 workers over time."),
    Section("A corpus larger than the cache", "corpus", "pages that a step reads.", ("megatron-core",)),
    Section("Step", "step", "against Megatron-Core's step on the same batches.", ("megatron-core",)),
    Section("Kernels", "kernels", "kernels, copies and waits of one step, counted.", ("megatron-core",)),
    Section("Checkpoints", "checkpoint", "with and without hashes.", ("megatron-core",)),
    Section(
        "GPUs",
        "gpu",
        "attention, layouts, the training step, dense sequences, checkpoints.",
        ("megatron-core", "transformer-engine"),
    ),
)


# The figures of the page, and what each is compared with: the title of the section, the figure, the peer.
HEADLINES = {
    ("Formats: random reads", "memmap to np.memmap, random"): "numpy's np.memmap",
    ("Formats: the loader's order", "parquet to memmap, loader's order"): "memmap of this project",
    ("Formats: against other readers", "parquet to Megatron-Bridge's, random"): "Megatron-Bridge",
    ("Formats: what checking costs", "binidx, time with checks to without"): "the same reader, unchecked",
    ("Formats: opening", "parquet, open"): "none",
    ("Formats: the legacy .npy", "npy's memory to parquet's"): "numpy.load of the legacy file",
    ("Packing", "best_fit_decreasing to trl"): "TRL's pack_dataset",
    ("Preparing", "prepare to tokenizers alone"): "the tokenizers library",
    ("Token shards", "median 600: to tensors of rows"): "Megatron-Core's IndexedDatasetBuilder",
    ("Scheduling", "cost_balanced, synchronized cost"): "a perfect balance",
    ("Planning of batches", "cost_balanced, 8,192 sequences on 64 ranks"): "none",
    ("Loader", "parquet, best of 0, 2, 4 workers"): "none",
    ("Live data", "cost_balanced windows, training speed to modulo"): "ms-swift's modulo reading",
    ("Integrations", "TRL, ours to theirs, 2 workers"): "TRL's data path",
    ("Step", "our loop over a bare one, the same batch"): "Megatron-Core's bare step",
}
# Limits of ratios that their own benchmarks, which also run on other sizes and machines, do not set.
_LIMITS: dict[str, dict[str, float]] = {
    "best_fit_decreasing to trl": {"at_least": 10.0},
    "cost_balanced windows, training speed to modulo": {"at_least": 1.0},
    "TRL, ours to theirs, 2 workers": {"at_least": 1.0},
    "our loop over a bare one, the same batch": {"at_most": 1.05},
}


def write_page(arguments: list[str]) -> None:
    """Measure every section in processes of their own, and write the page of them; `--quick` for small sizes."""
    page = Path(next((argument for argument in arguments if argument != "--quick"), "BENCHMARKS.md"))
    failed: list[str] = []
    with exit_on_error(), Workspace() as workspace:
        page.open("a").close()  # refused before anything is measured
        measurements = measure_everything(workspace.folder, quick="--quick" in arguments, failed=failed)
        page.write_text(render_benchmarks([run_measurement(one, as_json=False) for one in measurements]))
        if failed:
            raise HarnessError(
                f"{len(failed)} benches could not be measured: {', '.join(failed)}",
                where=str(page),
                fix="the page has the error of each",
            )


def measure_everything(folder: Path, *, quick: bool, failed: list[str]) -> list[Callable[[Progress], BenchReport]]:
    """Return a measurement for every section, with data shared in `folder`.

    A section that cannot be measured becomes a report with a note, and its title is added to `failed`, so that an hour
    of other measurements is not lost.
    """
    return [partial(_measure, section, folder, quick, failed) for section in SECTIONS]


def _measure(section: Section, folder: Path, quick: bool, failed: list[str], progress: Progress) -> BenchReport:
    name, *settings = section.arguments.split()
    arguments = [name, *settings, *(["--quick"] if quick else [])]
    command = " ".join(["python -m tests.benchmarks" if name in PEERS else "harness bench", *arguments])
    progress(f"{section.title}: {command}")
    report = BenchReport(name)
    if name == "gpu" and shutil.which("nvidia-smi") is None:
        report.notes.append("Not measured: this machine has no GPU")
    else:
        try:
            report = _run([*arguments, *(["--dir", str(folder), "--keep"] if name in _SHARING else []), "--json"])
        except HarnessError as error:
            failed.append(section.title)
            report.notes.append(f"this could not be measured: {error.what}")
    report.command = command
    missing = [peer for peer in section.peers if peer not in list_versions()]
    report.notes += [f"{peer} is not installed, and not measured" for peer in missing]
    return report


def _run(arguments: list[str]) -> BenchReport:
    command = [sys.executable, "-m", "tests.benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    try:
        return read_figures(json.loads(done.stdout[done.stdout.index("{") :])["reports"][0])
    except (ValueError, KeyError, IndexError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise HarnessError(
            f"exit code {done.returncode}: {' '.join(lines[-3:])[-500:] or 'no output'}",
            where=" ".join(arguments),
            fix="run it alone to see its whole output",
        ) from None


def render_benchmarks(reports: Sequence[BenchReport]) -> str:
    return "\n".join([_HEAD, *_describe(reports), *render_claims(reports)]) + "\n"


def render_claims(reports: Sequence[BenchReport]) -> list[str]:
    rows: list[tuple[str | TableCell, ...]] = []
    for section, report in zip(SECTIONS, reports, strict=True):
        for figure in report.figures:
            if (peer := HEADLINES.get((section.title, figure.name))) is not None:
                name, value, _, target, verdict = figure_row(replace(figure, **_LIMITS.get(figure.name, {})))
                rows.append((name, peer, value, target, verdict))
    table = Table(("measured", "peer", "figure", "target", ""), rows, "llrl")
    lines = ["", "## Claims", "", f"Including all other figures, {count_targets(reports)}.", "", table.to_markdown()]
    lines += ["", "## Sections", "", "Commands without `harness` follow `python -m tests.benchmarks`.", ""]
    for section, report in zip(SECTIONS, reports, strict=True):
        # The notes of what was measured are printed by its command.
        notes = [] if report.figures else [f"{note}." for note in report.notes]
        command = report.command.removeprefix("python -m tests.benchmarks ")
        lines.append(f"- **{section.title}** (`{command}`): {' '.join([section.about, *notes])}")
    return lines


def _describe(reports: Sequence[BenchReport]) -> list[str]:
    machine, cores = describe_machine(), describe_machine()["cores"]
    began = min((report.began for report in reports), default="")
    seconds = sum(report.seconds for report in reports)
    loads = [report.load for report in reports if report.load is not None]
    lines = [
        "## The machine\n",
        f"- measured {began[:10]}, {seconds / 60:.0f} minutes",
        f"- {machine['processor']}, {cores} cores, {machine['memory_bytes'] / 1e9:.0f} GB",
        f"- {machine['system']}, Python {machine['python']}",
        f"- {', '.join(f'{name} {version}' for name, version in list_versions().items())}",
        f"- load when a section ended: {min(loads, default=0):.1f} to {max(loads, default=0):.1f} processes",
    ]
    # Figures of a busy machine stay on the page, with a warning: a bench of one process has a load of one.
    return [*lines, _BUSY.format(cores) if max(loads, default=0) > cores + 1 else ""]
