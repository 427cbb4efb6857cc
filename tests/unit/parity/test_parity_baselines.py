"""Baselines are kept, compared with, and replaced only on purpose; nights and nodes are read together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness.recipes.parity import make_dataset
from parity_reports import read_report
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import ConfigError, FormatError
from harness.parity.baselines import against, baseline_of, read_baseline, record
from harness.parity.compare import Tolerances
from harness.parity.result import REPORT_FILE

from ...samples.recorded_runs import write_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("baselines") / "data")


def harness(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["parity", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.fixture
def kept(data, tmp_path) -> Path:
    """A folder of baselines with the one named `small`."""
    run = write_run(tmp_path / "first", data)
    code, output = harness("record", "small", run, f"baselines={tmp_path / 'kept'}", "tolerances.loss=1e-4")
    assert code == 0, output
    return tmp_path / "kept"


def test_a_run_agrees_with_the_baseline_that_was_made_from_it(kept, data, tmp_path) -> None:
    baseline = read_baseline(kept / "small.json")
    assert baseline.tolerances.loss == 1e-4
    assert baseline.environment["torch"]
    assert [step.loss for step in baseline.steps] == [6.0, 3.0, 2.0, 1.5]
    assert "run_dir" not in baseline.settings
    run = write_run(tmp_path / "tonight", data, change=lambda step: replace(step, loss=step.loss * (1 + 5e-5)))
    code, output = harness("against", "small", run, f"baselines={kept}", f"out={tmp_path / 'report'}")
    assert code == 0, output
    report = read_report(tmp_path / "report" / REPORT_FILE)
    assert [cell.status for cell in report.cells] == ["same", "same"]
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.parametrize(("device", "expected"), [("auto", "cpu"), ("cuda", "cuda")])
def test_a_baseline_has_the_device_of_its_run_on_any_machine(data, tmp_path, device, expected) -> None:
    run = write_run(tmp_path / "run", data)
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("device: cpu", f"device: {device}"))
    code, output = harness("record", "small", run, f"baselines={tmp_path / 'kept'}")
    assert code == 0, output
    assert read_baseline(tmp_path / "kept" / "small.json").environment["device"].startswith(expected)
    code, output = harness("against", "small", run, f"baselines={tmp_path / 'kept'}", f"out={tmp_path / 'out'}")
    assert code == 0, output
    assert read_report(tmp_path / "out" / REPORT_FILE).environment["device"].startswith(expected)


def test_a_run_that_drifted_or_read_other_data_differs_from_the_baseline_and_is_named(kept, data, tmp_path) -> None:
    drifted = write_run(
        tmp_path / "drifted", data, change=lambda step: replace(step, loss=step.loss * (1.001 if step.step == 3 else 1))
    )
    code, output = harness("against", "small", drifted, f"baselines={kept}")
    assert code == 1
    assert "step 3: loss is 2.002, not 2.0 (relative difference 1.0e-03, at most 0.0001)" in output
    other = write_run(tmp_path / "other", data, seed=1)
    code, output = harness("against", "small", other, f"baselines={kept}")
    assert code == 1
    assert "step 1: pack 0 of the global batch is" in output


def test_a_baseline_that_is_missing_or_damaged_fails(kept, data, tmp_path) -> None:
    run = write_run(tmp_path / "run", data)
    code, output = harness("against", "nothing", run, f"baselines={kept}")
    assert code == 1
    assert "there is no baseline nothing" in output
    assert "harness parity record nothing" in output
    path = kept / "small.json"
    whole = path.read_text()
    for damaged in (
        whole[:-200],
        whole.replace('"step_s": 0.0', '"step_s": "x"'),
        whole.replace('"experts": {}', '"experts": 1'),
        whole.replace('"loss": 0.0001', '"loss": 7'),
        whole.replace('"environment": {', '"environment": [], "kept": {'),
        whole.replace('"created": "', '"created": 5, "kept": "'),
    ):
        path.write_text(damaged)
        report = against("small", run, kept, command="")
        assert report.cells[-1].status == "failed"
        assert "this is not a baseline" in report.cells[-1].reason
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(FormatError, match="schema 99"):
        read_baseline(path)


def test_a_run_without_steps_or_digests_is_no_baseline_and_fails_against_one(kept, data, tmp_path) -> None:
    run = write_run(tmp_path / "run", data)
    (run / "digests.jsonl").unlink()
    with pytest.raises(FormatError, match="recorded no digests"):
        baseline_of("new", run, Tolerances())
    assert against("small", run, kept, command="").verdict == "different"
    assert against("small", tmp_path / "nowhere", kept, command="").cells[-1].status == "failed"
    with pytest.raises(ConfigError, match="is not a valid name"):
        record("../new", run, kept, Tolerances())


def test_an_update_is_explicit_and_reports_what_moved_and_by_how_much(kept, data, tmp_path) -> None:
    run = write_run(tmp_path / "new", data, change=lambda step: replace(step, loss=step.loss * (1 + 2e-3)))
    with pytest.raises(ConfigError, match="the baseline small already exists"):
        record("small", run, kept, Tolerances())
    code, output = harness("update", "small", run, f"baselines={kept}")
    assert code == 0, output
    assert "loss changed by up to 2.0e-03" in output
    assert "baseline small was replaced with this run: 1 of 6 checks changed" in output
    assert against("small", run, kept, command="").verdict == "same"
    assert read_baseline(kept / "small.json").tolerances.loss == 1e-4
    with pytest.raises(FormatError, match="there is no baseline other"):
        harness("update", "other", run, f"baselines={kept}")
