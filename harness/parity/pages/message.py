"""Render the report as Markdown, short enough for a chat message."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from harness.parity.pages import words
from harness.parity.pages.matrix import group_cells, tabulate_costs
from harness.parity.result import CellResult, ParityReport
from harness.printing import escape_markdown, printable
from harness.tables import SIGNS, Table, shorten

# Chats cut messages at 4,000 characters.
LONGEST = 3800
_MOST_PROBLEMS, _MOST_GROUPS, _MOST_COSTS = 5, 8, 8
_LONGEST_NAME, _LONGEST_TEXT, _LONGEST_COMMAND = 40, 240, 400


def render_message(report: ParityReport) -> str:
    """Render `report.md`, at most `LONGEST` characters: verdict, differences, checks, speed and memory by format."""
    verdict = f"**{SIGNS[report.verdict]} {words.verdict(report)}**"
    head = [f"{verdict}: {_text(report.title)}", "", words.summary(report)]
    parts = [head, _problems(report), _checks(report), _costs(report)]
    environment = [f"{_text(name, 40)} {_text(value, 60)}" for name, value in list(report.environment.items())[:12]]
    parts.append(["; ".join([_text(report.created, 40), *environment])])
    parts.append([f"Again: {_code(report.command)}"])
    text = ""
    for part in parts:
        more = "\n".join(part) + "\n"
        # Whole parts or nothing: half a table looks like all of it.
        if part and len(text) + len(more) + 1 <= LONGEST:
            text += ("\n" if text else "") + more
    return text


def _problems(report: ParityReport) -> list[str]:
    bad = [cell for cell in report.cells if cell.status in ("different", "failed")]
    lines = [f"- {SIGNS[cell.status]} **{_text(cell.name, 80)}**: {_text(words.trouble(cell))}" for cell in bad]
    if len(bad) > _MOST_PROBLEMS:
        lines = [*lines[:_MOST_PROBLEMS], f"- and {len(bad) - _MOST_PROBLEMS:,} more"]
    return lines + ([f"- again: {_code(bad[0].command)}"] if bad and bad[0].command else [])


def _checks(report: ParityReport) -> list[str]:
    groups = group_cells(report)
    if not groups:
        return []
    statuses = ("same", "different", "failed", "skipped")
    rows = []
    for group in groups[:_MOST_GROUPS]:
        cells = [cell for cell in group.cells if not cell.is_reference or cell.status != "same"]
        counts = Counter(cell.status for cell in cells)
        numbers = (str(counts[status]) for status in statuses)
        rows.append((shorten(group.name, _LONGEST_NAME), str(len(cells)), *numbers, _largest(group.cells)))
    if len(groups) > _MOST_GROUPS:
        rows.append((f"and {len(groups) - _MOST_GROUPS} more", *[""] * 6))
    return [Table(("check", "cells", *statuses, "largest"), rows, "lrrrrrl").to_markdown()]


def _largest(cells: list[CellResult]) -> str:
    largest: dict[str, float] = {}
    for cell in cells:
        for check in cell.checks:
            if check.largest is not None:
                largest[check.name] = max(check.largest, largest.get(check.name, 0.0))
    moved = {name: value for name, value in largest.items() if value > 0}
    shown = ", ".join(f"{shorten(name, 24)} {words.ratio(value)}" for name, value in moved.items())
    return shown or ("0" if largest else "")


def _costs(report: ParityReport) -> list[str]:
    table = tabulate_costs(report)
    return [] if table is None else [replace(table, rows=table.rows[:_MOST_COSTS]).to_markdown(longest=_LONGEST_NAME)]


def _text(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return one line that Markdown shows unchanged."""
    return escape_markdown(shorten(" ".join(text.split()), longest))


def _code(command: str) -> str:
    """Return a command to copy, within a fence that is longer than any in it."""
    short = " ".join(printable(command).split())
    if len(short) > _LONGEST_COMMAND:
        # Half a command must not be run.
        return "the command is in report.html"
    fence = "`" * (1 + max(map(len, re.findall("`+", short)), default=0))
    return f"{fence}{short}{fence}" if len(fence) == 1 else f"{fence} {short} {fence}"
