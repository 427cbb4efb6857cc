"""Damage of a checkpoint is named before anything of it is loaded, and the checkpoint before it is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.megatron.state.checkpoint import find_damage, find_newest
from harness.plan import SftConfig
from harness.recipes import sft
from harness.storage import file_digest, read_checksums
from harness.storage.checksums import CHECKSUMS_FILE
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE

from .conftest import forked, overrides_of, read_metrics, run_command, run_here

SETTINGS = ("trainer.checkpoint_interval=2", "trainer.eval_interval=0")
# Megatron-Core before 0.19 writes `common.pt` and a second file of weights too.
FILES = {".metadata", "__0_0.distcp", "metadata.json", RUN_FILE, CHECKSUMS_FILE}


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("checksums") / "run"
    run_here(sft, SftConfig, overrides_of(dataset, folder, *SETTINGS, "trainer.steps=4"))
    return folder


@pytest.fixture
def checkpoints(run: Path, tmp_path: Path) -> Path:
    """Its checkpoints, for a test to damage."""
    return shutil.copytree(run / CHECKPOINTS, tmp_path / CHECKPOINTS)


def flip_a_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 8
    path.write_bytes(data)


def files_of(checkpoint: Path) -> list[Path]:
    files = sorted(checkpoint.iterdir())
    assert {path.name for path in files} >= FILES
    return files


def test_every_file_has_its_hash_and_only_small_ones_are_read_again_for_it(run: Path) -> None:
    newest = run / CHECKPOINTS / "step-00000004"
    others = [path for path in newest.iterdir() if path.name != CHECKSUMS_FILE]
    assert {file.path: file.xxh3 for file in read_checksums(newest)} == {
        path.name: file_digest(path) for path in others
    }
    document = json.loads((newest / RUN_FILE).read_text())
    sizes = {path: path.stat().st_size for path in others if path.name != RUN_FILE}
    weights = sum(size for path, size in sizes.items() if path.suffix == ".distcp")
    assert document["hashed_while_written_bytes"] == weights
    assert document["hashed_after_bytes"] == sum(sizes.values()) - weights


@pytest.mark.parametrize("position", [0, 77, -1])
def test_a_flipped_bit_in_any_file_is_named_and_the_checkpoint_before_is_taken(checkpoints, position) -> None:
    damaged = checkpoints / "step-00000004"
    for path in files_of(damaged):
        flip_a_bit(path, position)
        newest, passed_over = find_newest(checkpoints)
        flip_a_bit(path, position)
        assert newest == checkpoints / "step-00000002", path
        assert [(path.name in error.what, error.where) for error in passed_over] == [(True, str(damaged))], path
    assert find_newest(checkpoints) == (damaged, [])


@pytest.mark.nightly
def test_two_ranks_agree_on_the_checkpoint_before_and_record_why(dataset: Path, run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    flip_a_bit(folder / CHECKPOINTS / "step-00000004" / "__0_0.distcp", 1000)
    resume = overrides_of(dataset, folder, *SETTINGS, "trainer.steps=6", "resume=true")
    code, output = run_command([*forked(2), "harness.recipes.sft", *resume])
    assert code == 0, output
    assert output.count("skipped: the checkpoint's file __0_0.distcp has the hash") == 1
    assert "resuming after step 2" in output
    (resumed,) = (json.loads(line) for line in (folder / "resumes.jsonl").read_text().splitlines())
    assert (resumed["after_step"], resumed["checkpoint"]) == (2, "step-00000002")
    assert "__0_0.distcp" in resumed["passed_over"][0]["what"]
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]
    # The damaged one was written again when the run came to its step.
    assert find_damage(folder / CHECKPOINTS / "step-00000004") is None


def test_a_damaged_newer_checkpoint_does_not_replace_the_one_just_written(dataset, run, tmp_path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    flip_a_bit(folder / CHECKPOINTS / "step-00000004" / "__0_0.distcp", 1000)
    resume = ["trainer.steps=3", "trainer.keep_checkpoints=1", "trainer.eval_interval=0", "resume=true"]
    run_here(sft, SftConfig, overrides_of(dataset, folder, *resume))
    assert find_newest(folder / CHECKPOINTS)[0] == folder / CHECKPOINTS / "step-00000003"
