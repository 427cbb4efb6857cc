"""A new run gets a new folder; a run that goes on gets its own."""

from __future__ import annotations

import pytest

from harness.errors import ConfigError
from harness.report.run_folder import choose_run_folder


def choose(tmp_path, run_dir=None, resume="false"):
    return choose_run_folder(run_dir, runs=str(tmp_path), name="sft", resume=resume)


def test_runs_are_numbered(tmp_path):
    assert choose(tmp_path) == tmp_path / "sft-001"
    (tmp_path / "sft-001").mkdir()
    (tmp_path / "sft-009").mkdir()
    (tmp_path / "sft-extra").mkdir()
    assert choose(tmp_path) == tmp_path / "sft-010"
    assert choose(tmp_path, resume="true") == choose(tmp_path, resume="auto") == tmp_path / "sft-009"


def test_auto_starts_anew_where_nothing_is_there_and_true_refuses(tmp_path):
    assert choose(tmp_path, resume="auto") == tmp_path / "sft-001"
    with pytest.raises(ConfigError, match="no run named sft to resume"):
        choose(tmp_path, resume="true")


def test_a_named_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    folder = tmp_path / "mine"
    assert choose(tmp_path, str(folder)) == folder
    (folder / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="the run folder is not empty"):
        choose(tmp_path, str(folder))
    assert choose(tmp_path, str(folder), "true") == folder


def test_a_named_folder_without_checkpoints_cannot_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoints"):
        choose(tmp_path, str(tmp_path / "mine"), "true")
    assert choose(tmp_path, str(tmp_path / "mine"), "auto") == tmp_path / "mine"


def test_another_word_for_resume_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="resume is 'maybe'"):
        choose(tmp_path, resume="maybe")
