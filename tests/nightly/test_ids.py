"""Names of tests are the same in every run: `-n` and lists of failed tests rely on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Sets have another order, addresses and the clock differ anyway, and so do the zone and the temporary folder.
PLACES = ({"PYTHONHASHSEED": "0", "TZ": "UTC"}, {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"})


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_ids_do_not_depend_on_hashes_or_the_time(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", "-m", "", "tests"]
    ids = []
    for number, place in enumerate(PLACES):
        environment = {**os.environ, **place, "TMPDIR": str(tmp_path / f"{number}")}
        (tmp_path / f"{number}").mkdir()
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        ids.append([line for line in ran.stdout.splitlines() if "::" in line])
        assert ran.returncode == 0, ran.stdout[-2000:]
    assert len(ids[0]) > 1000
    assert ids[0] == ids[1]
