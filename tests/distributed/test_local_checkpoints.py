"""Runs with checkpoints on the nodes' own disks are killed, lose disks, and resume; each rank here is a node."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.megatron.state.local import LocalStore
from harness.plan import SftConfig
from harness.recipes import sft as sft_recipe
from harness.train.local import own_local_record, read_local_record

from .conftest import forked, kill_when, overrides_of, read_metrics, run_command, run_here
from .test_resume import SAME

SETTINGS = ("trainer.eval_interval=0", "trainer.checkpoint_interval=0", "trainer.local_checkpoint_interval=3")


class Nodes:
    """A run whose ranks are nodes with a disk each.

    Attributes:
        run: its folder, which all nodes see.
    """

    def __init__(self, dataset: Path, folder: Path) -> None:
        self._dataset, self._folder, self.run = dataset, folder, folder / "run"

    def command(self, ranks: int, *overrides: str) -> list[str]:
        disks = "trainer.local_checkpoints=" + str(self._folder / "disk-${oc.env:RANK}")
        return [
            *forked(ranks),
            "harness.recipes.sft",
            *overrides_of(self._dataset, self.run, *SETTINGS, disks, *overrides),
        ]

    def kill_after_copies(self, *overrides: str, ranks: int = 2, after: int = 0) -> int:
        """Kill a run once all copies of a local checkpoint are there; return its step, then the newest on the disks.

        Args:
            after: a step before that checkpoint.
        """
        kill_when(lambda: self.copied() > after, self.command(ranks, "trainer.steps=100000", *overrides))
        step = self.copied()
        for path in self._folder.glob("disk-*/*/attempt-*/step-*"):
            if path.name != f"step-{step:08d}":
                shutil.rmtree(path)
        return step

    def copied(self) -> int:
        """Return the newest step of which two disks have every file, 0 for none."""
        found: Counter[tuple[int, str]] = Counter()
        for path in self._folder.glob("disk-*/*/attempt-*/step-????????/*"):
            found[int(path.parent.name[5:]), path.name] += 1
        for step in sorted({step for step, _ in found}, reverse=True):
            files = self.listed(step)
            if files and all(found[step, name] >= 2 for name in files):
                return step
        return 0

    def listed(self, step: int) -> list[str]:
        for path in self._folder.glob(f"disk-*/*/attempt-*/step-{step:08d}/checksums.json"):
            try:
                return sorted(json.loads(path.read_text())["files"])
            except (FileNotFoundError, ValueError):  # removed or being written
                continue
        return []

    def resume(self, steps: int, *overrides: str, ranks: int = 2) -> str:
        code, output = run_command(self.command(ranks, f"trainer.steps={steps}", "resume=true", *overrides))
        assert code == 0, output
        return output

    def disk(self, rank: int) -> Path:
        return self._folder / f"disk-{rank}"

    def file(self, rank: int, step: int, *, of: int) -> Path:
        """Return the largest file of rank `of` on the disk of a rank."""
        paths = self.disk(rank).glob(f"*/attempt-*/step-{step:08d}/__{of}_*.distcp")
        return max(paths, key=lambda path: path.stat().st_size)

    def curve(self) -> list[dict[str, object]]:
        return [{name: line[name] for name in SAME} for line in read_metrics(self.run)]

    def resumed_after(self) -> list[int]:
        return [json.loads(line)["after_step"] for line in (self.run / "resumes.jsonl").read_text().splitlines()]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_killed_run_resumes_from_copies_of_a_lost_and_of_a_damaged_file_with_the_same_losses(dataset, tmp_path):
    nodes = Nodes(dataset, tmp_path)
    step = nodes.kill_after_copies()
    before = nodes.curve()
    damaged = nodes.file(0, step, of=0)
    flip_a_bit(damaged)
    nodes.file(1, step, of=1).unlink()
    strange = nodes.disk(0) / f"run-{'0' * 32}/attempt-1/step-00000090"
    strange.mkdir(parents=True)
    output = nodes.resume(len(before) + 2)
    assert f"skipped: {damaged.name} on " in output, output
    assert "that of another node is used" in output
    assert nodes.resumed_after() == [step]
    assert nodes.curve()[: len(before)] == before
    # The local files of a finished run are gone, and nobody else's.
    assert sorted(nodes.disk(0).rglob("*")) == [strange.parents[1], strange.parent, strange]
    assert list(nodes.disk(1).iterdir()) == []


@pytest.mark.nightly
def test_what_a_lost_node_wrote_comes_from_its_peer_on_other_nodes_and_at_another_layout(dataset, tmp_path):
    nodes = Nodes(dataset, tmp_path)
    step = nodes.kill_after_copies(ranks=3)
    before = nodes.curve()
    shutil.rmtree(nodes.disk(1))
    nodes.disk(2).rename(nodes.disk(1))
    output = nodes.resume(len(before) + 2, "parallel.tensor_parallel_size=2", "resume=auto")
    assert f"resuming after step {step}, from {nodes.run / 'checkpoints' / f'step-{step:08d}'}" in output
    assert [line["loss"] for line in nodes.curve()[: len(before)]] == pytest.approx(
        [line["loss"] for line in before], rel=1e-5
    )


@pytest.mark.nightly
def test_with_both_disks_of_a_file_lost_the_run_resumes_from_its_own_folder_and_names_what_is_missing(
    dataset, tmp_path
):
    nodes = Nodes(dataset, tmp_path)
    step = nodes.kill_after_copies("trainer.checkpoint_interval=4", "trainer.keep_checkpoints=100", after=4)
    before = nodes.curve()
    record = read_local_record(nodes.run)
    assert record is not None
    assert record.step >= step
    shared = max(int(path.name[5:]) for path in (nodes.run / "checkpoints").glob("step-????????"))
    for path in (nodes.run / "checkpoints").glob("step-????????"):
        if int(path.name[5:]) > 4:
            shutil.rmtree(path)
    for rank in (0, 1):
        shutil.rmtree(nodes.disk(rank))
    output = nodes.resume(len(before) + 2, "trainer.checkpoint_interval=4")
    assert shared >= 4
    assert f"skipped: the local checkpoint of step {record.step} (written on " in output
    assert "is incomplete: no node of this job has any of its files" in output
    assert nodes.resumed_after() == [4]
    assert nodes.curve()[: len(before)] == before


@pytest.mark.nightly
def test_a_run_killed_again_and_again_while_it_writes_and_copies_has_the_losses_of_one_that_was_not(dataset, tmp_path):
    nodes, undisturbed = Nodes(dataset, tmp_path / "killed"), Nodes(dataset, tmp_path / "undisturbed")
    often = ("trainer.local_checkpoint_interval=1", "trainer.steps=40", "resume=auto")
    code, output = run_command(undisturbed.command(2, *often[1:]))
    assert code == 0, output
    for step in (5, 12, 19, 26):
        kill_when(lambda step=step: len(read_metrics(nodes.run)) >= step, nodes.command(2, *often))
    code, output = run_command(nodes.command(2, *often))
    assert code == 0, output
    assert nodes.curve() == undisturbed.curve()
    resumed = nodes.resumed_after()
    assert resumed
    assert resumed == sorted(resumed)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "file",
            r"the local checkpoint of step 2 cannot be written: rank 0: .*Is ?a ?directory.*\n  where: \S+/step-",
        ),
        (".metadata.tmp", "warning: the local checkpoint of step 2 cannot be written: Is a directory"),
        *(
            pytest.param(name, "warning: the local checkpoint of step 2 cannot be", marks=pytest.mark.nightly)
            for name in ("common.pt", "metadata.json")
        ),
        pytest.param(
            "folder",
            r"warning: the local checkpoint of step 2 cannot be written: \S+: Not a directory, \S+/attempt-\w+",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_local_disk_that_fails_is_a_warning_and_the_run_trains_on(
    dataset, tmp_path, monkeypatch, capsys, fault, message
):
    """One rank, whose disk fails for the folder of a checkpoint, or for a file: in the process that writes the largest,
    or of those that rank 0 writes alone."""
    make_folder: Callable[..., Any] = LocalStore.make_folder

    def fail(store: LocalStore, step: int) -> Path | None:
        (disk,) = tmp_path.glob("disk-0/run-*/attempt-*")
        if fault == "folder" and step == 2:
            disk.rename(disk.with_name("away"))
            disk.touch()
        folder: Path | None = make_folder(store, step)
        if fault == "folder" and step == 2:
            disk.unlink()
            disk.with_name("away").rename(disk)
        elif fault == "file" and step == 2:
            assert folder is not None
            for number in range(4):
                (folder / f"__0_{number}.distcp").mkdir()
        elif fault not in ("folder", "file") and step == 2:
            assert folder is not None
            (folder / fault).mkdir()
        return folder

    monkeypatch.setattr(LocalStore, "make_folder", fail)
    monkeypatch.setattr(LocalStore, "remove", LocalStore.close)
    local = (f"trainer.local_checkpoints={tmp_path}/disk-0", "trainer.local_checkpoint_interval=2")
    settings = overrides_of(dataset, tmp_path / "run", *SETTINGS, *local, "trainer.steps=5", "loader.num_workers=0")
    run_here(sft_recipe, SftConfig, [*settings, "trainer.background_checkpoints=false"])
    printed = "".join(capsys.readouterr())
    assert re.search(message, printed, re.IGNORECASE), printed
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    (disk,) = tmp_path.glob("disk-0/run-*/attempt-*")
    assert [path.name for path in disk.iterdir()] == ["step-00000004"]


def test_a_copied_run_resumes_from_its_own_checkpoints_and_leaves_the_local_ones_of_the_original(
    dataset, tmp_path, monkeypatch, capsys
):
    """Both train; with one identity the original would continue from the weights of the copy."""
    local = (f"trainer.local_checkpoints={tmp_path}/disk", "trainer.local_checkpoint_interval=3")

    def train(name: str, steps: int, *overrides: str) -> str:
        settings = overrides_of(dataset, tmp_path / name, *SETTINGS, "trainer.checkpoint_interval=2", *local)
        more = ("loader.num_workers=0", "trainer.background_checkpoints=false", f"trainer.steps={steps}", *overrides)
        run_here(sft_recipe, SftConfig, [*settings, *more])
        return "".join(capsys.readouterr())

    train("undisturbed", 5)
    with monkeypatch.context() as killed:
        killed.setattr(LocalStore, "remove", LocalStore.close)
        train("a", 4)
        shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000004")  # the newest is the local one
        original = own_local_record(tmp_path / "a")
        assert original is not None
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        printed = train("b", 4, "resume=true")
        assert f"skipped: the local checkpoints of run {original.run} up to step 3" in printed
        assert f"its checkpoint belongs to run {original.run}, and the resumed run is " in printed
        assert "resuming after step 2" in printed
        copy = own_local_record(tmp_path / "b")
        assert copy is not None
    train("b", 5, "resume=true")  # removes its local checkpoints
    assert (copy.folder(copy.root).exists(), original.folder(original.root).exists()) == (False, True)
    printed = train("a", 5, "resume=true")
    assert f"resuming after step 3, from {tmp_path}/a" in printed
    assert "its checkpoint belongs to run" not in printed
    for name in ("a", "b"):
        assert [line["loss"] for line in read_metrics(tmp_path / name)] == [
            line["loss"] for line in read_metrics(tmp_path / "undisturbed")
        ]
    assert list((tmp_path / "disk").iterdir()) == []
