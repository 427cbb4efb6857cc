"""Options of every test run."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="what the nightly runs train on")
    parser.addoption("--reports", metavar="DIR", help="keep the parity reports of the nightly runs here")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> Path | None:
    folder = request.config.getoption("--reports")
    return Path(folder).resolve() if folder else None
