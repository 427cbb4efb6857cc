"""Preparations of every kind of source give the same dataset, and record where it came from."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loopback_hub import LoopbackHub
from rich.console import Console

from harness.errors import ConfigError
from harness.prep import TokenizerConfig, prepare
from harness.prep.sources.config import SourceConfig


def chat(number):
    turns = [("user", f"question {number}"), ("assistant", f"answer {number} " + "word " * (number % 9))]
    return {"messages": [{"role": role, "content": content} for role, content in turns], "id": number}


CHATS = [chat(number) for number in range(200)]
BAD = [{"messages": [{"role": "user", "content": f"no answer {number}"}], "id": number} for number in range(3)]
ROWS = [*CHATS[:100], *BAD, *CHATS[100:]]
LINES = "".join(json.dumps(one) + "\n" for one in ROWS).encode()


def parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=30)
    return file.getvalue()


def table_of_text(rows):
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerows([["id", "messages"], *([row["id"], json.dumps(row["messages"], indent=1)] for row in rows)])
    return file.getvalue().encode()


FILES = {
    "a.csv": table_of_text(ROWS),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "a.parquet": parquet(ROWS),
    "a.jsonl.gz": gzip.compress(LINES),
    "a.json.bz2": bz2.compress(json.dumps(ROWS).encode()),
    "a.ndjson": LINES.replace(b"\n", b"\r\n\r\n"),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in CHATS))
    return run(folder / "data", str(folder / "a.jsonl"))[0].splits["train"].fingerprint


def run(path, source, **settings):
    console = Console(file=io.StringIO(), width=160)
    given = SourceConfig(path=source, shard_bytes=3000, **settings)
    report = prepare(given, TokenizerConfig(vocab_size=300), path, pack_size=64, num_workers=0, console=console)
    return report, console.file.getvalue()


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_dataset_and_keeps_refused_records_as_lines(tmp_path, expected, name):
    (tmp_path / name).write_bytes(FILES[name])
    report, output = run(tmp_path / "data", str(tmp_path / name), on_bad="skip")
    assert report.splits["train"].fingerprint == expected
    assert (report.records, report.bad) == (203, {"no_assistant_turn": 3})
    assert "use the `messages` schema" in output
    assert "Ignored fields: id" in output
    kept = (tmp_path / "data" / "bad_records_to_repair.jsonl").read_text().splitlines()
    turns = [json.loads(line)["messages"] for line in kept]
    assert [json.loads(one) if name == "a.csv" else one for one in turns] == [one["messages"] for one in BAD]


def test_a_dataset_of_the_hub_is_prepared_and_its_commit_recorded(tmp_path, expected, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    files = {
        "data/train-00000-of-00001.parquet": parquet(CHATS),
        "data/test-00000-of-00001.parquet": parquet(CHATS[:3]),
    }
    server = LoopbackHub({"org/chats": files})
    try:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        report, output = run(tmp_path / "data", "org/chats")
        assert report.splits["train"].fingerprint == expected
        stored = json.loads((tmp_path / "data" / "report.json").read_text())["settings"]["source"]
        assert (stored["dataset"], stored["split"]) == ("org/chats", "train")
        assert stored["revision"] == server.commit("org/chats")
        assert "split train: 1 file" in output
        assert "already prepared" in run(tmp_path / "data", "org/chats")[1]
        old = server.commit("org/chats")
        server.datasets["org/chats"] = {**files, "README.md": b"# New"}
        with pytest.raises(ConfigError, match=f"source.revision was '{old}'"):
            run(tmp_path / "data", "org/chats")
    finally:
        server.close()


def test_rows_that_cannot_be_read_are_kept_as_they_are(tmp_path):
    good = "".join(f"question {number},answer\n" for number in range(40))
    (tmp_path / "a.csv").write_bytes(b"prompt,completion\n" + good.encode() + b'D,E,F\nG,\xff\nH,"I\nI"J\n')
    report, _ = run(tmp_path / "data", str(tmp_path / "a.csv"), on_bad="skip")
    assert report.bad == {"bad_row": 2, "not_utf8": 1}
    listed = [json.loads(line) for line in (tmp_path / "data" / "bad_records.jsonl").read_text().splitlines()]
    assert [one["record"] for one in listed] == ["D,E,F", "G,\\xff", 'H,"I\nI"J']
    assert [list(one) for one in listed] == [["where", "reason", "detail", "record"]] * 3
    kept = (tmp_path / "data" / "bad_records_to_repair.jsonl").read_bytes()
    assert kept.split(b"\n") == [b"D,E,F", b"G,\xff", json.dumps('H,"I\nI"J').encode(), b""]
