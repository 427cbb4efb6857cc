"""The nightly script: an array of jobs, and a last one that waits for it and judges them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ..distributed.conftest import ROOT, run_command
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
    # Six cells of the schedules and two of the baseline, each job on a node of its own.
    cells = [cell for path in night.glob("part-*/**/report.json") for cell in json.loads(path.read_text())["cells"]]
    assert [cell["status"] for cell in cells] == ["same"] * 8
    assert {path.name for path in night.glob("part-*.xml")} == {"part-0.xml", "part-1.xml"}


@pytest.mark.parametrize(
    ("codes", "code", "message"),
    [
        (["0", "0"], 0, "all is well"),
        (["0", "1"], 1, "part 1: 1, see"),
        (["0", None], 1, "part 1: no result: it was cut off"),
    ],
)
def test_the_report_fails_where_a_part_failed_or_was_cut_off(tmp_path, codes, code, message):
    for number, part_code in enumerate(codes):
        if part_code is not None:
            (tmp_path / f"part-{number}.code").write_text(part_code)
    variables = {"NIGHTLY_ROLE": "report", "NIGHTLY_FOLDER": str(tmp_path), "NIGHTLY_PARTS": "2"}
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), "bash", "slurm/nightly.sbatch"]
    found, output = run_command(words)
    assert (found, message in output) == (code, True), output
