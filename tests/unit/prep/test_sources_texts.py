"""JSON lines, JSON lists and delimited text are read record by record; what is broken is refused with its place."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pyarrow as pa
import pytest

from harness.errors import PrepError
from harness.prep.chat import BadReason, BadRecord, Conversation
from harness.prep.sources import text
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import find_files, find_schema, list_files
from harness.prep.sources.reading import read_chunks

BOND = b'prompt,completion\r\n007,"James ""Bond"",\r\nof MI6"\r\n\r\n1e5,NaN\r\n'


def chat(question):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes"}]}


def read_all(file):
    return [record for chunk in read_chunks([file]) for record in chunk.parse()]


@pytest.mark.parametrize(
    ("layout", "start"),
    [
        ({}, "\ufeff"),
        ({"indent": 2}, "\n \r\n\t"),
        ({"separators": (",", ":")}, ""),
        ({"ensure_ascii": False}, "\ufeff\n"),
    ],
)
def test_a_json_list_gives_its_items_with_their_numbers(tmp_path, layout, start):
    questions = ["Hi", 'a "quoted" \\ [text], {with} marks', "größer 😀 \u2028", "5"]
    file = tmp_path / "chats.json"
    file.write_text(start + json.dumps([chat(one) for one in questions], **layout) + " \n\n", encoding="utf-8")
    records = read_all(file)
    assert [record.messages[0].content for record in records] == questions
    assert [record.where for record in records] == [f"{file}, item {number}" for number in range(4)]


def test_empty_lists_and_files_have_no_records(tmp_path):
    for name, content in {
        "a.json": "[]",
        "b.json": " [ \n ] ",
        "c.json": "",
        "d.jsonl": "",
        "e.json": "\ufeff",
    }.items():
        (tmp_path / name).write_text(content)
        assert read_all(tmp_path / name) == []


BAD_LISTS = {
    "no comma": ('[{"a": 1}, {"a": 2} {"a": 3}]', "broken in item 1", "item 1"),
    "broken in the middle": ('[{"a": 1}, {"a": 2}, {"a": oops}, {}' + " " * 99 + "]", "broken in item 2", "item 2"),
    "cut in an item": ('[{"a": 1}, {"a": 2}, {"a": "thr', "cut short in item 2", "item 2"),
    "cut after an item": ('[{"a": 1}, {"a": 2}', "cut short in item 1", "item 1"),
    "comma at the end": ('[{"a": 1}, {"a": 2}, ]', "a comma follows the last item", "item 2"),
    "text after it": ('[{"a": 1}]\n{"a": 2}', "text follows the end of the list", "item 1"),
    "nested too deeply": ('[{"a": 1}, ' + "[" * 200_000, "broken in item 1", "item 1"),
    "NUL bytes": ('[{"a": 1}, \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0]', "broken in item 1", "item 1"),
}


@pytest.mark.parametrize("case", BAD_LISTS)
def test_a_broken_list_is_refused_with_its_item_and_byte(tmp_path, case):
    content, words, place = BAD_LISTS[case]
    file = tmp_path / "chats.json"
    file.write_text(content)
    with pytest.raises(PrepError, match=words) as error:
        read_all(file)
    assert error.value.where == f"{file}, {place}"
    assert "byte" in error.value.what
    assert error.value.fix


def test_text_that_is_not_utf8_makes_one_item_bad_and_not_the_list(tmp_path):
    file = tmp_path / "chats.json"
    data = json.dumps([chat("one"), chat("two"), chat("three")]).encode()
    file.write_bytes(data.replace(b"two", b"t\xffo"))
    one, two, three = read_all(file)
    assert isinstance(one, Conversation)
    assert (two.where, two.reason) == (f"{file}, item 1", BadReason.NOT_UTF8)
    assert isinstance(three, Conversation)


def test_long_integers_do_not_end_the_reading(tmp_path):
    file = tmp_path / "chats.json"
    file.write_text(f'[{{"id": {"9" * 5000}}}, {json.dumps(chat("Hi"))}]')
    first, second = read_all(file)
    assert isinstance(first, BadRecord)
    assert isinstance(second, Conversation)


@pytest.mark.parametrize(
    ("name", "content", "words", "fix"),
    [
        ("a.json", json.dumps({"data": [chat("Hi")]}, indent=1), "one JSON object over several lines", "jq -c"),
        ("a.jsonl", json.dumps([chat("Hi")], indent=1), "but its name indicates one record per line", ".json"),
        ("a.jsonl", "PAR1" + "x" * 99, "the file is Parquet", "rename"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0).decode("latin-1"), "the file is gzip", "rename"),
        ("a.xlsx", "PK\x03\x04" + "x" * 99, "the file is zip", "export a spreadsheet as .csv"),
        ("a.md", "# Notes\n", "the file is plain text", "jq -cR"),
        ("a.json", "\xff\xfe{\0}\0", "UTF-16", "iconv"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused_with_the_fix(tmp_path, name, content, words, fix):
    file = tmp_path / name
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(PrepError, match=words) as error:
        read_all(file)
    assert error.value.where == str(file)
    assert fix in error.value.fix


@pytest.mark.parametrize("broken", [b'["\xed\xa0\x80"]', b'["\\x"]'])
def test_a_broken_list_on_the_first_line_of_jsonl_is_one_bad_record_as_on_any_line(tmp_path, broken):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(broken + b"\n" + json.dumps(chat("Hi")).encode() + b"\n" + broken)
    first, second, third = read_all(file)
    assert isinstance(second, Conversation)
    assert first.reason == third.reason in (BadReason.NOT_UTF8, BadReason.NOT_JSON)


def test_marks_line_ends_of_windows_and_nul_bytes_in_jsonl(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(chat("1")).encode() + b"\r\n\r\n\0\0\0\n" + json.dumps(chat("2")).encode()
    )
    one, nul, two = read_all(file)
    assert (one.where, two.where) == (f"{file}, line 1", f"{file}, line 4")
    assert (nul.where, nul.reason) == (f"{file}, line 3", BadReason.NOT_JSON)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_a_record_without_an_end_is_refused_before_memory_is_full(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text, "MAX_RECORD_BYTES", 1 << 20)
    file = tmp_path / name
    good = json.dumps(chat("Hi"))
    head = good + "\n" if name.endswith("l") else f"[{good}, "
    file.write_text(head + '{"messages": "' + "x" * (20 << 20))
    tracemalloc.start()
    with pytest.raises(PrepError, match=r"the (line|item) is longer|longer than 1 MiB") as error:
        read_all(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.value.where == f"{file}, {'line 2' if name.endswith('l') else 'item 1'}"
    assert peak < 16 << 20


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_a_record_of_20_mb_is_read_whole(tmp_path, name):
    records = [chat("before"), chat("x" * (20 << 20)), chat("after")]
    lines = [json.dumps(record) for record in records]
    file = tmp_path / name
    file.write_text("\n".join(lines) if name.endswith("l") else f"[{', '.join(lines)}]")
    assert [len(record.messages[0].content) for record in read_all(file)] == [6, 20 << 20, 5]


def test_reading_a_long_list_takes_memory_for_its_window_only(tmp_path):
    file = tmp_path / "chats.json"
    file.write_text("[" + ",\n".join([json.dumps(chat("x" * 1000))] * 30_000) + "]")
    tracemalloc.start()
    assert sum(len(chunk.records) for chunk in read_chunks([file])) == 30_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.stat().st_size > 30 << 20
    assert peak < 16 << 20


def test_json_files_of_a_folder_count_only_if_they_hold_chats(tmp_path):
    contents = {
        "a.json": json.dumps([chat("Hi")]),
        "b.json": json.dumps(chat("Hi")) + "\n" + json.dumps(chat("Ho")),
        "config.json": json.dumps({"model": "x"}),
        "pretty.json": json.dumps({"version": 1, "files": []}, indent=2),
        "numbers.json": "[1, 2, 3]",
        "dataset_infos.json": json.dumps({"text": "about"}),
        "empty.json": "",
        "broken.json": "[{oops",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    found = find_files(SourceConfig(path=str(tmp_path)))
    assert [file.name for file in found.files] == ["a.json", "b.json", "broken.json"]
    assert len(found.skipped) == 5


def texts(record):
    assert isinstance(record, Conversation), record
    return [message.content for message in record.messages]


@pytest.mark.parametrize("name", ["a.csv", "a.CSV", "a.csv.gz", "a.csv.zst", "a.tsv"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_values_stay_texts_and_a_quoted_one_may_have_line_ends_and_separators(tmp_path, name, mark):
    content = mark + (BOND.replace(b",", b"\t") if name == "a.tsv" else BOND)
    packed = {".gz": gzip.compress, ".zst": lambda data: pa.Codec("zstd").compress(data).to_pybytes()}
    (tmp_path / name).write_bytes(packed.get(name[-3:] if name[-3:] == ".gz" else name[-4:], bytes)(content))
    one, two = read_all(tmp_path / name)
    comma = "\t" if name == "a.tsv" else ","
    assert texts(one) == ["007", f'James "Bond"{comma}\r\nof MI6']
    assert texts(two) == ["1e5", "NaN"]
    assert [record.where.rpartition(", ")[2] for record in (one, two)] == ["line 2", "line 5"]


@pytest.mark.parametrize(
    ("header", "row", "schema"),
    [
        ("prompt,completion", "Hi,Hello", "prompt_completion"),
        ("instruction,input,output", "Hi,,Hello", "alpaca"),
        ("question,answer", "Hi,Hello", "pairs"),
        (
            "id,messages",
            '7,"[{""role"": ""user"", ""content"": ""Hi""}, {""role"": ""assistant"", ""content"": ""Hello""}]"',
            "messages",
        ),
    ],
)
def test_columns_are_read_as_the_fields_of_a_schema(tmp_path, header, row, schema):
    (tmp_path / "chats.csv").write_text(f"{header}\n{row}\n")
    found = find_files(SourceConfig(path=str(tmp_path)))
    assert find_schema(found.files, SourceConfig())[0].schema == schema
    (record,) = read_all(found.files[0])
    assert texts(record) == ["Hi", "Hello"]


def test_other_columns_are_named_with_the_setting_that_maps_them(tmp_path):
    (tmp_path / "chats.csv").write_text("Frage,Antwort\nHi,Hello\n")
    files = find_files(SourceConfig(path=str(tmp_path))).files
    with pytest.raises(PrepError) as caught:
        find_schema(files, SourceConfig())
    assert "fields: Frage, Antwort" in caught.value.what
    assert "source.columns.prompt=question" in caught.value.fix
    columns = {"prompt": "Frage", "completion": "Antwort"}
    assert find_schema(files, SourceConfig(columns=columns))[0].schema == "prompt_completion"


def test_rows_of_other_widths_and_with_broken_text_are_bad_with_their_lines(tmp_path):
    content = b'question,answer\nA,"B\nB"\nC\nD,E,F\nG,\xff\nH,"I"J\nK,L\n'
    (tmp_path / "a.csv").write_bytes(content)
    first, *bad, last = read_all(tmp_path / "a.csv")
    assert texts(first) == ["A", "B\nB"]
    assert texts(last) == ["K", "L"]
    assert all(isinstance(record, BadRecord) for record in bad)
    assert [(record.where.rpartition(", ")[2], record.reason) for record in bad] == [
        ("line 4", BadReason.BAD_ROW),
        ("line 5", BadReason.BAD_ROW),
        ("line 6", BadReason.NOT_UTF8),
        ("line 7", BadReason.BAD_ROW),
    ]
    assert "3 columns, but the header has 2: question, answer" in bad[1].detail


@pytest.mark.parametrize(
    ("content", "words", "fix"),
    [
        ('prompt,completion\nA,B\nC,"D\nE,F\n', "ends within quoted text", "close the quote"),
        ("prompt;completion\nA;B\n", "seems to be separated by ';'", "commas in .csv"),
        ("prompt,prompt\nA,B\n", "several columns have the name 'prompt'", "rename"),
    ],
)
def test_files_that_cannot_be_divided_into_rows_are_refused(tmp_path, content, words, fix):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(PrepError) as caught:
        read_all(tmp_path / "a.csv")
    assert words in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where.endswith("line 3" if "quoted" in words else "line 1")


def test_a_quote_that_is_never_closed_is_refused_before_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_RECORD_BYTES", 10_000)
    (tmp_path / "a.csv").write_text('prompt,completion\nA,"B\n' + "C,D\n" * 5000)
    with pytest.raises(PrepError, match="longer than"):
        read_all(tmp_path / "a.csv")


def test_tables_without_chats_beside_chats_are_left_out(tmp_path):
    (tmp_path / "chats.csv").write_text("prompt,completion\nA,B\n")
    (tmp_path / "lengths.csv").write_text("name,count\nA,1\n")
    assert list_files(str(tmp_path)) == [tmp_path / "chats.csv"]


def test_chats_in_a_file_of_text_are_read(tmp_path):
    (tmp_path / "chats.txt").write_text('{"prompt": "A", "completion": "B"}\n')
    (record,) = read_all(tmp_path / "chats.txt")
    assert texts(record) == ["A", "B"]
