"""Every bench in a process of its own, and `BENCHMARKS.md` from what they measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.bench import BENCHES, Workspace
from harness.bench.figures import (
    VERDICTS,
    BenchReport,
    Figure,
    Progress,
    describe_machine,
    escape_cell,
    figure_table,
    list_versions,
    read_figures,
    show_number,
)
from harness.cli.bench import run_benches
from harness.errors import HarnessError, exit_on_error

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 7200.0
_HEAD = """# Benchmarks

Made by `python -m tests.benchmarks all`; every section names the command that makes it alone. Figures are medians over
rounds in which the sides of a comparison take turns, on the same data, in the same run: on another machine the figures
change, and the ratios should change little. Ranges are of the rounds. A ratio is the first side's figure over the
second's, and a target is this project's own. Missed targets stay on the page.
"""
_NOT_FASTER = """## What is not faster

- **The step of a large model.** At 30 B parameters a published comparison of bin/idx and Parquet saw no difference in
  step time (104.7 s against 103.8 s): a step waits for the model, and any of these formats is ready long before. The
  claims are about start-up, memory, balance, safety and proof, not about the step.
"""


@dataclass(frozen=True)
class Section:
    """One bench of the page.

    Attributes:
        title: of the page's section.
        arguments: of `harness bench`.
        about: the sides of the comparison.
        peers: packages whose code is the other side.
        shares_data: whether other sections use the same data, which is then made once.
        needs_gpu: a machine without nvidia-smi has nothing to measure.
    """

    title: str
    arguments: tuple[str, ...]
    about: str
    peers: tuple[str, ...] = ()
    shares_data: bool = False
    needs_gpu: bool = False


def _part(title: str, part: str, about: str, *peers: str) -> Section:
    return Section(f"Formats: {title}", ("formats", f"parts={part}"), about, peers, shares_data=True)


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
        shares_data=True,
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
        shares_data=True,
    ),
    Section(
        "Live data",
        ("live",),
        "One stream read by 8 ranks: windows that a schedule balances, packs that are trained where they are read, and "
        "the modulo reading of Megatron-SWIFT, which trains each sequence in a row of its own.",
    ),
    Section(
        "Integrations",
        ("integrations",),
        "Rows that other trainers get here, against the trainer's own data path on the same packs and with as many "
        "workers. Megatron-Bridge's is what its `GPTSFTPackedParquetDataset` does, written out for this bench.",
        ("trl", "datasets", "torchtitan"),
        shares_data=True,
    ),
    Section(
        "Soak",
        ("soak",),
        "A loader with 4 workers reads each format again and again; what it holds early against what it holds late.",
    ),
    Section(
        "A corpus of many files",
        ("corpus",),
        "Opening a blend of 1,000 `.bin` and `.idx` pairs through Megatron-Core's builder, with its fast options; and "
        "the pages that a step reads of a corpus ten times larger than the cache.",
        ("megatron-core",),
    ),
    Section(
        "Step",
        ("step",),
        "The training loop against Megatron-Core's bare step on the same batches.",
        ("megatron-core",),
    ),
    Section(
        "Kernels",
        ("kernels",),
        "Kernels, copies and waits of one layer and one step, counted, against Megatron-Core's own.",
        ("megatron-core",),
    ),
    Section(
        "Checkpoints",
        ("checkpoint",),
        "Saving with the hashes of all files against saving without, and their check at resume against loading.",
        ("megatron-core",),
    ),
    Section(
        "GPUs",
        ("gpu",),
        "Attention against a plain reference, layouts against one rank, our step against a bare Megatron loop, packed "
        "chats against dense sequences, and checkpoints, on the GPUs of this machine.",
        ("megatron-core", "transformer-engine"),
        needs_gpu=True,
    ),
)


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
    return [_measurement(section, folder, quick=quick, failed=failed) for section in SECTIONS]


def _measurement(
    section: Section, folder: Path, *, quick: bool, failed: list[str]
) -> Callable[[Progress], BenchReport]:
    arguments = [*section.arguments, *(["--quick"] if quick else [])]
    program = "harness bench" if section.arguments[0] in BENCHES else "python -m tests.benchmarks"
    command = " ".join([program, *arguments])

    def measure(progress: Progress) -> BenchReport:
        progress(f"{section.title}: {command}")
        data = ["--dir", str(folder), "--keep"] if section.shares_data else []
        report = BenchReport(section.arguments[0], {})
        if section.needs_gpu and shutil.which("nvidia-smi") is None:
            report.notes.append("not measured: this machine has no nvidia-smi, and so no GPU")
        else:
            try:
                report = _measure([*arguments, *data, "--json"])
            except HarnessError as error:
                failed.append(section.title)
                report.notes.append(f"this could not be measured: {error.what}")
        report.command, report.title, report.about = command, section.title, section.about
        if section.peers:
            versions = list_versions()
            peers = [f"{name} {versions.get(name, '(not installed, not measured)')}" for name in section.peers]
            report.about += f" Measured against {', '.join(peers)}."
        return report

    return measure


def _measure(arguments: list[str]) -> BenchReport:
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
    """Return the page of the sections' reports, in their order."""
    parts = [_HEAD, _machine(reports), _summary(reports), _not_faster(reports)]
    return "\n".join([*parts, *map(_section, reports)])


def _machine(reports: Sequence[BenchReport]) -> str:
    machine = describe_machine()
    began = min((report.began for report in reports), default="")
    seconds = sum(report.seconds for report in reports)
    loads = [report.load for report in reports if report.load is not None]
    packages = ", ".join(f"{name} {version}" for name, version in list_versions().items())
    lines = [
        "## The machine\n\n| | |\n|---|---|",
        f"| measured | {began[:10]}, {seconds / 60:.0f} minutes |",
        f"| processor | {machine['processor']}, {machine['cores']} cores |",
        f"| memory | {machine['memory_bytes'] / 1e9:.0f} GB |",
        f"| system | {machine['system']}, Python {machine['python']} |",
        f"| packages | {packages} |",
    ]
    if loads:
        lines.append(f"| load when a section ended | {min(loads):.1f} to {max(loads):.1f} processes |")
    text = "\n".join(lines) + "\n"
    # Figures of a busy machine stay on the page, with a warning: a bench of one process has a load of one.
    if loads and max(loads) > machine["cores"] + 1:
        text += (
            f"\nThis machine had other work: more processes wanted to run than its {machine['cores']} cores\n"
            "can. Seconds on the clock are too long and rates too low; ratios, and what is timed by processor time,\n"
            "suffer less.\n"
        )
    return text


def _summary(reports: Sequence[BenchReport]) -> str:
    rows = [
        f"| {escape_cell(figure.name)} | {_shown(figure)} | {figure.target} | {VERDICTS[figure.met]} | {report.title} |"
        for report in reports
        for figure in report.figures
        if figure.met is not None
    ]
    met = sum(figure.met is True for report in reports for figure in report.figures)
    head = ["## In short", "", f"{met} of {len(rows)} targets are met.", ""]
    return "\n".join([*head, "| | figure | target | | section |", "|---|--:|---|---|---|", *rows, ""])


def _not_faster(reports: Sequence[BenchReport]) -> str:
    lines = [_NOT_FASTER.rstrip()]
    for report in reports:
        # A ratio with an upper target is a cost, a ratio without is a speed.
        ratios = [figure for figure in report.figures if figure.unit == "x" and figure.of]
        slower = [figure for figure in ratios if (figure.value > 1 if figure.at_most else figure.value < 1)]
        if slower:
            lines.append(f"- **{report.title}**: {', '.join(map(_named, slower))}.")
    for report in reports:
        if report.missed:
            listed = ", ".join(f"{_named(figure)} ({figure.target})" for figure in report.missed)
            lines.append(f"- Targets missed, {report.title}: {listed}.")
    return "\n".join(lines) + "\n"


def _section(report: BenchReport) -> str:
    lines = [f"## {report.title}", "", report.about, "", "```", report.command, "```", ""]
    if report.figures:
        bold = {figure: figure.of and figure.unit == "x" for figure in report.figures}
        rows = [(f"**{figure.name}**" if bold[figure] else figure.name, figure) for figure in report.figures]
        lines += [*figure_table(rows), ""]
    lines += [f"- {note}" for note in report.notes]
    if report.load is not None:
        lines.append(f"- took {report.seconds:.0f} s; load when it ended {report.load:.1f}")
    return "\n".join(lines).rstrip() + "\n"


def _shown(figure: Figure) -> str:
    return f"{show_number(figure.value)} {figure.unit}".rstrip()


def _named(figure: Figure) -> str:
    return f"{escape_cell(figure.name)} {_shown(figure)}"
