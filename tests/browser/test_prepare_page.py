"""The page of a preparation in a browser: samples with their masks, and no text of a record does anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.prep import TokenizerConfig, prepare
from harness.prep.sources.config import SourceConfig

pytestmark = pytest.mark.submission

NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} \x1b[2J Grüße, 世界"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


def write_page(folder: Path) -> Path:
    for file in range(2):
        lines = []
        for number in range(60):
            turns = [{"role": "system", "content": "Answer."}]
            for turn in range(1 + number % 4):
                turns += [
                    {"role": "user", "content": f"Question {file} {number} {turn}: {NASTY}"},
                    {"role": "assistant", "content": f"{NASTY} is answer {number}. " * (1 + number % 5)},
                ]
            lines.append({"messages": turns, "id": number})
        lines[3]["messages"][1]["images"] = ["<b>x</b>.png"]
        lines[4]["messages"].append({"role": "user", "content": "And?"})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"<b>part-{file}.jsonl".replace("/", "")).write_text(text)
    source, settings = SourceConfig(path=str(folder), on_bad="skip"), {"over_long": "split", "num_workers": 0}
    console = Console(quiet=True)
    prepare(source, TokenizerConfig(vocab_size=500), folder / "out", pack_size=512, console=console, **settings)
    return folder / "out" / "report.html"


def test_samples_show_their_masks_and_nothing_of_them_runs(tmp_path: Path, visit: Any, keep: Any) -> None:
    page_path = write_page(tmp_path)
    page = visit(page_path)
    # Of each file, two conversations.
    assert page.locator("details").count() == 4
    first = page.locator("details").first
    assert first.locator("mark").count() == 1
    assert first.locator("mark").inner_text().startswith("</pre><script>alert(1)</script>")
    assert "{{ 7 * 7 }}" in first.inner_text()
    assert "␛[2J" in first.inner_text()
    for name in ("script", "img", "main b"):
        assert page.locator(name).count() == 0
    text = page.locator("main").inner_text()
    assert "turn 2 (user) has `images`" in text
    assert "end with a user turn" in text
    assert "unused fields" in text
    keep(page, "prepare-page")
    # On a phone and in the dark.
    page = visit(page_path, color_scheme="dark", **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    keep(page, "prepare-page-phone")
