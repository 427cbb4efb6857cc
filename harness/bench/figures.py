"""Figures of one bench: what was measured, what was hoped for, as a table for people and as JSON for programs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_PACKAGES = ("numpy", "pyarrow", "xxhash", "torch", "megatron-core", "trl", "datasets")


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: unique in its report.
        value: in `unit`.
        unit: such as `packs/s`; `x` for a ratio.
        at_least, at_most: the target, where there is one.
        samples: what `value` is the median of, one a round, in `unit`; empty where it is computed from other figures
            or counted.
        of: names of the figures that it is computed from.
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
        """Whether the target is met; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        parts = []
        if self.at_least is not None:
            parts.append(f"at least {show_number(self.at_least)}")
        if self.at_most is not None:
            parts.append(f"at most {show_number(self.at_most)}")
        return " and ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "met": self.met,
            "samples": list(self.samples),
            "of": list(self.of),
        }


@dataclass
class BenchReport:
    """The figures of one bench, in the order in which they were measured.

    Attributes:
        subject: name of the bench.
        settings: what it was run with.
        notes: what a reader of the figures must know, such as what could not be measured here.
        command: that measured them; empty for that of this process.
        load: processes that ran or waited to run, mean of a minute, when it was done.
        title, about: on a page of several: what it is called, what is held against what.
    """

    subject: str
    settings: Mapping[str, Any]
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0
    command: str = ""
    load: float | None = None
    title: str = ""
    about: str = ""

    def add(self, figure: Figure) -> Figure:
        """Raises ValueError for a name that is taken."""
        if any(known.name == figure.name for known in self.figures):
            raise ValueError(f"two figures are named {figure.name!r}")
        self.figures.append(figure)
        return figure

    def add_samples(
        self,
        name: str,
        samples: Sequence[float],
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Figure:
        """Add the median of `samples`."""
        return self.add(Figure(name, statistics.median(samples), unit, at_least, at_most, tuple(samples)))

    def add_ratio(
        self,
        name: str,
        over: str,
        under: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Figure:
        """Add the value of figure `over` divided by that of figure `under`."""
        value = self.figure(over).value / self.figure(under).value
        return self.add(Figure(name, value, "x", at_least, at_most, of=(over, under)))

    def figure(self, name: str) -> Figure:
        """Raises KeyError where there is none of that name."""
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise KeyError(name)

    @property
    def missed(self) -> list[Figure]:
        """Figures that do not meet their targets."""
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
    """The report that `BenchReport.to_dict` made `values` of, in this process or another.

    Raises:
        KeyError: something is missing.
    """
    figures = [
        Figure(
            one["name"],
            one["value"],
            one["unit"],
            one["at_least"],
            one["at_most"],
            tuple(one["samples"]),
            tuple(one["of"]),
        )
        for one in values["figures"]
    ]
    return BenchReport(
        values["subject"],
        values["settings"],
        figures,
        list(values["notes"]),
        values["began"],
        values["seconds"],
        values["command"],
        values["machine"]["load"],
    )


def render_report(report: BenchReport) -> RenderableType:
    """A table of figures and targets, and the notes below it."""
    table = Table(title=f"bench {report.subject}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("measured")
    table.add_column("figure", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("", no_wrap=True)
    words = {None: Text(""), True: Text("met", style="green"), False: Text("missed", style="bold red")}
    for figure in report.figures:
        table.add_row(figure.name, show_number(figure.value), figure.unit, figure.target, words[figure.met])
    machine = describe_machine()
    lines = [
        Text(f"{machine['processor']}, {machine['cores']} cores, load {machine['load']}; took {report.seconds:.0f} s"),
        *(Text(f"- {note}") for note in report.notes),
    ]
    return Group(table, *lines)


def show_number(value: float) -> str:
    """Three significant digits, four from 1 to 10 (most ratios), all of the whole part above 100."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    if 1 <= size < 10:
        return f"{value:.3f}"
    return f"{value:#.3g}" if size >= 0.001 else f"{value:.2g}"


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes, load, system and Python."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def list_versions() -> dict[str, str]:
    """Versions of the packages that matter to speed, of those that are installed."""
    found = {}
    for name in ("megatron-sft-harness", *_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
