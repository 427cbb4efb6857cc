"""What a matrix is asked for is checked before anything runs, and a finished cell is kept only while it is true."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import compose_config
from harness.errors import ConfigError
from harness.formats import FORMATS
from harness.parity.cells import Cell, parse_case
from harness.parity.processes import log_file, run_folder
from harness.parity.running import Finished, fingerprints, run_cells
from recipes.parity import ParityConfig, device_of, plan


def config(*overrides: str) -> ParityConfig:
    return compose_config("parity", ParityConfig, list(overrides))


def test_the_default_holds_every_format_against_legacy_npy() -> None:
    made = config()
    assert made.checks == ["formats"]
    assert made.formats[0] == "1 format=npy"
    assert sorted(made.formats) == sorted(f"1 format={name}" for name in FORMATS)
    persistent = [case for case in made.workers if "num_workers=4 loader.persistent_workers=true" in case]
    assert {parse_case(case).takes("format") for case in persistent} == set(FORMATS)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["check=format"], "check 'format' is unknown"),
        (["check=formats+nothing"], "is unknown"),
        (["check=versions"], "no other version's interpreter is named"),
        (["versions=[python]"], "'python' is not NAME=PATH"),
        (["steps=0"], "steps is 0"),
        (["slots=0"], "slots is 0"),
        (["timeout_s=0"], "timeout_s is 0"),
        (['sft_more=["data.path=x"]'], "data.path=x would be the data of every cell"),
        (['sft=["data=train_blend"]'], "data=train_blend would be the data of every cell"),
    ],
)
def test_a_matrix_that_means_nothing_is_refused(overrides, what) -> None:
    with pytest.raises(ConfigError, match=what):
        config(*overrides)


def test_cells_are_planned_for_the_datasets_and_versions_that_are_named(tmp_path) -> None:
    made = config(
        "check=formats+versions", 'versions=["new=/opt/python"]', 'datasets=["parquet=/data/mine"]', "steps=3"
    )
    cells, left_out = plan(made, tmp_path, "cpu")
    assert left_out == []
    by_name = {cell.name: cell for cell in cells}
    assert by_name["formats: parquet"].dataset == "/data/mine"
    assert by_name["formats: memmap"].dataset == str(tmp_path / "data" / "memmap")
    assert (tmp_path / "data" / "memmap" / "train" / "manifest.json").exists()
    assert by_name["versions: new"].python == "/opt/python"
    assert by_name["versions: new"].reference == "versions: this"
    assert {cell.steps for cell in cells} == {3}
    assert "trainer.record_batches=true" in by_name["formats: npy"].settings

    _, left_out = plan(config("check=all", "max_ranks=2"), tmp_path, "cpu")
    assert [(cell.name, cell.status) for cell in left_out] == [("versions", "skipped")]
    with pytest.raises(ConfigError, match="there is no format 'csv'"):
        plan(config('formats=["1 format=npy", "1 format=csv"]'), tmp_path, "cpu")


def test_the_device_is_that_of_the_runs_and_may_not_be_left_open() -> None:
    assert device_of([]) == "cpu"
    assert device_of(["trainer.device=cpu", "trainer.device=cuda"]) == "cuda"
    with pytest.raises(ConfigError, match="device is auto"):
        device_of(["trainer.device=auto"])


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard").write_text("one")
    return Cell(
        name="formats: npy",
        check="formats",
        case=parse_case("1 format=npy"),
        reference=None,
        settings=(f"data.path={tmp_path / 'data'}", "trainer.device=cpu"),
        steps=2,
        # No interpreter: a cell that is run again fails at once.
        python=str(tmp_path / "no-python"),
        dataset=str(tmp_path / "data"),
    )


def finish(cell: Cell, folder: Path) -> None:
    """What a cell leaves that ran to its end."""
    run = run_folder(folder, cell)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    done = Finished(fingerprints([cell])[cell.name], "", 3.0, None)
    (run.parent / "cell.json").write_text(json.dumps(done.__dict__))


def test_a_finished_cell_is_kept_until_its_settings_or_its_data_change(cell, tmp_path) -> None:
    folder = tmp_path / "parity"
    finish(cell, folder)

    def run(one: Cell) -> Finished:
        return run_cells([one], folder, slots=1, timeout_s=60, watch=lambda progress: None)[one.name]

    assert run(cell).was_kept
    assert fingerprints([replace(cell, settings=("a=1",))]) != fingerprints([cell])
    assert fingerprints([replace(cell, python="other")]) != fingerprints([cell])
    before = fingerprints([cell])
    (tmp_path / "data" / "shard").write_text("three")
    assert fingerprints([cell]) != before
    with pytest.raises(ConfigError, match="the interpreter of formats: npy cannot be started"):
        run(cell)
    assert not run_folder(folder, cell).exists()


def test_a_cell_whose_metrics_were_cut_is_not_kept(cell, tmp_path) -> None:
    folder = tmp_path / "parity"
    finish(cell, folder)
    (run_folder(folder, cell) / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with pytest.raises(ConfigError, match="cannot be started"):
        run_cells([cell], folder, slots=1, timeout_s=60, watch=lambda progress: None)


def test_what_a_failed_cell_said_is_its_reason(cell, tmp_path) -> None:
    script = tmp_path / "no-python"
    script.write_text(
        "#!/bin/sh\necho 'W1 warning'; echo 'FormatError: pack 3 is bad'; echo '  where: shard 1'; exit 2\n"
    )
    script.chmod(0o755)
    folder = tmp_path / "parity"
    found = run_cells([cell], folder, slots=1, timeout_s=60, watch=lambda progress: None)[cell.name]
    assert found.reason == f"FormatError: pack 3 is bad; where: shard 1 (log: {log_file(folder, cell)})"
    script.write_text("#!/bin/sh\necho '[rank0]: AttributeError: no such thing'; exit 1\n")
    found = run_cells([cell], folder, slots=1, timeout_s=60, watch=lambda progress: None)[cell.name]
    assert found.reason.startswith("AttributeError: no such thing")
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    found = run_cells([cell], folder, slots=1, timeout_s=60, watch=lambda progress: None)[cell.name]
    assert found.reason.startswith("killed by signal 9")
    script.write_text("#!/bin/sh\nsleep 100\n")
    found = run_cells([cell], folder, slots=1, timeout_s=0.5, watch=lambda progress: None)[cell.name]
    assert found.reason == "ended after 0.5 s"


def test_a_second_matrix_in_the_same_folder_is_refused(cell, tmp_path) -> None:
    folder = tmp_path / "parity"
    (tmp_path / "no-python").write_text("#!/bin/sh\nsleep 1\n")
    (tmp_path / "no-python").chmod(0o755)
    refused = []

    def second(progress: object) -> None:
        if not refused:
            with pytest.raises(ConfigError, match="another parity run works in this folder"):
                run_cells([cell], folder, slots=1, timeout_s=60, watch=lambda progress: None)
            refused.append(True)

    run_cells([cell], folder, slots=1, timeout_s=60, watch=second)
    assert refused
