"""Chat files are listed in natural order and read in a stream, each record with its file and number."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import os
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import ConfigError, PrepError
from harness.prep.sources import reading, text
from harness.prep.sources.config import MixedSource, SourceConfig
from harness.prep.sources.finding import find_files, find_schema, find_sources, list_files
from harness.prep.sources.reading import cut_shards, read_chunks, read_shard

PACKED = ("a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.csv.gz")
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def read_all(path, limit=0):
    return [record for chunk in read_chunks(list_files(str(path)), limit=limit) for record in chunk.parse()]


def test_a_folder_is_read_recursively_in_natural_order(tmp_path):
    for name in ["part-10.jsonl", "part-2.jsonl", "deep/part-1.ndjson", ".hidden/x.jsonl", "README.md"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(GOOD) + "\n")
    names = [str(file.relative_to(tmp_path)) for file in list_files(str(tmp_path))]
    assert names == ["deep/part-1.ndjson", "part-2.jsonl", "part-10.jsonl"]


@pytest.mark.parametrize("name", ["*.jsonl", ""])
def test_a_path_without_chat_files_is_an_error(tmp_path, name):
    with pytest.raises(PrepError, match="there are no chat files"):
        list_files(str(tmp_path / name))


def test_a_path_that_does_not_exist_is_an_error_with_the_nearest_name(tmp_path):
    (tmp_path / "chats.jsonl").write_text("")
    with pytest.raises(PrepError, match="does not exist") as error:
        list_files(str(tmp_path / "chatz.jsonl"))
    assert error.value.fix == f"did you mean {tmp_path / 'chats.jsonl'}?"
    with pytest.raises(PrepError, match="does not exist") as error:
        list_files(str(tmp_path / "none" / "x"))
    assert error.value.fix == "check the path and the working folder"


@pytest.mark.parametrize("name", ["b.jsonl.xz", "b.zip", "b.tar.gz"])
def test_an_unsupported_compression_is_refused_and_not_skipped(tmp_path, name):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(PrepError, match="compressed file is not supported"):
        list_files(str(tmp_path))


def compress(data, suffix):
    if suffix == ".zst":
        return pa.compress(data, codec="zstd", asbytes=True)
    return {".gz": gzip, ".bz2": bz2}[suffix].compress(data)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_compressed_files_give_the_same_records_and_a_truncated_one_is_an_error(tmp_path, suffix):
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"{n} " * 500}, GOOD["messages"][1]]}) for n in range(900)
    ]
    text = "\n".join(lines).encode()
    (tmp_path / "chat.jsonl").write_bytes(text)
    # Two members, as left by a tool that appends to a compressed file.
    (tmp_path / f"chat.jsonl{suffix}").write_bytes(compress(text[:1000], suffix) + compress(text[1000:], suffix))
    plain, packed = read_all(tmp_path / "chat.jsonl"), read_all(tmp_path / f"chat.jsonl{suffix}")
    assert [record.hash() for record in packed] == [record.hash() for record in plain]
    assert packed[899].where == f"{tmp_path}/chat.jsonl{suffix}, line 900"
    whole = (tmp_path / f"chat.jsonl{suffix}").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / f"chat.jsonl{suffix}").write_bytes(whole[:-9])
    with pytest.raises(PrepError, match="cannot be read") as error:
        read_all(tmp_path / "cut")
    assert error.value.where.startswith(f"{tmp_path}/cut/chat.jsonl{suffix}, after line ")


RECORDS = [
    {"prompt": f"question {number}", "completion": f"answer {number}\n" + "word " * (number % 97)}
    for number in range(9000)
]


def content_of(name, records):
    """A file of records: lines with blank ones between, rows with line ends in them, a list with numbers in it."""
    kind, _, packing = name.removeprefix("a.").partition(".")
    if kind == "jsonl":
        content = "".join(json.dumps(one) + "\n" * (1 + number % 3) for number, one in enumerate(records)).rstrip("\n")
    elif kind == "json":
        content = json.dumps([one if number % 7 else number * 11 for number, one in enumerate(records)], indent=1)
    elif kind == "csv":
        content = "prompt,completion\n" + "".join(f'"{one["prompt"]}","{one["completion"]}"\n' for one in records)
    else:
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(records), file, row_group_size=50)
        return file.getvalue()
    return compress(content.encode(), f".{packing}") if packing else content.encode()


def parsed(shards):
    return [one for shard in shards for chunk in read_shard(shard) for one in chunk.parse()]


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "a.json", "a.csv", "a.parquet"),
        *(pytest.param(name, marks=pytest.mark.submission) for name in PACKED),
    ],
)
def test_shards_of_any_size_hold_every_record_once_with_its_number(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text, "_CHUNK_BYTES", 1 << 18 if name in PACKED else 300)
    monkeypatch.setattr(text, "_WINDOW_BYTES", 1 << 20 if name in PACKED else 64)
    file, records = tmp_path / name, RECORDS if name in PACKED else RECORDS[:1000]
    file.write_bytes(content_of(name, records))
    whole = [record for chunk in read_chunks([file]) for record in chunk.parse()]
    prompts = [getattr(one, "messages", None) and one.messages[0].content for one in whole]
    bad = {*range(0, len(records), 7)} if "json" in name.split(".") else set()
    assert prompts == [None if number in bad else one["prompt"] for number, one in enumerate(records)]
    if bad:
        assert [one.where for one in whole] == [f"{file}, item {number}" for number in range(len(records))]
    total = file.stat().st_size
    middle = 400_000 if name in PACKED else total // 12
    for size, most in [(middle, 4)] if name in PACKED else [(1, 19), (middle, 5), (total // 3, 1), (total, 0)]:
        shards = list(cut_shards([file], shard_bytes=size))
        assert len(shards) > most
        assert parsed(shards) == whole
        assert sum(shard.num_bytes for shard in shards) == total
    for limit in (1, 333, 1000):
        assert parsed(cut_shards([file], shard_bytes=middle, limit=limit)) == whole[:limit]
    if name in PACKED:  # each by itself, and a later one before an earlier one
        pieces = list(cut_shards([file], shard_bytes=middle))
        reading._packed_file.cache_clear()
        assert parsed([pieces[2]]) + parsed([pieces[1]]) == parsed([pieces[2], pieces[1]])


def test_a_limit_counts_the_records_of_all_files(tmp_path):
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        (tmp_path / name).write_bytes(content_of(f"a{name[1:]}", RECORDS[:100]))
    files = list_files(str(tmp_path))
    expected = [one.where for chunk in read_chunks(files) for one in chunk.parse()]
    for limit in (99, 100, 101, 250, 999):
        assert [one.where for one in parsed(cut_shards(files, shard_bytes=3000, limit=limit))] == expected[:limit]


def test_blank_lines_do_not_count_toward_the_limit(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n" + (json.dumps(GOOD) + "\n  \n") * 3)
    assert [len(read_all(tmp_path, limit)) for limit in (1, 2, 3, 4)] == [1, 2, 3, 3]


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("train/a.jsonl", "validation/a.jsonl")])
def test_a_folder_of_several_splits_is_refused_until_one_is_named(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(GOOD))
    with pytest.raises(PrepError, match="contains files of the splits") as error:
        list_files(str(tmp_path))
    assert "source.split=train" in error.value.fix
    found = find_files(SourceConfig(path=str(tmp_path), split="train"))
    assert found.files == (tmp_path / names[0],)
    assert (found.skipped, found.facts) == ((str(tmp_path / names[1]),), {"split": "train"})
    assert len(list_files(str(tmp_path / "**/*.jsonl"))) == 2
    with pytest.raises(PrepError, match="split 'other' does not exist"):
        find_files(SourceConfig(path=str(tmp_path), split="other"))


@pytest.mark.parametrize(
    "names", [("train.jsonl", "more.jsonl"), ("chat-test.jsonl", "chat-train.jsonl"), ("dev.jsonl",)]
)
def test_other_names_of_files_are_no_splits(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text(json.dumps(GOOD))
    assert len(list_files(str(tmp_path))) == len(names)


@pytest.mark.parametrize(("path", "setting"), [("a.jsonl", "split"), ("*.jsonl", "split"), (".", "subset")])
def test_a_split_or_subset_that_would_not_be_used_is_refused(tmp_path, path, setting):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(ConfigError) as error:
        find_files(SourceConfig(path=str(tmp_path / path), **{setting: "train"}))
    assert error.value.where == f"source.{setting}"


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text("")
    assert list_files("~/a.jsonl") == list_files("~/*.jsonl") == [tmp_path / "a.jsonl"]


def test_files_of_two_schemas_are_refused_with_a_place_of_each(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps({"instruction": "Hi", "output": "Hello"}))
    files = list_files(str(tmp_path))
    with pytest.raises(PrepError, match="two schemas, messages and alpaca") as error:
        find_schema(files, SourceConfig(path=str(tmp_path)))
    assert f"{files[0]}, line 1" in error.value.where
    assert f"{files[1]}, line 1" in error.value.where


def test_the_schema_and_unused_fields_are_found_in_the_first_records(tmp_path):
    (tmp_path / "a.jsonl").write_text("broken\n" + json.dumps({**GOOD, "id": 1, "score": None}))
    (tmp_path / "b.jsonl").write_text(json.dumps({**GOOD, "source": "web", "chat_template_kwargs": {}}))
    (tmp_path / "c.jsonl").write_text("")
    reader, unused = find_schema(list_files(str(tmp_path)), SourceConfig(path=str(tmp_path)))
    assert (reader.schema, unused) == ("messages", ["id", "source"])
    given, _ = find_schema(list_files(str(tmp_path)), SourceConfig(path=str(tmp_path), schema="sharegpt"))
    assert given.schema == "sharegpt"


def test_the_digest_of_a_source_changes_with_its_files(tmp_path):
    (tmp_path / "a.jsonl").write_text("1")
    first = find_files(SourceConfig(path=str(tmp_path))).digest
    assert find_files(SourceConfig(path=str(tmp_path))).digest == first
    (tmp_path / "b.jsonl").write_text("")
    second = find_files(SourceConfig(path=str(tmp_path))).digest
    (tmp_path / "a.jsonl").write_text("12")
    assert len({first, second, find_files(SourceConfig(path=str(tmp_path))).digest}) == 3


@pytest.mark.parametrize(
    "path", ["https://hub.example/a.jsonl", "file:///tmp/a.jsonl", "s3://", "s3://key:word@bucket/a"]
)
def test_addresses_that_cannot_be_read_are_refused(path):
    with pytest.raises(ConfigError) as error:
        find_files(SourceConfig(path=path))
    assert error.value.fix
    assert "word" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"kind": "http"}, "source.kind"),
        ({"on_bad": "ignore"}, "source.on_bad"),
        ({"kind": "files"}, "source.path"),
        ({"path": ""}, "source.path"),
        ({"kind": "pydoc", "path": "chats.jsonl"}, "source.path"),
        ({"split": "train"}, "source.split"),
        ({"kind": "pydoc", "subset": "all"}, "source.subset"),
    ],
)
def test_invalid_settings_are_refused(settings, where):
    with pytest.raises(ConfigError) as error:
        SourceConfig(**settings)
    assert error.value.where == where


def test_suffixes_ignore_case_and_skipped_files_are_listed(tmp_path):
    for name in ("a.jsonl", "b.JSONL", "c.json", "_d.jsonl", "sub/e.ndjson"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [file.name for file in list_files(str(tmp_path))] == ["a.jsonl", "b.JSONL", "e.ndjson"]
    lines = []
    found = find_files(SourceConfig(path=str(tmp_path)), show=lines.append)
    assert found.skipped == (str(tmp_path / "_d.jsonl"), str(tmp_path / "c.json"))
    assert lines[0] == "2 other files of the source are ignored:"


def test_a_piece_of_a_compressed_file_that_could_not_be_read_is_not_empty_the_next_time(tmp_path, monkeypatch):
    """As in a notebook, whose file system fails for a moment: what failed must not be taken for the end."""
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(content_of("a.jsonl.gz", RECORDS))
    pieces = list(cut_shards([file], shard_bytes=1))
    assert len(pieces) > 3
    read, failures = reading._read_text, [OSError(errno.EIO, "Input/output error")]

    def fail_once(*given):
        for number, group in enumerate(read(*given)):
            if number == 2 and failures:
                raise failures.pop()
            yield group

    monkeypatch.setattr(reading, "_read_text", fail_once)
    reading._packed_file.cache_clear()
    with pytest.raises(PrepError, match="Input/output error"):
        parsed(pieces)
    assert parsed(pieces[2:]) == parsed(pieces)[-len(parsed(pieces[2:])) :] != []


def test_a_line_without_end_is_not_read_into_memory_to_cut_the_file(tmp_path):
    """The tail of zeros of a file whose disk lost power."""
    file = tmp_path / "a.jsonl"
    file.write_text((json.dumps(GOOD) + "\n") * 1000)
    with file.open("r+b") as grown:
        grown.truncate(200 << 20)
    tracemalloc.start()
    shards = list(cut_shards([file], shard_bytes=10_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20
    assert shards[-1].end == 200 << 20
    assert len(parsed(shards[:-1])) > 800
    with pytest.raises(PrepError, match="the line is longer than 32 MiB"):
        parsed(shards[-1:])


@pytest.mark.parametrize("name", ["b.json.gz", "b.csv.gz"])
def test_a_file_of_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / name).write_bytes(content_of(f"a{name[1:]}", RECORDS[:50])[:-9])
    with pytest.raises(PrepError, match="cannot be read"):
        read_all(tmp_path)


def test_a_subfolder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    for name in ("a.jsonl", "closed/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(GOOD))
    scandir = os.scandir

    def refuse(path="."):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PrepError, match="cannot be listed"):
        list_files(str(tmp_path))


def test_a_file_of_two_sources_is_found_under_any_spelling_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    monkeypatch.chdir(tmp_path)
    for other in (str(tmp_path / "a.jsonl"), f"../{tmp_path.name}/*.jsonl"):
        with pytest.raises(PrepError, match="belongs to two sources"):
            find_sources(SourceConfig(mix=[MixedSource("a.jsonl"), MixedSource(other)]), lambda line: None)


@pytest.mark.timeout(60)
def test_a_table_of_text_with_many_columns_is_refused_in_time_that_grows_with_its_length(tmp_path):
    """Seconds, and hours where names are compared with one another, or are joined anew for each bad row."""
    names = [f"c{number}" for number in range(100_000)]
    (tmp_path / "a.csv").write_text(",".join([*names, "c7"]) + "\n")
    with pytest.raises(PrepError, match="several columns have the name 'c7'"):
        read_all(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text(",".join(names) + "\n" + "x\n" * 50_000)
    bad = read_all(tmp_path / "b.csv")
    assert (len(bad), bad[-1].reason) == (50_000, "bad_row")
