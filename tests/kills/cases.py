"""The commands that write data, each with what it needs and what it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from counted_calls import Commands

from harness.errors import FormatError
from harness.formats import FORMATS, open_dataset
from harness.storage import file_digest

Command = Sequence[object]
# Of the process that wrote: never the same twice.
_OWN = ("stream", "producer", "time")


@dataclass(frozen=True)
class Case:
    """A command to kill.

    Attributes:
        command: from the folder of inputs and an empty folder for outputs.
        kills: of the default run; the nightly one makes 50 of each.
        before: commands that run whole before it.
    """

    name: str
    command: Callable[[Path, Path], Command]
    kills: int = 5
    before: Callable[[Path, Path], Sequence[Command]] = lambda inputs, out: ()


def _convert(format: str, name: str = "", *more: object) -> Callable[[Path, Path], Command]:
    name = name or format
    return lambda inputs, out: ["harness", "convert", inputs / "packs", out / name, format, *more]


_TENTH = ("parquet", "memmap", "binidx", "npy")
BRIDGE = "training.idx.parquet"
SHARDS = "data.packs_per_shard=7"
PRODUCE = ("chunks.rows=7", "chunks.max_waiting=100", "chunks.flush_s=3600")
FAMILY = ("split.train=80", "split.valid=20", "tokenizer.vocab_size=90000")
CASES = [
    *(Case(f"convert {format}", _convert(format, format, SHARDS), format in _TENTH) for format in FORMATS),
    Case("convert one.parquet", _convert("parquet", "one.parquet"), 1),
    Case("convert one.npy", _convert("npy", "one.npy"), 0),
    Case(
        "convert over another",
        _convert("memmap", "out", SHARDS, "--overwrite"),
        0,
        before=lambda inputs, out: [["harness", "convert", inputs / "other", out / "out", "binidx", SHARDS]],
    ),
    Case("repack", lambda inputs, out: ["harness", "repack", inputs / "store", out / "plan", "data.pack_size=50"]),
    Case(
        "repack over another",
        lambda inputs, out: ["harness", "repack", inputs / "store", out / "plan", "data.pack_size=50", "--overwrite"],
        0,
        before=lambda inputs, out: [["harness", "repack", inputs / "other-store", out / "plan", "data.pack_size=40"]],
    ),
    Case(
        "import",
        lambda inputs, out: [
            "harness",
            "import",
            inputs / "training.idx.parquet",
            out / "in",
            "megatron_bridge",
            SHARDS,
        ],
    ),
    Case(
        "import one.parquet",
        lambda inputs, out: [
            "harness",
            "import",
            inputs / "training.idx.parquet",
            out / "one.parquet",
            "megatron_bridge",
        ],
        0,
    ),
    Case(
        "indexed convert",
        lambda inputs, out: ["harness", "indexed", "convert", inputs / "tokens-*.parquet", out / "tokens"],
    ),
    Case(
        "indexed convert over another",
        lambda inputs, out: ["harness", "indexed", "convert", inputs / "tokens-*.parquet", out / "x", "--overwrite"],
        0,
        before=lambda inputs, out: [["harness", "indexed", "convert", inputs / "tokens-0.parquet", out / "x"]],
    ),
    Case(
        "indexed merge",
        lambda inputs, out: ["harness", "indexed", "merge", out.parent / "a", out.parent / "b", out / "ab"],
        0,
        before=lambda inputs, out: [
            ["harness", "indexed", "convert", inputs / "tokens-0.parquet", out.parent / "a", "--overwrite"],
            ["harness", "indexed", "convert", inputs / "tokens-1.parquet", out.parent / "b", "--overwrite"],
        ],
    ),
    Case(
        "indexed family",
        lambda inputs, out: ["harness", "indexed", "family", out, "web", inputs / "tokens-*.parquet", *FAMILY],
    ),
    Case(
        "indexed family over another",
        lambda inputs, out: [
            *("harness", "indexed", "family", out, "web", inputs / "tokens-*.parquet", *FAMILY, "--overwrite")
        ],
        0,
        before=lambda inputs, out: [
            ["harness", "indexed", "family", out, "web", inputs / "tokens-0.parquet", "tokenizer.vocab_size=65000"]
        ],
    ),
    Case(
        "live produce",
        lambda inputs, out: ["harness", "live", "produce", inputs / "chats.jsonl", out / "live", *PRODUCE],
    ),
    Case(
        "live produce packs",
        lambda inputs, out: [
            *("harness", "live", "produce", inputs / "packs", out / "live"),
            *("chunks.kind=packs", "chunks.format=parquet", *PRODUCE),
        ],
        0,
    ),
    Case(
        "live produce --append",
        lambda inputs, out: ["harness", "live", "produce", inputs / "more.jsonl", out / "live", *PRODUCE, "--append"],
        0,
        before=lambda inputs, out: [
            ["harness", "live", "produce", inputs / "chats.jsonl", out / "live", *PRODUCE, "--leave-open"]
        ],
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
        for one in case.before(inputs, self.out):
            ran = commands.run(one, root=self.out)
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
