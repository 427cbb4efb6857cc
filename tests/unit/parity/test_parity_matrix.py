"""Settings of a matrix are checked before anything runs, and a finished cell is kept while its inputs are the same."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from harness.recipes.parity import ParityConfig, device_of, main, make_dataset, plan

from harness.config import compose_config
from harness.errors import ConfigError
from harness.formats import FORMATS
from harness.parity.assemble import cell_result
from harness.parity.cells import Cell, parse_case
from harness.parity.running import Finished, fingerprints, run_cells
from harness.storage import Marker

from ...samples.recorded_runs import write_run


def config(*overrides: str) -> ParityConfig:
    return compose_config("parity", ParityConfig, list(overrides))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("matrix") / "data")


def test_the_default_compares_every_format_with_legacy_npy_and_the_device_is_that_of_the_runs() -> None:
    made = config()
    assert made.checks == ["formats"]
    assert made.formats[0] == "1 format=npy"
    assert sorted(made.formats) == sorted(f"1 format={name}" for name in FORMATS)
    persistent = [case for case in made.workers if "num_workers=4 loader.persistent_workers=true" in case]
    assert {parse_case(case).value_of("format") for case in persistent} == set(FORMATS)
    assert device_of(config()) == "cpu"
    assert device_of(config("device=cuda")) == "cuda"
    assert device_of(config('sft_more=["trainer.device=cpu", "trainer.device=cuda"]')) == "cuda"
    assert device_of(config('sft_more=["++trainer.device=cuda"]')) == "cuda"
    with pytest.raises(ConfigError, match="device is auto"):
        device_of(config('sft_more=["trainer.device=auto"]'))


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["check=format"], "check 'format' is unknown"),
        (["check=versions"], "no interpreter of another version is specified"),
        (["versions=[python]"], "'python' is not NAME=PATH"),
        (["device=auto"], "'auto' is not known"),
        (['sft_more=["data.path=x"]'], "data.path=x would replace the data of every cell"),
        (['sft=["data=train_blend"]'], "data=train_blend would replace the data of every cell"),
        (['sft_more=["trainer.steps=50"]'], "trainer.steps=50 would not be used"),
        (['sft=["optimizer.decay_steps=9"]'], "optimizer.decay_steps=9 would not be used"),
        (['sft_more=["++run_dir=x"]'], "run_dir=x would not be used"),
        (["dataset=s3://bucket/chats"], "dataset is a URI"),
        (['versions=["a=/x", "a=/y"]'], "a name is given twice"),
    ],
)
def test_a_meaningless_matrix_is_refused(overrides, what) -> None:
    with pytest.raises(ConfigError, match=what):
        config(*overrides)


@pytest.mark.submission
def test_cells_use_the_named_datasets_and_versions_and_isolation_is_checked_on_each_layout_by_itself(tmp_path) -> None:
    made = config(
        "check=formats+versions", 'versions=["new=/opt/python"]', 'datasets=["parquet=/data/mine"]', "steps=3"
    )
    source = make_dataset(tmp_path / "data" / "made")
    cells, left_out = plan(made, source, tmp_path, "cpu")
    assert left_out == []
    by_name = {cell.name: cell for cell in cells}
    assert by_name["formats: parquet"].dataset == "/data/mine"
    assert by_name["formats: memmap"].dataset == str(tmp_path / "data" / "memmap")
    assert (tmp_path / "data" / "memmap" / "train" / "manifest.json").exists()
    assert by_name["versions: new"].python == "/opt/python"
    assert by_name["versions: new"].reference == "versions: this"
    assert {cell.steps for cell in cells} == {3}
    assert "trainer.record_batches=true" in by_name["formats: npy"].settings

    _, left_out = plan(config("check=all", "max_ranks=2"), source, tmp_path, "cpu")
    assert [(cell.name, cell.status) for cell in left_out] == [("versions", "skipped")]
    with pytest.raises(ConfigError, match="format 'csv' does not exist"):
        plan(config('formats=["1 format=npy", "1 format=csv"]'), source, tmp_path, "cpu")
    cells, _ = plan(config("check=isolation", "max_ranks=2"), tmp_path, tmp_path, "cpu")
    assert {cell.case.ranks for cell in cells} == {1, 2}
    assert {cell.reference for cell in cells} == {None}
    assert " -m harness.recipes.isolation " in cells[0].command(tmp_path)
    alone, _ = plan(config("check=isolation", 'isolation=["2 parallel=cp2"]'), tmp_path, tmp_path, "cpu")
    assert [cell.name for cell in alone] == ["isolation: 2x cp2"]


@pytest.mark.parametrize(
    ("ranks", "change", "status"),
    [
        (1, 0.0, "same"),
        (2, 0.0, "same"),  # balanced over two ranks: the same sequences in other rows
        (2, 3.5e-8, "same"),
        (2, 3.5e-5, "different"),
        (1, 3.5e-8, "different"),
    ],
)
def test_a_case_on_more_ranks_than_its_reference_has_the_tolerance_of_layouts_and_rows_of_its_own(
    tmp_path, data, ranks, change, status
) -> None:
    cases = config(
        f'formats=["1 format=npy","{ranks} format=memmap"]', 'datasets=["npy=a","memmap=b"]', f"dataset={data}"
    )
    (one, other), _ = plan(cases, data, tmp_path, "cpu")
    write_run(one.run_folder(tmp_path), data)
    write_run(other.run_folder(tmp_path), data, ranks=ranks, change=lambda step: replace(step, loss=step.loss + change))
    known = {cell.name: cell for cell in (one, other)}
    finished = {name: Finished("", "", 1.0, None) for name in known}
    result = cell_result(other, finished, folder=tmp_path, known=known, device="cpu")
    assert result.status == status, result.checks
    assert ("placement" in [check.name for check in result.checks]) == (ranks == 1)


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
    """Leave the files of a cell that ran to its end."""
    run = cell.run_folder(folder)
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    done = Finished(fingerprints([cell])[cell.name], "", 3.0, None)
    (run.parent / "cell.json").write_text(json.dumps(done.__dict__))


def test_a_finished_cell_is_kept_until_its_settings_or_its_data_change(cell, tmp_path) -> None:
    folder = tmp_path / "parity"
    finish(cell, folder)

    def run(cell: Cell) -> Finished:
        return run_cells([cell], folder, slots=1, timeout_s=60, watch=lambda progress: None)[cell.name]

    assert run(cell).was_kept
    record = cell.record(folder).read_text()
    cell.record(folder).write_text(record[:-4])
    with pytest.raises(ConfigError, match="cannot be started"):
        run(cell)
    finish(cell, folder)
    assert fingerprints([replace(cell, settings=("a=1",))]) != fingerprints([cell])
    assert fingerprints([replace(cell, python="other")]) != fingerprints([cell])
    before = fingerprints([cell])
    (tmp_path / "data" / "shard").write_text("three")
    assert fingerprints([cell]) != before
    with pytest.raises(ConfigError, match="the interpreter of formats: npy cannot be started"):
        run(cell)
    assert not cell.run_folder(folder).exists()


def test_the_error_of_a_failed_cell_is_its_reason_and_a_second_matrix_in_the_folder_is_refused(cell, tmp_path) -> None:
    script, folder, refused = tmp_path / "no-python", tmp_path / "parity", []

    def second(progress: object) -> None:
        """Begin another matrix in the folder while one runs."""
        with pytest.raises(ConfigError, match="another parity run is using this folder"):
            run_cells([cell], folder, slots=1, timeout_s=60, watch=lambda progress: None)
        refused.append(True)

    log = f" (log: {cell.log_file(folder)})"
    for commands, timeout_s, reason in (
        ("echo 'W1 warning'; echo 'FormatError: pack 3 is bad'; echo '  where: shard 1'; exit 2", 60,
         f"FormatError: pack 3 is bad; where: shard 1{log}"),
        ("echo '[rank0]: AttributeError: no such thing'; exit 1", 60, f"AttributeError: no such thing{log}"),
        ("echo 'OSError: s3://key:tops3cret@bucket is gone'; exit 1", 60, f"OSError: s3://***@bucket is gone{log}"),
        ("kill -9 $$", 60, f"killed by signal 9: no output{log}"),
        ("sleep 100", 0.5, "ended after 0.5 s"),
    ):  # fmt: skip
        script.write_text(f"#!/bin/sh\n{commands}\n")
        script.chmod(0o755)
        assert run_cells([cell], folder, slots=1, timeout_s=timeout_s, watch=second)[cell.name].reason == reason
    assert refused


def test_a_check_or_a_family_that_is_named_twice_runs_once(tmp_path) -> None:
    cells, _ = plan(config("check=schedules+schedules", "max_ranks=1"), tmp_path, tmp_path, "cpu")
    names = [cell.name for cell in cells]
    assert len(names) == len(set(names)) == 3


def test_a_kind_of_media_without_an_encoder_is_refused(tmp_path) -> None:
    made = config("check=media", "kinds.mine='model.num_layers=2'", 'media=["1 kind=mine", "2 kind=mine"]')
    with pytest.raises(ConfigError, match=r"kind 'mine' has no model\.encoder"):
        plan(made, tmp_path, tmp_path, "cpu")


def test_a_matrix_in_a_folder_that_is_used_or_cannot_be_made_changes_nothing(tmp_path, data, monkeypatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the folder cannot be used") as refused:
        main(config("check=schedules", f"folder={tmp_path / 'file'}", f"dataset={data}"))
    assert refused.value.where == str(tmp_path / "file")
    (tmp_path / "matrix/cells/schedules__as_packed").mkdir(parents=True)
    running = Marker(tmp_path / "matrix/.lock")
    running.acquire()
    try:
        with pytest.raises(ConfigError, match="another parity run is using this folder"):
            main(config("check=schedules", f"folder={tmp_path / 'matrix'}", f"dataset={data}", "fresh=true"))
    finally:
        running.release(remove=True)
    assert (tmp_path / "matrix/cells/schedules__as_packed").is_dir()


def test_a_cell_is_run_again_with_other_packages(cell, monkeypatch) -> None:
    before = fingerprints([cell])
    monkeypatch.setattr("harness.parity.running.installed_versions", lambda names: {"torch": "2.0"})
    assert fingerprints([cell]) != before


@pytest.mark.parametrize("dataset", ["", "/shard", "/shar", "/sh*", "/*"])
def test_a_cell_is_run_again_after_a_change_of_the_files_of_any_form_of_path(cell, tmp_path, dataset) -> None:
    chosen = replace(cell, dataset=f"{tmp_path / 'data'}{dataset}")
    before = fingerprints([chosen])
    (tmp_path / "data" / "shard").write_text("three")
    assert fingerprints([chosen]) != before


def test_a_cell_whose_records_are_damaged_failed_and_the_others_are_reported(data, tmp_path) -> None:
    cases = config('formats=["1 format=npy","1 format=memmap"]', 'datasets=["npy=a","memmap=b"]')
    (one, other), _ = plan(cases, data, tmp_path, "cpu")
    for cell in (one, other):
        write_run(cell.run_folder(tmp_path), data)
    whole = other.record(tmp_path).read_text()
    other.record(tmp_path).write_text(f"nothing\n{whole}")
    known = {cell.name: cell for cell in (one, other)}
    finished = {name: Finished("", "", 1.0, None) for name in known}
    result = cell_result(other, finished, folder=tmp_path, known=known, device="cpu")
    assert result.status == "failed"
    assert "line 1 is not a step's metrics" in result.reason


def test_a_value_of_a_small_model_is_changed_by_its_name() -> None:
    assert config("models.qwen2.hidden_size=64").models["qwen2"] == {"tie_word_embeddings": True, "hidden_size": 64}
