"""The page of all benches has every figure with its command, and lists what is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bench import BENCHES
from harness.bench.figures import BenchReport, read_figures
from tests.benchmarks.__main__ import PEERS
from tests.benchmarks.everything import HEADLINES, SECTIONS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.nightly
def test_every_section_is_measured(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks", "all", "--quick", str(tmp_path / "page.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stored_page_has_every_headline_and_section():
    page = (ROOT / "BENCHMARKS.md").read_text()
    assert [name for _, name in HEADLINES if f"\n| {name} | " not in page] == []
    assert len(HEADLINES) == 15
    lines = {line for line in page.splitlines() if line.startswith("- **")}
    for section in SECTIONS:
        assert any(f"**{section.title}** (`" in line and section.about in line for line in lines), section.title
    assert {section.arguments.split()[0] for section in SECTIONS} == {*BENCHES, *PEERS}


def test_a_report_of_another_process_is_the_same():
    report = BenchReport("formats", notes=["a note"], seconds=61.0)
    report.command, report.load = "harness bench formats parts=random", 1.25
    report.add_samples("ours", [2.0, 3.0, 4.0], "packs/s", at_least=5)
    report.add_samples("theirs", [6.0, 6.0], "packs/s")
    report.add_ratio("ours to theirs", "ours", "theirs", at_most=3)
    again = read_figures(json.loads(json.dumps(report.to_dict())))
    assert again.figures == report.figures
    assert (again.subject, again.notes, again.began) == (report.subject, report.notes, report.began)
    assert again.load == report.load
    assert (again.settings, again.seconds, again.command) == (report.settings, report.seconds, report.command)
