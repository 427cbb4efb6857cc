"""Baselines are kept, compared with, and replaced only on purpose; nights and nodes are read together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import ConfigError, FormatError
from harness.parity.baselines import against, baseline_of, read_baseline, record
from harness.parity.compare import Tolerances
from harness.parity.history import read_history, summarize
from harness.parity.result import REPORT_FILE, CellResult, ParityReport, Series, read_report, write_report
from recipes.parity import make_dataset

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


@pytest.mark.parametrize(("device", "expected"), [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
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


def test_a_folder_that_cannot_be_written_is_an_error_without_a_traceback(kept, data, tmp_path) -> None:
    run = write_run(tmp_path / "again", data)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="the baseline cannot be written"):
        harness("record", "small", run, f"baselines={blocked / 'kept'}")
    with pytest.raises(ConfigError, match="the report cannot be written"):
        harness("against", "small", run, f"baselines={kept}", f"out={blocked}")


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
    with pytest.raises(ConfigError, match="cannot name a baseline"):
        record("../new", run, kept, Tolerances())


def test_an_update_is_explicit_and_reports_what_moved_and_by_how_much(kept, data, tmp_path) -> None:
    run = write_run(tmp_path / "new", data, change=lambda step: replace(step, loss=step.loss * (1 + 2e-3)))
    with pytest.raises(ConfigError, match="there is a baseline small already"):
        record("small", run, kept, Tolerances())
    code, output = harness("update", "small", "--run", run, "--baselines", kept)
    assert code == 0, output
    assert "loss moved by up to 2.0e-03" in output
    assert "baseline small is this run now: 1 of 6 checks moved" in output
    assert against("small", run, kept, command="").verdict == "same"
    assert read_baseline(kept / "small.json").tolerances.loss == 1e-4
    with pytest.raises(FormatError, match="there is no baseline other"):
        harness("update", "other", run, f"baselines={kept}")


def report(
    created: str,
    *,
    loss: float = 2.0,
    rate: float = 900.0,
    memory: int = 10**9,
    host: str = "one",
    status: str = "same",
) -> ParityReport:
    series = Series(step=[1, 2], loss=[3.0, loss])
    cells = [
        CellResult("formats: npy", "formats", {}, None, "same", "", series=series, tokens_per_s=1000.0),
        CellResult(
            *("formats: parquet", "formats", {"format": "parquet"}, "formats: npy", status, "run it"),
            series=series,
            tokens_per_s=rate,
            peak_memory_bytes=memory,
        ),
    ]
    return ParityReport("formats", created, "parity", {"machine": f"{host}, Linux", "torch": "2.6"}, cells)


def nights(folder: Path, *later: ParityReport) -> Path:
    for number in range(1, 6):
        (folder / f"night-{number}").mkdir(parents=True)
        made = report(f"2026-01-0{number}T02:00:00+00:00", rate=900.0 + number)
        write_report(made, folder / f"night-{number}" / REPORT_FILE)
    for number, night in enumerate(later):
        (folder / f"later-{number}").mkdir()
        write_report(night, folder / f"later-{number}" / REPORT_FILE)
    return folder


def test_a_history_follows_loss_speed_and_memory_and_marks_the_night_that_left_its_band(tmp_path) -> None:
    folder = nights(tmp_path / "nights", report("2026-01-06T02:00:00+00:00", loss=2.01, rate=500.0, memory=2 * 10**9))
    found = read_history(folder)
    assert found.title == "formats"
    metrics = {(metric.cell, metric.name): metric for metric in found.metrics}
    assert set(metrics) == {
        ("formats: npy", "loss at step 2"),
        ("formats: parquet", "loss at step 2"),
        ("formats: parquet", "tokens/s, to the reference's"),
        ("formats: parquet", "peak memory"),
    }
    speed = metrics["formats: parquet", "tokens/s, to the reference's"]
    assert [night.value for night in speed.nights] == [0.901, 0.902, 0.903, 0.904, 0.905, 0.5]
    assert [night.low is None for night in speed.nights] == [True, True, True, False, False, False]
    assert speed.nights[-1].low == pytest.approx(0.903 * 0.8)
    assert {(metric.cell, metric.name) for metric, _ in found.left} == set(metrics)
    assert {night.created for _, night in found.left} == {"2026-01-06T02:00:00+00:00"}
    assert {metric.nights[0].value for metric in read_history(folder, step=1).metrics if "loss" in metric.name} == {3.0}

    code, output = harness("history", folder)
    assert code == 1
    assert "formats: parquet, loss at step 2: 2.01 left its band, 1.998 to 2.002" in output
    assert (folder / "history.html").exists()


def test_a_night_that_left_its_band_does_not_widen_it_and_a_quiet_history_ends_well(tmp_path) -> None:
    odd = report("2026-01-06T02:00:00+00:00", memory=5 * 10**9)
    folder = nights(tmp_path / "nights", odd, report("2026-01-07T02:00:00+00:00"))
    memory = next(metric for metric in read_history(folder).metrics if metric.name == "peak memory")
    assert [night.left_band for night in memory.nights] == [False] * 5 + [True, False]
    assert (memory.nights[-1].low, memory.nights[-1].high) == (900.0, 1100.0)
    code, output = harness("history", folder, "--out", tmp_path / "page")
    assert code == 0, output
    assert "7 nights, 4 metrics, 0 out of their band in the newest night" in output
    with pytest.raises(FormatError, match="there is no report"):
        harness("history", tmp_path / "page")


def test_a_night_may_have_reports_of_several_matrices_and_a_cell_that_is_lost_left_its_band(tmp_path) -> None:
    def workers(day: int, *, lost: bool = False) -> ParityReport:
        made = report(f"2026-01-0{day}T03:00:00+00:00")
        cells = [replace(cell, name=cell.name.replace("formats", "workers")) for cell in made.cells]
        return replace(made, title="workers", cells=cells[:1] if lost else cells)

    folder = nights(tmp_path / "nights", *(workers(day) for day in range(1, 6)))
    found = read_history(folder)
    assert (found.title, found.left) == ("2 matrices", [])
    assert {metric.cell for metric in found.metrics} >= {"formats: parquet", "workers: parquet"}
    assert {len(metric.nights) for metric in found.metrics} == {5}

    lost = nights(tmp_path / "lost", *(workers(day, lost=day == 5) for day in range(1, 6)))
    left = read_history(lost).left_now
    assert {metric.cell for metric, _ in left} == {"workers: parquet"}
    assert {night.value for _, night in left} == {None}
    code, output = harness("history", lost)
    assert code == 1
    assert "workers: parquet, loss at step 2: no value left its band" in output


def test_many_nodes_become_one_report_and_a_node_without_one_fails(tmp_path) -> None:
    for name, made in (("a", report("2026", host="one")), ("b", report("2026", host="two", status="different"))):
        (tmp_path / name).mkdir()
        write_report(made, tmp_path / name / REPORT_FILE)
    joined = summarize([tmp_path / "a"], command="")
    assert joined.verdict == "same"
    assert joined.cells[1].reference == joined.cells[0].name == "one: formats: npy"
    code, output = harness("summarize", tmp_path / "a", tmp_path / "b", tmp_path / "c", "--out", tmp_path / "joined")
    assert code == 1
    joined = read_report(tmp_path / "joined" / REPORT_FILE)
    assert [(cell.name, cell.status) for cell in joined.cells] == [
        ("one: formats: npy", "same"),
        ("one: formats: parquet", "same"),
        ("two: formats: npy", "same"),
        ("two: formats: parquet", "different"),
        ("c: report", "failed"),
    ]
    assert joined.environment == {"machine": "one: one, Linux; two: two, Linux", "torch": "2.6"}
    assert f"there is no report.json in {tmp_path / 'c'}" in output
