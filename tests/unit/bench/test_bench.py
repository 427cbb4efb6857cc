"""Benches report medians of samples and ratios of figures, and remove their data afterwards."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness.bench import BENCHES, load
from harness.bench.figures import BenchReport, Figure, render_report
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, make_packs
from harness.cli.app import app
from harness.errors import ConfigError
from harness.formats import open_dataset
from tests.benchmarks import reading, scheduling
from tests.benchmarks.__main__ import PEERS
from tests.benchmarks.clocks import rate
from tests.benchmarks.links import make_dataset

ALL = BENCHES | PEERS
KERNELS = Path(__file__).resolve().parents[2] / "golden" / "kernels.json"

WORKS = {"many": 1000.0, "few": 100.0, "none": 0.0}


def silent(text: str) -> None:
    pass


def measure(bench: str, folder: Path, **sizes) -> BenchReport:
    """Measure with quick sizes but these, and check what every report keeps."""
    with Workspace(folder) as workspace:
        report = ALL[bench].measure(ALL[bench].sizes(quick=True, **sizes), workspace, silent)
    assert list(folder.iterdir()) == []
    assert report.settings.keys() == ALL[bench].full.keys()
    check(report)
    return report


def text_of(renderable) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def check(report: BenchReport) -> None:
    """Medians are those of the samples, and ratios those of the figures that they name."""
    for figure in report.figures:
        if figure.unit == "x" and figure.of:
            over, under = (report.figure(name).value for name in figure.of)
            assert figure.value == over / under
        elif figure.samples and report.subject != "schedule":
            assert figure.value == statistics.median(figure.samples)
    stored = json.loads(json.dumps(report.to_dict()))
    assert [figure["name"] for figure in stored["figures"]] == [figure.name for figure in report.figures]
    assert {"machine", "versions", "command", "settings", "notes", "began"} <= stored.keys()
    assert stored["versions"]["numpy"] == np.__version__


def test_a_report_takes_medians_and_divides_what_it_names():
    report = BenchReport("subject")
    report.add_samples("ours", [9.0, 1.0, 8.0], "packs/s")
    report.add_samples("theirs", [2.0, 4.0, 1000.0], "packs/s", at_least=5)
    report.add_ratio("ours to theirs", "ours", "theirs", at_least=3)
    assert report.figures[-1].samples == (4.5, 0.25, 0.008)
    assert [figure.value for figure in report.figures] == [8.0, 4.0, 2.0]
    assert [figure.met for figure in report.figures] == [None, False, False]
    assert Figure("a", 60.0, "MB", at_least=60, at_most=60).met
    assert not Figure("a", 61.0, "MB", at_most=60).met
    assert [figure.name for figure in report.missed] == ["theirs", "ours to theirs"]
    assert "missed" in text_of(render_report(report))
    report.add(Figure("of numpy", np.float64(3), "x", at_most=4))
    with pytest.raises(ValueError, match="two figures"):
        report.add_samples("ours", [1.0], "packs/s")
    check(report)


def test_sides_are_measured_in_turns_and_compared_by_the_ratio_of_the_first_to_the_second():
    clock = iter(range(0, 100, 2))  # two seconds between any two readings
    sides = {name: rate(lambda number, units=units: units, lambda: next(clock)) for name, units in WORKS.items()}
    report = BenchReport("subject")
    report.compare("many to few", sides, 3, "packs/s", at_least=5)
    assert [(figure.name, figure.value, figure.samples) for figure in report.figures] == [
        ("many", 500.0, (500.0,) * 3),
        ("few", 50.0, (50.0,) * 3),
        ("none", 0.0, (0.0,) * 3),
        ("many to few", 10.0, (10.0,) * 3),
    ]
    assert report.figures[-1].met
    check(report)


def test_a_workspace_is_removed_unless_it_is_kept_and_its_packs_are_the_same_again(tmp_path):
    with Workspace(tmp_path) as workspace:
        path = make_dataset(workspace, "memmap", packs=4, pack_size=32)
        assert len(open_dataset(path)) == 4
    assert list(tmp_path.iterdir()) == []
    with Workspace(tmp_path, keep=True) as workspace:
        path = make_dataset(workspace, "memmap", packs=4, pack_size=32)
        written = (path / "manifest.json").stat().st_mtime_ns
    with Workspace(tmp_path, keep=True) as workspace:
        assert make_dataset(workspace, "memmap", packs=4, pack_size=32) == path
        assert (path / "manifest.json").stat().st_mtime_ns == written
    packs = list(make_packs(20, 128))
    assert [pack.problem(128) for pack in packs] == [None] * 20
    assert packs == list(make_packs(20, 128))
    assert np.mean([len(pack) for pack in packs]) > 115
    assert all(pack.loss_mask[pack.seq_start_id[1:] - 1].sum() == 0 for pack in packs)
    (tmp_path / "file").write_text("")
    for keep in (True, False):
        with pytest.raises(ConfigError, match="the folder for the data cannot be used"):
            Workspace(tmp_path / "file", keep=keep)


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the benches of this folder, as under `python -m tests.benchmarks`."""
    for name in ("loader", "schedule"):
        monkeypatch.setitem(BENCHES, name, PEERS[name])


def test_settings_that_are_too_few_too_small_or_of_another_bench_are_refused_by_name():
    for words, what in ((["loader", "workers=[]"], "0 numbers, expected"), (["schedule", "ranks=0"], "0 is too small")):
        done = CliRunner().invoke(app, ["bench", *words])
        assert isinstance(done.exception, ConfigError)
        assert what in done.exception.what
    done = CliRunner().invoke(app, ["bench", "gpu", "workers=2"])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.fix == "use out, device, size, parts, ranks, part_limit_s, total_limit_s"
    printed = CliRunner().invoke(app, ["bench", "gpu", "ranks=2", "--quick", "--cfg"]).stdout
    lines = [line for line in printed.splitlines() if line and line[0] not in "#-"]
    assert lines[:5] == ["out: gpu-report", "device: auto", "size: tiny", "parts: []", "ranks: 2"]


def test_bytes_of_many_ranks_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_RANKS", (64,))
    sizes = {"packs": 40, "pack_size": 64, "max_tokens_per_rank": 128, "global_batch": 4}
    report = measure("reading", tmp_path, large_packs=0, **sizes)
    # Counted, so the same on every machine: 40 packs, each on another rank.
    alone = report.figure("parquet, as_packed, bytes read, 64 ranks, 4 workers")
    assert 1.0 < alone.value < alone.at_most == 1.2
    assert report.figure("parquet, cost_balanced, bytes read, 64 ranks, 4 workers").value > 2
    decoded = report.figure("parquet, as_packed, decoded per own token, 64 ranks")
    assert (decoded.unit, decoded.at_most, min(decoded.samples) > 0) == ("ns", 15, True)
    # Pages of 64 tokens, which lists share by 64.
    stored = report.figure("parquet, bytes stored, to lists in groups of 64 packs")
    assert stored.value > stored.at_most == 1.06


def test_a_microbatch_launches_what_the_golden_table_says(tmp_path):
    """A change of these counts is a change of every step on a GPU: correct the table, and say why in its commit."""
    megatron = pytest.importorskip("megatron.core")
    report = measure("kernels", tmp_path)
    counted = {figure.name: round(figure.value, 3) for figure in report.figures}
    assert counted == json.loads(KERNELS.read_text())[megatron.__version__]
    assert not report.missed
    few, many = (
        {name.removeprefix(of): value for name, value in counted.items() if name.startswith(of) and "bytes" not in name}
        for of in ("2 sequences", "8 sequences")
    )
    for name in (", copied to the device", ", Megatron's rotary embedding of 32 layers"):
        del few[name], many[name]  # a bound a sequence; a loop over sequences in Megatron 0.19
    assert few == many


def test_the_command_prints_a_table_or_json_and_saves_it(tmp_path):
    arguments = ["bench", "schedule", "steps=2", "ranks=4", "parts=cost_balanced"]
    run = CliRunner()
    printed = run.invoke(app, arguments)
    assert printed.exit_code == 0
    assert "cost_balanced, step cost" in printed.stdout
    printed = run.invoke(app, [*arguments, "--json", "--save", str(tmp_path / "new" / "a.json")])
    reports = json.loads(printed.stdout)["reports"]
    assert [report["subject"] for report in reports] == ["schedule"]
    assert reports[0]["settings"]["ranks"] == 4
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == {"reports": reports}


@pytest.mark.parametrize("name", ALL)
def test_every_bench_has_two_presets_and_a_function(name):
    pytest.importorskip("megatron.core" if ALL[name].uses_megatron else "numpy")
    bench = ALL[name]
    assert set(bench.quick) <= set(bench.full)
    assert isinstance(bench.sizes(), Sizes)
    assert isinstance(bench.sizes(quick=True), Sizes)
    assert callable(load(f"{bench.package}.{bench.place}", uses_megatron=bench.uses_megatron))


def test_a_missed_target_is_exit_code_1_only_with_check(monkeypatch):
    def measure_nothing(sizes, workspace, progress):
        progress("measuring nothing")
        report = BenchReport("subject")
        report.add(Figure("speed", 3.0, "packs/s", at_least=4))
        return report

    monkeypatch.setattr(scheduling, "bench_schedule", measure_nothing)
    assert CliRunner().invoke(app, ["bench", "schedule"]).exit_code == 0
    done = CliRunner().invoke(app, ["bench", "schedule", "--check"])
    assert done.exit_code == 1
    assert "subject: speed" in done.stderr
