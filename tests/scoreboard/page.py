"""`docs/scoreboard/index.html` from the `scoreboard.json` beside it: trainers by checks, sortable, one file."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "scoreboard" / "index.html"
SIGNS = {"PASS": "✓", "FAIL": "✗", "ERROR": "!", "NOT SUPPORTED": "·"}


def write_page(results: dict[str, Any], path: Path) -> None:
    """Write the page.

    Args:
        results: `checks` (name, about, threads) and `rows` (trainer, version, date, command, verdicts of check,
            outcome, text and note).
    """
    templates = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    sources = {kind: (HERE / f"page.{kind}").read_text() for kind in ("css", "js")}
    hashes = {kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for kind, text in sources.items()}
    rows = []
    for row in results["rows"]:
        cells = {verdict["check"]: verdict for verdict in row["verdicts"]}
        counts = {outcome: sum(cell["outcome"] == outcome for cell in cells.values()) for outcome in SIGNS}
        rows.append({**row, "cells": cells, "counts": counts})
    text = templates.get_template("page.html.j2").render(
        checks=results["checks"], rows=rows, signs=SIGNS, sources=sources, hashes=hashes
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    write_page(json.loads((PAGE.parent / "scoreboard.json").read_text()), PAGE)


if __name__ == "__main__":
    main()
