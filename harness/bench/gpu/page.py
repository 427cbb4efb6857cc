"""One HTML file of a report, with everything in it: it opens from a disk and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from harness.bench.figures import BenchReport, Figure, read_figures, show_number
from harness.parity.pages import read_style

# Figures that a reader looks for first.
_SPEEDS = (
    "our loop over a bare one, the same batch",
    "waiting for data, of a step",
    "tokens",
    "MFU",
    "MFU of packed chats over dense ones of the same tokens and attention",
    "waiting over one copy",
)
_STYLE = """
td.met { color: var(--same); font-weight: 600; }
td.missed { color: var(--different); background: var(--different-bg); font-weight: 650; }
.gauge { display: inline-block; height: 0.7em; background: var(--accent); border-radius: 2px; margin-right: 8px; }
td.number { text-align: right; }
tbody th { max-width: 34em; }
td.words { white-space: normal; max-width: 44em; }
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
        '<section id="parts"><h2>Parts</h2>',
        _overview(about, results, reports),
        "</section>",
    ]
    speeds = [(name, figure) for name in reports for figure in reports[name].figures if figure.name in _SPEEDS]
    for title, chosen in (
        ("Missed", [(name, figure) for name in reports for figure in reports[name].missed]),
        ("Speed", speeds),
    ):
        if chosen:
            table = _table((f"{name}: {figure.name}", figure) for name, figure in chosen)
            body += [f'<section id="{title.lower()}"><h2>{title}</h2>{table}</section>']
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


def _overview(
    about: Mapping[str, str], results: Mapping[str, Mapping[str, Any]], reports: Mapping[str, BenchReport]
) -> str:
    """Return a table of the parts: state, targets met, seconds."""
    lines = []
    for name in about:
        state = results[name]["status"] if name in results else "not measured yet"
        targets, seconds, kind = results.get(name, {}).get("reason", ""), "", "missed" if state == "failed" else ""
        if name in reports:
            aimed = [figure for figure in reports[name].figures if figure.met is not None]
            met = len(aimed) - len(reports[name].missed)
            targets = f"{met} of {len(aimed)} targets met" if aimed else "no targets"
            kind = "missed" if reports[name].missed else "met"
            seconds = f"{results[name]['seconds']:.0f} s"
        lines.append(
            f'<tr><th scope="row"><a href="#{name}">{escape(name)}</a></th><td class="{kind}">{state}</td>'
            f'<td class="words">{escape(targets)}</td><td class="number">{seconds}</td></tr>'
        )
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _table(rows: Iterable[tuple[str, Figure]]) -> str:
    lines = "".join(_row(name, figure) for name, figure in rows)
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("measured", "figure", "range", "target", ""))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _row(name: str, figure: Figure) -> str:
    is_count = figure.value == int(figure.value) if abs(figure.value) < 1e15 else False
    shown = f"{figure.value:,.0f}" if is_count else show_number(figure.value)
    shown = f"{shown} {figure.unit}".rstrip()
    if figure.unit == "share":
        width = max(0.0, min(figure.value, 1.0)) * 120
        shown = f'<span class="gauge" style="width:{width:.0f}px"></span>{figure.value:.2%}'
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
