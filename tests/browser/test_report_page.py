"""The report in a browser: reading, hovering, narrow screens, dark mode and printing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from parity_reports import all_same, cell, one_of_each, reference, report, series

from harness.parity.pages import HTML_FILE, render_all
from harness.parity.result import Check, ParityReport

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


def hover(page: Any, chart: str, step: int) -> str:
    """Return the text that a chart shows when the mouse rests on a step."""
    shown = page.locator(f"#chart-{chart} .hoverlayer text")
    # Wait until the text of an earlier step has gone.
    page.mouse.move(1, 1)
    page.wait_for_function("id => !document.querySelector(id + ' .hoverlayer text')", arg=f"#chart-{chart}")
    box = page.locator(f"#chart-{chart} .nsewdrag").first
    box.scroll_into_view_if_needed()
    bounds = box.bounding_box()
    x = page.evaluate(
        "([id, step]) => document.getElementById(id)._fullLayout.xaxis.d2p(step)", [f"chart-{chart}", step]
    )
    page.mouse.move(bounds["x"] + x - 2, bounds["y"] + bounds["height"] / 2)
    page.mouse.move(bounds["x"] + x, bounds["y"] + bounds["height"] / 2)
    shown.first.wait_for()
    return " | ".join(shown.all_text_contents())


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


def test_hovering_shows_the_values_of_a_step(visit, written):
    shown = one_of_each()
    page = visit(written("each", shown))
    loss = hover(page, "loss", 12)
    assert f"npy, 0 workers : {shown.cells[0].series.loss[11]:.6f}" in loss
    assert f"binidx, 0 workers : {shown.cells[4].series.loss[11]:.6f}" in loss
    assert shown.cells[0].series.loss[11] != shown.cells[4].series.loss[11]
    apart = hover(page, "loss-difference", 12)
    assert "binidx, 0 workers : 1.20e-3" in apart
    assert "parquet, 4 workers : identical" in apart
    assert "identical" in hover(page, "loss-difference", 11).split("binidx, 0 workers : ")[1]


def test_a_chart_is_zoomed_with_the_mouse_and_uploads_nothing(visit, written):
    page = visit(written("each", one_of_each()))
    page.locator("#chart-loss").scroll_into_view_if_needed()
    box = page.locator("#chart-loss .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 160, steps=4)
    page.mouse.up()
    low, high = page.evaluate("document.getElementById('chart-loss')._fullLayout.xaxis.range")
    assert 1 < low < high < 40
    buttons = page.locator("#chart-loss .modebar-btn").evaluate_all("all => all.map((one) => one.dataset.title)")
    assert buttons == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]


def test_a_checkbox_hides_a_cell_in_all_charts_and_a_button_shows_one_group(visit, written):
    other = cell("tp2", "parquet", 0, check="layouts", axes={"layout": "tp2"})
    page = visit(written("groups", report([*all_same().cells, other])))
    shown = """() => [...document.querySelectorAll('.plot')].map((div) =>
        [...new Set(div.data.filter((one) => one.visible !== false).map((one) => one.meta))])"""
    page.get_by_role("checkbox", name="memmap, 4 workers").uncheck()
    assert all("memmap, 4 workers" not in names and len(names) >= 8 for names in page.evaluate(shown))
    page.get_by_role("button", name="layouts").click()
    assert {tuple(names) for names in page.evaluate(shown)} == {("tp2",)}


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
    for name, shown in (
        ("each", one_of_each()),
        ("empty", report([])),
        ("nasty", nasty_report),
    ):
        page = visit(written(name, shown), **PHONE)
        assert name != "empty" or "Nothing was compared" in page.locator("#verdict").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == 360, name
        assert page.locator("#verdict").is_visible()
        inside = """() => [...document.querySelectorAll('.plot svg.main-svg')].every(
            (svg) => svg.getBoundingClientRect().right <= 360)"""
        assert page.evaluate(inside), name
        keep(page, f"report-phone-{name}")


def test_markup_in_names_is_shown_as_text(visit, written):
    sharp = "<img src=x onerror=alert(1)>"
    page = visit(written("sharp", report([reference(), cell(sharp, "<b>x</b>", 0, status="different")], title=sharp)))
    assert page.locator("h1").inner_text() == sharp
    assert page.locator("img").count() == 0
    assert f"{sharp} : " in hover(page, "fill", 5)


def test_text_is_legible_in_light_and_dark_mode_and_plots_follow_a_switch(visit, written, keep):
    page = visit(written("each", one_of_each()))
    surface = "#curves figure"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for kind in ("same", "different", "failed", "skipped", "reference"):
            assert contrast(page, f".tile.{kind}") >= 4.5, (scheme, kind)
        assert contrast(page, "body") >= 10
        assert contrast(page, ".note", on="body") >= 4.5
        assert contrast(page, "#chart-loss .xtick text", text="fill", on=surface) >= 4.5
        # Lines have the same colors in both modes.
        for trace in page.locator("#chart-loss .scatterlayer .js-line").all():
            one = luminance(trace.evaluate("one => getComputedStyle(one).stroke"))
            other = luminance(page.evaluate(f"getComputedStyle(document.querySelector('{surface}')).backgroundColor"))
            assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 2.2, scheme
    background = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert background < 0.02
    hover(page, "loss", 20)
    assert contrast(page, "#chart-loss .hoverlayer text", text="fill", on=surface) >= 4.5
    assert page.evaluate("getComputedStyle(document.querySelector('.hoverlayer rect.bg')).fillOpacity") == "1"
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


def test_a_tolerance_is_drawn_as_a_line_among_the_differences(visit, written):
    loss = Check("loss", passed=True, tolerance=1e-5, largest=1e-7)
    near = cell("tp2", "parquet", 0, check="layouts", checks=[loss], series=series(40, drift=1e-7))
    page = visit(written("near", report([reference(), near])))
    assert page.locator("#chart-loss-difference .shapelayer path").count() == 1
    assert "tp2 : 1.00e-7" in hover(page, "loss-difference", 3)


@pytest.mark.nightly
def test_a_report_of_a_hundred_runs_of_2000_steps_opens(visit, written):
    cells = [
        cell(f"run {n}", "parquet", n, status="different", series=series(2000, drift=1e-6 * n)) for n in range(1, 100)
    ]
    page = visit(written("many", report([reference(series=series(2000)), *cells])), **PHONE)
    assert page.locator("#chart-loss .scatterlayer .trace").count() == 200
    assert page.evaluate("document.documentElement.scrollWidth") == 360
