"""The page of the scoreboard: sorted by a click, explained by another, and readable on a phone."""

from __future__ import annotations

import pytest

from harness.conformance import CHECKS
from tests.scoreboard.page import write_page

from .conftest import SCREENSHOTS

pytestmark = pytest.mark.submission


def make_results() -> dict:
    checks = [{"name": one.name, "about": one.about, "threads": list(one.threads)} for one in CHECKS.values()]
    outcomes = {
        "alpha": ["PASS"] * 25 + ["FAIL"],
        "beta": ["FAIL", "ERROR"] + ["NOT SUPPORTED"] * 20,
        "gamma <b>": ["PASS", "FAIL"] * 12,
    }
    rows = []
    for trainer, given in outcomes.items():
        verdicts = {
            check["name"]: {
                "outcome": outcome,
                "text": f"loss 6.1 <i>{outcome}</i>",
                "note": "Documented: a choice" if trainer == "alpha" else "a function",
                "command": f"python -m tests.scoreboard {trainer} --checks {check['name']}",
            }
            for check, outcome in zip(checks, given, strict=False)
        }
        rows.append({"trainer": trainer, "version": "1.2", "date": "2026-11-26", "verdicts": verdicts})
    return {"checks": checks, "rows": rows}


def names_of(page) -> list[str]:
    return [name.split("1.2")[0].strip() for name in page.locator("tbody th").all_inner_texts()]


def test_the_scoreboard_is_sorted_explained_and_fits_a_phone(tmp_path, visit) -> None:
    write_page(make_results(), tmp_path / "index.html")
    page = visit(tmp_path / "index.html")
    assert names_of(page) == ["alpha", "beta", "gamma <b>"]
    page.get_by_role("button", name="pass", exact=True).click()
    assert names_of(page) == ["alpha", "gamma <b>", "beta"]
    page.get_by_role("button", name="pass", exact=True).click()
    assert names_of(page) == ["beta", "gamma <b>", "alpha"]
    assert page.locator("tbody td button.CHOICE").all_inner_texts() == ["d"]
    cell = page.locator("tbody td button.FAIL").first
    cell.click()
    text = page.locator("dialog").inner_text()
    assert "loss 6.1 <i>FAIL</i>" in text
    assert "a function" in text
    assert "python -m tests.scoreboard beta --checks " in text
    page.keyboard.press("Escape")
    assert page.locator('button[data-kind="NOT RUN"]').first.inner_text() == "…"
    assert not page.locator("dialog").is_visible()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "scoreboard.png")
    for width, scheme in ((390, "dark"), (1200, "light")):
        page = visit(tmp_path / "index.html", viewport={"width": width, "height": 844}, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=SCREENSHOTS / f"scoreboard-{width}.png")
