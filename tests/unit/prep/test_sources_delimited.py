"""CSV and TSV files are records of text by the names in their header; rows that do not fit are named by their line."""

from __future__ import annotations

import gzip

import pyarrow as pa
import pytest

from harness.errors import PrepError
from harness.prep.chat import BadReason, BadRecord, Conversation
from harness.prep.sources import delimited
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import find_files, list_files
from harness.prep.sources.reading import read_chunks
from harness.prep.sources.schema import find_schema

BOND = b'prompt,completion\r\n007,"James ""Bond"",\r\nof MI6"\r\n\r\n1e5,NaN\r\n'


def read_all(file):
    return [record for chunk in read_chunks([file]) for record in chunk.parse()]


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
        ("prompt;completion\nA;B\n", "';' seems to separate", "commas in .csv"),
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
    monkeypatch.setattr(delimited, "MAX_RECORD_BYTES", 10_000)
    (tmp_path / "a.csv").write_text('prompt,completion\nA,"B\n' + "C,D\n" * 5000)
    with pytest.raises(PrepError, match="longer than"):
        read_all(tmp_path / "a.csv")


def test_tables_without_chats_beside_chats_are_left_out(tmp_path):
    (tmp_path / "chats.csv").write_text("prompt,completion\nA,B\n")
    (tmp_path / "lengths.csv").write_text("name,count\nA,1\n")
    assert list_files(str(tmp_path)) == [tmp_path / "chats.csv"]


def test_plain_text_is_refused_with_the_command_that_makes_records(tmp_path):
    (tmp_path / "book.txt").write_text("Call me Ishmael.\n")
    with pytest.raises(PrepError) as caught:
        read_all(tmp_path / "book.txt")
    assert "plain text" in caught.value.what
    assert "jq -cR" in caught.value.fix
    (tmp_path / "chats.txt").write_text('{"prompt": "A", "completion": "B"}\n')
    (record,) = read_all(tmp_path / "chats.txt")
    assert texts(record) == ["A", "B"]
