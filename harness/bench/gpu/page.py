"""One HTML file of a report, with everything in it: it opens from a disk and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from harness.bench.figures import Figure, read_figures, show_number
from harness.parity.pages import read_style

_STYLE = """
td.met { color: var(--same); font-weight: 600; }
td.missed { color: var(--different); background: var(--different-bg); font-weight: 650; }
.bar { display: inline-block; height: 0.7em; background: var(--accent); border-radius: 2px; margin-right: 8px; }
td.number { text-align: right; }
tbody th { max-width: 34em; }
"""


def render_page(
    machine: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]], about: Mapping[str, str], left: Sequence[str]
) -> str:
    """Return the page of a machine's parts.

    Args:
        results: of each part, by name: status, reason, report.
        about: a sentence about each part that there is, in the order of the page.
        left: parts that were not begun.
    """
    reports = {name: read_figures(part["report"]) for name, part in results.items() if part["status"] == "done"}
    aimed = [figure for report in reports.values() for figure in report.figures if figure.met is not None]
    missed = sum(figure.met is False for figure in aimed)
    failed = [name for name, part in results.items() if part["status"] == "failed"]
    kind = "different" if missed or failed else "same"
    device = f"{len(machine['gpus'])} x {machine['gpus'][0]}" if machine["gpus"] else "a CPU, with gloo"
    words = f"{len(aimed) - missed} of {len(aimed)} targets met"
    sentences = [f"{len(reports)} of {len(about)} parts are measured"]
    sentences += [f"failed: {', '.join(failed)}"] if failed else []
    sentences += [f"not begun: {', '.join(left)}"] if left else []
    body = [
        f'<header><p class="eyebrow">First contact</p><h1>{escape(device)}</h1></header>',
        f'<section id="verdict" class="verdict {kind}"><p class="word">{words}</p>',
        f'<p class="sentence">{escape("; ".join(sentences))}.</p></section>',
        '<section id="targets"><h2>Targets</h2>',
        _table(
            (f"{name}: {figure.name}", figure)
            for name, report in reports.items()
            for figure in report.figures
            if figure.met is not None
        ),
        "</section>",
    ]
    for name, text in about.items():
        body += [f'<section id="{name}"><h2>{escape(name)}</h2><p class="note">{escape(text)}</p>']
        if name in reports:
            body += [_table((figure.name, figure) for figure in reports[name].figures), _list(reports[name].notes)]
            body += [f'<p class="note">Took {results[name]["seconds"]:.0f} s.</p>']
        elif name in results:
            body += [f'<p class="message">{results[name]["status"]}: {escape(results[name]["reason"])}</p>']
        else:
            body += ['<p class="message">not measured yet</p>']
        body += ["</section>"]
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(_text(value))}</td></tr>' for key, value in machine.items()
    )
    body += [f'<section id="machine"><h2>Machine</h2><div class="scroll"><table>{rows}</table></div></section>']
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{words}: {escape(device)}</title><style>{read_style()}{_STYLE}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _table(rows: Iterable[tuple[str, Figure]]) -> str:
    lines = "".join(_row(name, figure) for name, figure in rows)
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("measured", "figure", "range", "target", ""))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _row(name: str, figure: Figure) -> str:
    shown = f"{show_number(figure.value)} {figure.unit}".rstrip()
    if figure.unit == "share":
        width = max(0.0, min(figure.value, 1.0)) * 120
        shown = f'<span class="bar" style="width:{width:.0f}px"></span>{figure.value:.2%}'
        number = f"<td>{shown}</td>"
    else:
        number = f'<td class="number">{escape(shown)}</td>'
    span = ""
    if len(figure.samples) > 1:
        span = f"{show_number(min(figure.samples))} to {show_number(max(figure.samples))}"
    verdict = {None: "", True: "met", False: "missed"}[figure.met]
    cells = f"{number}<td>{span}</td><td>{escape(figure.target)}</td><td class='{verdict}'>{verdict}</td>"
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'


def _list(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="note">{items}</ul>' if items else ""


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
