"""`BENCHMARKS.md`: every figure with the command that makes it, and what is not faster."""

from __future__ import annotations

from collections.abc import Sequence

from harness.bench.figures import BenchReport, Figure, describe_machine, list_versions, show_number

_HEAD = """# Benchmarks

Made by `harness bench all`; every section names the command that makes it alone. Figures are medians over rounds in
which the sides of a comparison take turns, on the same data, in the same run: on another machine the figures change,
and the ratios should change little. Ranges are of the rounds. A ratio is the first side's figure over the second's,
and a target is this project's own. Misses stay on the page.
"""
_NOT_FASTER = """## What is not faster

- **The step of a large model.** At 30 B parameters a published comparison of bin/idx and Parquet saw no difference in
  step time (104.7 s against 103.8 s): a step waits for the model, and any of these formats is ready long before. What
  is claimed is start-up, memory, balance, safety and proof, and nothing about the step.
"""


def render_benchmarks(reports: Sequence[BenchReport]) -> str:
    """The page, of the reports of `harness.bench.everything` in their order."""
    parts = [_HEAD, _machine(reports), _short(reports), _not_faster(reports)]
    return "\n".join([*parts, *map(_section, reports)])


def _machine(reports: Sequence[BenchReport]) -> str:
    machine = describe_machine()
    began = min((report.began for report in reports), default="")
    seconds = sum(report.seconds for report in reports)
    loads = [report.load for report in reports if report.load is not None]
    lines = [
        "## The machine",
        "",
        "| | |",
        "|---|---|",
        f"| measured | {began[:10]}, {seconds / 60:.0f} minutes |",
        f"| processor | {machine['processor']}, {machine['cores']} cores |",
        f"| memory | {machine['memory_bytes'] / 1e9:.0f} GB |",
        f"| system | {machine['system']}, Python {machine['python']} |",
        f"| packages | {', '.join(f'{name} {version}' for name, version in list_versions().items())} |",
    ]
    if loads:
        lines.append(f"| load when a section ended | {min(loads):.1f} to {max(loads):.1f} processes |")
    text = "\n".join(lines) + "\n"
    # A busy machine is no reason to leave a figure out, but to say so: a bench of one process has a load of one.
    if loads and max(loads) > machine["cores"] + 1:
        text += (
            f"\nThis machine had other work: more processes wanted to run than its {machine['cores']} cores\n"
            "can. Seconds on the clock are too long and rates too low; ratios, and what is timed by processor time,\n"
            "suffer less.\n"
        )
    return text


def _short(reports: Sequence[BenchReport]) -> str:
    rows = [
        f"| {_text(figure.name)} | {_shown(figure)} | {figure.target} | {_word(figure)} | {report.title} |"
        for report in reports
        for figure in report.figures
        if figure.met is not None
    ]
    met = sum(figure.met is True for report in reports for figure in report.figures)
    return "\n".join(
        [
            "## In short",
            "",
            f"{met} of {len(rows)} targets are met.",
            "",
            "| | figure | target | | section |",
            "|---|--:|---|---|---|",
            *rows,
            "",
        ]
    )


def _not_faster(reports: Sequence[BenchReport]) -> str:
    lines = [_NOT_FASTER.rstrip()]
    for report in reports:
        # A ratio with a ceiling is a cost, and one without is a speed.
        slower = [
            figure
            for figure in report.figures
            if figure.unit == "x" and figure.of and (figure.value > 1 if figure.at_most else figure.value < 1)
        ]
        if slower:
            said = ", ".join(f"{_text(figure.name)} {_shown(figure)}" for figure in slower)
            lines.append(f"- **{report.title}**: {said}.")
    for report in reports:
        if report.missed:
            said = ", ".join(f"{_text(one.name)} {_shown(one)} ({one.target})" for one in report.missed)
            lines.append(f"- Targets missed, {report.title}: {said}.")
    return "\n".join(lines) + "\n"


def _section(report: BenchReport) -> str:
    lines = [f"## {report.title}", "", report.about, "", "```", report.command, "```", ""]
    if report.figures:
        lines += ["| measured | figure | range | target | |", "|---|--:|--:|---|---|"]
        for figure in report.figures:
            name = f"**{_text(figure.name)}**" if figure.of and figure.unit == "x" else _text(figure.name)
            lines.append(f"| {name} | {_shown(figure)} | {_range(figure)} | {figure.target} | {_word(figure)} |")
        lines.append("")
    lines += [f"- {note}" for note in report.notes]
    if report.load is not None:
        lines.append(f"- took {report.seconds:.0f} s; load when it ended {report.load:.1f}")
    return "\n".join(lines).rstrip() + "\n"


def _shown(figure: Figure) -> str:
    return f"{show_number(figure.value)} {figure.unit}".rstrip()


def _range(figure: Figure) -> str:
    if len(figure.samples) < 2:
        return ""
    return f"{show_number(min(figure.samples))} – {show_number(max(figure.samples))}"  # noqa: RUF001


def _word(figure: Figure) -> str:
    return {None: "", True: "met", False: "**missed**"}[figure.met]


def _text(name: str) -> str:
    return name.replace("|", "\\|")
