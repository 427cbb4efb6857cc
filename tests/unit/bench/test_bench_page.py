"""The page of all benches has every figure with its command, and lists what is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.bench import BENCHES
from harness.bench.figures import BenchReport, read_figures
from tests.benchmarks import everything
from tests.benchmarks.__main__ import PEERS
from tests.benchmarks.everything import HEADLINES, SECTIONS, Section, render_benchmarks, write_page


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


def silent(text: str) -> None:
    pass


def test_headlines_are_on_the_page_with_their_peers_and_targets(monkeypatch):
    peers = {"ours": "", "theirs to ours": "numpy", "ours to theirs": "numpy", "time of theirs to ours": "numpy"}
    monkeypatch.setattr(everything, "HEADLINES", {("Formats: reading", name): peer for name, peer in peers.items()})
    page = render_benchmarks([a_report()])
    assert "| ours |  | 3.000 packs/s | at least 5.000 | **missed** |" in page
    assert "| theirs to ours | numpy | 2.000 x |  |  |" in page
    # A ratio with an upper target is a cost, which should be low.
    assert "| ours to theirs | numpy | 0.500 x |  | slower |" in page
    assert "| time of theirs to ours | numpy | 2.000 x | at most 3.000 | met |" in page
    # No headline: the command prints it.
    assert "| theirs |" not in page
    assert "| cost |" not in page
    assert "Of all figures, 2 targets met, 1 missed." in page
    assert "- **Formats: reading** (`harness bench formats parts=random`): Against numpy 2.4.6.\n" in page
    assert "104.7 s against 103.8 s" in page


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


def test_a_failed_section_reports_its_error_and_loses_no_other(monkeypatch, tmp_path, capsys):
    broken = Section("Broken", "formats parts=nonsense", "")
    whole = Section("Scheduling", "schedule parts=as_packed", "")
    monkeypatch.setattr(everything, "SECTIONS", [broken, whole])
    page = tmp_path / "BENCHMARKS.md"
    with pytest.raises(SystemExit):
        write_page([str(page), "--quick"])
    assert "1 benches could not be measured: Broken" in capsys.readouterr().err
    assert "this could not be measured: exit code 2" in page.read_text()
    assert "'nonsense' is not known" in page.read_text()
    assert "- **Scheduling** (`schedule parts=as_packed" in page.read_text()


def test_sections_are_benches_that_exist_and_have_their_own_titles():
    assert len({section.title for section in SECTIONS}) == len(SECTIONS)
    assert {section.arguments.split()[0] for section in SECTIONS} == set(BENCHES | PEERS)
