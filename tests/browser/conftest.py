"""A headless browser of the machine, one a worker, and pages in it that must not complain."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Kept after the tests, for a person to look at; not committed.
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)}: apt-get install chromium")
    with playwright.sync_playwright() as running:
        # Root, as in most containers, cannot have the sandbox; the pages are our own.
        started = running.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """`visit(path, **context)`: a page in a context of its own.

    At the end of the test, whatever a page wrote to the console, every error, every dialog and everything that it
    asked the network or the disk for beside itself fails the test.
    """
    contexts, complaints = [], []

    def open_page(path: Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: request.url != path.as_uri() and complaints.append(f"asked {request.url}"))

        def refuse(dialog: Any) -> None:
            complaints.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("dialog", refuse)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def keep() -> Callable[[Any, str], None]:
    """`keep(page, name)`: a picture of the whole page for the artefacts of the test run."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
