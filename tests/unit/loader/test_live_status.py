"""`harness live status` reports the producer, the waiting chunks, their rate, and the readers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from live_streams import some_packs, write_stream

from harness.loader.live import LiveProducer
from harness.loader.live.folder import LiveChunk, LiveFolder
from harness.loader.live.status import live_status
from harness.storage import Marker


def train_somewhere(folder: Path, **status: object) -> None:
    """Write the consumer file that a run leaves in a folder."""
    mark = Marker(folder / "_consumer")
    mark.acquire()
    mark.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **status}).encode())
    mark.release(remove=False)


def test_a_reader_may_wait_for_the_first_chunk(tmp_path):
    train_somewhere(tmp_path)
    status = live_status(tmp_path)
    assert (status.producer, status.chunks, status.rows, status.ended) == ("none", 0, None, False)
    assert status.consumer != "none"


def test_a_folder_without_a_stream_and_an_input_without_rows_are_errors(tmp_path, harness):
    code, _, err = harness("live", "status", tmp_path / "elsewhere")
    assert (code, "the folder does not exist" in err) == (2, True)
    (tmp_path / "notes.txt").write_text("not a chunk")
    code, _, err = harness("live", "status", tmp_path)
    assert (code, "contains no live stream" in err) == (2, True)
    (tmp_path / "none.jsonl").write_text("\n")
    code, _, err = harness("live", "produce", tmp_path / "none.jsonl", tmp_path / "live")
    assert (code, "the input contains no rows" in err) == (2, True)
    assert not live_status(tmp_path / "live").ended


def test_a_producer_at_work_its_backlog_and_its_rate(tmp_path):
    with LiveProducer(tmp_path, kind="packs", rows_per_chunk=2) as producer:
        for pack in some_packs(6):
            producer.add(pack)
        LiveFolder(tmp_path).complete([0])
        for index, record in enumerate(sorted(tmp_path.glob("*.ready"))):
            record.write_text(json.dumps({**json.loads(record.read_text()), "time": 1000.0 + 8 * index}))
        status = live_status(tmp_path)
    assert (status.producer, status.chunks, status.rows, status.waiting, status.completed) == ("alive", 3, 6, 2, 1)
    assert status.tokens == sum(map(len, some_packs(6)))
    assert (status.rows_per_s, status.chunks_per_min) == (4 / 16, 7.5)
    write_stream(tmp_path, some_packs(1), [1])
    assert live_status(tmp_path).producer == "ended"


def test_a_dead_producer_is_reported_with_the_time_it_was_last_seen(tmp_path, harness):
    LiveProducer(tmp_path).close()
    ended = subprocess.Popen(["true"])
    ended.wait()
    status = json.loads(Marker(tmp_path / "_producer").read())
    (tmp_path / "_producer").write_text(json.dumps({**status, "pid": ended.pid}))
    os.utime(tmp_path / "_producer", (time.time() - 300,) * 2)
    _, out, _ = harness("live", "status", tmp_path)
    assert f"gone ({socket.gethostname()}, process {ended.pid}), last seen 5 min ago" in out
    (tmp_path / "_producer").write_text(json.dumps({**status, "host": "another"}))
    os.utime(tmp_path / "_producer", (time.time() - 300,) * 2)
    assert live_status(tmp_path).producer == "silent"


def test_readers_are_shown_with_what_they_wait_for(tmp_path, harness):
    write_stream(tmp_path, some_packs(6), [3, 3], end=False)
    ranks = [
        {"rank": 0, "chunk": 0, "row": 2, "waits_for": None, "waits_s": None},
        {"rank": 1, "chunk": None, "row": None, "waits_for": 3, "waits_s": 12.3},
    ]
    rates = {"packs_per_s": 2.5, "tokens_per_s": 80.0}
    train_somewhere(tmp_path, steps=7, rows=5, read_below=0, read=[1], waiting_for=[3], ranks=ranks, **rates)
    _, out, _ = harness("live", "status", tmp_path)
    assert "chunks to read: 1, completed and not deleted yet: 0" in out
    assert "5 rows read in 7 steps, 2.5 packs/s, 80 tokens/s" in out
    assert "chunk 3 for 12 s" in out
    code, out, _ = harness("live", "status", tmp_path, "--json")
    assert code == 0
    assert json.loads(out)["consumer_status"]["ranks"] == ranks
    train_somewhere(tmp_path, state="ended")
    assert live_status(tmp_path).consumer == "ended"


def test_a_stream_is_produced_and_ended_from_the_command_line(tmp_path, harness):
    source = tmp_path / "in.jsonl"
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    source.write_text(f"{json.dumps(line)}\n" * 5)
    code, out, _ = harness("live", "produce", source, tmp_path / "live", "chunks.rows=2", "--leave-open")
    assert code == 0
    assert out.splitlines()[-1] == f"{tmp_path / 'live'}: 5 rows in 3 chunks"
    code, out, _ = harness("live", "end", tmp_path / "live")
    assert out == f"{tmp_path / 'live'}: ends after 3 chunks\n"
    assert live_status(tmp_path / "live").ended


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_calls_in_texts_are_lifted_on_the_way_into_a_stream(tmp_path, harness, format):
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    turns = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": call}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": turns, "tools": [tool]}) + "\n")
    settings = ("source.tool_calls=hermes", f"chunks.format={format}")
    assert harness("live", "produce", tmp_path / "in.jsonl", tmp_path / "live", *settings)[0] == 0
    made = LiveChunk(tmp_path / "live" / f"chunk_00000.{format}", None).conversation(0)
    assert [one.name for one in made.messages[1].tool_calls] == ["weather"]
    assert not made.messages[1].text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tokenizer.name=any", "tokenizer.train_on=weighted"], "live data does not support token weights"),
        (["--leave-rest"], "fix:   add --append"),  # a rest is left only for another input
        (["chunks.kind=images"], "choose one of: chat, packs"),
    ],
)
def test_settings_of_a_stream_that_no_reader_could_train_are_refused(tmp_path, harness, settings, message):
    code, _, err = harness("live", "produce", tmp_path / "chats.jsonl", tmp_path / "live", *settings)
    assert (code, message in err) == (2, True)


@pytest.mark.parametrize("source", ["chats.jsonl", "-"])
def test_the_folder_before_the_input_is_refused_and_nothing_is_written(tmp_path, harness, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats.jsonl").write_text("{}\n")
    code, _, err = harness("live", "produce", "live", source)
    assert (code, f"harness live produce {source} live" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["chats", "chats.jsonl"]


def test_names_of_an_input_control_no_terminal_that_shows_the_producer(tmp_path, harness):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns, "x\x1b[2J\ny": 1}) + "\n")
    code, printed, _ = harness("live", "produce", tmp_path / "chats.jsonl", tmp_path / "live")
    assert (code, "\x1b" in printed) == (0, False)
    assert "ignored fields: x\u241b[2J\u240ay\n" in printed
