"""The report in a browser: reading, narrow screens, dark mode and printing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from parity_reports import all_same, cell, one_of_each, reference, report

from harness.parity.pages import HTML_FILE, render_all
from harness.parity.result import ParityReport

pytestmark = pytest.mark.submission

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
NASTY = "<img src=x onerror=alert(1)> <b>bold</b> &amp; a_name_that_goes_on_and_on_without_a_place_to_break_it"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`written(name, report)`: the path of the report's page, rendered once per name."""
    paths: dict[str, Path] = {}

    def write(name: str, report: ParityReport) -> Path:
        if name not in paths:
            folder = tmp_path_factory.mktemp(name)
            render_all(report, folder)
            paths[name] = folder / HTML_FILE
        return paths[name]

    return write


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page: Any, selector: str, *, text: str = "color", on: str = "") -> float:
    """Return the WCAG contrast between an element's text and its background, or the background of another element."""
    style = "([query, name]) => getComputedStyle(document.querySelector(query))[name]"
    one = luminance(page.evaluate(style, [selector, text]))
    other = luminance(page.evaluate(style, [on or selector, "backgroundColor"]))
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_the_verdict_and_the_first_difference_are_at_the_top(visit, written, keep):
    page = visit(written("each", one_of_each()))
    verdict = page.locator("#verdict")
    assert verdict.bounding_box()["y"] < 200
    assert "Different" in verdict.inner_text()
    assert "2 of 5 compared cells agree" in verdict.inner_text()
    assert "token 211 of sequence 4,182 is 5,120" in verdict.inner_text()
    # Readable without colors: each has a sign and a word.
    tiles = page.locator("#matrix .tile").all_inner_texts()
    assert set(tiles) == {"!failed", "✓same", "✗different", "○skipped", "◆reference"}
    keep(page, "report-light")


def test_a_tile_opens_its_cell_whose_command_can_be_copied(visit, written):
    page = visit(written("same", all_same()), permissions=["clipboard-read", "clipboard-write"])
    assert page.locator("details[open]").count() == 0
    page.locator("#matrix .tile").nth(3).click()
    opened = page.locator("details[open]")
    assert opened.locator(".name").inner_text() == "parquet, 4 workers"
    opened.get_by_role("button", name="Copy").click()
    opened.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "python -m recipes.parity check=formats cells='parquet, 4 workers'"


def test_pages_fit_a_phone_screen(visit, written, keep):
    nasty = [cell(f"{NASTY} {n}", NASTY, n, command=NASTY * 3, axes={"format": NASTY, "n": str(n)}) for n in range(9)]
    nasty_report = report([reference(), *nasty], title=NASTY, environment={NASTY: NASTY})
    for name, shown in (("each", one_of_each()), ("empty", report([])), ("nasty", nasty_report)):
        page = visit(written(name, shown), **PHONE)
        assert name != "empty" or "Nothing was compared" in page.locator("#verdict").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == 360, name
        assert page.locator("#verdict").is_visible()
        if name == "nasty":  # markup in names is shown as text
            assert page.locator("h1").inner_text() == NASTY
            assert page.locator("img").count() == 3  # the charts
        keep(page, f"report-phone-{name}")


def test_text_is_legible_in_light_and_dark_mode(visit, written, keep):
    page = visit(written("each", one_of_each()))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for kind in ("same", "different", "failed", "skipped", "reference"):
            assert contrast(page, f".tile.{kind}") >= 4.5, (scheme, kind)
        assert contrast(page, "body") >= 10
        assert contrast(page, ".note", on="body") >= 4.5
    background = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert background < 0.02
    keep(page, "report-dark")


def test_a_printed_page_is_white_unfolded_and_as_wide_as_the_paper(visit, written, keep):
    page = visit(written("same", all_same()), color_scheme="dark", viewport={"width": 688, "height": 1000})
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) == 1
    assert page.locator("details").count() == page.locator("details[open]").count() == 10
    assert page.get_by_role("navigation").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 688
    assert "python -m recipes.parity check=formats cells='jsonl, 4 workers'" in page.locator("main").inner_text()
    keep(page, "report-print")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.locator("details[open]").count() == 0
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_report_without_curves_renders(visit, written):
    broken = [cell("a", "memmap", 0, status="failed", checks=[], series=one_of_each().cells[5].series, reason="gone")]
    page = visit(written("broken", report(broken)))
    assert "No cell made a step" in page.locator("#curves").inner_text()
    assert "gone" in page.locator("#verdict").inner_text()
