"""Figures of one bench: sides that take turns, medians with their targets, a table for people, JSON for programs."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from harness.checks import memory_bytes, usable_cores
from harness.errors import installed_versions
from harness.settings import from_plain
from harness.tables import Table, TableCell

_PACKAGES = ("numpy", "pyarrow", "xxhash", "torch", "megatron-core", "tokenizers", "trl", "datasets", "torchtitan")
# Logs what a bench is doing now.
Progress = Callable[[str], None]
# Does its part of a round (-1 is the warm-up, then 0, 1, ...) and returns the sample to keep, or the units of work.
Side = Callable[[int], float]
# Seconds of this process on a processor, whatever else the machine does. Only for works of one thread that wait for
# nothing: on a quiet machine they equal those on the clock.
CPU = time.process_time


def take_turns(sides: Mapping[str, Side], *, rounds: int) -> dict[str, list[float]]:
    """Return the samples of each side, one a round.

    All sides run in every round, so that a disturbance hits all of them, and each round starts with another side, so
    that none always gets the caches that its neighbor warmed. A warm-up round is not counted.
    """
    names = list(sides)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            sample = sides[name](number)
            if number >= 0:
                samples[name].append(sample)
    return samples


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        unit: such as `packs/s`; `x` for a ratio.
        samples: one a round, in `unit`; `value` is their median, but that of a ratio is the ratio of medians. Empty for
            a count.
        of: names of the figures that `value` is computed from.
    """

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    samples: tuple[float, ...] = ()
    of: tuple[str, ...] = ()

    @property
    def met(self) -> bool | None:
        """True where the target is met, None without a target."""
        if self.at_least is None and self.at_most is None:
            return None
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{word} {show_number(bound)}" for word, bound in bounds if bound is not None)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "samples": list(self.samples), "of": list(self.of), "met": self.met}


@dataclass
class BenchReport:
    """The figures of one bench, in the order in which they were measured.

    Attributes:
        command: the command that measured; empty for the command of this process.
        load: load average of the last minute when the bench ended.
        failed: parts of the bench that could not be measured, with their reasons among the notes.
    """

    subject: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0
    command: str = ""
    load: float | None = None
    failed: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> Figure:
        """Append a figure; raises ValueError for a name that is taken."""
        if any(known.name == figure.name for known in self.figures):
            raise ValueError(f"two figures are named {figure.name!r}")
        figure = replace(figure, value=float(figure.value))  # numpy's compare to what JSON does not have
        self.figures.append(figure)
        return figure

    def add_samples(self, name: str, samples: Sequence[float], unit: str, **target: float | None) -> Figure:
        """Add the median of `samples`, with its `target`, `at_least` or `at_most`."""
        return self.add(Figure(name, statistics.median(samples), unit, samples=tuple(samples), of=(), **target))

    def compare(self, ratio: str, sides: Mapping[str, Side], rounds: int, unit: str, **target: float | None) -> None:
        """Measure sides in turns, by the names of their figures; add the median of each.

        Add the ratio of the first to the second with its `target`, `at_least` or `at_most`, unless its name is empty.
        """
        for name, samples in take_turns(sides, rounds=rounds).items():
            self.add_samples(name, samples, unit)
        if ratio:
            over, under, *_ = sides
            self.add_ratio(ratio, over, under, **target)

    def add_ratio(self, name: str, over: str, under: str, **target: float | None) -> Figure:
        """Add the value of figure `over` divided by that of figure `under`; its samples are those of the rounds."""
        ours, theirs = self.figure(over), self.figure(under)
        pairs = zip(ours.samples, theirs.samples, strict=False)
        samples = tuple(one / other for one, other in pairs) if len(ours.samples) == len(theirs.samples) else ()
        return self.add(Figure(name, ours.value / theirs.value, "x", samples=samples, of=(over, under), **target))

    def figure(self, name: str) -> Figure:
        """Return the figure of that name; raises KeyError where there is none."""
        return {figure.name: figure for figure in self.figures}[name]

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.met is False]

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "began": self.began,
            "seconds": round(self.seconds, 3),
            "command": self.command or " ".join(["harness", *sys.argv[1:]]),
            "machine": describe_machine() | ({} if self.load is None else {"load": self.load}),
            "versions": list_versions(),
            "settings": dict(self.settings),
            "figures": [figure.to_dict() for figure in self.figures],
            "notes": list(self.notes),
        }


def read_figures(values: Mapping[str, Any]) -> BenchReport:
    """Return the report that `BenchReport.to_dict` made `values` from; raise KeyError or ValueError for others."""
    stored = ({key: value for key, value in figure.items() if key != "met"} for figure in values["figures"])
    figures = [from_plain(Figure, figure) for figure in stored]
    report = BenchReport(values["subject"], values["settings"], figures, list(values["notes"]))
    report.began, report.seconds, report.command = values["began"], values["seconds"], values["command"]
    report.load = values["machine"].get("load")
    return report


def render_report(report: BenchReport) -> RenderableType:
    """Return a table of figures and targets, and the notes below it."""
    machine = describe_machine()
    lines = [
        Text(f"{machine['processor']}, {machine['cores']} cores, load {machine['load']}; took {report.seconds:.0f} s"),
        *(Text(f"- {note}") for note in report.notes),
    ]
    return Group(Text(f"bench {report.subject}", style="bold"), figure_table(report.figures).to_terminal(), *lines)


def count_targets(reports: Iterable[BenchReport]) -> str:
    """Return how many targets are met and missed, in words."""
    met = [figure.met for report in reports for figure in report.figures if figure.met is not None]
    return f"{sum(met)} targets were met and {len(met) - sum(met)} missed"


def figure_table(figures: Iterable[Figure]) -> Table:
    """Return a table of figures, with the range of their samples; a ratio below one is marked as slower."""
    return Table(("measured", "figure", "range", "target", ""), list(map(figure_row, figures)), "lrrl")


def figure_row(figure: Figure) -> tuple[str | TableCell, ...]:
    ends = (show_number(min(figure.samples)), show_number(max(figure.samples))) if len(figure.samples) > 1 else ()
    shown = f"{show_number(figure.value)} {figure.unit}".rstrip()
    is_slower = figure.met is None and figure.of and figure.unit == "x" and figure.value < 1
    verdict = {None: "slower" if is_slower else "", True: "met", False: "missed"}[figure.met]
    return figure.name, shown, " – ".join(ends), figure.target, TableCell(verdict, verdict)  # noqa: RUF001


def show_number(value: float) -> str:
    """Format with three significant digits, four from 1 to 10 (most ratios), and no fraction from 100 on."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    if 1 <= size < 10:
        return f"{value:.3f}"
    return f"{value:#.3g}" if size >= 0.001 else f"{value:.2g}"


def describe_machine() -> dict[str, Any]:
    """Return the processor, cores that this process may use, memory in bytes, load, system and Python."""
    named: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": next(iter(named), platform.processor() or platform.machine()),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def list_versions() -> dict[str, str]:
    """Return the versions of the installed packages that matter to speed."""
    return installed_versions(("megatron-sft-harness", *_PACKAGES))
