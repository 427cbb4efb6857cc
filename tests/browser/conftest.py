"""A headless browser, one per test worker, whose pages must report no errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Kept for a person to look at; not committed.
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
# A page draws its charts in a second, and on a machine that does much else in a minute.
PATIENCE_MS = 120_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"none of {', '.join(BROWSERS)}: apt-get install chromium")
    with playwright.sync_playwright() as running:
        # Root, the user of most containers, cannot use the sandbox; the pages are our own.
        started = running.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=PATIENCE_MS
        )
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """`visit(path, **context)`: open a page in its own context.

    Any console output, error, dialog, or request for anything but the page itself fails the test at its end.
    """
    contexts, problems = [], []

    def open_page(path: Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: request.url != path.as_uri() and problems.append(f"request: {request.url}"))

        def refuse(dialog: Any) -> None:
            problems.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("dialog", refuse)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def keep() -> Callable[[Any, str], None]:
    """`keep(page, name)`: save a screenshot of the whole page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
