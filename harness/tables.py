"""One table for a terminal, a page of Markdown and a page of HTML; each escapes what others wrote."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.printing import escape_markdown, one_line, printable

if TYPE_CHECKING:
    from rich.table import Table as TerminalTable

# The sign of a status in pages, and its color in a terminal; what is bold there is bold in Markdown.
SIGNS = {"same": "✓", "different": "✗", "failed": "!", "skipped": "○", "reference": "◆"}
_BAD = dict.fromkeys(("different", "failed", "missed"), "bold red")
_STYLES = {
    "title": "bold",
    "same": "green",
    "met": "green",
    **_BAD,
    "skipped": "yellow",
    "running": "cyan",
    "waiting": "dim",
}
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell that is more than text.

    Attributes:
        status: a key of `SIGNS`, "met", "missed", "running", "waiting" or "title"; in HTML the class of the text.
        link, hover: in HTML, where the text leads, and what a pointer on it shows.
        share: from 0 to 1, the length of a bar; beside text it is drawn in HTML alone.
    """

    text: str
    status: str = ""
    link: str = ""
    hover: str = ""
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, the first cell of each its name.

    Attributes:
        head: names of the columns; () for none.
        rows: a cell for each column; several cells in one place are a sequence.
        align: "l" or "r" for each column; the last one holds for the columns that follow.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | TableCell | Sequence[TableCell]]]
    align: str = "l"

    def to_terminal(self) -> TerminalTable:
        """Return the table for a console."""
        from rich.table import Table as TerminalTable
        from rich.text import Text

        table = TerminalTable(box=None, show_header=bool(self.head), padding=(0, 2, 0, 0), pad_edge=False)
        for place, name in enumerate(self.head or self._no_names()):
            is_right = self._is_right(place)
            justify = "right" if is_right else "left"
            table.add_column(Text(one_line(name)), justify=justify, no_wrap=is_right, overflow="fold")
        for row in self.rows:
            texts = ([Text(_plain(cell), _STYLES.get(cell.status, "")) for cell in _cells(value)] for value in row)
            table.add_row(*map(Text(" ").join, texts))
        return table

    def to_markdown(self, *, longest: int | None = None) -> str:
        """Return the lines of the table.

        Args:
            longest: characters of a cell; None for all.
        """
        lines = [map(escape_markdown, self.head or self._no_names())]
        lines.append("--:" if self._is_right(place) else "---" for place in range(len(self.head or self._no_names())))
        for row in self.rows:
            lines.append(" ".join(_marked(cell, longest) for cell in _cells(value)) for value in row)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_html(self, label: str) -> str:
        """Return the table as a part of a page, which scrolls where it is too wide.

        Args:
            label: for readers of the page who do not see it.
        """
        parts = [f'<div class="scroll" tabindex="0" role="region" aria-label="{_escaped(label)}"><table>']
        if self.head:
            names = (
                f'<th scope="col"{self._kind(place)}>{_escaped(name)}</th>' for place, name in enumerate(self.head)
            )
            parts.append(f"<thead><tr>{''.join(names)}</tr></thead>")
        parts.append("<tbody>")
        for row in self.rows:
            places = []
            for place, value in enumerate(row):
                cells = _cells(value)
                tag, scope = ("td", "") if place else ("th", ' scope="row"')
                share = next((cell.share for cell in cells if cell.share is not None), None)
                kind = self._kind(place) if share is None else f' class="bar" style="--share: {share:.3f}"'
                places.append(f"<{tag}{scope}{kind}>{' '.join(map(_element, cells))}</{tag}>")
            parts.append(f"<tr>{''.join(places)}</tr>")
        return "\n".join([*parts, "</tbody></table></div>"])

    def _no_names(self) -> list[str]:
        return [""] * max(map(len, self.rows), default=0)

    def _is_right(self, place: int) -> bool:
        return self.align[min(place, len(self.align) - 1)] == "r"

    def _kind(self, place: int) -> str:
        return ' class="number"' if self._is_right(place) else ""


def make_histogram(name: str, counts: Mapping[str, int]) -> Table:
    """Return a table of counts by label, with a bar for each; `name` is the head of the labels."""
    most, total = max(counts.values(), default=0) or 1, sum(counts.values()) or 1
    rows = [
        (label, f"{count:,}", f"{count / total:.1%}", TableCell("", share=count / most))
        for label, count in counts.items()
    ]
    return Table((name, "count", "share", ""), rows, "rrrl")


def shorten(text: str, longest: int) -> str:
    """Return text of at most `longest` characters; an ellipsis ends what was longer."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _cells(value: str | TableCell | Sequence[TableCell]) -> Sequence[TableCell]:
    if isinstance(value, str):
        return [TableCell(value)]
    return [value] if isinstance(value, TableCell) else value


def _plain(cell: TableCell) -> str:
    # Any share but none gets a bar of at least one mark.
    return one_line(cell.text) or "█" * math.ceil(_BAR_WIDTH * (cell.share or 0))


def _marked(cell: TableCell, longest: int | None) -> str:
    text = escape_markdown(_plain(cell) if longest is None else shorten(" ".join(_plain(cell).split()), longest))
    return f"**{text}**" if text and "bold" in _STYLES.get(cell.status, "") else text


def _element(cell: TableCell) -> str:
    text = _escaped(cell.text)
    if cell.status in SIGNS:
        text = f'<span class="sign" aria-hidden="true">{SIGNS[cell.status]}</span>{text}'
    hover = f' title="{_escaped(cell.hover)}"' if cell.hover else ""
    if cell.link:
        kind = f' class="tile {_escaped(cell.status)}"' if cell.status else ""
        return f'<a{kind} href="{_escaped(cell.link)}"{hover}>{text}</a>'
    return f'<span class="{_escaped(cell.status)}"{hover}>{text}</span>' if cell.status or hover else text


def _escaped(text: str) -> str:
    return html.escape(printable(text))
