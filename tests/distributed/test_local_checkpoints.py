"""Runs with checkpoints on the nodes' own disks are killed, lose disks, and resume; each rank here is a node."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

from .conftest import forked, kill_when, overrides_of, read_metrics, run_command
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
        return [*forked(ranks), "recipes.sft", *overrides_of(self._dataset, self.run, *SETTINGS, disks, *overrides)]

    def kill_after_copies(self, *overrides: str, ranks: int = 2) -> int:
        """Kill a run once all copies of a local checkpoint are there; return its step, then the newest on the disks."""
        kill_when(self.copied, self.command(ranks, "trainer.steps=100000", *overrides))
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
    strange = nodes.disk(0) / "run-00000000/attempt-1/step-00000090"
    strange.mkdir(parents=True)
    output = nodes.resume(len(before) + 2)
    assert f"passed over: {damaged.name} on " in output, output
    assert "that of another node is used" in output
    assert nodes.resumed_after() == [step]
    assert nodes.curve()[: len(before)] == before
    # The local files of a finished run are gone, and nobody else's.
    assert sorted(nodes.disk(0).rglob("*")) == [strange.parents[1], strange.parent, strange]
    assert list(nodes.disk(1).iterdir()) == []
