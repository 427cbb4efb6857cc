"""The page of all benches has every figure with its command, and lists what is slow."""

from __future__ import annotations

import json
from pathlib import Path

from harness.bench.figures import BenchReport, read_figures
from tests.benchmarks.everything import HEADLINES


def a_report() -> BenchReport:
    report = BenchReport("formats", notes=["a note"], seconds=61.0)
    report.title, report.about = "Formats: reading", "Against numpy 2.4.6."
    report.command, report.load = "harness bench formats parts=random", 1.25
    report.add_samples("ours", [2.0, 3.0, 4.0], "packs/s", at_least=5)
    report.add_samples("theirs", [6.0, 6.0], "packs/s")
    report.add_samples("cost", [1.0], "s", at_most=2)
    report.add_ratio("ours to theirs", "ours", "theirs")
    report.add_ratio("theirs to ours", "theirs", "ours")
    report.add_ratio("time of theirs to ours", "theirs", "ours", at_most=3)
    return report


def test_the_stored_page_has_every_headline():
    page = (Path(__file__).resolve().parents[3] / "BENCHMARKS.md").read_text()
    assert [name for _, name in HEADLINES if f"\n| {name} | " not in page] == []
    assert len(HEADLINES) == 15


def test_a_report_of_another_process_is_the_same():
    report = a_report()
    again = read_figures(json.loads(json.dumps(report.to_dict())))
    assert again.figures == report.figures
    assert (again.subject, again.notes, again.began) == (report.subject, report.notes, report.began)
    assert again.load == report.load
    assert (again.settings, again.seconds, again.command) == (report.settings, report.seconds, report.command)
