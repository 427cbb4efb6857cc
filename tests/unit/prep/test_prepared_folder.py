"""A prepared folder is finished, in progress, or holds something else; each case is handled."""

from __future__ import annotations

import json

import pytest

from harness.errors import ConfigError, FormatError, PrepError
from harness.prep.folder import PreparedFolder, finished_report, settings_hash
from harness.storage import LocalFolder

SETTINGS = {"data": {"pack_size": 8}, "source": "x"}
OTHER = {"data": {"pack_size": 16}, "source": "x"}


def finish(path, settings=SETTINGS):
    folder = PreparedFolder(path)
    folder.begin()
    (path / "train").mkdir()
    (path / "train" / "manifest.json").write_text("{}")
    (path / "tokenizer").mkdir()
    report = {"settings": settings, "settings_hash": settings_hash(settings), "splits": {"train": {}}}
    folder.finish(report)
    return report


def test_changed_settings_are_listed_and_need_overwrite(tmp_path):
    finish(tmp_path / "d")
    folder = PreparedFolder(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"data\.pack_size was 8 and is 16") as error:
        finished_report(LocalFolder(folder.path), OTHER, overwrite=False)
    assert "data.overwrite=true" in error.value.fix
    assert finished_report(LocalFolder(folder.path), OTHER, overwrite=True) is None


def test_a_finished_folder_without_its_data_is_prepared_again(tmp_path):
    finish(tmp_path / "d")
    (tmp_path / "d" / "train" / "manifest.json").unlink()
    assert finished_report(LocalFolder(tmp_path / "d"), SETTINGS, overwrite=False) is None


def test_a_running_preparation_locks_the_folder_and_an_interrupted_one_is_taken_over_with_any_settings(tmp_path):
    folder = PreparedFolder(tmp_path / "d")
    folder.begin()
    with pytest.raises(FormatError, match="another process"):
        PreparedFolder(tmp_path / "d").begin()
    (tmp_path / "d" / "train").mkdir()
    (tmp_path / "d" / "train" / "half").write_text("")
    folder.abandon()
    again = PreparedFolder(tmp_path / "d")
    assert finished_report(LocalFolder(again.path), OTHER, overwrite=False) is None
    again.begin()
    assert [entry.name for entry in (tmp_path / "d").iterdir()] == ["_preparing"]
    again.abandon()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_other_files_is_never_changed(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(PrepError, match=r"thesis\.tex"):
        finished_report(LocalFolder(tmp_path), SETTINGS, overwrite=overwrite)
    (tmp_path / "report.json").write_text(json.dumps({"title": "another tool"}))
    with pytest.raises(PrepError, match="was not written by a preparation"):
        finished_report(LocalFolder(tmp_path), SETTINGS, overwrite=overwrite)
    with pytest.raises(ConfigError, match="is a file"):
        finished_report(LocalFolder(tmp_path / "thesis.tex"), SETTINGS, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "x"


@pytest.mark.parametrize("damage", [{"settings": "date"}, {"settings": ["date"]}, {"splits": 5}, {"splits": None}])
def test_a_damaged_report_is_an_error_with_its_place(tmp_path, damage):
    report = finish(tmp_path / "d")
    (tmp_path / "d" / "report.json").write_text(json.dumps({**report, **damage}))
    with pytest.raises(PrepError) as error:
        finished_report(LocalFolder(tmp_path / "d"), SETTINGS, overwrite=False)
    assert error.value.where == str(tmp_path / "d" / "report.json")
