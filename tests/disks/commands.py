"""The commands that write, each with its input and the result that it must have in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
        is_exact: the results are equal bit by bit, not to 1e-6.
    """

    make: Callable[[Path], object]
    arguments: str
    again: str = ""
    result: Callable[[Path], Any] = lambda folder: contents(folder / "out")
    inputs: tuple[str, ...] = ("source",)
    is_exact: bool = True


def contents(path: Path) -> dict[str, str]:
    """Return the hash of every file of a folder, or of one file and those that begin with its name."""
    files = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.name}*")
    # The lock of a writer, which means nothing beside what it has finished.
    files = [file for file in sorted(files) if file.is_file() and not file.name.endswith("_writing")]
    return {str(file.relative_to(path.parent)): file_digest(file) for file in files}


def make_dataset(folder: Path, *, name: str = "source", format: str = "binidx") -> None:
    write_packs(folder / name, PACKS, format=format, pack_size=8)


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


def make_tokens(folder: Path) -> None:
    (folder / "source").mkdir()
    rows = [[number, 70_000, 3, number] for number in range(40)]
    pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), folder / "source" / "tokens.parquet")


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


def stream(folder: Path) -> list[Any]:
    """Return the contents of a stream's chunks, and the chain of their hashes."""
    chunks = [file_digest(path) for path in sorted((folder / "out").glob("chunk_*")) if path.suffix != ".ready"]
    return [chunks, json.loads((folder / "out" / "END.json").read_text())["chain"]]


def losses(folder: Path) -> list[Any]:
    """Return losses, norms and data of every step of the run, as they were recorded."""
    run = folder / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens", "packs_consumed")
    more = [run / "digests.jsonl", run / "samples.jsonl", *sorted((run / "batches").iterdir())]
    checkpoint = read_checksums(run / "checkpoints" / "step-00000004") or []
    weights = [file for file in checkpoint if file.path.endswith(".distcp")]
    there = [file_digest(path) for path in more if path.exists() and path.suffix != ".npz"]
    return [[{name: step[name] for name in names} for step in steps], there, [path.name for path in more], weights]


def figures(folder: Path) -> list[float]:
    """Return the numbers of `losses`, one after another."""
    steps, *_ = losses(folder)
    return [value if value is not None else -1.0 for step in steps for value in step.values()]


def prepared(folder: Path) -> dict[str, str]:
    """Return the hashes of what a preparation wrote, without its times."""
    timed = ("report.json", "report.md", "report.html")
    return {name: digest for name, digest in contents(folder / "out").items() if Path(name).name not in timed}


def commands() -> Iterator[tuple[str, Command]]:
    """Yield the commands that need no torch, by name."""
    for format in FORMATS:
        arguments = f"convert {{}}/source {{}}/out {format} data.packs_per_shard=2"
        yield f"convert-{format}", Command(make_dataset, arguments)
    yield (
        "convert-file",
        Command(
            make_dataset,
            "convert {}/source {}/out.parquet parquet",
            result=lambda folder: contents(folder / "out.parquet"),
        ),
    )
    yield (
        "repack",
        Command(lambda folder: make_dataset(folder, format="virtual"), "repack {}/source {}/out data.pack_size=16"),
    )
    yield "import", Command(make_chunks, "import {}/source {}/out ms_swift parquet")
    for format in FORMATS:
        yield (
            f"prepare-{format}",
            Command(
                make_chats,
                "prepare source.path={}/source data.path={}/out data.pack_size=256 tokenizer.vocab_size=300 "
                "data.validation_fraction=0.2 source.on_bad=skip "
                f"data.packed_storage={format} data.num_workers={int(format == 'npy')}",
                result=prepared,
            ),
        )
    yield "indexed-convert", Command(make_tokens, "indexed convert {}/source {}/out data.column=input_ids")
    yield (
        "indexed-family",
        Command(
            make_tokens,
            "indexed family {}/out name {}/source data.column=input_ids split.train=3 split.valid=1 "
            "tokenizer.vocab_size=100000",
        ),
    )
    yield "indexed-merge", Command(make_pairs, "indexed merge {}/source/a {}/source/b {}/out")
    parquet = "chunks.format=parquet"
    for kind, options in (("chat", ""), ("chat", parquet), ("packs", ""), ("packs", parquet)):
        make = make_chats if kind == "chat" else make_dataset
        produced = f"live produce {{}}/source {{}}/out chunks.kind={kind} source.on_bad=skip chunks.rows=2 {options}"
        yield f"live-produce-{kind}{'-parquet' if options else ''}", Command(make, produced, result=stream)


def training() -> Iterator[tuple[str, Command]]:
    """Yield the commands that need torch, by name."""
    whole = f"{RUN} trainer.steps=4"
    yield "train", Command(make_prepared, whole, f"{whole} resume=auto", losses)
    yield "train-resumed", Command(make_half_run, f"{whole} resume=auto", "", losses)
    whole = f"{LIVE_RUN} trainer.steps=4"
    yield "train-live", Command(make_stream, whole, f"{whole} resume=auto", losses)
    yield "export", Command(make_half_run, "export {}/run {}/out", inputs=("source", "run/checkpoints"))
