"""The commands that write data, each with what it needs and what it leaves."""

from __future__ import annotations

import json
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from counted_calls import Commands

from harness.errors import FormatError
from harness.formats import FORMATS, open_dataset
from harness.storage import file_digest

NOBODY = 65534
HELD = re.compile(rf"process \d+ on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
# Of the process that wrote: never the same twice.
_OWN = ("stream", "producer", "time")


@dataclass(frozen=True)
class Case:
    """A command to kill.

    Attributes:
        text: of the command, after `harness`; `{inputs}`, `{out}` and `{beside}` are the folder of inputs, an empty
            folder for outputs, and the one that this is in.
        kills: of the default run; the nightly one makes 50 of each.
        before: commands that run whole before it.
    """

    name: str
    text: str
    kills: int = 5
    before: tuple[str, ...] = ()

    def command(self, inputs: Path, out: Path) -> list[str]:
        return words_of(self.text, inputs, out)


def words_of(text: str, inputs: Path, out: Path) -> list[str]:
    return ["harness", *(word.format(inputs=inputs, out=out, beside=out.parent) for word in text.split())]


_TENTH = ("parquet", "memmap", "binidx", "npy")
BRIDGE = "{inputs}/training.idx.parquet"
SHARDS = "data.packs_per_shard=7"
PRODUCE = "chunks.rows=7 chunks.max_waiting=100 chunks.flush_s=3600"
FAMILY = "split.train=80 split.valid=20 tokenizer.vocab_size=90000"
CASES = [
    *(
        Case(f"convert {name}", f"convert {{inputs}}/packs {{out}}/{name} {name} {SHARDS}", name in _TENTH)
        for name in FORMATS
    ),
    Case("convert one.parquet", "convert {inputs}/packs {out}/one.parquet parquet", 1),
    Case("convert one.npy", "convert {inputs}/packs {out}/one.npy npy", 0),
    Case(
        "convert over another",
        f"convert {{inputs}}/packs {{out}}/out memmap {SHARDS} --overwrite",
        0,
        before=(f"convert {{inputs}}/other {{out}}/out binidx {SHARDS}",),
    ),
    Case("repack", "repack {inputs}/store {out}/plan data.pack_size=50"),
    Case(
        "repack over another",
        "repack {inputs}/store {out}/plan data.pack_size=50 --overwrite",
        0,
        before=("repack {inputs}/other-store {out}/plan data.pack_size=40",),
    ),
    Case("import", f"import {BRIDGE} {{out}}/in megatron_bridge {SHARDS}"),
    Case("import one.parquet", f"import {BRIDGE} {{out}}/one.parquet megatron_bridge", 0),
    Case("indexed convert", "indexed convert {inputs}/tokens-*.parquet {out}/tokens"),
    Case(
        "indexed convert over another",
        "indexed convert {inputs}/tokens-*.parquet {out}/x --overwrite",
        0,
        before=("indexed convert {inputs}/tokens-0.parquet {out}/x",),
    ),
    Case(
        "indexed merge",
        "indexed merge {beside}/a {beside}/b {out}/ab",
        0,
        before=tuple(
            f"indexed convert {{inputs}}/tokens-{number}.parquet {{beside}}/{name} --overwrite"
            for number, name in enumerate("ab")
        ),
    ),
    Case("indexed family", f"indexed family {{out}} web {{inputs}}/tokens-*.parquet {FAMILY}"),
    Case(
        "indexed family over another",
        f"indexed family {{out}} web {{inputs}}/tokens-*.parquet {FAMILY} --overwrite",
        0,
        before=("indexed family {out} web {inputs}/tokens-0.parquet tokenizer.vocab_size=65000",),
    ),
    Case("live produce", f"live produce {{inputs}}/chats.jsonl {{out}}/live {PRODUCE}"),
    Case(
        "live produce packs",
        f"live produce {{inputs}}/packs {{out}}/live chunks.kind=packs chunks.format=parquet {PRODUCE}",
        0,
    ),
    Case(
        "live produce --append",
        f"live produce {{inputs}}/more.jsonl {{out}}/live {PRODUCE} --append",
        0,
        before=(f"live produce {{inputs}}/chats.jsonl {{out}}/live {PRODUCE} --leave-open",),
    ),
]


class Whole:
    """A case that ran without a kill.

    Attributes:
        out: folder of outputs.
        command: writes to it.
        count: calls below `out` that it made.
        expected: what it left, as `contents` has it.
        fingerprints: of the datasets before and after it.
        modes: permissions of the files that it left, under the usual umask.
    """

    def __init__(self, case: Case, commands: Commands, inputs: Path, folder: Path) -> None:
        self.out, self._kept = folder / "out", folder / "before"
        self.out.mkdir()
        self.command = case.command(inputs, self.out)
        for text in case.before:
            ran = commands.run(words_of(text, inputs, self.out), root=self.out)
            assert ran.code == 0, ran.output
        before = contents(self.out)
        shutil.copytree(self.out, self._kept)
        ran = commands.run(self.command, root=self.out)
        assert ran.code == 0, ran.output
        self.count, self.expected = ran.count, contents(self.out)
        self.modes = {path.name: oct(path.stat().st_mode) for path in self.out.rglob("*") if path.is_file()}
        assert self.expected != before
        self.fingerprints = {fingerprint_of(self.out), fingerprint_of(self._kept)}

    def begin(self) -> None:
        """Make the outputs as they were before the command."""
        shutil.rmtree(self.out)
        shutil.copytree(self._kept, self.out)


def contents(folder: Path) -> dict[str, str]:
    """Return what a folder holds: the hash of each file, without what names the process or the time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name.endswith(".ready") or path.name == "END.json":
            values = json.loads(path.read_text())
            found[name] = json.dumps({key: value for key, value in values.items() if key not in _OWN})
        elif path.name != "_producer":
            found[name] = "folder" if path.is_dir() else file_digest(path)
    return found


def fingerprint_of(folder: Path) -> str | None:
    """Return the fingerprint of the dataset in a folder, from all of its packs; None where there is no whole one."""
    for path in sorted(folder.iterdir()):
        if path.name == "live":  # a stream may be read before it is whole
            continue
        try:
            reader = open_dataset(path)
        except FormatError:
            continue
        fingerprint = reader.digest_packs()
        reader.close()
        return fingerprint
    return None
