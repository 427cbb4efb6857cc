"""Copies of data on the disk of a node: made once, checked, and read in place of the originals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.recipes.parity import make_dataset

from harness.errors import HarnessError
from harness.launch.preflight.probe import copy_checks, known_hashes
from harness.loader import DataConfig, open_datasets
from harness.plan.hf_config import find_weights
from harness.storage.local_copies import copy_to_node, local_copy


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "inner" / "weights").write_bytes(bytes(range(256)) * 4096)
    return folder


def test_a_copy_has_all_files_and_a_later_one_copies_and_removes_what_has_changed(original, tmp_path):
    local = tmp_path / "local"
    made = copy_to_node(str(original), local)
    assert made.path == local / original.relative_to("/")
    assert (made.path / "inner" / "weights").read_bytes() == (original / "inner" / "weights").read_bytes()
    assert (made.new_bytes, made.num_bytes) == (2 + (1 << 20), 2 + (1 << 20))
    again = copy_to_node(str(original), local)
    assert (again.new_bytes, again.digest) == (0, made.digest)
    made = copy_to_node(str(original), tmp_path / "local")
    (original / "config.json").unlink()
    (original / "inner" / "weights").write_bytes(b"new")
    again = copy_to_node(str(original), tmp_path / "local")
    assert (again.new_bytes, sorted(again.files)) == (3, ["inner/weights"])
    assert not (made.path / "config.json").exists()


def test_a_killed_copy_is_not_read_and_is_made_again(original, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_LOCAL_DIR", str(tmp_path / "local"))
    assert local_copy(str(original)) == str(original)
    copy_to_node(str(original), tmp_path / "local")
    assert local_copy(str(original)) != str(original)
    (original / "inner" / "weights").write_bytes(bytes(range(256)) * 4095)
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom harness.storage import local_copies\n"
        "local_copies._BLOCK_BYTES = 1 << 16\nprogress = lambda num_bytes: num_bytes > 9 and os.kill(os.getpid(), 9)\n"
        "local_copies.copy_to_node(sys.argv[1], Path(sys.argv[2]), progress=progress)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(original), str(tmp_path / "local")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert local_copy(str(original)) == str(original)
    assert list((tmp_path / "local").rglob("*.partial"))
    made = copy_to_node(str(original), tmp_path / "local")
    assert (made.path / "inner" / "weights").read_bytes() == bytes(range(256)) * 4095
    assert not list((tmp_path / "local").rglob("*.partial"))


def test_other_bytes_missing_originals_and_what_a_disk_cannot_hold_are_refused(original, tmp_path):
    with pytest.raises(HarnessError, match=r"weights has the hash \w+, expected 0123"):
        copy_to_node(str(original), tmp_path / "local", known={"inner/weights": "0123"})
    assert not list((tmp_path / "local").rglob("*.copied"))
    with pytest.raises(HarnessError, match="cannot be copied to this node: there are no files"):
        copy_to_node(str(tmp_path / "none"), tmp_path / "local")
    with (original / "large").open("wb") as file:
        file.truncate(1 << 43)  # none of its bytes is stored
    with pytest.raises(HarnessError, match=r"8,192 GiB must be copied, but only \S+ GiB are free"):
        copy_to_node(str(original), tmp_path / "local")


def test_datasets_and_weights_are_read_in_their_copies(tmp_path, original, monkeypatch):
    data, local = make_dataset(tmp_path / "data"), tmp_path / "local"
    before = open_datasets(DataConfig(path=str(data))).train
    assert any(name.startswith("train/") for name in known_hashes(str(data)))
    for path in (data, original):
        copy_to_node(str(path), local, known=known_hashes(str(path)))
    monkeypatch.setenv("HARNESS_LOCAL_DIR", str(local))
    after = open_datasets(DataConfig(path=str(data), validation_path=str(data / "validation")))
    assert Path(after.train.path) == local / (data / "train").relative_to("/")
    assert Path(after.validation.path) == local / (data / "validation").relative_to("/")
    assert after.train.fingerprint == before.fingerprint
    assert after.train[0].input_ids.tolist() == before[0].input_ids.tolist()
    assert find_weights(str(original)) == local / original.relative_to("/")
    # A copy that was never finished is not read.
    (local / data.relative_to("/")).with_name(f"{data.name}.copied").unlink()
    assert Path(open_datasets(DataConfig(path=str(data))).train.path) == data / "train"


def test_a_job_that_reads_copies_copies_only_what_has_changed_since(tmp_path):
    """As the batch script runs it on each node: with the variable by which the ranks find the copies."""
    data, local = make_dataset(tmp_path / "data"), tmp_path / "local"
    ((_, check),) = copy_checks([str(data)], local, timeout_s=30).items()
    assert check()["new_bytes_s"] > 0
    manifest = data / "train" / "manifest.json"
    os.utime(manifest)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "preflight", "copy", str(local), f"data.path=[{data}]"],
        env={**os.environ, "HARNESS_LOCAL_DIR": str(local)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["facts"]["new_bytes_s"] == manifest.stat().st_size


def test_a_damaged_original_is_named_by_the_check_of_its_node(tmp_path):
    data = make_dataset(tmp_path / "data")
    shard = max((data / "train").iterdir(), key=lambda path: path.stat().st_size)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    ((name, check),) = copy_checks([str(data)], tmp_path / "local", timeout_s=30).items()
    assert name == f"copy of {data}"
    with pytest.raises(HarnessError, match=rf"{shard.name} has the hash") as error:
        check()
    assert "harness verify" in error.value.fix


def test_a_disk_that_does_not_answer_is_reported(tmp_path, original, monkeypatch):
    """A named pipe without a writer blocks whoever opens it, as a dead mount does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("harness.launch.preflight.probe.copy_to_node", lambda *_, **__: pipe.read_bytes())
    ((_, check),) = copy_checks([str(original)], tmp_path / "local", timeout_s=0.3).items()
    with pytest.raises(HarnessError, match=r"no data arrived for 0.3 s"):
        check()
    with os.fdopen(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "wb"):  # ends the thread
        pass


def test_folders_behind_links_are_copied_and_links_upward_are_not(original, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shard").write_bytes(b"tokens")
    (original / "train").symlink_to(tmp_path / "elsewhere")
    (original / "inner" / "up").symlink_to(original)
    made = copy_to_node(str(original), tmp_path / "local")
    assert sorted(made.files) == ["config.json", "inner/weights", "train/shard"]
    assert (made.path / "train" / "shard").read_bytes() == b"tokens"


def test_a_folder_for_copies_inside_of_what_is_copied_is_refused(original):
    for local in (original, original / "inner" / "local"):
        with pytest.raises(HarnessError, match="each copy would contain the one before"):
            copy_to_node(str(original), local)
