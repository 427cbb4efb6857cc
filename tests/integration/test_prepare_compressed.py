"""A compressed source is prepared in pieces: a kill loses the unfinished ones, and progress moves inside each."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness.errors import PrepError
from harness.prep import PrepareConfig, TokenizerConfig, prepare, report, shards
from harness.prep.chat import RecordReader
from harness.prep.packing import PackingConfig
from harness.prep.sources import reading
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.reading import SourceShard, cut_shards, read_chunks, read_shard
from harness.prep.tokenize.bpe import train_bpe


def record(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "completion": f"answer {number} " + "word " * (number % 97)}


RECORDS = [record(number) for number in range(9000)]
LINES = "".join(json.dumps(one) + "\n" * (1 + number % 2) for number, one in enumerate(RECORDS)).encode()
ROWS = b"prompt,completion\n" + b"".join(b'"%s","\n%s"\n' % tuple(map(str.encode, one.values())) for one in RECORDS)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data).to_pybytes()


FILES = {
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": zstd(LINES),
    "a.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
    "a.csv.gz": gzip.compress(ROWS),
}


def parsed(shards):
    return [one for shard in shards for chunk in read_shard(shard) for one in chunk.parse()]


@pytest.mark.parametrize("name", FILES)
def test_pieces_of_a_compressed_file_hold_every_record_once_with_its_number(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(FILES[name])
    whole = [one for chunk in read_chunks([file]) for one in chunk.parse()]
    assert [one.messages[0].content for one in whole] == [one["prompt"] for one in RECORDS]
    pieces = list(cut_shards([file], shard_bytes=400_000))
    assert len(pieces) > 4
    assert parsed(pieces) == whole
    assert sum(piece.num_bytes for piece in pieces) == len(FILES[name])
    # Each by itself, and a later one before an earlier one.
    reading._packed_file.cache_clear()
    assert parsed([pieces[2]]) + parsed([pieces[1]]) == parsed([pieces[2], pieces[1]])
    for limit in (1, 2500, 8999):
        assert parsed(cut_shards([file], shard_bytes=400_000, limit=limit)) == whole[:limit]


def test_a_truncated_file_is_refused_after_its_last_record(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(FILES["a.jsonl.gz"][:-5000])
    pieces = list(cut_shards([file], shard_bytes=400_000))
    assert len(parsed(pieces[:-1])) > 2000
    with pytest.raises(PrepError, match="cannot be read") as caught:
        parsed(pieces[-1:])
    assert ", after line " in caught.value.where


def content(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("report."))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def receipts(path: Path) -> dict[str, int]:
    """Times of the receipts that exist now; the preparation deletes them with the folder once the packs are written."""
    found: dict[str, int] = {}
    for file in path.glob(".shards/?????/receipt.json"):
        with suppress(FileNotFoundError):
            found[file.parent.name] = file.stat().st_mtime_ns
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A preparation that nothing disturbed, with its source and its tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "few.jsonl").write_bytes(LINES[:20_000].rpartition(b"\n")[0])
    few = SourceConfig(path=str(folder / "few.jsonl"))
    data = PackingConfig(path=str(folder / "few"), pack_size=256, num_workers=0)
    prepare(PrepareConfig(few, TokenizerConfig(vocab_size=300), data), console=Console(quiet=True))
    (folder / "a.jsonl.gz").write_bytes(FILES["a.jsonl.gz"])
    assert start(folder, folder / "whole").wait() == 0
    return folder


def start(folder: Path, path: Path, *more: str) -> subprocess.Popen[bytes]:
    settings = (f"source.path={folder / 'a.jsonl.gz'}", f"tokenizer.name={folder / 'few' / 'tokenizer'}")
    command = [sys.executable, "-m", "harness", "prepare", *settings, f"data.path={path}", "data.pack_size=256", *more]
    return subprocess.Popen([*command, "source.shard_bytes=1"], stdout=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_killed_preparation_of_one_compressed_file_keeps_its_pieces_and_gives_the_same_bytes(
    tmp_path, prepared, num_workers
):
    path, workers = tmp_path / "d", f"data.num_workers={num_workers}"
    process = start(prepared, path, workers)
    while process.poll() is None and len(receipts(path)) < 3:
        time.sleep(0.01)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = receipts(path)
    process = start(prepared, path, workers)
    after: dict[str, int] = {}
    while process.poll() is None:
        after |= receipts(path)
        time.sleep(0.01)
    assert process.returncode == 0
    assert len(after) > len(before) >= 3
    assert {name: after[name] for name in before} == before
    assert content(path) == content(prepared / "whole")


def kill_after_much() -> None:
    """Save progress after every batch, and die when much is saved."""
    save = shards.write_atomically

    def save_and_die(path: Path, data: bytes) -> None:
        save(path, data)
        if path.name == shards.PARTIAL and json.loads(data)["counts"]["records"] > 2000:
            os.kill(os.getpid(), signal.SIGKILL)

    shards._SAVE_S = 0.0
    shards.write_atomically = save_and_die


def kill_at_once() -> None:
    shards._batch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def attempt(job: shards.ShardJob, shard: SourceShard, prepare_to_die: Callable[[], None]) -> int:
    """Make a shard in a process of its own, which kills itself; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            prepare_to_die()
            shards.do_shard(job, 0, shard)
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "a.arrow", "a.json"])
def test_a_kill_inside_a_shard_loses_no_record_that_was_saved_and_gives_the_same_bytes(tmp_path, monkeypatch, name):
    """The file is one shard, and progress is saved after every batch: no clock decides what is lost."""
    file, tokenizer = tmp_path / name, tmp_path / "tokenizer"
    train_bpe([one["completion"] for one in RECORDS[:100]], tokenizer, vocab_size=300)
    bad = [one if number % 50 else {"prompt": "alone"} for number, one in enumerate(RECORDS)]
    if name == "a.arrow":
        table = pa.Table.from_pylist(RECORDS)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table, max_chunksize=700)
    else:
        file.write_bytes({**FILES, "a.csv": ROWS, "a.json": json.dumps(bad).encode()}[name])
    (shard,) = cut_shards([file], shard_bytes=1 << 40, reader=RecordReader("prompt_completion"))

    def job(folder: str) -> shards.ShardJob:
        config = TokenizerConfig(name=str(tokenizer))
        (tmp_path / folder).mkdir(exist_ok=True)
        return shards.ShardJob(str(tmp_path / folder), config, "", "", 256, "drop", "skip")

    whole = shards.do_shard(job("whole"), 0, shard)
    assert isinstance(whole, shards.Receipt)
    assert attempt(job("killed"), shard, kill_after_much) == -signal.SIGKILL
    (saved,) = (tmp_path / "killed").glob(f"*/{shards.PARTIAL}")
    counted = json.loads(saved.read_bytes())["counts"]["records"]
    assert 2000 < counted < len(RECORDS)
    # An attempt that dies before it saves anything keeps what the first one saved.
    assert attempt(job("killed"), shard, kill_at_once) == -signal.SIGKILL

    batch, seen = shards._batch, []
    monkeypatch.setattr(shards, "_batch", lambda *given: seen.append(batch(*given)) or seen[-1])
    made = shards.do_shard(job("killed"), 0, shard)
    assert isinstance(made, shards.Receipt)
    assert replace(made, shard=whole.shard) == whole  # with the hash of every file
    assert sum(map(len, seen)) == len(RECORDS) - counted


def test_progress_moves_inside_the_only_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_WATCH_S", 0.005)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    seen: list[int] = []

    def see(stage: str, done: int, total: int) -> None:
        if stage == "tokens":
            assert total == len(LINES)
            seen.append(done)

    prepare(
        PrepareConfig(
            source=SourceConfig(path=str(tmp_path / "a.jsonl")),
            tokenizer=TokenizerConfig(vocab_size=300),
            data=PackingConfig(path=str(tmp_path / "d"), pack_size=256, num_workers=0),
        ),
        console=Console(quiet=True),
        progress=see,
    )
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == len(LINES)
    assert len(set(seen)) > 4


def test_progress_moves_inside_a_chunk_of_slow_records(tmp_path, monkeypatch):
    """Every row group of a table is one chunk; its records are tokenized in batches that a slow one makes smaller."""
    monkeypatch.setattr(report, "_WATCH_S", 0.002)
    monkeypatch.setattr(shards, "_BATCH_S", 0.0)
    pq.write_table(pa.Table.from_pylist(RECORDS[:1000]), tmp_path / "a.parquet")
    seen: set[int] = set()
    config = PrepareConfig(
        source=SourceConfig(path=str(tmp_path / "a.parquet")),
        tokenizer=TokenizerConfig(vocab_size=300),
        data=PackingConfig(path=str(tmp_path / "d"), pack_size=256, num_workers=0),
    )
    made = prepare(config, progress=lambda stage, done, total: seen.add(done) if stage == "tokens" else None)
    assert made.records == 1000
    assert len(seen) > 4


def test_a_log_has_the_progress_and_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_WATCH_S", 0.005)
    monkeypatch.setattr(report, "_LOG_S", 0.0)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with (tmp_path / "log").open("w") as log:
        config = PrepareConfig(
            source=SourceConfig(path=str(tmp_path / "a.jsonl")),
            tokenizer=TokenizerConfig(vocab_size=300),
            data=PackingConfig(path=str(tmp_path / "d"), pack_size=256, num_workers=0),
        )
        prepare(config, console=Console(file=log))
    lines = (tmp_path / "log").read_text().splitlines()
    moves = [line for line in lines if re.fullmatch(r"tokens +[\d.]+ s  [\d.]+%(, about [\d a-z]+ left)?", line)]
    assert len({line.partition("%")[0].rpartition(" ")[2] for line in moves}) > 4
    assert moves[-1].endswith(" left")
    assert lines.index(moves[-1]) < next(n for n, line in enumerate(lines) if "tokens of" in line)
