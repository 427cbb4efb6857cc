"""A compressed source is prepared in pieces: a kill loses the unfinished ones, and progress moves inside each."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness.prep import TokenizerConfig, prepare, report, shards
from harness.prep.chat import RecordReader
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.reading import SourceShard, cut_shards
from harness.prep.tokenize.bpe import train_bpe
from tests.samples.warm_python import warm_python

from .test_prepare_shards import content, receipts


def record(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "completion": f"answer {number} " + "word " * (number % 97)}


# Three pieces of a compressed file.
RECORDS = [record(number) for number in range(2500)]
LINES = "".join(json.dumps(one) + "\n" * (1 + number % 2) for number, one in enumerate(RECORDS)).encode()
ROWS = b"prompt,completion\n" + b"".join(b'"%s","\n%s"\n' % tuple(map(str.encode, one.values())) for one in RECORDS)


PACKED = gzip.compress(LINES)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A preparation in one process that nothing disturbed, with its source and its tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    prepared_from(folder, "few.jsonl", LINES[:20_000].rpartition(b"\n")[0], console=Console(quiet=True))
    (folder / "a.jsonl.gz").write_bytes(PACKED)
    source, named = SourceConfig(path=str(folder / "a.jsonl.gz"), shard_bytes=1), str(folder / "d" / "tokenizer")
    settings = {"pack_size": 256, "num_workers": 0, "console": Console(quiet=True)}
    prepare(source, TokenizerConfig(name=named), folder / "whole", **settings)
    return folder


def start(folder: Path, path: Path, *more: str, python: str = sys.executable) -> subprocess.Popen[bytes]:
    settings = (f"source.path={folder / 'a.jsonl.gz'}", f"tokenizer.name={folder / 'd' / 'tokenizer'}")
    command = [python, "-m", "harness", "prepare", *settings, f"data.path={path}", "data.pack_size=256", *more]
    return subprocess.Popen([*command, "source.shard_bytes=1"], stdout=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.submission
def test_a_killed_preparation_by_workers_keeps_its_pieces_and_gives_the_same_bytes(tmp_path, prepared):
    path = tmp_path / "d"
    process = start(prepared, path, "data.num_workers=2")
    while process.poll() is None and not receipts(path):
        time.sleep(0.01)
    assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(workers, timeout=120)[1] == []  # no worker survives
    before = receipts(path)
    process = start(prepared, path, "data.num_workers=0", python=warm_python())
    after: dict[str, int] = {}
    while process.poll() is None:
        after |= receipts(path)
        time.sleep(0.01)
    assert process.returncode == 0
    assert len(after) > len(before) >= 1
    assert {name: after[name] for name in before} == before
    assert content(path) == content(prepared / "whole")


def kill_after_much() -> None:
    """Save progress after every batch, and die when much is saved."""
    save = shards.write_atomically

    def save_and_die(path: Path, data: bytes) -> None:
        save(path, data)
        if path.name == shards.PARTIAL and json.loads(data)["counts"]["records"] > 800:
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


@pytest.mark.parametrize(
    "name",
    ["a.jsonl.gz", *(pytest.param(name, marks=pytest.mark.submission) for name in ("a.csv", "a.arrow", "a.json"))],
)
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
        file.write_bytes({"a.jsonl.gz": PACKED, "a.csv": ROWS, "a.json": json.dumps(bad).encode()}[name])
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
    assert 800 < counted < len(RECORDS)
    # An attempt that dies before it saves anything keeps what the first one saved.
    assert attempt(job("killed"), shard, kill_at_once) == -signal.SIGKILL

    batch, seen = shards._batch, []
    monkeypatch.setattr(shards, "_batch", lambda *given: seen.append(batch(*given)) or seen[-1])
    made = shards.do_shard(job("killed"), 0, shard)
    assert isinstance(made, shards.Receipt)
    assert replace(made, shard=whole.shard) == whole  # with the hash of every file
    assert sum(map(len, seen)) == len(RECORDS) - counted


def test_progress_moves_inside_the_only_shard_and_a_log_has_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_WATCH_S", 0.005)
    monkeypatch.setattr(report, "_LOG_S", 0.0)
    monkeypatch.setattr(shards, "_BATCH_S", 0.02)
    seen: list[tuple[int, int]] = []
    with (tmp_path / "log").open("w") as log:
        watch = lambda stage, *made: seen.append(made) if stage == "tokens" else None  # noqa: E731
        prepared_from(tmp_path, "a.jsonl", LINES, console=Console(file=log), progress=watch)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, len(LINES)), (len(LINES), len(LINES)))
    assert len(set(seen)) > 4
    lines = (tmp_path / "log").read_text().splitlines()
    shown = re.compile(
        r"token\w+ +[\d.]+ s  (reading|tokenizing|training the tokenizer$)[^%]*?([\d.]+%)?(, about [\d a-z]+ left)?"
    )
    moves = [match for line in lines if (match := shown.fullmatch(line))]
    assert len({move[2] for move in moves if move[1] == "tokenizing"}) > 4
    assert "training the tokenizer" in {move[1] for move in moves}
    assert [move[2] for move in moves if move[1] == "tokenizing" and move[3]][-1] not in (None, "100.0%")
    assert lines.index(moves[-1][0]) < next(n for n, line in enumerate(lines) if "tokens of" in line)


def test_the_time_left_is_estimated_from_the_work_of_this_run_alone(tmp_path, monkeypatch):
    """An earlier run finished 60 of 100 and saved 20 more of a shard; since then, each part takes 10 seconds."""
    now = [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(report, "_WATCH_S", 1e6)
    with (
        (tmp_path / "log").open("w") as log,
        report.Stages(Console(file=log)).stage("tokens", "tokenizing", total=100) as stage,
    ):
        stage.watch(lambda: 20.0)
        for second, step, is_earlier in ((1, 60, True), (11, 21, False), (21, 1, False), (31, 2, False)):
            now[0] = float(second)
            stage.advance(step, is_earlier=is_earlier)
    assert (tmp_path / "log").read_text().splitlines() == [
        "tokens        1.0 s  tokenizing, 60.0%",
        "tokens       11.0 s  tokenizing, 81.0%",
        "tokens       21.0 s  tokenizing, 82.0%, about 3 min left",
        "tokens       31.0 s  tokenizing, 84.0%, about 1 min 47 s left",
        "tokens       31.0 s  ",
    ]


def test_progress_moves_inside_a_chunk_of_slow_records(tmp_path, monkeypatch):
    """Every row group of a table is one chunk; its records are tokenized in batches that a slow one makes smaller."""
    monkeypatch.setattr(report, "_WATCH_S", 0.002)
    monkeypatch.setattr(shards, "_BATCH_S", 0.0)
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(RECORDS[:1000]), table)
    seen: set[int] = set()
    watch = lambda stage, done, total: seen.add(done) if stage == "tokens" else None  # noqa: E731
    assert prepared_from(tmp_path, "a.parquet", table.getvalue(), progress=watch).records == 1000
    assert len(seen) > 4


def prepared_from(folder: Path, name: str, content: bytes, **options):
    (folder / name).write_bytes(content)
    settings = {"pack_size": 256, "num_workers": 0, **options}
    return prepare(folder / name, TokenizerConfig(vocab_size=300), folder / "d", **settings)
