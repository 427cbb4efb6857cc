"""Every bench in a process of its own, and `BENCHMARKS.md` from what they measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from harness.cli.bench import run_benches
from harness.errors import HarnessError, exit_on_error
from harness.tables import Table, TableCell
from tests.benchmarks.__main__ import PEERS

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 7200.0
# Benches whose datasets are the same, and made once.
_SHARING = ("formats", "repack", "loader", "integrations")
_HEAD = """# Benchmarks

`python -m tests.benchmarks all` runs all benchmarks and writes this page, which shows fifteen figures; the command of
each section prints all of its figures. Figures are medians over rounds in which the compared sides take turns on the
same data. A ratio is the figure of this project over that of the peer, and a target is this project's own. On another
machine figures change, and ratios should change little. Missed targets and slower results stay on the page.

The step time of a large model is not a claim. At 30 B parameters, a published comparison of bin/idx and Parquet found
no difference in step time (104.7 s against 103.8 s): a step waits for the model, not for the data format. The claims
are about startup, memory, balance, safety and proof.
"""
_BUSY = """
This machine had other work: more processes wanted to run than its {} cores can. Seconds on the clock are too long and
rates too low; ratios, and what is timed by processor time, suffer less."""


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
    Section(
        "Formats: random reads",
        "formats parts=random",
        "Against numpy's `np.memmap` and plain `pread` of the same rows, unchecked.",
        ("numpy",),
    ),
    Section(
        "Formats: the loader's order",
        "formats parts=order",
        "Formats against one another, in the order in which a loader reads.",
    ),
    Section(
        "Formats: against other readers",
        "formats parts=peer",
        "Fully random reads. Megatron-Bridge's Parquet is what its `GPTSFTPackedParquetDataset` does, written out for "
        "this bench (the package itself needs CUDA); Arrow is Hugging Face's `datasets`, which decompresses nothing.",
        ("pyarrow", "datasets"),
    ),
    Section(
        "Formats: what checking costs", "formats parts=checks", "Against the same reader without comparing checksums."
    ),
    Section("Formats: opening", "formats parts=open", "Millions of packs opened, each time in a new process."),
    Section(
        "Formats: writing",
        "formats parts=write",
        "Against the same bytes written to one plain file and forced to disk.",
    ),
    Section(
        "Formats: the legacy .npy",
        "formats parts=legacy",
        "Opening Parquet against `numpy.load(allow_pickle=True)` of the same packs.",
        ("numpy",),
    ),
    Section("Packing", "pack", "Against a plain best-fit decreasing and trl's `pack_dataset`.", ("trl", "datasets")),
    Section(
        "Preparing",
        "prepare",
        "Chat files to tokens on disk, against the tokenizers library on text in memory; memory as the input grows.",
        ("tokenizers",),
    ),
    Section(
        "Planning again",
        "repack",
        "A plan over stored sequences, written in whole; and packs read through one, against the same packs in rows.",
    ),
    Section(
        "Token shards",
        "tokens",
        "Parquet to Megatron's `.bin` and `.idx`, against Megatron-Core's `IndexedDatasetBuilder`.",
        ("megatron-core",),
    ),
    Section(
        "Scheduling",
        "schedule",
        "Simulated batches on 8 ranks. `next fit` is the placement of Megatron-LM's `DpBalancedScheduler` (in no wheel "
        "on PyPI) and of packs made in order; `as_packed` is training packs as they are stored.",
    ),
    Section("Loader", "loader", "Finished THD batches from each format, and the wait for the first one."),
    Section(
        "Live data",
        "live",
        "One stream read by 8 ranks: windows that a schedule balances, packs that are trained where they are read, and "
        "the modulo reading of Megatron-SWIFT, which trains each sequence in a row of its own.",
    ),
    Section(
        "Integrations",
        "integrations",
        "Rows that other trainers get here, against the trainer's own data path on the same packs and with as many "
        "workers. Megatron-Bridge's is what its `GPTSFTPackedParquetDataset` does, written out for this bench.",
        ("trl", "datasets", "torchtitan"),
    ),
    Section(
        "Soak",
        "soak",
        "A loader with 4 workers reads each format again and again; what it holds early against what it holds late.",
    ),
    Section(
        "A corpus of many files",
        "corpus",
        "Opening a blend of 1,000 `.bin` and `.idx` pairs through Megatron-Core's builder, with its fast options; and "
        "the pages that a step reads of a corpus ten times larger than the cache.",
        ("megatron-core",),
    ),
    Section(
        "Step",
        "step",
        "The training loop against Megatron-Core's bare step on the same batches.",
        ("megatron-core",),
    ),
    Section(
        "Kernels",
        "kernels",
        "Kernels, copies and waits of one layer and one step, counted, against Megatron-Core's own.",
        ("megatron-core",),
    ),
    Section(
        "Checkpoints",
        "checkpoint",
        "Saving with the hashes of all files against saving without, and their check at resume against loading.",
        ("megatron-core",),
    ),
    Section(
        "GPUs",
        "gpu",
        "Attention against a plain reference, layouts against one rank, our step against a bare Megatron loop, packed "
        "chats against dense sequences, and checkpoints, on the GPUs of this machine.",
        ("megatron-core", "transformer-engine"),
    ),
)


# The figures of the page, and what each is compared with: the title of the section, the figure, the peer.
HEADLINES = {
    ("Formats: random reads", "memmap to np.memmap, random"): "numpy's np.memmap",
    ("Formats: the loader's order", "parquet to memmap, loader's order"): "memmap of this project",
    ("Formats: against other readers", "parquet to Megatron-Bridge's, random"): "Megatron-Bridge",
    ("Formats: what checking costs", "binidx, time with checks to without"): "the same reader, unchecked",
    ("Formats: opening", "parquet, open"): "",
    ("Formats: the legacy .npy", "npy's memory to parquet's"): "numpy.load of the legacy file",
    ("Packing", "best_fit_decreasing to trl"): "TRL's pack_dataset",
    ("Preparing", "prepare to tokenizers alone"): "the tokenizers library",
    ("Token shards", "median 600: to tensors of rows"): "Megatron-Core's IndexedDatasetBuilder",
    ("Scheduling", "cost_balanced, synchronised cost"): "a perfect balance",
    ("Scheduling", "cost_balanced, 8,192 sequences on 64 ranks"): "",
    ("Loader", "parquet, best of 0, 2, 4 workers"): "",
    ("Live data", "cost_balanced windows, training speed to modulo"): "ms-swift's modulo reading",
    ("Integrations", "TRL, ours to theirs, 2 workers"): "TRL's data path",
    ("Step", "our loop over a bare one, the same batch"): "Megatron-Core's bare step",
}


def write_page(arguments: list[str]) -> None:
    """Measure every section in processes of their own, and write the page of them; `--quick` for small sizes."""
    page = Path(next((argument for argument in arguments if argument != "--quick"), "BENCHMARKS.md"))
    failed: list[str] = []
    with exit_on_error(), Workspace() as workspace:
        page.open("a").close()  # refused before anything is measured
        measurements = measure_everything(workspace.folder, quick="--quick" in arguments, failed=failed)
        page.write_text(render_benchmarks(run_benches(measurements, as_json=False)))
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
        report.notes.append("not measured: this machine has no nvidia-smi, and so no GPU")
    else:
        try:
            report = _run([*arguments, *(["--dir", str(folder), "--keep"] if name in _SHARING else []), "--json"])
        except HarnessError as error:
            failed.append(section.title)
            report.notes.append(f"this could not be measured: {error.what}")
    report.command, report.title, report.about = command, section.title, section.about
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
    for report in reports:
        for figure in report.figures:
            if (peer := HEADLINES.get((report.title, figure.name))) is not None:
                name, value, _, target, verdict = figure_row(figure)
                rows.append((name, peer, value, target, verdict))
    table = Table(("measured", "peer", "figure", "target", ""), rows, "llrl")
    lines = ["", "## Claims", "", f"Of all figures, {count_targets(reports)}.", "", table.to_markdown()]
    lines += ["", "## What is compared", ""]
    for report in reports:
        # The notes of what was measured are printed by its command.
        notes = [] if report.figures else [f"{note}." for note in report.notes]
        lines.append(f"- **{report.title}** (`{report.command}`): {' '.join([report.about, *notes])}")
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
