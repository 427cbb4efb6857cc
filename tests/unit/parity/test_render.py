"""A parity report becomes one page, one message and one XML file, whatever its contents."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from parity_reports import DATA_DIFFERENCE, all_same, cell, checks, one_of_each, read_report, reference, report

import harness.parity.pages
from harness.errors import ConfigError
from harness.parity import result
from harness.parity.pages import publish, render_all, render_junit, render_page
from harness.parity.result import Difference, Series, to_json
from harness.printing import open_console

SCHEMA = json.loads(Path(harness.parity.pages.__file__).with_name("report.schema.json").read_text())


def text_of(page: str) -> str:
    page = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        render_all(all_same(), tmp_path / "file" / "folder")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib.figure"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=package.partition(".")[0]) as error:
        render_all(all_same(), tmp_path)
    assert "report" in error.value.fix
    assert list(tmp_path.iterdir()) == []


def test_the_page_names_the_first_difference_and_how_to_run_it_again():
    text = text_of(render_page(one_of_each()))
    assert "✗ Different 2 of 5 compared cells agree, 1 failed, 2 different, 1 skipped." in text
    assert "First difference memmap, 4 workers against npy, 0 workers" in text
    for part in ("microbatch 1", "sequence 4,182", "position 211", "expected 5,121", "found 5,120"):
        assert part in text
    assert "python -m recipes.parity check=formats cells=&#39;memmap, 4 workers&#39;" in text
    assert "no second interpreter was given" in text


SKIPPED = cell("a", "memmap", 0, status="skipped", checks=[], reason="no")
FAILED = cell("b", "memmap", 2, status="failed", checks=[])


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        (all_same(), "same", "Same 9 of 9 compared cells agree."),
        (report([]), "failed", "Nothing was compared"),
        (report([reference()]), "failed", "Nothing was compared"),
        (report([reference(), SKIPPED]), "failed", "Nothing was compared"),
        (report([reference(), cell("a", "memmap", 0), FAILED]), "different", "Failed 1 of 2 compared"),
        (report([reference(status="failed", series=Series()), SKIPPED]), "different", "1 reference failed."),
        (one_of_each(), "different", "Different"),
    ],
)
def test_every_rendering_has_the_same_verdict(found, verdict, text):
    assert found.verdict == verdict
    assert text in text_of(render_page(found))
    root = ElementTree.fromstring(render_junit(found))
    assert (int(root.get("failures")) + int(root.get("errors")) == 0) == (verdict == "same")


def test_names_and_errors_of_runs_are_text_and_never_markup(tmp_path):
    bad = "<img src=x onerror=alert(1)> \x1b[31m \u202e `|` \ud800 </script>&amp; ]]>"
    broken = cell(bad, bad, 0, check=bad, status="different", reason=bad, command=bad, checks=[])
    difference = Difference(bad, field=bad, expected=bad, found=bad)
    differs = replace(broken, name=bad + "2", checks=checks(failed="data", difference=difference))
    found = report([reference(), broken, differs], title=bad, created=bad, environment={bad: bad}, command=bad)
    render_all(found, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<img src=x" not in page
    assert page.count("</script>") == 1
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert "<img src=x onerror=alert(1)> \u241b[31m \ufffd `|`" in root.get("name")
    assert not {"\x1b", "\u202e"} & {*page, *root.get("name")}


def test_every_comparison_is_an_xml_case_with_its_difference():
    root = ElementTree.fromstring(render_junit(one_of_each()))
    cases = {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}
    assert len(cases) == 7 + 4 * 6
    assert int(root.get("tests")) == len(cases)
    failure = cases["parity.formats.memmap, 4 workers", "data"].find("failure")
    assert failure.get("message") == DATA_DIFFERENCE.message
    assert "position: 211" in failure.text
    assert "again: python -m recipes.parity check=formats cells='memmap, 4 workers'" in failure.text
    assert cases["parity.formats.memmap, 4 workers", "loss"].find("failure") is None
    assert "exit code 2" in cases["parity.formats.jsonl, 0 workers", "run"].find("error").get("message")
    assert cases["parity.versions.npy, megatron-core 0.19", "run"].find("skipped") is not None


@pytest.mark.parametrize("found", [all_same(), one_of_each(), report([])])
def test_report_json_follows_its_schema(tmp_path, found):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    first = replace(found.cells[0], seconds=math.nan) if found.cells else None
    changed = replace(found, cells=[first, *found.cells[1:]] if first else [])
    (tmp_path / "report.json").write_text(to_json(changed))
    jsonschema.validate(json.loads((tmp_path / "report.json").read_text()), SCHEMA)
    assert read_report(tmp_path / "report.json").verdict == found.verdict


@pytest.mark.parametrize("kind", ["ParityReport", "CellResult", "Check", "Difference", "Series"])
def test_the_schema_describes_every_field(kind):
    described = SCHEMA if kind == "ParityReport" else SCHEMA["$defs"][kind]
    assert set(described["properties"]) == {field.name for field in fields(getattr(result, kind))}
    assert all("description" in one for name, one in described["properties"].items() if name != "series")
    assert SCHEMA["properties"]["schema"]["const"] == result.SCHEMA
    assert kind != "CellResult" or tuple(described["properties"]["status"]["enum"]) == result.STATUSES


def test_no_page_shows_the_credentials_of_a_command(tmp_path, capsys):
    secret = "s3://key:tops3cret@bucket/data"
    broken = cell("a", "memmap", 0, status="failed", checks=[], reason=secret, command=f"sft data.path={secret}")
    found = report([reference(), broken], command=secret, environment={"settings": secret, "loss": "3"})
    publish(found, open_console(), tmp_path)
    files = [file.read_text() for file in tmp_path.iterdir()]
    assert len(files) == 3
    for text in (*files, capsys.readouterr().out):
        assert "tops3cret" not in text
        assert "s3://***@bucket/data" in text
