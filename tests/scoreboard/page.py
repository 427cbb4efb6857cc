"""A page of trainers by checks: one file, sortable, with what was seen in each cell."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent
SIGNS = {"PASS": "✓", "FAIL": "✗", "CHOICE": "d", "ERROR": "!", "NOT SUPPORTED": "·", "NOT RUN": "…"}


def kind_of(cell: dict[str, Any]) -> str:
    """Return the outcome of a cell, CHOICE for a failure that the trainer's documentation names as its choice."""
    return "CHOICE" if cell["outcome"] == "FAIL" and cell["note"].startswith("Documented") else str(cell["outcome"])


def write_page(results: dict[str, Any], path: Path) -> None:
    """Write the page.

    Args:
        results: `checks` (name, about, threads) and `rows` (trainer, version, date, and `verdicts` by check: outcome,
            text, note, command).
    """
    templates = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    sources = {kind: (HERE / f"page.{kind}").read_text() for kind in ("css", "js")}
    hashes = {kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for kind, text in sources.items()}
    rows = []
    for row in results["rows"]:
        cells = {name: {**cell, "kind": kind_of(cell)} for name, cell in row["verdicts"].items()}
        kinds = [cell["kind"] for cell in cells.values()]
        rows.append({**row, "verdicts": cells, "counts": {kind: kinds.count(kind) for kind in SIGNS}})
    text = templates.get_template("page.html.j2").render(
        checks=results["checks"], rows=rows, signs=SIGNS, sources=sources, hashes=hashes
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
