"""The page of a report: what is met and missed, every part with its figures, and the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.bench.figures import figure_table, read_figures

# Figures that a reader looks for first.
_SPEEDS = (
    "our loop over a bare one, the same batch",
    "waiting for data, of a step",
    "tokens",
    "MFU",
    "MFU of packed chats over dense ones of the same tokens and attention",
    "waiting over one copy",
)


def render_page(
    machine: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]], about: Mapping[str, str], left: Sequence[str]
) -> str:
    """Return the page of a machine's parts, as Markdown.

    Args:
        results: of each part, by name: status, reason, report.
        about: a sentence about each part that there is, in the order of the page.
        left: parts that were not begun.
    """
    reports = {name: read_figures(part["report"]) for name, part in results.items() if part["status"] == "done"}
    figures = [(name, figure) for name, report in reports.items() for figure in report.figures]
    missed = [figure.met for _, figure in figures].count(False)
    failed = [name for name, part in results.items() if part["status"] == "failed"]
    device = f"{len(machine['gpus'])} x {machine['gpus'][0]}" if machine["gpus"] else "a CPU, with gloo"
    sentences = [f"{sum(figure.met is not None for _, figure in figures) - missed} targets met, {missed} missed"]
    sentences += [f"{len(reports)} of {len(about)} parts are measured"]
    sentences += [f"failed: {', '.join(failed)}"] if failed else []
    sentences += [f"not begun: {', '.join(left)}"] if left else []
    lines = [f"# First contact: {device}", "", f"{'; '.join(sentences)}."]
    for title, chosen in (
        ("Missed", [(name, figure) for name, figure in figures if figure.met is False]),
        ("Speed", [(name, figure) for name, figure in figures if figure.name in _SPEEDS]),
    ):
        if chosen:
            lines += ["", f"## {title}", "", *figure_table([(f"{name}: {one.name}", one) for name, one in chosen])]
    for name, text in about.items():
        lines += ["", f"## {name}", "", text, ""]
        if name in reports:
            lines += figure_table([(figure.name, figure) for figure in reports[name].figures])
            lines += ["", *(f"- {note}" for note in reports[name].notes), f"- took {results[name]['seconds']:.0f} s"]
        else:
            state = results.get(name, {"status": "not measured yet", "reason": ""})
            lines += [f"**{state['status']}** {state['reason']}".rstrip()]
    lines += ["", "## Machine", ""]
    lines += [
        f"- {key}: {', '.join(value) or 'none' if isinstance(value, list) else value}" for key, value in machine.items()
    ]
    return "\n".join(lines) + "\n"
