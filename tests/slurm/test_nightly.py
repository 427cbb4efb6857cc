"""The nightly script: an array of jobs, and a last one that waits for it, joins the reports and judges them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import parity_reports
import pytest

from harness.parity.result import REPORT_FILE, to_json

from ..distributed.conftest import ROOT, environment
from .conftest import SlurmJob

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]
TESTS = (
    "tests/nightly/test_matrix.py::test_every_schedule_trains_the_same_on_one_rank_and_on_two",
    "tests/nightly/test_resume_and_baseline.py::test_tonights_run_agrees_with_the_baseline",
)


@pytest.mark.nightly
def test_a_night_is_an_array_and_a_report_that_depends_on_it(slurm, tmp_path):
    slurm.wait_idle()
    printed = slurm.on(
        "login",
        *("env", f"PYTHON={sys.executable}", f"NIGHTLY_DIR={tmp_path}", "NIGHTLY_PARTS=2"),
        *(f"NIGHTLY_TESTS={' '.join(TESTS)}", "NIGHTLY_SBATCH=--partition=batch --cpus-per-task=2"),
        *("sbatch", "--parsable", f"--output={tmp_path}/start.out", "slurm/nightly.sbatch"),
        check=True,
        cwd=ROOT,
    )
    start = SlurmJob(slurm, printed.strip(), tmp_path)
    log = tmp_path / "start.out"
    assert start.wait() == "COMPLETED", log.read_text()
    match = re.search(r"2 tests in 2 parts \(job (\d+)\), report (\S+)/report.out \(job (\d+)\)", log.read_text())
    assert match, log.read_text()
    night = Path(match[2])
    report = SlurmJob(slurm, match[3], night)
    assert report.facts["Dependency"].startswith(f"afterany:{match[1]}")
    assert report.wait(timeout_s=1600) == "COMPLETED", (night / "report.out").read_text()
    assert "all is well" in (night / "report.out").read_text()
    joined = json.loads((night / "summary" / REPORT_FILE).read_text())
    # Six cells of the schedules and two of the baseline, each job on a node of its own.
    assert [cell["status"] for cell in joined["cells"]] == ["same"] * 8
    assert (night / "summary" / "report.html").exists()
    assert {path.name for path in night.glob("part-*.xml")} == {"part-0.xml", "part-1.xml"}


@pytest.mark.parametrize(
    ("codes", "status", "code", "message"),
    [
        (["0", "0"], "same", 0, "all is well"),
        (["0", "1"], "same", 1, "part 1: 1, see"),
        (["0", None], "same", 1, "part 1: no result: it was cut off"),
        (["0", "0"], "different", 1, "runs differ or failed"),
    ],
)
def test_the_report_fails_where_a_part_failed_was_cut_off_or_differs(tmp_path, codes, status, code, message):
    for number, part_code in enumerate(codes):
        if part_code is not None:
            (tmp_path / f"part-{number}.code").write_text(part_code)
    same = parity_reports.all_same()
    cells = [same.cells[0], replace(same.cells[1], status=status)]
    (tmp_path / "part-0").mkdir()
    (tmp_path / "part-0" / REPORT_FILE).write_text(to_json(replace(same, cells=cells)))
    variables = {
        "NIGHTLY_ROLE": "report",
        "NIGHTLY_FOLDER": str(tmp_path),
        "NIGHTLY_PARTS": "2",
        "PYTHON": sys.executable,
    }
    done = subprocess.run(
        ["bash", "slurm/nightly.sbatch"],
        cwd=ROOT,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, message in done.stdout) == (code, True), done.stdout + done.stderr
