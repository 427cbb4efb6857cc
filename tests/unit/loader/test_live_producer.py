"""Chunks appear whole, no faster than they are read; a producer that was killed leaves no gap and repeats nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from live_streams import long_chats, some_chats, some_packs, wait_until, write_stream

from harness.errors import ConfigError, FormatError, LoaderError, PrepError
from harness.formats import open_dataset
from harness.formats.layouts.jsonl import line_of_pack
from harness.loader.live import LiveProducer
from harness.loader.live.folder import LiveChunk, LiveFolder, chunk_name
from harness.loader.live.produce import Item, Packing, log_unused_fields, produce_chunks, read_conversations, read_packs
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.chat import RecordReader, parse_record
from harness.prep.tokenize.bpe import train_bpe
from harness.storage import Marker, folders


def items(count: int) -> list[Item]:
    return [Item(json.dumps(chat).encode(), f"chat {number}") for number, chat in enumerate(some_chats(count))]


def rows_of(folder: Path) -> list[dict[str, object]]:
    paths = sorted(folder.glob("chunk_*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_records_describe_their_chunks_and_the_end_has_the_totals(tmp_path: Path) -> None:
    packs = some_packs(7)
    write_stream(tmp_path, packs, [3, 4])
    record, end = LiveFolder(tmp_path).record(1), LiveFolder(tmp_path).end()
    assert record is not None
    assert end is not None
    assert (record.kind, record.rows, record.total_rows) == ("packs", 4, 7)
    assert record.tokens == sum(map(len, packs[3:]))
    assert (end.chunks, end.rows, end.tokens) == (2, 7, sum(map(len, packs)))
    assert (end.sequences, end.chain) == (sum(pack.num_sequences for pack in packs), record.chain)
    # A folder of packs that has ended is a dataset like any other.
    assert open_dataset(tmp_path).read(list(range(7))) == packs


def test_parquet_chunks_hold_the_same_packs(tmp_path: Path) -> None:
    packs = some_packs(5)
    for suffix in (".jsonl", ".parquet"):
        write_stream(tmp_path / suffix, packs, [5], suffix=suffix)
        chunk = LiveChunk(tmp_path / suffix / chunk_name(0, suffix), None)
        assert (chunk.kind, [chunk.pack(row) for row in range(5)]) == ("packs", packs)


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "unit": None}}}
CHATS_OF_SCHEMAS = [
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
            {"role": "tool", "content": ""},
            {"role": "assistant", "content": ["Sun", "ny"], "weight": 0},
        ],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "chat_template_kwargs": {"enable_thinking": True},
        "id": 7,
    },
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be short."},
    {"instruction": "Add", "input": "1 + 1", "output": "2"},
    {"text": "Plain text to continue on."},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_chunks_keep_everything_of_records_of_every_schema(tmp_path: Path, suffix: str) -> None:
    write_stream(tmp_path, CHATS_OF_SCHEMAS, [4], suffix=suffix)
    chunk = LiveChunk(tmp_path / chunk_name(0, suffix), None)
    assert [replace(chunk.conversation(row), where="") for row in range(4)] == [
        parse_record(record, "") for record in CHATS_OF_SCHEMAS
    ]


def test_a_parquet_chunk_of_another_program_may_have_any_schema(tmp_path: Path) -> None:
    turns = [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]]
    pq.write_table(pa.table({"id": [1], "conversations": turns}), tmp_path / chunk_name(0, ".parquet"))
    chunk = LiveChunk(tmp_path / chunk_name(0, ".parquet"), None)
    assert (chunk.kind, [message.text for message in chunk.conversation(0).messages]) == ("chat", ["Hi", "Hello"])
    pq.write_table(pa.table({"id": [1]}), tmp_path / chunk_name(1, ".parquet"))
    with pytest.raises(FormatError, match="neither conversations of a known schema"):
        LiveChunk(tmp_path / chunk_name(1, ".parquet"), None)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_records_with_names_of_their_own_are_stored_with_the_usual_ones(tmp_path: Path, suffix: str) -> None:
    reader = RecordReader("alpaca", {"instruction": "question", "output": "answer"}, ["functions"])
    record = {"question": "Hi", "answer": "Hello", "functions": [{"name": "f"}], "system": "Be short."}
    given = [
        Item(json.dumps(record).encode(), "line 1", reader=reader),
        Item(b'{"question": 1}', "line 2", reader=reader),
    ]
    with LiveProducer(tmp_path, suffix=suffix) as producer:
        assert produce_chunks(producer, given, on_bad="skip") == {"not_text": 1}
        producer.end()
    chunk = LiveChunk(tmp_path / chunk_name(0, suffix), None)
    assert replace(chunk.conversation(0), where="line 1") == reader.parse(record, "line 1")


@pytest.mark.parametrize("is_packed", [False, True])
def test_media_that_are_left_out_are_counted_and_logged(tmp_path: Path, is_packed: bool) -> None:
    packing = None
    if is_packed:
        train_bpe(["What is this? A cat. alpha beta"] * 20, tmp_path / "tokenizer", vocab_size=300)
        packing = Packing(ChatTokenizer(TokenizerConfig(name=str(tmp_path / "tokenizer"))), pack_size=512)
    turns = [{"role": "user", "content": "<image><image>What is this?"}, {"role": "assistant", "content": "A cat."}]
    records = [{"messages": turns, "images": ["a.png", "b.png"]}, {"messages": turns[:0]}, *some_chats(2)]
    reader = RecordReader(drop_media=True)
    given = [Item(json.dumps(one).encode(), f"line {n}", reader=reader) for n, one in enumerate([*records, records[0]])]
    log: list[str] = []
    with LiveProducer(tmp_path / "live", kind="packs" if is_packed else "chat") as producer:
        produce_chunks(producer, given, packing=packing, on_bad="skip", log=log.append)
        producer.end()
    assert log == ["left out: 1 no_messages", "media omitted from 2 conversations, with 4 placeholders"]


def test_media_that_packs_cannot_contain_are_refused_with_the_setting_to_omit(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image>What is this?"}, {"role": "assistant", "content": "A cat."}]
    given = [Item(json.dumps({"messages": turns, "images": ["a.png"]}).encode(), "line 1")]
    with LiveProducer(tmp_path / "live", kind="chat") as producer, pytest.raises(PrepError) as error:
        produce_chunks(producer, given)
    assert "to train on media, omit tokenizer.name" in error.value.fix


def test_rows_of_parquet_become_records_without_fields_that_only_other_rows_have(tmp_path: Path) -> None:
    calls = [[{"name": "f", "arguments": {"a": 1}}], [{"name": "g", "arguments": {"b": 2}}]]
    turns = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": call}] for call in calls]
    pq.write_table(pa.table({"messages": turns, "when": [datetime(2024, 1, 1)] * 2}), tmp_path / "in.parquet")
    assert [json.loads(item.line) for item in read_conversations(str(tmp_path / "in.parquet"))] == [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": call}]} for call in calls
    ]


class Killed(Exception):  # noqa: N818 - simulates SIGKILL
    pass


def killed(folder: Path, given: list[Item], **settings: bool) -> None:
    """Add the items and end as a killed producer does: items in no whole chunk are lost."""

    def until_killed() -> Iterator[Item]:
        yield from given
        raise Killed

    producer = LiveProducer(folder, rows_per_chunk=3, max_waiting=100)
    with pytest.raises(Killed):
        produce_chunks(producer, until_killed(), **settings)
    producer.close()


def test_a_chunk_without_its_record_is_written_again_and_one_of_another_producer_is_not(tmp_path: Path) -> None:
    with LiveProducer(tmp_path, rows_per_chunk=2) as producer:
        produce_chunks(producer, items(4))
    # Killed between a chunk and its record: the lock file shows it.
    (tmp_path / chunk_name(2)).write_text("half a chunk")
    status = json.loads(Marker(tmp_path / "_producer").read())
    (tmp_path / "_producer").write_text(json.dumps({**status, "writing": 2}))
    with LiveProducer(tmp_path, rows_per_chunk=2) as producer:
        produce_chunks(producer, items(6))
    assert rows_of(tmp_path) == some_chats(6)
    (tmp_path / chunk_name(3)).write_text("of somebody else\n")
    with LiveProducer(tmp_path, rows_per_chunk=2) as producer:
        produce_chunks(producer, items(8))
        producer.end()
    assert (tmp_path / chunk_name(3)).read_text() == "of somebody else\n"
    assert (tmp_path / chunk_name(4)).exists()


def test_two_producers_never_work_on_one_folder(tmp_path: Path) -> None:
    with LiveProducer(tmp_path) as first:
        first.add(some_chats(1)[0])
        with pytest.raises(FormatError, match="another process is writing here"):
            LiveProducer(tmp_path)
    assert rows_of(tmp_path) == some_chats(1)


def test_a_chunk_that_another_program_writes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    producer = LiveProducer(tmp_path)
    (tmp_path / chunk_name(0)).write_text("of somebody else\n")
    producer.add(some_chats(1)[0])
    with pytest.raises(FormatError, match=r"chunk_00000.jsonl already exists"):
        producer.flush()
    producer.close()
    assert (tmp_path / chunk_name(0)).read_text() == "of somebody else\n"


def test_another_input_is_refused_and_new_rows_can_be_appended(tmp_path: Path) -> None:
    with LiveProducer(tmp_path, rows_per_chunk=2) as producer:
        produce_chunks(producer, items(4))
    changed = [Item(b'{"messages": []}', "changed"), *items(5)[1:]]
    with LiveProducer(tmp_path) as producer, pytest.raises(ConfigError, match="differs from the first 4 items"):
        produce_chunks(producer, changed)
    with LiveProducer(tmp_path) as producer, pytest.raises(ConfigError, match="has 3 items, but the folder"):
        produce_chunks(producer, items(3))
    with LiveProducer(tmp_path) as producer:
        produce_chunks(producer, items(2), append=True)
    with LiveProducer(tmp_path) as producer, pytest.raises(ConfigError, match="with --append"):
        produce_chunks(producer, items(8))
    assert rows_of(tmp_path) == [*some_chats(4), *some_chats(2)]


@pytest.mark.parametrize("killed_at", [0, 1, 3, 5, 9, 10])
def test_an_input_that_is_appended_is_added_once_whenever_its_producer_is_killed(
    tmp_path: Path, killed_at: int
) -> None:
    first, second = items(17)[:7], items(17)[7:]
    with LiveProducer(tmp_path, rows_per_chunk=3, max_waiting=100) as producer:
        produce_chunks(producer, first)
    killed(tmp_path, second[:killed_at], append=True)
    killed(tmp_path, second[: killed_at + 1], append=True)
    with LiveProducer(tmp_path, rows_per_chunk=3, max_waiting=100) as producer:
        produce_chunks(producer, second, append=True)
    assert rows_of(tmp_path) == some_chats(17)
    # A third one, the same as the second: the second was added to its end.
    with LiveProducer(tmp_path, rows_per_chunk=3, max_waiting=100) as producer:
        produce_chunks(producer, second, append=True)
        producer.end()
    assert rows_of(tmp_path) == [*some_chats(17), *some_chats(17)[7:]]


def test_an_appended_input_whose_stream_did_not_end_is_not_added_again(tmp_path: Path) -> None:
    with LiveProducer(tmp_path) as producer:
        produce_chunks(producer, items(3))
    for ends in (False, True):  # killed before END.json has its name, then not
        with LiveProducer(tmp_path) as producer:
            produce_chunks(producer, items(9)[3:], append=True, ends=True)
            if ends:
                producer.end()
        assert rows_of(tmp_path) == some_chats(9)


def test_after_an_interrupted_input_another_is_appended_only_on_request(tmp_path: Path) -> None:
    killed(tmp_path, items(5))
    other = items(9)[5:]
    with LiveProducer(tmp_path) as producer, pytest.raises(ConfigError, match="the first 3 items") as caught:
        produce_chunks(producer, other, append=True)
    assert "--leave-rest" in caught.value.fix
    killed(tmp_path, items(5), append=True)  # the same stream continues
    with LiveProducer(tmp_path) as producer:
        produce_chunks(producer, other, append=True, leave_rest=True)
    assert rows_of(tmp_path) == [*some_chats(3), *some_chats(9)[5:]]


def test_an_input_with_more_or_other_rows_than_a_stream_that_has_ended_is_refused(tmp_path: Path) -> None:
    with LiveProducer(tmp_path) as producer:
        produce_chunks(producer, items(4))
        producer.end()
    with LiveProducer(tmp_path) as producer:
        produce_chunks(producer, items(4))
    for given, error, match in (
        (items(5), LoaderError, "the stream has ended"),
        (items(3), ConfigError, "has 3 items, but the folder"),
        ([Item(b'{"messages": []}', "changed"), *items(4)[1:]], ConfigError, "differs from the first 4 items"),
    ):
        with LiveProducer(tmp_path) as producer, pytest.raises(error, match=match) as caught:
            produce_chunks(producer, given)
        assert "use a new folder" in caught.value.fix
    with LiveProducer(tmp_path) as producer, pytest.raises(LoaderError, match="no rows can be added"):
        produce_chunks(producer, items(4), append=True)
    assert rows_of(tmp_path) == some_chats(4)


@pytest.mark.parametrize(
    ("over_long", "killed_after"), [("drop", 1), ("drop", 5), *(("split", n) for n in (1, 2, 3, 8))]
)
def test_a_killed_packing_producer_adds_all_sequences_of_a_conversation_once(
    tmp_path: Path, over_long: str, killed_after: int
) -> None:
    train_bpe(["question alpha beta gamma delta 0123456789 "] * 20, tmp_path / "tokenizer", vocab_size=300)
    tokenizer = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "tokenizer")))
    packing = Packing(tokenizer, pack_size=64, over_long=over_long, open_packs=3)
    chats = long_chats(24) if over_long == "split" else some_chats(24)
    given = [Item(json.dumps(chat).encode(), f"chat {number}") for number, chat in enumerate(chats)]
    settings = {"kind": "packs", "rows_per_chunk": 1, "max_waiting": 1000}

    def sequences(folder: Path) -> list[bytes]:
        with closing(open_dataset(folder)) as reader:
            return sorted(one.input_ids.tobytes() for pack in reader for one in pack.sequences())

    with LiveProducer(tmp_path / "whole", **settings) as producer:
        produce_chunks(producer, given, packing=packing)
        producer.end()
    producer = LiveProducer(tmp_path / "killed", **settings)
    add = producer.add

    def add_some(row: object, position: object) -> None:
        add(row, position)
        if producer.num_chunks == killed_after:
            raise Killed

    producer.add = add_some
    with pytest.raises(Killed):
        produce_chunks(producer, given, packing=packing)
    producer.close()
    with LiveProducer(tmp_path / "killed", **settings) as producer:
        assert producer.position["open"]
        produce_chunks(producer, given, packing=packing)
        producer.end()
    assert sequences(tmp_path / "killed") == sequences(tmp_path / "whole")
    ends = [LiveFolder(tmp_path / name).end() for name in ("whole", "killed")]
    # Packs of a conversation that was cut in half by the kill may be others.
    assert over_long == "split" or ends[0].chain == ends[1].chain
    assert (ends[1].sequences > 24) is (over_long == "split")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_a_chunk_with_a_record_survives_a_later_error(tmp_path: Path, monkeypatch, error) -> None:
    producer = LiveProducer(tmp_path, rows_per_chunk=2)
    done = folders.sync_path

    def fail(folder: Path) -> None:
        done(folder)
        if (tmp_path / "chunk_00001.jsonl.ready").exists():
            raise error

    monkeypatch.setattr(folders, "sync_path", fail)
    with pytest.raises((KeyboardInterrupt, FormatError)):
        produce_chunks(producer, items(6))
    producer.close()
    monkeypatch.undo()
    with LiveProducer(tmp_path, rows_per_chunk=2) as producer:
        assert producer.num_rows == 4
        produce_chunks(producer, items(6))
        producer.end()
    folder = LiveFolder(tmp_path)
    assert sorted(folder.look().chunks) == sorted(folder.look().ready) == [0, 1, 2]
    assert folder.end().rows == 6


def test_it_pauses_while_too_many_chunks_wait_and_deletes_completed_ones(tmp_path: Path) -> None:
    log: queue.SimpleQueue[str] = queue.SimpleQueue()
    folder = LiveFolder(tmp_path)
    with LiveProducer(tmp_path, rows_per_chunk=1, max_waiting=3, keep=1, log=log.put) as producer:
        adding = threading.Thread(target=lambda: produce_chunks(producer, items(6)))
        adding.start()
        assert log.get(timeout=60) == "paused until a run reads: 3 chunks are unread (chunks.max_waiting)"
        assert sorted(folder.look().ready) == [0, 1, 2]
        folder.complete([0, 1])  # two are read: two more come, and of the read ones the newest stays
        wait_until(lambda: sorted(folder.look().chunks) == [1, 2, 3, 4])
        # A rank that waits for a chunk far ahead gets it, whatever others have left to read.
        (tmp_path / "_consumer").write_text(json.dumps({"waiting_for": [5], "read_below": 1, "read": []}))
        adding.join(300)
        assert not adding.is_alive()
    assert sorted(folder.look().ready) == [1, 2, 3, 4, 5]


def test_a_slow_input_reaches_the_ranks_after_a_while(tmp_path: Path) -> None:
    with LiveProducer(tmp_path, rows_per_chunk=1000, flush_s=0.1) as producer:
        producer.add(some_chats(1)[0])
        wait_until(lambda: sorted(LiveFolder(tmp_path).look().ready) == [0])


def test_rows_that_cannot_be_used_are_refused_by_name_or_left_out(tmp_path: Path) -> None:
    mixed = [*items(2), Item(b'{"messages": [{"role": "robot", "content": "x"}]}', "in.jsonl, line 3"), *items(3)[2:]]
    with LiveProducer(tmp_path / "a") as producer, pytest.raises(PrepError, match=r"unknown_role") as caught:
        produce_chunks(producer, mixed)
    assert caught.value.where == "in.jsonl, line 3"
    with LiveProducer(tmp_path / "b") as producer:
        assert produce_chunks(producer, mixed, on_bad="skip") == {"unknown_role": 1}
    assert rows_of(tmp_path / "b") == some_chats(3)
    with LiveProducer(tmp_path / "c", kind="packs") as producer, pytest.raises(FormatError, match="expected a Pack"):
        producer.add({"messages": []})
    with LiveProducer(tmp_path / "d") as producer, pytest.raises(FormatError, match="tokens instead of chats"):
        producer.add({"input_ids": []})


def test_input_comes_from_files_datasets_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"".join(item.line + b"\n" for item in items(3))
    (tmp_path / "in.jsonl").write_bytes(lines + b"\n")
    assert [json.loads(item.line) for item in read_conversations(str(tmp_path / "in.jsonl"))] == some_chats(3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert [item.where for item in islice(read_conversations("-"), 2)] == [
        "standard input, line 1",
        "standard input, line 2",
    ]
    packs = some_packs(3)
    write_stream(tmp_path / "packs", packs, [3])
    assert [item.pack for item in read_packs(str(tmp_path / "packs"))] == packs
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line_of_pack(packs[0]) + b"{}\n")))
    read = read_packs("-")
    assert next(read).pack == packs[0]
    with pytest.raises(FormatError, match="input_ids") as caught:
        next(read)
    assert caught.value.where == "standard input, line 2"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_fields_that_are_not_read_are_logged_once(tmp_path: Path, suffix: str) -> None:
    records = [{"messages": chat["messages"], "id": 1, "score": 2.0} for chat in some_chats(3)]
    source, lines = tmp_path / f"in.{suffix}", []
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(records), source)
    else:
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
    items = list(log_unused_fields(read_conversations(str(source)), str(source), lines.append))
    assert (len(items), lines) == (3, ["ignored fields: id, score"])


def test_a_producer_shows_that_it_is_alive_while_it_waits_for_input(tmp_path: Path) -> None:
    with LiveProducer(tmp_path):
        os.utime(tmp_path / "_producer", (0, 0))
        wait_until(lambda: (tmp_path / "_producer").stat().st_mtime > 0)
