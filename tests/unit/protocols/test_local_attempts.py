"""Local checkpoints in the interleavings of a run that is killed at each step, and of a copy of its folder that trains.

The functions of `harness.train.local` run on real files, by the protocol in the docstring of that module.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from interleavings import BrokenError, Event, World, explore

from harness.errors import CheckpointError
from harness.loader import LoaderState
from harness.train import local
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, Progress, whole_checkpoints, write_run_file
from harness.train.local import LocalRecord

NUMBERS = itertools.count()


class Runs(World):
    """Run `a` trains to its last step, and `cp -r` makes `b` of its folder, which trains too.

    Attributes:
        root: `trainer.local_checkpoints`, one disk for both.
        written: by which runs each folder below `root` was made.
    """

    home: Path
    num_steps, kills = 2, 0
    is_brief = False  # the copy is made in one step, and trains in one
    # Values that somebody writes into the record of `a`.
    edits: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.root, self.attempts = self.home / "disk", {"a": 0, "b": 0}
        self.written: dict[str, str] = {}
        (self.home / "removed").mkdir(exist_ok=True)
        for name in ("a", "b", "disk"):
            (self.home / name).mkdir(exist_ok=True)  # kept, because a new folder has a new place
            for path in (self.home / name).iterdir():
                self.put_away(path)
        local.write_atomically = self.write
        local.secrets = SimpleNamespace(token_hex=lambda size: self.new_token())
        self.begin("a")
        self.start("copy", "host", self.copy)

    def pause(self, *args: Any, **settings: Any) -> str:
        return "goes" if self.is_brief and self.process.name[0] != "a" else super().pause(*args, **settings)

    def begin(self, who: str) -> None:
        self.attempts[who] += 1
        name = f"{who}{self.attempts[who]}"
        self.start(name, "host", lambda: self.train(who))

    def new_token(self) -> str:
        # Equal in all interleavings: by the attempt and its own number of tokens.
        name = self.process.name
        number = self.attempts[name] = self.attempts.get(name, 0) + 1
        return f"{ord(name[0]):x}{int(name[1:]):x}{number:x}".rjust(32, "0")

    def write(self, path: Path, data: bytes) -> None:
        self.pause()
        path.write_bytes(data)

    # ---- what processes do

    def copy(self) -> None:
        """`cp -r a b`, file by file; or an edit of the record of `a`."""
        if self.edits:
            super().pause(lambda: (self.home / "a" / local.LOCAL_RECORD).exists())
            path = self.home / "a" / local.LOCAL_RECORD
            path.write_text(json.dumps({**json.loads(path.read_text()), **self.edits}))
            return
        if self.is_brief:
            super().pause()
        for name in (local.LOCAL_RECORD, local.IDENTITY_FILE, CHECKPOINTS):
            self.pause()
            source, target = self.home / "a" / name, self.home / "b" / name
            if source.is_dir():
                shutil.copytree(source, target)
            elif source.exists():
                shutil.copyfile(source, target)
        self.begin("b")

    def train(self, who: str) -> None:
        if self.is_brief:
            super().pause()
        folder, root = self.home / who, str(self.root)
        try:
            steps = self.resume(who, folder)
        except CheckpointError:
            return
        identity = local.begin_attempt(folder)
        record = local.begin_local_attempt(folder, root, identity)
        assert record is not None
        own = record.folder(root)
        own.mkdir(parents=True)
        self.written[own.parent.name] = who
        for path in sorted(own.parent.iterdir()):
            if path != own:
                self.remove(who, path)
        while len(steps) < self.num_steps:
            steps += who
            self.pause()
            self.checkpoint(own / f"step-{len(steps):08d}", steps, record, who)
            record = replace(record, step=len(steps))
            local.write_local_record(folder, record)
            for path in local.prune_local(own, [f"step-{len(steps):08d}"]):
                self.remove(who, path)
        self.pause()
        self.checkpoint(folder / CHECKPOINTS / f"step-{len(steps):08d}", steps, record, who)
        self.pause()
        local.begin_local_attempt(folder, "", identity)  # as `LocalStore.remove`: the record first
        self.remove(who, own.parent)

    def resume(self, who: str, folder: Path) -> str:
        """Return which run trained each step up to the newest checkpoint, on any disk."""
        found = {path.name: path for path in whole_checkpoints(folder / CHECKPOINTS)}
        record = local.own_local_record(folder)
        if record is not None:
            below = record.folder(str(self.root)).resolve()
            assert below.parent.parent == self.root.resolve(), f"{who} has a record of a folder outside of the root"
            for name, part in local.read_disk(record, str(self.root)).items():
                if part.manifest and name not in found:
                    found[name] = record.folder(str(self.root)) / name
                    writer = json.loads(part.manifest[RUN_FILE])["writer"]
                    assert writer == who, f"{who} resumes from a local checkpoint of {writer}"
        if not found:
            return ""
        document = json.loads((found[max(found)] / RUN_FILE).read_text())
        steps: str = document["steps"]
        assert who == "b" or set(steps) == {"a"}, f"a resumes steps {steps}"
        return steps

    def checkpoint(self, path: Path, steps: str, record: LocalRecord, who: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        facts = {"run": record.run, "attempt": record.attempt, "steps": steps, "writer": who}
        write_run_file(path, Progress(len(steps), LoaderState(seed=0)), facts, [], [])

    def remove(self, who: str, path: Path) -> None:
        self.pause()
        writer = self.written[path.relative_to(self.root).parts[0]]
        assert writer == who, f"{who} removes local checkpoints of {writer}"
        if path.exists():
            self.put_away(path)

    def put_away(self, path: Path) -> None:
        """Remove a file or a folder in one operation, whatever is in it."""
        path.rename(self.home / "removed" / str(next(NUMBERS)))

    # ---- for the explorer

    def apply(self, event: Event) -> None:
        super().apply(event)
        if event[1] == "kill":
            self.begin(event[0][0])

    def events(self) -> Iterator[Event]:
        return (event for event in super().events() if event[1] != "kill" or event[0].startswith("a"))

    def more_state(self) -> Hashable:
        files = {}
        for place, _, names in (one for name in ("a", "b", "disk") for one in os.walk(self.home / name)):
            files[place] = ""
            files.update({f"{place}/{name}": Path(place, name).read_text() for name in names})
        return frozenset(files.items()), tuple(self.attempts.items())

    def finish(self) -> None:
        if self.edits:
            return  # `a` refuses the record
        last = self.home / "a" / CHECKPOINTS / f"step-{self.num_steps:08d}" / RUN_FILE
        assert json.loads(last.read_text())["steps"] == "a" * self.num_steps, "a has not trained all of its steps"
        left = [path.name for path in self.root.glob("*") if self.written[path.name] == "a"]
        assert not left, f"a left {left}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("write_atomically", "secrets"):
        monkeypatch.setattr(local, name, getattr(local, name))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return tmp_path


def model(home: Path, **settings: Any) -> type[Runs]:
    return type("Model", (Runs,), {"home": home, **settings})


EDITS = {"attempt": "x/../../../outside"}


@pytest.mark.parametrize(
    "settings",
    [{"num_steps": 1, "kills": 1, "is_brief": True}, {"num_steps": 1}, {"num_steps": 1, "kills": 1, "edits": EDITS}],
    ids=["kills", "copy", "edits"],
)
def test_a_run_and_its_copy_resume_and_remove_only_their_own(home: Path, settings: dict[str, Any]) -> None:
    states, ends = explore(model(home, **settings), most=5_000)
    assert states > 100
    assert ends > 1


def resume_any(folder: Path) -> LocalRecord | None:
    return local.read_local_record(folder)


def keep_the_run(folder: Path) -> str:
    return "anywhere"


@pytest.mark.parametrize(
    ("name", "fault", "settings", "found"),
    [
        ("own_local_record", resume_any, {}, "b resumes from a local checkpoint of a|b removes"),
        ("_place_of", keep_the_run, {}, "removes local checkpoints of|resumes from a local checkpoint of"),
        ("_TOKEN", re.compile(".*"), {"num_steps": 1, "kills": 1, "edits": EDITS}, "a folder outside of the root"),
    ],
    ids=["records of others", "copies are the run", "any token"],
)
def test_the_model_finds_planted_faults(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, settings: dict[str, Any], found: str
) -> None:
    monkeypatch.setattr(local, name, fault)
    with pytest.raises(BrokenError, match=found):
        explore(model(home, **settings), most=5_000)
