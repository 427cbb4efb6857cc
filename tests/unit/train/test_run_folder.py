"""A new run gets a new folder; a resumed run gets its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from harness.errors import ConfigError
from harness.train.attempts import read_status
from harness.train.checkpoints import UnreadableError, begin_attempt, read_identity, refuse_foreign, whole_checkpoints
from harness.train.folder import choose_run_folder, leave_refusal, open_run_folder


def choose(tmp_path, run_dir=None, resume="false"):
    return choose_run_folder(run_dir, runs=str(tmp_path), name="sft", resume=resume)


def checkpoint_in(folder, step=3):
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return path


def test_runs_are_numbered(tmp_path):
    assert choose(tmp_path) == tmp_path / "sft-001"
    checkpoint_in(tmp_path / "sft-001")
    checkpoint_in(tmp_path / "sft-009")
    (tmp_path / "sft-extra").mkdir()
    assert choose(tmp_path) == tmp_path / "sft-010"
    # One that failed before its first checkpoint hides no other.
    (tmp_path / "sft-010" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert choose(tmp_path, resume="true") == choose(tmp_path, resume="auto") == tmp_path / "sft-009"
    assert choose(tmp_path) == tmp_path / "sft-011"


@pytest.mark.parametrize("name", [None, "mine"])
def test_auto_starts_a_new_run_without_a_checkpoint_and_true_refuses(tmp_path, name):
    run_dir = None if name is None else str(tmp_path / name)
    assert choose(tmp_path, run_dir, "auto") == tmp_path / (name or "sft-001")
    with pytest.raises(ConfigError, match=r"(no run named sft with a|has no) complete checkpoint"):
        choose(tmp_path, run_dir, "true")
    with pytest.raises(ConfigError, match="'maybe' is not known"):
        choose(tmp_path, run_dir, "maybe")


def test_a_named_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    folder = tmp_path / "mine"
    assert choose(tmp_path, str(folder)) == folder
    checkpoint_in(folder)
    with pytest.raises(ConfigError, match="the run folder is not empty"):
        choose(tmp_path, str(folder))
    assert choose(tmp_path, str(folder), "true") == folder


def test_a_copy_that_somebody_keeps_of_a_checkpoint_is_none_of_the_run_s(tmp_path):
    (tmp_path / "config.yaml").touch()
    newest = checkpoint_in(tmp_path, 4)
    (newest.with_name("step-00000004-good")).mkdir()
    (newest.with_name("step-00000004-good") / "run.json").write_text("{}")
    assert whole_checkpoints(tmp_path / "checkpoints") == [newest]
    assert read_status(tmp_path).checkpoint == 4


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    found = [checkpoint_in(tmp_path, step) for step in (99_999_999, 100_000_000)]
    assert whole_checkpoints(tmp_path / "checkpoints") == found


def test_a_checkpoint_of_another_run_is_refused_and_those_of_the_run_and_of_what_it_copies_are_not(tmp_path):
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()

    def written_by(folder, step, **facts):
        path = checkpoint_in(folder, step)
        (path / "run.json").write_text(json.dumps(facts))
        return path

    written_by(first, 1, run=begin_attempt(first).run)
    written_by(first, 2)  # of an early version
    foreign = written_by(first, 9, run=begin_attempt(other).run)
    copy = shutil.copytree(first, tmp_path / "copy")
    for folder in (first, copy, shutil.copytree(copy, tmp_path / "copy of a copy")):
        for _ in range(3):  # the attempts after a copy, which may write no checkpoint of their own
            for step in (1, 2):
                refuse_foreign(folder, folder / "checkpoints" / f"step-{step:08d}")
            with pytest.raises(ConfigError, match="the checkpoint is of another run") as refused:
                refuse_foreign(folder, folder / "checkpoints" / foreign.name)
            assert "model.init_from" in refused.value.fix
            begin_attempt(folder)


def test_a_folder_with_checkpoints_of_unknown_runs_resumes_from_them_in_every_later_attempt_and_copy(tmp_path):
    def folder_of(name, change):
        folder = tmp_path / name
        checkpoint = checkpoint_in(folder, 1)
        (checkpoint / "run.json").write_text(json.dumps({"run": "ab" * 16}))
        begin_attempt(folder)
        path = folder / "identity.json"
        change(path, json.loads(path.read_text()))
        return folder

    folders = [
        folder_of("removed", lambda path, identity: path.unlink()),
        folder_of("early", lambda path, identity: path.write_text(json.dumps({**identity, "earlier": None}))),
        folder_of("earlier", lambda path, identity: identity.pop("earlier") or path.write_text(json.dumps(identity))),
    ]
    for first in folders:
        for folder in (first, shutil.copytree(first, tmp_path / f"copy of {first.name}")):
            for _ in range(3):
                refuse_foreign(folder, folder / "checkpoints" / "step-00000001")
                begin_attempt(folder)


def test_an_identity_that_cannot_be_read_now_is_not_to_be_removed(tmp_path):
    (tmp_path / "identity.json").symlink_to("identity.json")
    with pytest.raises(UnreadableError, match="cannot be read: Too many levels of symbolic links") as refused:
        read_identity(tmp_path)
    assert "remove" not in refused.value.fix
    leave_refusal(tmp_path, refused.value)
    assert json.loads((tmp_path / "_stopped.json").read_text())["requeue"] is True


@pytest.mark.parametrize("name", ["a/b", "x[1]", "", "../up", "-x"])
def test_a_name_that_cannot_name_a_folder_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="is not a valid name for a run's folder"):
        choose_run_folder(None, runs=str(tmp_path), name=name, resume="false")


def test_earlier_settings_are_kept_if_they_differ(tmp_path):
    folder = tmp_path / "run"
    for number, resumes in ((1, False), (1, True), (2, True)):
        with open_run_folder(folder, settings=f"steps: {number}\n", resumes=resumes):
            pass
    assert sorted(path.name for path in folder.iterdir()) == ["config.before-1.yaml", "config.yaml", "identity.json"]
    assert (folder / "config.before-1.yaml").read_text() == "steps: 1\n"
    assert (folder / "config.yaml").read_text() == "steps: 2\n"
    for number in (3, 4, 5):
        if number == 5:  # as where somebody has removed one
            (folder / "config.before-1.yaml").unlink()
        with open_run_folder(folder, settings=f"steps: {number}\n", resumes=True):
            pass
    kept = {path.read_text() for path in folder.glob("config.before-*.yaml")}
    assert kept == {"steps: 2\n", "steps: 3\n", "steps: 4\n"}
    taken = open_run_folder(folder, settings="steps: 1\n", resumes=False)
    with pytest.raises(ConfigError, match="another run has just started"):
        taken.__enter__()


def test_a_folder_that_a_run_is_writing_to_is_refused_until_that_run_ends(tmp_path):
    folder = tmp_path / "run"
    with open_run_folder(folder, settings="steps: 1\n", resumes=False):
        second = open_run_folder(folder, settings="steps: 2\n", resumes=True)
        with pytest.raises(ConfigError, match="another run is still writing to this folder"):
            second.__enter__()
        with pytest.raises(ConfigError, match="another run is still writing to this folder"):
            choose(tmp_path, str(folder), "auto")
        assert (folder / "config.yaml").read_text() == "steps: 1\n"
    with open_run_folder(folder, settings="steps: 2\n", resumes=True):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["config.before-1.yaml", "config.yaml", "identity.json"]


def test_a_forked_process_of_a_killed_run_does_not_block_another_run(tmp_path):
    """Such as one that writes a checkpoint in the background, which may outlive its run for a while."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from harness.train.folder import open_run_folder\n"
        "opened = open_run_folder(Path(sys.argv[1]), settings='', resumes=False)\n"
        "opened.__enter__()\n"
        "child = os.fork()\n"
        "print(os.getpid(), flush=True) if not child else None\n"  # it has let go of the lock by then
        "time.sleep(900)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    try:
        with (
            pytest.raises(ConfigError, match="still writing to this folder"),
            open_run_folder(tmp_path / "run", settings="", resumes=True),
        ):
            pass
        run.kill()
        run.wait()
        os.kill(child, 0)  # it is still there
        with open_run_folder(tmp_path / "run", settings="", resumes=True):
            pass
    finally:
        run.kill()
        os.kill(child, signal.SIGKILL)
        run.stdout.close()
        run.wait()
