"""Token shards become .bin and .idx files: every form of shard, the same bytes, a clear error for each fault."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import ConfigError, FormatError, HarnessError, PrepError
from harness.indexed import token_shards
from harness.indexed.convert import TokenFamily, TokenSource, convert_tokens, verify_family, write_family
from harness.indexed.index import MappedIndex, verify_indexed

ROWS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def shard(path: Path, rows, *, kind=None, column: str = "input_ids", **options) -> str:
    pq.write_table(pa.table({column: pa.array(rows, kind or pa.list_(pa.int32()))}), path, **options)
    return str(path)


def sequences_of(prefix: Path) -> list[list[int]]:
    index = MappedIndex(Path(f"{prefix}.idx"))
    tokens = np.fromfile(f"{prefix}.bin", index.header.dtype).tolist()
    ends = np.cumsum(index.lengths).tolist()
    return [tokens[end - length : end] for end, length in zip(ends, index.lengths.tolist(), strict=True)]


def documents_of(prefix: Path) -> list[int]:
    return MappedIndex(Path(f"{prefix}.idx")).documents.tolist()


def built_by_megatron(prefix: Path, rows, dtype) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for row in rows:
        builder.add_document(row, [len(row)])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize(
    ("largest", "dtype", "batch"),
    [(65_535, np.uint16, 1 << 20), (65_536, np.int32, 1 << 20), (2**31 - 1, np.int32, 64)],
)
def test_shards_become_the_bytes_of_megatrons_builder(tmp_path: Path, monkeypatch, largest: int, dtype, batch) -> None:
    monkeypatch.setattr(token_shards, "_BATCH_TOKENS", batch)
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 60_000, size).tolist() for size in generator.integers(1, 50, 300)]
    # The token that needs more comes late, after much was written as uint16.
    rows[-1][-1] = largest
    shard(tmp_path / "s_2.parquet", rows[:100], row_group_size=30)
    shard(tmp_path / "s_10.parquet", rows[100:200], kind=pa.large_list(pa.int64()))
    shard(tmp_path / "s_11.parquet", [], row_group_size=30)
    shard(tmp_path / "s_12.parquet", rows[200:], kind=pa.list_(pa.uint32()), row_group_size=7, compression="zstd")
    report = convert_tokens([str(tmp_path)], str(tmp_path / "out" / "ours"))
    built_by_megatron(tmp_path / "theirs", rows, dtype)
    for suffix in (".bin", ".idx"):
        ours, theirs = tmp_path / f"out/ours{suffix}", tmp_path / f"theirs{suffix}"
        assert ours.read_bytes() == theirs.read_bytes()
    assert (report.num_documents, report.dtype) == (300, np.dtype(dtype).name)
    assert verify_indexed(tmp_path / "out" / "ours") == []


FORMS = {
    "list<int64>": pa.array(ROWS, pa.list_(pa.int64())),
    "list<uint8>": pa.array(ROWS, pa.list_(pa.uint8())),
    "large_list": pa.array(ROWS, pa.large_list(pa.int32())),
    "fixed_size_list": pa.array([[5, 6], [7, 8]], pa.list_(pa.int16(), 2)),
    "text": pa.array(["5 6 7", " 8", "9,10, 11\t12 "]),
    "text between other spaces": pa.array(["\f5 6 7", "8\f", "9\f10,\n11\r\n12"]),
    "JSON text": pa.array(["[5, 6, 7]", "[8]", "[9,10,11,12]"], pa.large_string()),
    "a slice": pa.array([[1, 2], *ROWS, [3]], pa.list_(pa.int32())).slice(1, 3),
    "a slice of fixed size": pa.array([[1, 2], [5, 6], [7, 8], [3, 4]], pa.list_(pa.int32(), 2)).slice(1, 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_stored_form_of_a_document_gives_the_same_tokens(name: str) -> None:
    batch = token_shards.parse_column(FORMS[name])
    fixed = "fixed" in name
    assert batch.tokens.tolist() == ([5, 6, 7, 8] if fixed else [5, 6, 7, 8, 9, 10, 11, 12])
    assert batch.lengths.tolist() == ([2, 2] if fixed else [3, 1, 4])
    assert batch.documents.tolist() == ([1, 1] if fixed else [1, 1, 1])


@pytest.mark.parametrize("eod", [None, 3, 70_000])
def test_a_document_of_several_sequences_stays_one_document(tmp_path: Path, eod: int | None) -> None:
    rows = [[[5, 6], [7]], [[], [8]], [], [[]], [[9, 10]]]
    source = shard(tmp_path / "s.parquet", rows, kind=pa.list_(pa.list_(pa.uint16())))
    report = convert_tokens([source], str(tmp_path / "x"), source=TokenSource(eod=eod))
    end = [] if eod is None else [eod]
    assert sequences_of(tmp_path / "x") == [[5, 6], [7, *end], [8, *end], [9, 10, *end]]
    assert documents_of(tmp_path / "x") == [0, 2, 3, 4]
    assert (report.num_documents, report.empty_documents) == (3, 2)
    with pytest.raises(PrepError, match="2 rows in one batch have no tokens"):
        convert_tokens([source], str(tmp_path / "y"), source=TokenSource(empty="refuse"))
    assert not list(tmp_path.glob("*y*"))


def test_the_vocabulary_bounds_tokens_and_fixes_the_dtype(tmp_path: Path) -> None:
    source = shard(tmp_path / "s.parquet", ROWS)
    assert convert_tokens([source], str(tmp_path / "x"), source=TokenSource(vocab_size=65_537)).dtype == "int32"
    assert convert_tokens([source], str(tmp_path / "y"), source=TokenSource(vocab_size=65_536)).dtype == "uint16"
    with pytest.raises(PrepError, match="token id 12 is outside the vocabulary of 12") as caught:
        convert_tokens([source], str(tmp_path / "z"), source=TokenSource(vocab_size=12))
    assert caught.value.where == source
    with pytest.raises(ConfigError, match="the token 12 is not between 0 and 11"):
        TokenSource(vocab_size=12, eod=12)


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ([[1], [2, -3]], pa.list_(pa.int32()), "row 101 has the token -3 at position 1"),
        (
            [[1], [], [2**31]],
            pa.list_(pa.int64()),
            "row 102 has the token 2147483648 at position 0, expected 0 to 2,147,483,647",
        ),
        ([[1], [2**63]], pa.list_(pa.uint64()), "row 101 has the token 9223372036854775808 at position 0"),
        ([[1], None], pa.list_(pa.int32()), "row 101 is null (1 of 1 in this batch)"),
        ([[1], [2, None]], pa.list_(pa.int32()), "row 101 has the token None at position 1"),
        ([[[1]], [[1], None]], pa.list_(pa.list_(pa.int32())), "a sequence of row 101 is null"),
        ([[[1]], [[1], [2, -3]]], pa.list_(pa.list_(pa.int32())), "row 101 has the token -3 at position 1"),
        ([[1.5]], pa.list_(pa.float32()), "is of type list<element: float>, expected lists of integers"),
        ([["a"]], pa.list_(pa.string()), "is of type list<element: string>"),
        ([5], pa.int32(), "is of type int32, expected lists"),
        (["5 6", "5 six 7"], pa.string(), "row 101 contains the text 'six' instead of a token id"),
        (["5 6", "5 99999999999999999999"], pa.string(), "row 101 contains the text '99999999999999999999'"),
        (["5 6", None], pa.string(), "row 101 is null"),
    ],
)
def test_an_invalid_token_is_reported_with_file_and_row(tmp_path: Path, rows, kind, message: str) -> None:
    first = rows[:1] * 100
    source = shard(tmp_path / "s.parquet", first + rows, kind=kind, row_group_size=100)
    with pytest.raises(PrepError) as caught:
        convert_tokens([source], str(tmp_path / "out" / "x"))
    assert message in caught.value.what
    assert caught.value.where == f"{source}, column input_ids"
    assert list((tmp_path / "out").iterdir()) == []


def test_files_that_are_not_token_shards_are_refused_by_name(tmp_path: Path) -> None:
    whole = Path(shard(tmp_path / "s.parquet", ROWS)).read_bytes()
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(whole))
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "cut.parquet").write_bytes(whole[:-9])
    (tmp_path / "other.parquet").write_bytes(b"something else")
    for name in ("a.parquet.gz", "empty.parquet", "cut.parquet", "other.parquet", "nothing"):
        words = "there are no token shards" if name == "nothing" else "the shard cannot be read"
        with pytest.raises(PrepError, match=words) as caught:
            convert_tokens([str(tmp_path / name)], str(tmp_path / "x"))
        assert name in caught.value.where
    with pytest.raises(PrepError, match="has no column 'tokens'") as caught:
        convert_tokens([str(tmp_path / "s.parquet")], str(tmp_path / "x"), source=TokenSource(column="tokens"))
    assert "input_ids" in caught.value.fix
    with pytest.raises(FormatError, match="no document was written"):
        convert_tokens([shard(tmp_path / "none.parquet", [])], str(tmp_path / "x"))
    assert not list(tmp_path.glob("x*"))


def test_a_damaged_byte_of_a_shard_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    rows = [list(range(40))] * 20
    original = Path(shard(tmp_path / "s.parquet", rows, write_page_checksum=True, compression="zstd")).read_bytes()
    (tmp_path / "d").mkdir()
    caught = 0
    for position in range(4, len(original), 41):
        damaged = bytearray(original)
        damaged[position] ^= 16
        (tmp_path / "d" / "s.parquet").write_bytes(damaged)
        try:
            convert_tokens([str(tmp_path / "d")], str(tmp_path / "x"), overwrite=True)
        except HarnessError:
            caught += 1
        else:
            assert sequences_of(tmp_path / "x") == rows
    assert caught > 5


def test_a_family_has_a_pair_for_each_split_and_the_files_that_megatron_reads(tmp_path: Path) -> None:
    rows = [[number, number + 1] for number in range(1000)]
    source = shard(tmp_path / "s.parquet", rows)
    family = TokenFamily("corpus-1", {"train": 80, "test": 20}, TokenSource(eod=7, vocab_size=2000))
    report = write_family([source], tmp_path / "out", family)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "corpus-1.json",
        "corpus-1_sequences.json",
        "corpus-1_splits.json",
        *(f"corpus-1_{split}.{suffix}" for split in ("test", "train") for suffix in ("bin", "idx")),
    ]
    stored = {name: sequences_of(tmp_path / "out" / f"corpus-1_{name}") for name in ("train", "test")}
    assert sorted(stored["train"] + stored["test"]) == [[*row, 7] for row in rows]
    assert 750 < len(stored["train"]) < 850
    prefixes = {name: str(tmp_path / "out" / f"corpus-1_{name}") for name in ("train", "test")}
    splits = json.loads((tmp_path / "out" / "corpus-1_splits.json").read_text())
    assert splits == {"train": [prefixes["train"]], "valid": None, "test": [prefixes["test"]]}
    counts = json.loads((tmp_path / "out" / "corpus-1_sequences.json").read_text())
    assert counts == {prefixes[name]: [len(stored[name]), len(stored[name]) + 1] for name in stored}
    assert report["train"].num_documents == len(stored["train"])


def test_each_split_may_have_its_own_shards(tmp_path: Path) -> None:
    sources = {"train": [shard(tmp_path / "a.parquet", ROWS)], "valid": [shard(tmp_path / "b.parquet", [[70_000]])]}
    report = write_family(sources, tmp_path / "out", TokenFamily("c", {"train": 1, "valid": 1}))
    assert sequences_of(tmp_path / "out" / "c_train") == ROWS
    assert sequences_of(tmp_path / "out" / "c_valid") == [[70_000]]
    # One tokenizer made them, and Megatron may derive one dtype from it.
    assert [one.dtype for one in report.values()] == ["int32", "int32"]
    # Megatron does so given counts; only the vocabulary size shows whether that is right.
    assert not (tmp_path / "out" / "c_sequences.json").exists()
    with pytest.raises(ConfigError, match="there are shards for train, valid but the splits are train"):
        write_family(sources, tmp_path / "out", TokenFamily("c"))


def test_a_document_stays_in_its_split_among_other_documents_and_integer_types(tmp_path: Path) -> None:
    rows = [[number, number + 1] for number in range(400)]
    one = shard(tmp_path / "one.parquet", rows[:200])
    other = shard(tmp_path / "other.parquet", rows[::-1], kind=pa.list_(pa.int64()))
    family = TokenFamily("c", {"train": 0.5, "valid": 0.5})
    write_family([one], tmp_path / "a", family)
    write_family([other], tmp_path / "b", family)
    first = {tuple(row) for row in sequences_of(tmp_path / "a" / "c_valid")}
    second = {tuple(row) for row in sequences_of(tmp_path / "b" / "c_valid")}
    assert first == {row for row in second if row[0] < 200}


@pytest.mark.parametrize(
    ("name", "splits", "words"),
    [
        *((name, {"train": 1}, "is not valid in a file name") for name in ("", "../up", "a/b", ".hidden", "a b")),
        *(("c", splits, "are not valid") for splits in ({}, {"dev": 1}, {"train": 0}, {"train": -1, "valid": 2})),
        ("c", {"train": float("nan")}, "are not valid"),
    ],
)
def test_names_and_splits_that_make_no_family_are_refused(name: str, splits: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TokenFamily(name, splits)


def test_a_changed_token_of_a_family_is_detected_by_its_hash(tmp_path: Path) -> None:
    write_family([shard(tmp_path / "s.parquet", ROWS)], tmp_path / "out", TokenFamily("c"))
    record, data = str(tmp_path / "out" / "c.json"), tmp_path / "out" / "c_train.bin"
    assert verify_family(record) == []
    damaged = bytearray(data.read_bytes())
    damaged[0] ^= 1
    data.write_bytes(damaged)
    assert verify_indexed(tmp_path / "out" / "c_train") == []
    assert ["has the hash" in one.what for one in verify_family(record)] == [True]
    data.unlink()
    assert "cannot be read" in verify_family(record)[0].what


@pytest.mark.parametrize(
    "change",
    [{"files": {"c_train.bin": "xxh3"}}, {"splits": {"train": "prefix"}}, {"source": {"vocab_size": "many"}}, {}],
)
def test_a_file_that_only_resembles_the_record_of_a_family_is_none(tmp_path: Path, monkeypatch, change) -> None:
    write_family([shard(tmp_path / "s.parquet", ROWS)], tmp_path / "out", TokenFamily("c"))
    path = tmp_path / "out" / "c.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    monkeypatch.setattr("harness.indexed.convert._MAX_RECORD_BYTES", path.stat().st_size - (not change), raising=False)
    assert [one.what for one in verify_family(str(path))] == ["is not a record of a token family"]


def test_settings_of_a_family_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    family = TokenFamily("c", {"train": np.float32(1)}, TokenSource(eod=np.int64(3), vocab_size=np.int64(20)))
    write_family([shard(tmp_path / "s.parquet", ROWS)], tmp_path / "out", family)
    assert verify_family(str(tmp_path / "out" / "c.json")) == []


def test_two_stars_match_shards_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = [shard(tmp_path / "a" / "s.parquet", ROWS), shard(tmp_path / "s.parquet", ROWS)]
    assert [str(path) for path in token_shards.list_shards([str(tmp_path / "**" / "*.parquet")])] == paths


def test_commands_convert_merge_count_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shard(tmp_path / "s.parquet", ROWS)
    run = CliRunner()

    def output_of(*arguments: str, code: int = 0) -> str:
        done = run.invoke(app, arguments)
        assert done.exit_code == code, done.output
        return done.output

    assert "3 documents, 3 sequences, 11 tokens as uint16" in output_of(
        "indexed", "convert", "s.parquet", "x", "data.eod=1"
    )
    output_of("indexed", "merge", "x", "x.idx", "xx")
    output_of("indexed", "counts", "x", "xx", "c.json")
    assert json.loads(Path("c.json").read_text()) == {"x": [3, 4], "xx": [6, 7]}
    assert json.loads(output_of("indexed", "family", "f", "c", "s.parquet", "--json"))[0]["num_tokens"] == 8
    output_of("indexed", "family", "g", "c", "shards.train=s.parquet", "shards.valid=s.parquet")
    assert sequences_of(Path("g/c_train")) == sequences_of(Path("g/c_valid")) == ROWS
    for path in ("x", "x.idx", "xx.bin", "f/c.json", "g/c.json"):
        note, _, found = output_of("verify", path).rpartition("note: ")[2].rpartition(f"{path}: ")
        assert found == "nothing wrong\n"
        # What a pair cannot show, its family's record does.
        assert ("harness indexed family" in note) == (not path.endswith(".json"))
    # Of a folder all pairs are checked, those of a family against its record alone.
    Path("x.idx").rename("g/x.idx")
    Path("x.bin").rename("g/x.bin")
    assert output_of("verify", "g").endswith("g: nothing wrong\n")
    Path("g/x.bin").unlink()
    assert "x.bin is missing" in output_of("verify", "g", code=1)
    damaged = bytearray(Path("g/c_valid.bin").read_bytes())
    damaged[0] ^= 1
    Path("g/c_valid.bin").write_bytes(damaged)
    assert "has the hash" in output_of("verify", "g", code=1)
    assert "note" not in output_of("verify", "f")
    Path("xx.bin").unlink()
    assert "xx.bin is missing" in output_of("verify", "xx.idx", code=1)


MEMORY = """
import sys
from harness.indexed.convert import TokenSource, convert_tokens
convert_tokens(sys.argv[1:2] * int(sys.argv[2]), sys.argv[3], source=TokenSource(eod=1))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.nightly  # reads resident memory: needs a quiet machine
def test_memory_does_not_grow_with_the_shards_nor_their_row_groups(tmp_path: Path) -> None:
    offsets = np.arange(0, 12_000_001, 60, dtype=np.int32)
    tokens = np.arange(12_000_000, dtype=np.int32) % 60_000
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    # One row group of three times a batch.
    pq.write_table(table, tmp_path / "s.parquet", compression="zstd")
    peaks = []
    for times in (1, 8):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path / "s.parquet"), str(times), str(tmp_path / str(times))],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout))
    # The output alone grows from 24 to 195 MB.
    assert peaks[1] - peaks[0] < 40_000, peaks
    assert peaks[1] < 250_000, peaks
