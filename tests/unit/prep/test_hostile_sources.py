"""Small chat files that claim much: our own errors, within memory that is limited by the system and not by us."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import PrepError
from harness.formats.layouts.jsonl import pack_of_line
from harness.prep.sources import tables
from harness.prep.sources.reading import read_chunks

# Imports alone take up to 1.5 GB of addresses, nearly all of them unused.
_CHILD = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from harness.errors import HarnessError
from harness.formats import open_dataset
from harness.loader.live.folder import LiveChunk
from harness.prep.sources.reading import read_chunks
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
resource.setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20))
for path in map(Path, sys.argv[1:]):
    for read in (
        lambda: [one for chunk in read_chunks([path]) for one in chunk.parse()],
        lambda: LiveChunk(path, None).conversation(0),
        lambda: list(open_dataset(path)),
    ):
        try:
            read()
        except HarnessError as error:
            assert error.fix
            print(error.what)
        else:
            print("read")
"""


def whats_of(*paths: Path) -> list[str]:
    """Read files as chats, as live chunks and as packs, in a process of limited memory; returns the errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, paths)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_parquet_of_500_bytes_with_a_conversation_of_millions_of_turns_is_refused(tmp_path: Path) -> None:
    turns = pa.nulls(1 << 23, pa.struct([("role", pa.string()), ("content", pa.string())]))
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 1 << 23], pa.int32()), turns)})
    pq.write_table(table, tmp_path / "chats.parquet", write_statistics=False, store_schema=False)
    assert (tmp_path / "chats.parquet").stat().st_size < 700
    chats, live, packs = whats_of(tmp_path / "chats.parquet")
    assert chats.startswith("the column messages.list.element.role declares 8,388,608 values; at most 4,194,304")
    assert live == chats
    assert packs.startswith("has no column input_ids")


@pytest.mark.submission
@pytest.mark.parametrize("unit", [b"[],", b'"ab",'], ids=["lists", "texts"])
def test_a_line_of_60_mb_is_refused_before_it_is_parsed(tmp_path: Path, unit: bytes) -> None:
    for name in (b"messages", b"input_ids"):
        line = b'{"' + name + b'":[' + unit * (60_000_000 // len(unit)) + b"0]}\n"
        (tmp_path / "rows.jsonl").write_bytes(line)
        chats, live, packs = whats_of(tmp_path / "rows.jsonl")
        assert chats == "the line is longer than 32 MiB"
        assert live == f"the conversation is {len(line):,} bytes long, more than 33,554,432"
        assert "quotes and brackets, too many for lists of numbers" in packs


def test_a_row_group_of_many_regular_conversations_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their roles take few bytes, a field that no turn has takes none.
    monkeypatch.setattr(tables, "_FREE_VALUES", 1000)
    turns = [
        {"role": role, "content": f"{role} {place}", "name": None}
        for place in range(5)
        for role in ("user", "assistant")
    ]
    schema = pa.schema([("messages", pa.list_(pa.struct([(name, pa.string()) for name in turns[0]])))])
    rows = [[turn | {"content": f"{turn['content']} {row}"} for turn in turns] for row in range(2000)]
    pq.write_table(pa.table({"messages": rows}, schema), tmp_path / "chats.parquet", compression="zstd")
    group = pq.read_metadata(tmp_path / "chats.parquet").row_group(0)
    assert min(group.column(place).total_compressed_size for place in range(3)) * 16 < 20_000
    assert sum(len(list(chunk.parse())) for chunk in read_chunks([tmp_path / "chats.parquet"])) == 2000


TEXT = "x" * (1 << 20)


def repeated(rows: int, turns: int) -> pa.Array:
    """Conversations whose answers are one text of 1 MiB, stored once."""
    count = rows * turns
    roles = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (count // 2), pa.int32()), pa.array(["user", "assistant"]))
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (count // 2), pa.int32()), pa.array(["?", TEXT]))
    structs = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(range(0, count + 1, turns), pa.int32()), structs)


def write_repeated(path: Path, rows: int, turns: int) -> Path:
    table = pa.table({"messages": repeated(rows, turns)})
    limits = {"write_statistics": False, "store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(table, path, compression="zstd", **limits)
    assert path.stat().st_size < 2000
    return path


def test_a_parquet_of_a_kilobyte_whose_row_names_a_long_text_a_thousand_times_is_refused(tmp_path: Path) -> None:
    chats, live, _ = whats_of(write_repeated(tmp_path / "chats.parquet", 1, 4096))
    assert chats == "a row decodes to 2,147,485,696 bytes of messages.list.element.content, more than 33,554,432"
    assert live == chats


def test_a_parquet_whose_rows_name_one_long_text_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    path = write_repeated(tmp_path / "chats.parquet", 96, 2)
    sizes = [len(chunk.records) for chunk in read_chunks([path])]
    assert sum(sizes) == 96
    assert max(sizes) == 31
    assert [chunk.first for chunk in read_chunks([path])] == [sum(sizes[:place]) for place in range(len(sizes))]
    [*_, last] = read_chunks([path])
    assert last.records[-1] == {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": TEXT}]}


def test_pages_that_expand_are_refused_by_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MAX_PAGE_BYTES", 8 << 20)
    monkeypatch.setattr(tables, "_MAX_DICTIONARY_BYTES", 4 << 20)
    options: dict[str, Any] = {"compression": "zstd", "write_statistics": False, "store_schema": False}
    path = tmp_path / "chats.parquet"
    for use_dictionary, size in ((False, 9 << 20), (True, 5 << 20)):
        table = pa.table({"messages": ["x" * size]})
        pq.write_table(table, path, use_dictionary=use_dictionary, dictionary_pagesize_limit=1 << 30, **options)
        with pytest.raises(PrepError, match=f"the column messages declares a page of {f'{size:,}'[:5]}"):
            list(read_chunks([path]))


def test_an_arrow_file_whose_row_names_a_long_text_a_thousand_times_is_refused(tmp_path: Path) -> None:
    table = pa.table({"messages": repeated(1, 4096)})
    with pa.ipc.new_stream(tmp_path / "chats.arrow", table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(PrepError, match="the row decodes to 2,147,512,320 bytes") as error:
        list(read_chunks([tmp_path / "chats.arrow"]))
    assert error.value.where == f"{tmp_path / 'chats.arrow'}, row 0"


def write_arrow(path: Path, column: pa.Array, *, opened: Any = pa.ipc.new_stream, codec: str | None = "zstd") -> Path:
    table = pa.table({"messages": column})
    with opened(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    return path


@pytest.mark.submission
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("opened", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_small_arrow_file_whose_batch_takes_gigabytes_is_refused(tmp_path: Path, opened: Any, codec: str) -> None:
    column = pa.array(["x" * (1 << 28)]).take(pa.array([0] * 5, pa.int32())).cast(pa.large_string())
    path = write_arrow(tmp_path / "chats.arrow", column, opened=opened, codec=codec)
    assert path.stat().st_size < 6 << 20
    del column
    chats, *_ = whats_of(path)
    assert chats == "the batch decompresses to 1,342,177,328 bytes, more than 1,073,741,824"


def test_dictionaries_of_an_arrow_file_count_with_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MAX_BATCH_BYTES", 3 << 20)
    texts = [letter * (1 << 20) for letter in "abc"]
    write_arrow(tmp_path / "two.arrow", pa.array(texts[:2]).dictionary_encode())
    assert sum(len(chunk.records) for chunk in read_chunks([tmp_path / "two.arrow"])) == 2
    write_arrow(tmp_path / "three.arrow", pa.array(texts).dictionary_encode())
    with pytest.raises(PrepError, match=r"the batch decompresses to 3,145,7.. bytes, more than 3,145,728") as error:
        list(read_chunks([tmp_path / "three.arrow"]))
    assert error.value.where == f"{tmp_path / 'three.arrow'}, batch 0"


def test_arrow_values_that_take_no_bytes_count(tmp_path: Path) -> None:
    """Of nulls, of one value that is repeated, and of texts that are parts of the same bytes."""
    view = pa.array([TEXT], pa.string_view()).buffers()
    views = pa.Array.from_buffers(pa.string_view(), 64, [None, pa.py_buffer(view[1].to_pybytes() * 64), view[2]])
    repeats = pa.RunEndEncodedArray.from_arrays(pa.array([1 << 16], pa.int32()), pa.array([TEXT]))
    nulls = pa.nulls(1 << 30)
    structs = pa.StructArray.from_arrays([nulls], ["role"])
    many = pa.py_buffer(view[1].to_pybytes() * (1 << 11))
    parts = pa.Array.from_buffers(pa.string_view(), 1 << 11, [None, many, view[2]])
    paths, wanted = [], ["the file cannot be read: batch 0 declares 1,073,741,824 rows in 1"]
    for values, num_bytes in ((nulls, 8 << 30), (structs, 8 << 30), (repeats, (1 << 36) + (1 << 18)), (views, 1 << 26)):
        lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
        paths.append(write_arrow(tmp_path / f"{len(paths)}.arrow", lists))
        wanted.insert(-1, f"the row decodes to {num_bytes:,} bytes, more than 33,554,432")
    paths.append(write_arrow(tmp_path / "nulls.arrow", nulls))
    paths.append(write_arrow(tmp_path / "parts.arrow", pa.StructArray.from_arrays([parts], ["role"])))
    wanted.append("the batch decompresses to 2,147,483,648 bytes, more than 1,073,741,824")
    found = whats_of(*paths)[::3]
    assert [chats[: len(words)] for chats, words in zip(found, wanted, strict=True)] == wanted
    lists = pa.ListViewArray.from_arrays([1, 1], [1, 1], pa.array(["", TEXT]))
    assert tables.decoded_bytes(lists) >= 2 * len(TEXT)


@pytest.mark.submission
@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("opened", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_damaged_arrow_file_is_read_or_refused(tmp_path: Path, opened: Any, codec: str | None) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 100}]
    path = write_arrow(tmp_path / "chats.arrow", pa.array([turns] * 4), opened=opened, codec=codec)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(PrepError):
            assert len([list(chunk.parse()) for chunk in read_chunks([path], limit=16)]) <= 16


@pytest.mark.parametrize(
    "column",
    [
        pa.array([bytes(100)] * 64, pa.binary(100)),
        pa.ListArray.from_arrays([0, 64], pa.array([bytes(100)] * 64, pa.binary(100))),
    ],
)
def test_long_values_of_fixed_length_are_refused(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"messages": column}), tmp_path / "chats.parquet", compression="zstd")
    with pytest.raises(PrepError, match=r"has values of type FIXED_LEN_BYTE_ARRAY \(100 bytes\)"):
        list(read_chunks([tmp_path / "chats.parquet"]))


@pytest.mark.parametrize("store_schema", [True, False])
def test_a_column_of_json_that_names_a_long_text_often_is_refused(tmp_path: Path, store_schema: bool) -> None:
    texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array([f'"{TEXT}"'] * 64))
    lists = pa.ListArray.from_arrays(pa.array([0, 64], pa.int32()), texts)
    pq.write_table(
        pa.table({"messages": lists}), tmp_path / "chats.parquet", compression="zstd", store_schema=store_schema
    )
    with pytest.raises(PrepError, match="a row decodes to 67,108,992 bytes of messages"):
        list(read_chunks([tmp_path / "chats.parquet"]))


def test_a_packed_line_of_other_tools_may_name_its_samples() -> None:
    line = b'{"input_ids":[1,2],"labels":[-100,2],"lengths":[2],"names":[' + b'"a",' * 5000 + b'"b"]}'
    assert len(pack_of_line(line)) == 2
