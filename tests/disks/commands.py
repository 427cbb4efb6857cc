"""The commands that write, each with its input and the result that it must have in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from small_packs import write_packs

from harness.formats import FORMATS
from harness.indexed.index import IndexedWriter
from harness.loader.live import LiveProducer
from harness.prep import PrepareConfig, TokenizerConfig, prepare
from harness.prep.packing import PackingConfig
from harness.prep.sources.config import SourceConfig
from harness.records import Pack
from harness.storage import file_digest, read_checksums

ROOT = Path(__file__).resolve().parents[2]
_OF_THE_WRITER = ("stream", "producer", "time")
PACKS = [Pack([number, 2, 3, 4, 5], [1, 0, 1, 1, 0], [0, 2]) for number in range(3)]
_TRAINED = (
    "model.num_layers=1 model.hidden_size=16 model.ffn_hidden_size=32 model.num_attention_heads=2 "
    "loader.global_batch_size=2 loader.num_workers=0 schedule.max_tokens_per_rank=128 optimizer.decay_steps=10 "
    "trainer.device=cpu trainer.checkpoint_interval=2 trainer.record_digests=true trainer.record_batches=true"
)
RUN = (
    "train sft data.path={}/source run_dir={}/run loader.block_packs=2 trainer.eval_interval=2 "
    f"trainer.sample_prompts=[hello] trainer.sample_tokens=2 {_TRAINED}"
)
LIVE_RUN = (
    "train sft data=live data.live.path={}/live data.live.pack_size=128 data.live.tokenizer.name={}/source/tokenizer "
    f"data.live.open_packs=2 run_dir={{}}/run schedule=as_packed schedule.max_tokens_per_rank=128 "
    f"trainer.eval_interval=0 {_TRAINED}"
)


@dataclass(frozen=True)
class Command:
    """A command that writes below a folder.

    Attributes:
        make: writes the input into the folder.
        arguments: of `harness`, with `{}` for the folder.
        again: arguments that finish what was interrupted; the same if empty.
        result: what must be equal in the end, from the folder.
        inputs: names in the folder that nothing may change.
        before: arguments of a command that has written to the same place.
        is_exact: the results are equal bit by bit, not to 1e-6.
    """

    make: Callable[[Path], object]
    arguments: str
    again: str = ""
    result: Callable[[Path], Any] = lambda folder: contents(folder)
    inputs: tuple[str, ...] = ("source",)
    before: str = ""
    is_exact: bool = True


def contents(path: Path) -> dict[str, str]:
    """Return what a folder holds: the hash of each file, without what names the process that wrote it or the time."""
    found = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if file.name.endswith(".ready") or file.name == "END.json":
            values = json.loads(file.read_text())
            found[name] = json.dumps({key: value for key, value in values.items() if key not in _OF_THE_WRITER})
        # A lock means nothing beside what its owner has finished.
        elif file.name != "_producer" and not file.name.endswith("_writing"):
            found[name] = "folder" if file.is_dir() else file_digest(file)
    return found


def make_dataset(folder: Path, *, format: str = "binidx") -> None:
    write_packs(folder / "source", PACKS, format=format, pack_size=8)


def make_chunks(folder: Path) -> None:
    lines = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "position_ids": [0, 1, 2], "lengths": [3]} for _ in range(3)
    ]
    (folder / "source").mkdir()
    text = "".join(json.dumps({**line, "pack_length": 3, "num_samples": 1}) + "\n" for line in lines)
    (folder / "source" / "chunk_00000.jsonl").write_text(text)


def chat(number: int) -> list[dict[str, str]]:
    answer = f"{number} is {number} " * 9
    return [{"role": "user", "content": f"what is {number}"}, {"role": "assistant", "content": answer}]


def make_chats(folder: Path) -> None:
    (folder / "source").mkdir()
    lines = [json.dumps({"messages": chat(number)}) for number in range(12)] + ['{"messages": 3}']
    (folder / "source" / "chats.jsonl").write_text("".join(f"{line}\n" for line in lines))


def make_more_chats(folder: Path) -> None:
    make_chats(folder)
    more = "".join(json.dumps({"messages": chat(number)}) + "\n" for number in range(12, 20))
    (folder / "source" / "more.jsonl").write_text(more)


def make_tokens(folder: Path) -> None:
    (folder / "source").mkdir()
    for shard, largest in enumerate((300, 70_000)):  # the second does not fit the uint16 that the first is kept in
        rows = pa.array([[number, largest, 3, number] for number in range(40)], pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": rows}), folder / "source" / f"tokens-{shard}.parquet")


def make_pairs(folder: Path) -> None:
    (folder / "source").mkdir()
    for name in "ab":
        with IndexedWriter(folder / "source" / name) as writer:
            writer.append(np.arange(30), np.array([10, 20]))


def make_prepared(folder: Path) -> None:
    """Prepare chats as a dataset to train on, with its tokenizer."""
    make_chats(folder)
    (folder / "source").rename(folder / "chats")
    config = PrepareConfig(
        source=SourceConfig(kind="files", path=str(folder / "chats"), on_bad="skip"),
        tokenizer=TokenizerConfig(vocab_size=300),
        data=PackingConfig(path=str(folder / "source"), pack_size=128, validation_fraction=0.2, num_workers=0),
    )
    prepare(config, console=Console(quiet=True))


def make_half_run(folder: Path) -> None:
    """Train the first half of the run of `RUN`."""
    make_prepared(folder)
    command = f"-m harness {RUN} trainer.steps=2".replace("{}", str(folder)).split()
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def make_stream(folder: Path) -> None:
    """Write a whole stream of chats, and the tokenizer for it."""
    make_prepared(folder)
    with LiveProducer(folder / "live", rows_per_chunk=3) as producer:
        for number in range(12):
            producer.add({"messages": chat(number)})
        producer.end()


def losses(folder: Path) -> list[Any]:
    """Return losses, norms and data of every step of the run as they were recorded, and the chunks that are marked."""
    run = folder / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens", "packs_consumed")
    more = [run / "digests.jsonl", run / "samples.jsonl", *sorted((run / "batches").iterdir())]
    checkpoint = read_checksums(run / "checkpoints" / "step-00000004") or []
    weights = [file for file in checkpoint if file.path.endswith(".distcp")]
    there = [file_digest(path) for path in more if path.exists() and path.suffix != ".npz"]
    marks = sorted(path.name for path in folder.glob("live/*.completed"))
    trained = [{name: step[name] for name in names} for step in steps]
    return [trained, there, [path.name for path in more], weights, marks]


def figures(folder: Path) -> list[float]:
    """Return the numbers of `losses`, one after another."""
    steps, *_ = losses(folder)
    return [value if value is not None else -1.0 for step in steps for value in step.values()]


def prepared(folder: Path) -> dict[str, str]:
    """Return the hashes of what a preparation wrote, without its times."""
    timed = ("report.json", "report.md", "report.html")
    return {name: digest for name, digest in contents(folder).items() if Path(name).name not in timed}


def commands() -> Iterator[tuple[str, Command]]:
    """Yield the commands that need no torch, by name."""
    for format in FORMATS:
        yield (
            f"convert-{format}",
            Command(make_dataset, f"convert {{}}/source {{}}/out {format} data.packs_per_shard=2"),
        )
    for format in ("parquet", "npy"):
        yield f"convert-{format}-file", Command(make_dataset, f"convert {{}}/source {{}}/out.{format} {format}")
    yield (
        "convert-over",
        Command(make_dataset, "convert {}/source {}/out memmap --overwrite", before="convert {}/source {}/out npy"),
    )
    store, repack = partial(make_dataset, format="virtual"), "repack {}/source {}/out data.pack_size="
    yield "repack", Command(store, f"{repack}16")
    yield "repack-over", Command(store, f"{repack}16 --overwrite", before=f"{repack}8")
    yield "import", Command(make_chunks, "import {}/source {}/out ms_swift parquet")
    for format in FORMATS:
        yield (
            f"prepare-{format}",
            Command(
                make_chats,
                "prepare source.path={}/source data.path={}/out data.pack_size=256 tokenizer.vocab_size=300 "
                "data.validation_fraction=0.2 source.on_bad=skip source.shard_bytes=700 "
                f"data.packed_storage={format} data.num_workers={int(format == 'npy')}",
                result=prepared,
            ),
        )
    tokens = "indexed convert {}/source{} {}/out data.column=input_ids"
    family = "indexed family {}/out name {}/source{} data.column=input_ids split.train=3 split.valid=1 "
    for name, whole in (("convert", tokens), ("family", f"{family}tokenizer.vocab_size=100000")):
        whole, first = whole.replace("source{}", "source"), whole.replace("source{}", "source/tokens-0.parquet")
        yield f"indexed-{name}", Command(make_tokens, whole)
        yield f"indexed-{name}-over", Command(make_tokens, f"{whole} --overwrite", before=first)
    yield "indexed-merge", Command(make_pairs, "indexed merge {}/source/a {}/source/b {}/out")
    parquet, produce = "chunks.format=parquet", "live produce {}/source{} {}/out source.on_bad=skip chunks.rows=2 "
    for kind, options in (("chat", ""), ("chat", parquet), ("packs", ""), ("packs", parquet)):
        make = make_chats if kind == "chat" else make_dataset
        name = f"live-produce-{kind}{'-parquet' if options else ''}"
        yield name, Command(make, f"{produce.replace('source{}', 'source')}chunks.kind={kind} {options}")
    first, more = (produce.replace("source{}", f"source/{name}.jsonl") for name in ("chats", "more"))
    yield "live-append", Command(make_more_chats, f"{more}--append", before=f"{first}--leave-open")


def training() -> Iterator[tuple[str, Command]]:
    """Yield the commands that need torch, by name."""
    whole = f"{RUN} trainer.steps=4"
    yield "train", Command(make_prepared, whole, f"{whole} resume=auto", losses)
    yield "train-resumed", Command(make_half_run, f"{whole} resume=auto", "", losses)
    whole = f"{LIVE_RUN} trainer.steps=4"
    yield "train-live", Command(make_stream, whole, f"{whole} resume=auto", losses)
    yield "export", Command(make_half_run, "export {}/run {}/out", inputs=("source", "run/checkpoints"))
