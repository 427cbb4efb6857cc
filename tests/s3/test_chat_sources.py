"""Chats in a real S3 server: found by file, folder and glob, cut into exact shards, and refused if they change."""

from __future__ import annotations

import bz2
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness.errors import FormatError, HarnessError, PrepError
from harness.prep import PrepareConfig, TokenizerConfig, prepare, shards
from harness.prep.chat import BadRecord, Conversation, RecordReader
from harness.prep.chat.records import MediaPart
from harness.prep.media import MediaLimits
from harness.prep.packing import PackingConfig
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import find_files, find_schema
from harness.prep.sources.reading import cut_shards, read_chunks, read_shard
from tests.samples.media_models import picture

from .faulty_proxy import Fault

pytestmark = [pytest.mark.s3, pytest.mark.submission]


def chat(number: int, words: int = 8) -> dict[str, Any]:
    text = " ".join(f"w{(number * 7 + word) % 50}" for word in range(words))
    turns = [{"role": "user", "content": f"{number} {text}"}, {"role": "assistant", "content": f"yes {text}"}]
    return {"messages": turns}


def contents(first: int, count: int, words: int = 8) -> dict[str, bytes]:
    """The same chats in every kind of file."""
    chats = [chat(number, words) for number in range(first, first + count)]
    lines = "".join(json.dumps(one) + "\n" for one in chats).encode()
    parquet, arrow = io.BytesIO(), io.BytesIO()
    table = pa.Table.from_pylist(chats)
    pq.write_table(table, parquet, row_group_size=50)
    with pa.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)
    return {
        "a.jsonl": lines,
        "a.json": json.dumps(chats).encode(),
        "a.parquet": parquet.getvalue(),
        "a.arrow": arrow.getvalue(),
        "a.jsonl.gz": gzip.compress(lines),
        "a.json.bz2": bz2.compress(json.dumps(chats).encode()),
        "a.jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True),
    }


def put(bucket: Any, place: str, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        with bucket.open_output_stream(f"{place.removeprefix('s3://')}/{name}", compression=None) as stream:
            stream.write(data)
    return place


def read(path: str, **settings: Any) -> list[Any]:
    source = SourceConfig(path=path, **settings)
    files = find_files(source).files
    reader = find_schema(files, source)[0]
    return [record for chunk in read_chunks(files, reader=reader) for record in chunk.parse()]


@pytest.mark.parametrize("name", contents(0, 1))
def test_every_kind_of_file_gives_the_same_records(bucket: Any, place: str, name: str) -> None:
    put(bucket, place, {name: contents(0, 300)[name]})
    records = read(f"{place}/{name}")
    assert [record.as_record()["messages"] for record in records] == [chat(number)["messages"] for number in range(300)]
    unit = "item" if ".json" in name and ".jsonl" not in name else "line" if ".jsonl" in name else "row"
    assert records[-1].where == f"{place}/{name}, {unit} {300 if unit == 'line' else 299}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_shards_of_an_object_hold_every_record_once(bucket: Any, place: str, name: str) -> None:
    put(bucket, place, {name: contents(0, 900, 200)[name]})
    files = find_files(SourceConfig(path=place)).files
    expected = [one.where for chunk in read_chunks(files) for one in chunk.parse()]
    cut = list(cut_shards(files, shard_bytes=100_000))
    assert len(cut) > 1
    assert [one.where for shard in cut for chunk in read_shard(shard) for one in chunk.parse()] == expected


def test_files_are_found_by_folder_and_glob_in_natural_order(bucket: Any, place: str) -> None:
    line = json.dumps(chat(1)).encode()
    names = ["part-10.jsonl", "part-2.jsonl", "deep/part-1.jsonl", "README.md", "_SUCCESS", "config.json"]
    put(bucket, place, dict.fromkeys(names, line) | {"config.json": b'{"model": 1}'})

    def found(path: str) -> list[str]:
        return [str(file).removeprefix(f"{place}/") for file in find_files(SourceConfig(path=path)).files]

    assert found(place) == found(f"{place}/") == ["deep/part-1.jsonl", "part-2.jsonl", "part-10.jsonl"]
    assert found(f"{place}/*.jsonl") == ["part-2.jsonl", "part-10.jsonl"]
    assert found(f"{place}/**/*.jsonl") == ["deep/part-1.jsonl", "part-2.jsonl", "part-10.jsonl"]
    assert found(f"{place}/part-?.jsonl") == ["part-2.jsonl"]
    assert found(f"{place}/deep/part-1.jsonl") == ["deep/part-1.jsonl"]
    skipped = find_files(SourceConfig(path=place)).skipped
    assert [name.removeprefix(f"{place}/") for name in skipped] == ["README.md", "_SUCCESS", "config.json"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{}/nothing.jsonl", "no such object"),
        ("{}/*.jsonl", "no chat files"),
        ("s3://no-such-bucket-1/x", "no such bucket"),
    ],
)
def test_what_is_not_there_is_named(place: str, path: str, words: str) -> None:
    with pytest.raises(HarnessError, match=words) as error:
        find_files(SourceConfig(path=path.format(place)))
    assert error.value.fix


def test_a_server_that_refuses_ends_in_an_error_and_not_in_fewer_records(proxy: Any, bucket: Any, place: str) -> None:
    put(bucket, place, {"a.jsonl": contents(0, 300)["a.jsonl"]})
    files = find_files(SourceConfig(path=place)).files
    proxy.faults.append(Fault("status", path="a.jsonl", times=999, code=403))
    with pytest.raises(FormatError, match="denied access"):
        list(read_chunks(files))


def prepared(path: Path, source: str, **data: Any) -> Any:
    config = PrepareConfig(
        source=SourceConfig(path=source, shard_bytes=20_000),
        tokenizer=TokenizerConfig(vocab_size=400),
        data=PackingConfig(path=str(path), pack_size=256, num_workers=0, **data),
    )
    return prepare(config, console=Console(quiet=True))


def test_an_object_that_changes_while_it_is_read_is_refused(bucket, place, tmp_path, monkeypatch) -> None:
    put(bucket, place, {"a.jsonl": contents(0, 400)["a.jsonl"]})
    reading = shards.read_shard

    def change(shard: Any) -> Any:
        put(bucket, place, {"a.jsonl": contents(1, 400)["a.jsonl"]})
        return reading(shard)

    monkeypatch.setattr(shards, "read_shard", change)
    with pytest.raises(PrepError, match="changed while it was read"):
        prepared(tmp_path / "data", place)


def test_a_record_names_an_image_by_its_object_and_a_missing_one_is_a_bad_record(bucket, place) -> None:
    put(bucket, place, {"a.png": (image := picture(40, 30))})
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
    reader = RecordReader(media=MediaLimits())
    found, missing = (
        reader.parse({"messages": turns, "images": [f"{place}/{name}"]}, "line 1", "") for name in ("a.png", "b.png")
    )
    assert isinstance(found, Conversation)
    assert found.messages[0].parts[0] == MediaPart("image", image)
    assert isinstance(missing, BadRecord)
    assert missing.detail == f"`images[0]` (turn 1) {place}/b.png: no such object"
