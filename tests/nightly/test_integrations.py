"""Every trainer that is installed reads the same global batches, before and after a resume on other ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ..distributed.conftest import run_command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_every_integration_reads_the_same_global_batches(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integrations.global_batches", str(tmp_path)]
    code, output = run_command(command, timeout_s=1700)
    assert code == 0, output
    cells = {cell["name"]: cell for cell in json.loads((tmp_path / "report.json").read_text())["cells"]}

    for name in ("torch", "accelerate", "huggingface", "trl"):  # the extra `dev` has them
        assert cells[f"integrations: {name} as_packed"]["status"] == "same"
        assert cells[f"integrations: {name} dp_balanced"]["status"] == "same"
    skipped = [cell for cell in cells.values() if cell["status"] != "same"]
    assert all(cell["status"] == "skipped" and "pip install" in cell["reason"] for cell in skipped)
