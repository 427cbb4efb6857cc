"""The matrix as the nightly tests run it: `python -m recipes.parity` in a process of its own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from parity_reports import read_report

from harness.parity.result import REPORT_FILE, ParityReport

from ..distributed.conftest import run_command


@dataclass(frozen=True)
class Matrix:
    code: int
    output: str
    report: ParityReport


@pytest.fixture
def parity(device: str, reports: Path | None, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Matrix]:
    """parity(*overrides, sft=[...]): run it on the device of this test run, below `tmp_path`."""

    def run(*overrides: str, sft: tuple[str, ...] = (), keep: bool = True) -> Matrix:
        folder = tmp_path / "parity"
        more = json.dumps([f"trainer.device={device}", *sft])
        code, output = run_command(
            [sys.executable, "-m", "harness.recipes.parity", f"folder={folder}", f"sft_more={more}", *overrides],
            timeout_s=3000,
        )
        if not (folder / REPORT_FILE).exists():
            raise AssertionError(output)
        if reports is not None and keep:
            kept = reports / request.node.name
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / REPORT_FILE, kept / REPORT_FILE)
        return Matrix(code, output, read_report(folder / REPORT_FILE))

    return run
