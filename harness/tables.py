"""Tables for terminals, Markdown and HTML, with untrusted text escaped for each."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.printing import code_span, escape_markdown, one_line, printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import JustifyMethod
    from rich.table import Table as TerminalTable

# Sign of each status in pages, for readers who cannot see colors, and its style in a terminal. Styles that are bold
# there are bold in Markdown.
SIGNS = {"same": "✓", "different": "✗", "failed": "!", "skipped": "○", "reference": "◆"}
_STYLES = {"title": "bold", "skipped": "yellow", "warning": "yellow"}
_STYLES |= dict.fromkeys(("same", "met"), "green") | dict.fromkeys(("different", "failed", "missed"), "bold red")
_BAR_WIDTH = 40
_NUMBER = ' class="number"'


@dataclass(frozen=True, slots=True)
class TableCell:
    """A table cell with a status, link or bar.

    Attributes:
        status: a key of `SIGNS`, "met", "missed", "warning", "title", or "code" for text to
            copy; the CSS class of the text in HTML.
        link, hover: in HTML, link target and tooltip.
        share: length of a bar, 0 to 1; next to text it is drawn only in HTML.
    """

    text: str
    status: str = ""
    link: str = ""
    hover: str = ""
    share: float | None = None


Row = Sequence[str | TableCell | Sequence[TableCell]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the first cell of each row is its name.

    Attributes:
        head: names of the columns; () for none.
        rows: one cell per column; a sequence puts several cells in one place.
        align: "l" or "r" for each column; the last one applies to all further columns.
    """

    head: Sequence[str]
    rows: Sequence[Row]
    align: str = "l"

    def to_terminal(self) -> TerminalTable:
        """Return the table for a console."""
        from rich.table import Table as TerminalTable
        from rich.text import Text

        table = TerminalTable(box=None, show_header=bool(self.head), padding=(0, 2, 0, 0), pad_edge=False)
        for place, name in enumerate(self._names()):
            right = self._is_right(place)
            justify: JustifyMethod = "right" if right else "left"
            table.add_column(Text(one_line(name)), justify=justify, no_wrap=right)
        for row in self.rows:
            texts = ([Text(_plain(cell), _STYLES.get(cell.status, "")) for cell in _cells(value)] for value in row)
            table.add_row(*map(Text(" ").join, texts))
        return table

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        names = self._names()
        lines: list[Iterable[str]] = [map(escape_markdown, names)]
        lines.append("--:" if self._is_right(place) else "---" for place in range(len(names)))
        lines += [[" ".join(map(_marked, _cells(value))) for value in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_html(self, label: str) -> str:
        """Return the table as HTML that scrolls if it is too wide; `label` is for screen readers."""
        parts = [f'<div class="scroll" tabindex="0" role="region" aria-label="{_escaped(label)}"><table>']
        if self.head:
            kinds = (_NUMBER * self._is_right(place) for place in range(len(self.head)))
            names = map('<th scope="col"{}>{}</th>'.format, kinds, map(_escaped, self.head))
            parts.append(f"<thead><tr>{''.join(names)}</tr></thead>")
        parts.append("<tbody>")
        for row in self.rows:
            places = []
            for place, value in enumerate(row):
                cells = _cells(value)
                tag, scope = ("td", "") if place else ("th", ' scope="row"')
                share = next((cell.share for cell in cells if cell.share is not None), None)
                kind = (
                    _NUMBER * self._is_right(place) if share is None else f' class="bar" style="--share: {share:.3f}"'
                )
                places.append(f"<{tag}{scope}{kind}>{' '.join(map(_element, cells))}</{tag}>")
            parts.append(f"<tr>{''.join(places)}</tr>")
        return "\n".join([*parts, "</tbody></table></div>"])

    def _names(self) -> Sequence[str]:
        return self.head or [""] * max(map(len, self.rows), default=0)

    def _is_right(self, place: int) -> bool:
        return self.align[min(place, len(self.align) - 1)] == "r"


def open_templates(folder: Path, **options: Any) -> Environment:
    """Open the Jinja templates of a folder, which escape all text; the filter `table(label)` renders a `Table`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # Escape regardless of file name: all templates are HTML.
    templates = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, **options)
    # Applies to values only; converted template text would be escaped.
    templates.finalize = lambda value: printable(value) if type(value) is str else value
    templates.filters |= {"number": "{:,}".format, "table": lambda table, label: Markup(table.to_html(label))}
    return templates


def make_histogram(name: str, counts: Mapping[str, int]) -> Table:
    """Return a table of counts by label, each with a bar; `name` is the column name of the labels."""
    most, total = max(counts.values(), default=0) or 1, sum(counts.values()) or 1
    rows = [
        (label, f"{count:,}", f"{count / total:.1%}", TableCell("", share=count / most))
        for label, count in counts.items()
    ]
    return Table((name, "count", "share", ""), rows, "rrrl")


def shorten(text: str, longest: int) -> str:
    """Replace the middle of text longer than `longest` characters with an ellipsis; names differ most at their ends."""
    return text if len(text) <= longest else f"{text[: longest // 4]}…{text[1 + longest // 4 - longest :]}"


def _cells(value: str | TableCell | Sequence[TableCell]) -> Sequence[TableCell]:
    if isinstance(value, str):
        return [TableCell(value)]
    return [value] if isinstance(value, TableCell) else value


def _plain(cell: TableCell) -> str:
    # Any share above 0 gets a bar of at least one block.
    return one_line(cell.text) or "█" * math.ceil(_BAR_WIDTH * (cell.share or 0))


def _marked(cell: TableCell) -> str:
    text = _plain(cell)
    if cell.status == "code" and text:
        return code_span(text)
    return f"**{escape_markdown(text)}**" if text and "bold" in _STYLES.get(cell.status, "") else escape_markdown(text)


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
