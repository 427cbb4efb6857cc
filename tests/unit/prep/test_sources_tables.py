"""Parquet and Arrow files give all columns that the schema reads, of any Arrow type, and none that it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import PrepError
from harness.prep.chat import BadReason, Conversation
from harness.prep.sources import tables
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import find_files, find_schema, list_files
from harness.prep.sources.reading import cut_shards, read_chunks, read_shard

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def write(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        opened = pa.ipc.new_file if path.stem.endswith("_file") else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
            writer.write_table(table)
    return path


def read_all(path, **settings):
    source = SourceConfig(path=str(path), **settings)
    files = find_files(source).files
    reader = find_schema(files, source)[0]
    return [record for chunk in read_chunks(files, reader=reader) for record in chunk.parse()]


TEXT, LARGE = pa.string(), pa.large_string()
TYPES = {
    "plain": pa.list_(pa.struct([("role", TEXT), ("content", TEXT)])),
    "large": pa.large_list(pa.struct([("role", LARGE), ("content", LARGE)])),
    "dictionary": pa.list_(pa.struct([("role", pa.dictionary(pa.int8(), TEXT)), ("content", TEXT)])),
    "fixed": pa.list_(pa.struct([("role", TEXT), ("content", TEXT)]), 2),
    "maps": pa.list_(pa.map_(TEXT, TEXT)),
    "json": TEXT,
}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", "_file.arrow"])
@pytest.mark.parametrize("kind", TYPES)
def test_turns_of_every_arrow_type_are_read(tmp_path, kind, suffix):
    turns = json.dumps(TURNS) if kind == "json" else [list(t.items()) for t in TURNS] if kind == "maps" else TURNS
    file = write(tmp_path / f"chats{suffix}", pa.table({"messages": pa.array([turns, turns], TYPES[kind])}))
    records = read_all(file)
    assert [record.as_record()["messages"] for record in records] == [TURNS, TURNS]
    assert records[1].where == f"{file}, row 1"


def test_turns_that_an_arrow_file_stores_as_json_are_read(tmp_path):
    """As Hugging Face's datasets store turns whose fields differ, in caches of ms-swift."""
    texts = [[json.dumps(turn) for turn in TURNS], ["{", json.dumps(TURNS[1])]]
    storage = pa.array(texts, pa.list_(TEXT))
    column = pa.ListArray.from_arrays(storage.offsets, pa.json_().wrap_array(storage.values))
    whole, damaged = read_all(write(tmp_path / "chats.arrow", pa.table({"messages": column})))
    assert whole.as_record()["messages"] == TURNS
    assert damaged.reason == BadReason.BAD_TURN


def test_views_and_dictionaries_of_an_arrow_file_are_read(tmp_path):
    view = pa.list_view(pa.struct([("role", pa.string_view()), ("content", pa.string_view())]))
    table = pa.table({"messages": pa.array([TURNS], view)})
    (record,) = read_all(write(tmp_path / "chats.arrow", table))
    assert record.as_record()["messages"] == TURNS
    table = pa.table({"prompt": pa.array(["Hi", "Hi"]).dictionary_encode(), "completion": ["a", "b"]})
    assert [one.messages[1].content for one in read_all(write(tmp_path / "b.parquet", table))] == ["a", "b"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tools_are_read_and_other_columns_are_named(tmp_path, suffix):
    table = pa.table(
        {"id": [1, 2], "messages": [TURNS, TURNS], "tools": [json.dumps([TOOL]), None], "score": [0.5, None]}
    )
    file = write(tmp_path / f"chats{suffix}", table)
    one, two = read_all(file)
    assert (one.tools, two.tools) == ((TOOL,), ())
    reader, unused = find_schema([file], SourceConfig(path=str(file)))
    assert (reader.schema, unused) == ("messages", ["id", "score"])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_records_with_images_are_refused_without_reading_them(tmp_path, suffix, monkeypatch):
    image = pa.struct([("bytes", pa.binary()), ("path", TEXT)])
    images = pa.array([[{"bytes": b"x" * 10_000, "path": None}], [], None], pa.list_(image))
    single = pa.array([None, {"bytes": b"y", "path": "a.png"}, None], image)
    file = write(tmp_path / f"chats{suffix}", pa.table({"messages": [TURNS] * 3, "images": images, "image": single}))
    rows = next(iter(read_chunks([file]))).records
    assert [{name: row[name] for name in row if name != "messages"} for row in rows] == [
        {"images": True},
        {"image": True},
        {},
    ]
    one, two, three = read_all(file)
    assert (one.reason, two.reason) == (BadReason.MEDIA, BadReason.MEDIA)
    assert "`images`" in one.detail
    assert "`image`" in two.detail
    assert isinstance(three, Conversation)


def test_only_the_columns_of_the_schema_are_decoded(tmp_path):
    file = write(
        tmp_path / "a.parquet", pa.table({"messages": [TURNS], "text": ["long"], "output": ["x"], "blob": [b"0"]})
    )
    source = SourceConfig(path=str(file), schema="messages")
    (shard,) = cut_shards([file], shard_bytes=1 << 30, reader=find_schema([file], source)[0])
    (chunk,) = read_shard(shard)
    assert chunk.records == [{"messages": TURNS}]


def test_text_that_is_not_utf8_makes_one_row_bad_of_parquet_and_the_file_of_arrow(tmp_path):
    texts = pa.array([b"one", b"t\xffo", b"three"]).cast(pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    table = pa.table({"prompt": column, "completion": ["a", "b", "c"]})
    with pytest.raises(PrepError, match="Invalid UTF8 sequence at string index 1"):
        read_all(write(tmp_path / "chats.arrow", table))
    file = write(tmp_path / "chats.parquet", table)
    one, two, three = read_all(file)
    assert isinstance(one, Conversation)
    assert isinstance(three, Conversation)
    assert (two.where, two.reason) == (f"{file}, row 1", BadReason.NOT_UTF8)


def test_a_damaged_page_is_refused_with_the_last_row_before_it(tmp_path):
    rows = [[{"role": "user", "content": f"{n}" * 50}, TURNS[1]] for n in range(4000)]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": rows}), file, row_group_size=1000, write_page_checksum=True, compression=None)
    data = bytearray(file.read_bytes())
    at = data.index(b"2500" * 10)
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(PrepError, match="cannot be read") as error:
        [record for chunk in read_chunks([file]) for record in chunk.parse()]
    assert error.value.where.startswith(f"{file}, after row 1")


@pytest.mark.parametrize("keep", [0, 5, 500, -20])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_cut_table_is_refused(tmp_path, suffix, keep):
    file = write(tmp_path / f"a{suffix}", pa.table({"messages": [TURNS] * 2000}))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(PrepError, match="cannot be read") as error:
        [record for chunk in read_chunks([file]) for record in chunk.parse()]
    assert str(file) in error.value.where


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_without_rows_has_no_records(tmp_path, suffix):
    table = pa.table({"messages": pa.array([], TYPES["plain"]), "images": pa.array([], pa.list_(TEXT))})
    assert read_all(write(tmp_path / f"a{suffix}", table)) == []


def test_a_footer_that_hides_rows_is_refused(tmp_path):
    file = write(tmp_path / "a.parquet", pa.table({"messages": [TURNS] * 57}))
    whole, hidden = file.read_bytes(), 0
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(footer, len(whole) - 8):
        if whole[at] == 2 * 57:  # as Thrift writes 57
            file.write_bytes(whole[:at] + b"\0" + whole[at + 1 :])
            if pq.read_metadata(file).row_group(0).num_rows == 0:
                hidden += 1
                with pytest.raises(PrepError, match="values in a row group without rows"):
                    read_all(file)
    assert hidden == 1


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([TURNS]), pa.array([TURNS])], names=["messages", "messages"])
    file = write(tmp_path / "a.parquet", table)
    with pytest.raises(PrepError, match="several columns have the name 'messages'"):
        list(read_chunks([file]))


def save_to_disk(folder, *contents):
    names = []
    for number, table in enumerate(contents):
        names.append(f"data-{number:05d}-of-{len(contents):05d}.arrow")
        write(folder / names[-1], table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text('{"text": "about"}')
    return folder


def test_a_saved_dataset_gives_its_own_files_and_not_what_was_cached_beside_them(tmp_path):
    folder = save_to_disk(tmp_path / "saved", pa.table({"messages": [TURNS]}), pa.table({"messages": [TURNS]}))
    write(folder / "cache-1a2b.arrow", pa.table({"messages": [TURNS] * 9}))
    assert len(read_all(folder)) == 2
    found = find_files(SourceConfig(path=str(folder)))
    assert [Path(name).name for name in found.skipped] == ["cache-1a2b.arrow", "dataset_info.json", "state.json"]
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(PrepError, match=r"lacks data-00001-of-00002\.arrow"):
        list_files(str(folder))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"_data_files": [3]}', "\xff"])
def test_a_state_that_the_datasets_library_did_not_write_is_of_another_tool(tmp_path, text):
    write(tmp_path / "a.arrow", pa.table({"messages": [TURNS]}))
    (tmp_path / "state.json").write_text(text, encoding="latin-1")
    assert len(read_all(tmp_path)) == 1


def test_a_split_of_a_saved_dataset_is_chosen_by_setting(tmp_path):
    save_to_disk(tmp_path / "train", pa.table({"messages": [TURNS] * 2}))
    save_to_disk(tmp_path / "test", pa.table({"messages": [TURNS] * 5}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(PrepError, match="contains the splits test, train") as error:
        list_files(str(tmp_path))
    assert "source.split" in error.value.fix
    assert len(read_all(tmp_path, split="train")) == 2
    assert len(read_all(tmp_path / "test")) == 5
    assert find_files(SourceConfig(path=str(tmp_path), split="test")).facts == {"split": "test"}


def test_a_folder_saved_by_the_datasets_library_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"messages": TURNS, "id": n} for n in range(3)])
    data.save_to_disk(str(tmp_path / "one"))
    assert len(read_all(tmp_path / "one")) == 3
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "two"))
    assert len(read_all(tmp_path / "two", split="train")) == 3


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_of_one_large_group_is_read_in_little_memory(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(tables, "_CHUNK_BYTES", 2 << 20)
    texts = [[{"role": "user", "content": f"{number} " * 4000}, TURNS[1]] for number in range(2000)]
    file = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"messages": texts}), file, compression=None, use_dictionary=False)
    else:
        write(file, pa.table({"messages": texts}))
    size = file.stat().st_size
    del texts
    before, most, count = pa.total_allocated_bytes(), 0, 0
    for chunk in read_chunks([file]):
        most = max(most, pa.total_allocated_bytes() - before)
        count += len(chunk.records)
        assert sum(len(str(row)) for row in chunk.records) < 4 << 20
    assert count == 2000
    assert size > 30 << 20
    assert most < size / 2


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_that_is_media_by_its_name_is_refused_where_a_row_has_a_value(tmp_path, suffix):
    table = pa.table({"messages": [TURNS, TURNS], "image_path": [None, "a.png"], "id": [1, 2]})
    path = write(tmp_path / f"chats{suffix}", table)
    first, second = read_all(path)
    assert isinstance(first, Conversation)
    assert (second.reason, "`image_path`" in second.detail) == (BadReason.MEDIA, True)
    assert all(isinstance(record, Conversation) for record in read_all(path, ignore_fields=["image_path"]))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_time_that_python_does_not_have_makes_its_row_a_bad_record(tmp_path, suffix):
    """Of a year after 9999, and of one nanosecond."""
    kind = pa.struct([("role", TEXT), ("content", TEXT), ("at", pa.timestamp("ms")), ("when", pa.timestamp("ns"))])
    rows = [[{**TURNS[0], **more}, TURNS[1]] for more in ({}, {"at": 10**15}, {"when": 1}, {})]
    file = write(tmp_path / f"chats{suffix}", pa.table({"messages": pa.array(rows, pa.list_(kind))}))
    first, *bad, last = read_all(file)
    assert isinstance(first, Conversation)
    assert isinstance(last, Conversation)
    assert [one.where for one in bad] == [f"{file}, row 1", f"{file}, row 2"]
    assert bad[0].reason == BadReason.BAD_ROW
