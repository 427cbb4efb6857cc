"""Options and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli import main

# Before torch is imported: threads that wait for each other on a busy machine take minutes for a small model.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device that the nightly runs train on")
    parser.addoption("--reports", metavar="DIR", help="folder for the parity reports of the nightly runs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return the workers of `-n auto`: two more than cores, because half of a test's time is waiting for processes."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else (os.cpu_count() or 1) + 2


def pytest_collection_finish() -> None:
    """Leave the millions of objects of imported packages out of every later search for garbage."""
    gc.collect()
    gc.freeze()


class Threads:
    after_collection = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Free the process groups of runs in this process: each has gloo threads, which wake a hundred times per second."""
    running = len(list(Path("/proc/self/task").iterdir()))
    if running > Threads.after_collection + 60:
        gc.collect()
        Threads.after_collection = len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> Path | None:
    folder = request.config.getoption("--reports")
    return Path(folder).resolve() if folder else None


@pytest.fixture
def report_points(request: pytest.FixtureRequest, reports: Path | None) -> Callable[..., None]:
    """report_points(check, name, points, of=..., outcome=...): how many points a test tried, for the night's report."""

    def report(check: str, name: str, points: int, *, of: str, outcome: str) -> None:
        from night_reports import add_points

        print(f"{check}, {name}: {points} {of}")
        if reports is not None:
            add_points(reports / check, check, name, points, of=of, test=request.node.nodeid, outcome=outcome)

    return report


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """harness(*arguments) -> (exit code, stdout, stderr) of the command line, in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["harness", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run
