"""Parquet: files of other tools, single files, row groups, and damaged footers."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_packs import write_packs

from harness.errors import FormatError
from harness.formats import Provenance, open_dataset, open_writer
from harness.formats.layouts import parquet_packs
from harness.formats.layouts.parquet import SCHEMA, ParquetShard
from harness.formats.layouts.parquet_packs import _HEADER, SEGMENT_TOKENS, _decode_pack, find_table
from harness.formats.layouts.parquet_pages import Chunk, encode_number, fetch_columns
from harness.records import Pack
from harness.storage.inputs import LocalSource

ROWS = {
    "input_ids": [[1, 2, 3, 70_000, 5], [9], [4, 4, 4]],
    "loss_mask": [[0, 1, 0, 1, 0], [0], [1, 1, 0]],
    "seq_start_id": [[0, 3], [0], [0]],
}
PACKS = [Pack(*row) for row in zip(ROWS["input_ids"], ROWS["loss_mask"], ROWS["seq_start_id"], strict=True)]


def foreign_file(path: Path, rows: dict[str, Any] = ROWS, types: tuple[Any, ...] = (), **options: Any) -> Path:
    columns = {name: pa.array(values) for name, values in rows.items()}
    for name, kind in zip(rows, types, strict=False):
        columns[name] = pa.array(rows[name], kind)
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize(
    "types",
    [
        (),
        (pa.list_(pa.int64()), pa.list_(pa.int8()), pa.list_(pa.int64())),
        (pa.large_list(pa.uint32()), pa.list_(pa.uint8()), pa.list_(pa.int16())),
    ],
)
@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_files_of_other_tools_are_read_with_their_integer_types(tmp_path: Path, types: Any, compression: str) -> None:
    path = foreign_file(tmp_path / "data.idx.parquet", types=types, compression=compression, row_group_size=2)
    reader = open_dataset(path)
    assert list(reader) == PACKS
    assert (reader.pack_size, reader.manifest) == (5, None)
    assert reader.sequence_lengths.tolist() == [3, 2, 1, 3]
    assert reader.pack_offsets.tolist() == [0, 2, 3, 4]


def test_page_checksums_of_files_of_other_tools_are_compared(tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    path = foreign_file(tmp_path / "data.parquet", write_page_checksum=True, **options)
    assert list(open_dataset(path)) == PACKS
    data = path.read_bytes()
    at = data.index((70_000).to_bytes(4, "little"))
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(FormatError, match="damaged or not a Parquet file"):
        list(open_dataset(path))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_ids": [[1 << 40], [9], [4, 4, 4]]}, "do not fit int32"),
        ({"loss_mask": [[0, 1], [0], [1, 1, 0]]}, "seq_start_id of pack 0 do not"),
        ({"loss_mask": [[0, 1, 0, 1, 0], [7], [1, 1, 0]]}, "loss_mask 7"),
        ({"seq_start_id": [[0, 3], [0], [0, 3]]}, "seq_start_id of pack 2 do not"),
        ({"seq_start_id": [[0, 3], [1], [0]]}, "seq_start_id of pack 1 do not"),
        ({"seq_start_id": [[0, 3], [], [0]]}, "pack 1 refers to no sequences"),
        ({"input_ids": [[1, 2, 3, 4, None], [9], [4, 4, 4]]}, "missing values in input_ids"),
        ({"input_ids": [[1.5], [9.0], [4.0]]}, "expected a list of integers"),
        ({"input_ids": [1, 2, 3]}, "expected a list of integers"),
    ],
)
def test_foreign_rows_that_break_an_invariant_are_errors(tmp_path: Path, change: Any, problem: str) -> None:
    path = foreign_file(tmp_path / "data.parquet", {**ROWS, **change})
    with pytest.raises(FormatError, match=problem):
        list(open_dataset(path))


def test_a_shard_of_another_schema_and_one_of_thousands_of_columns_are_errors_on_open(tmp_path: Path) -> None:
    foreign_file(tmp_path / "a_1.parquet")
    pq.write_table(pa.table({"text": ["x"], "input_ids": [[1]]}), tmp_path / "a_2.parquet")
    with pytest.raises(FormatError, match="has no column loss_mask, only text, input_ids") as caught:
        open_dataset(tmp_path)
    assert "a_2.parquet" in caught.value.where
    names = [f"c{number}" for number in range(3000)]
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "wide.parquet")
    with pytest.raises(FormatError, match="3,000 columns"):
        open_dataset(tmp_path / "wide.parquet")


def test_a_single_file_holds_its_manifest_and_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "sft.parquet"
    write_packs(path, PACKS, pack_size=8, provenance=Provenance(tokenizer="t", seed=3, counts={"dropped": 2}))
    reader = open_dataset(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["sft.parquet"]
    assert list(reader) == PACKS
    assert reader.pack_size == 8
    assert reader.manifest is not None
    assert reader.manifest.provenance == Provenance(tokenizer="t", seed=3, counts={"dropped": 2})
    assert (reader.manifest.num_tokens, reader.manifest.num_trained_tokens) == (9, 4)
    with pytest.raises(FormatError, match="already contains a dataset"), open_writer(path, pack_size=8):
        pass


def test_row_groups_are_small_and_checked(tmp_path: Path) -> None:
    write_packs(tmp_path / "data", PACKS, pack_size=8, rows_per_group=2)
    file = pq.ParquetFile(tmp_path / "data" / "shard_000000.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(2)] == [2, 1]
    assert [str(field.type) for field in file.schema_arrow] == [
        "list<element: int32 not null>",
        "list<element: uint8 not null>",
        "list<element: int32 not null>",
    ]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    with pytest.raises(FormatError, match="row group 1"):
        _flip_and_read(
            tmp_path / "data" / "shard_000000.parquet", file.metadata.row_group(1).column(0).data_page_offset
        )


def _flip_and_read(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset + 30] ^= 1
    path.write_bytes(data)
    list(open_dataset(path.parent))


def test_few_decoded_row_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.formats.layouts.parquet.CACHE_BYTES", 200)
    rows = {
        "input_ids": [[number] * 8 for number in range(20)],
        "loss_mask": [[0] * 8] * 20,
        "seq_start_id": [[0]] * 20,
    }
    shard = ParquetShard(foreign_file(tmp_path / "one.parquet", rows, row_group_size=1))
    read = shard.read(list(range(20)))
    assert [int(pack.input_ids[0]) for pack, _ in read] == list(range(20))
    assert 1 <= len(shard._cache) <= 3


def test_a_file_of_an_earlier_version_opens_with_the_same_packs_and_fingerprint(tmp_path: Path) -> None:
    # Written before there were pages of single packs: 10 packs in row groups of 4, one page for each column.
    old = open_dataset(Path(__file__).parents[2] / "golden" / "row_groups.parquet")
    packs = list(old)
    assert [len(pack) for pack in packs] == list(range(30, 301, 30))
    assert [len(pack) for pack in old.read([9, 0, 5])] == [300, 30, 180]
    new = open_dataset(write_packs(tmp_path / "new.parquet", packs, pack_size=300))
    assert old.fingerprint == old.digest_packs() == new.digest_packs() == "0c24702196b3bd61d8df9ded90c0978e"


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_packs_one_by_one_take_their_own_bytes_alone(tmp_path: Path) -> None:
    packs = make_packs(100, longest=4000)
    path = write_packs(tmp_path / "data", packs, pack_size=4000) / "shard_000000.parquet"
    before = bytes_read()
    for row in np.random.default_rng(0).permutation(100).tolist():
        shard = ParquetShard(path, 4000)
        assert shard.read([row]) == [(packs[row], None)]
        shard.close()
    assert bytes_read() - before < 1.04 * path.stat().st_size


def long_packs() -> list[Pack]:
    random, packs = np.random.default_rng(3), []
    for length in (2 * SEGMENT_TOKENS, 2 * SEGMENT_TOKENS + 1, 5 * SEGMENT_TOKENS - 7):
        ids = random.zipf(1.3, length) % 150_000
        starts = np.unique([0, *random.integers(0, length, length // 900)])
        packs.append(Pack(ids, random.integers(0, 2, length), starts))
    packs.append(Pack(packs[-1].input_ids + (1 << 24), packs[-1].loss_mask, [0]))  # takes four bytes
    return packs


def check_part(got: Pack, pack: Pack, spans: Any) -> None:
    assert np.array_equal(got.loss_mask, pack.loss_mask)
    assert np.array_equal(got.seq_start_id, pack.seq_start_id)
    for first, end in spans.tolist():
        assert np.array_equal(got.input_ids[first:end], pack.input_ids[first:end])
    assert np.all((got.input_ids == pack.input_ids) | (got.input_ids == -1))


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_parts_of_long_packs_are_those_of_the_packs(long_dataset: Path, data: st.DataObject) -> None:
    reader, packs = open_dataset(long_dataset), long_packs()
    ids = data.draw(st.lists(st.integers(0, len(packs) - 1), min_size=1, max_size=4))
    spans = []
    for number in ids:
        firsts = np.array(data.draw(st.lists(st.integers(0, len(packs[number]) - 1), max_size=3)), np.int64)
        sizes = np.array([data.draw(st.integers(1, 9000)) for _ in firsts], np.int64)
        spans.append(np.stack([firsts, np.minimum(firsts + sizes, len(packs[number]))], axis=1))
    for number, each, got in zip(ids, spans, reader.read_parts(ids, spans), strict=True):
        check_part(got, packs[number], each)


@pytest.fixture(scope="module")
def long_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(
        tmp_path_factory.mktemp("long") / "data", long_packs(), format="parquet", pack_size=5 * SEGMENT_TOKENS
    )


def test_a_part_takes_its_own_bytes_and_the_masks_alone(long_dataset: Path) -> None:
    reader, (span,) = open_dataset(long_dataset), np.array([[[2 * SEGMENT_TOKENS, 3 * SEGMENT_TOKENS]]])
    reader.read([0, 2])
    before = bytes_read()
    whole = reader.read([2])[0]
    between = bytes_read()
    got = reader.read_parts([2], [span])[0]
    assert np.count_nonzero(got.input_ids >= 0) == SEGMENT_TOKENS
    # Random masks take an eighth of a byte, ids more than one.
    assert bytes_read() - between < 0.4 * (between - before)
    check_part(got, whole, span)


@pytest.mark.parametrize("size", [2 * SEGMENT_TOKENS, 1 << 30])
def test_packs_from_before_there_were_such_segments_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    packs = long_packs()
    with monkeypatch.context() as patched:
        patched.setattr(parquet_packs, "SEGMENT_TOKENS", size)
        path = write_packs(tmp_path / "data", packs, format="parquet", pack_size=5 * SEGMENT_TOKENS)
    reader = open_dataset(path)
    assert reader.read_parts([2, 1], [np.array([[0, 1]])] * 2) == [packs[2], packs[1]]


def test_a_bit_that_flips_anywhere_in_a_long_page_is_an_error_or_of_a_part_that_is_not_read(tmp_path: Path) -> None:
    packs, random, span = long_packs()[2:3], np.random.default_rng(5), np.array([[SEGMENT_TOKENS, SEGMENT_TOKENS + 9]])
    path = write_packs(tmp_path / "data", packs, format="parquet", pack_size=5 * SEGMENT_TOKENS)
    file = path / "shard_000000.parquet"
    whole, errors = file.read_bytes(), 0
    places = random.integers(4, len(whole) - 2000, 150).tolist()
    # The list of segments ends the page of ids, and the page of the mask follows.
    table, _ = table_of(file)
    (end,) = struct.unpack_from("<q", whole, table + 8)
    places += random.integers(end - 200, end, 50).tolist()
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged)
        try:
            (got,) = open_dataset(path).read_parts([0], [span])
        except FormatError:
            errors += 1
        else:
            check_part(got, packs[0], span)
    assert 50 < errors < 150  # most bytes are of the other four segments


def test_pages_of_packs_are_read_by_pyarrow_as_lists(tmp_path: Path) -> None:
    packs = make_packs(70, longest=300)
    path = write_packs(tmp_path / "data", packs, pack_size=300) / "shard_000000.parquet"
    table = pq.read_table(path, page_checksum_verification=True)
    assert table.schema.equals(SCHEMA)
    assert [Pack(*row.values()) for row in table.to_pylist()] == packs
    data = path.read_bytes()
    path.write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    with pytest.raises(OSError, match="CRC checksum"):
        pq.read_table(path, page_checksum_verification=True)


def table_of(path: Path) -> tuple[int, int]:
    """Return where the table of pages is, and where the footer begins."""
    table = find_table(LocalSource(path))
    assert table is not None
    return table.start, path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")


def test_a_damaged_table_of_pages_is_an_error_or_has_no_effect(tmp_path: Path) -> None:
    packs = make_packs(7, longest=50)
    path = write_packs(tmp_path / "data.parquet", packs, pack_size=50, rows_per_group=3)
    original, generator = path.read_bytes(), np.random.default_rng(0)
    start, end = table_of(path)
    assert end - start == 24 * 10
    refused = 0
    for position in [*range(start, end), *range(len(original) - 70, len(original))] * 2:
        damaged = bytearray(original)
        damaged[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        try:
            assert list(open_dataset(path)) == packs, position
        except FormatError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((0, 1 << 40, 2, 3, 4, 5), "a page is listed at bytes"),
        ((100, 50, 2, 3, 4, 5), "a page is listed at bytes 100 to"),
        ((-5, 50, 60, 70, 80, 90), "a page is listed at bytes -5"),
        ((5, 20, 40, 60, 80, 100), "a page header is damaged"),
    ],
)
def test_pages_that_cannot_be_are_refused(tmp_path: Path, numbers: tuple[int, ...], problem: str) -> None:
    path = write_packs(tmp_path / "data.parquet", make_packs(1, longest=50), pack_size=50)
    start, end = table_of(path)
    data = path.read_bytes()
    path.write_bytes(data[:start] + struct.pack("<6q", *numbers) + data[end:])
    with pytest.raises(FormatError, match=problem) as caught:
        open_dataset(path)[0]
    assert caught.value.where.endswith("row group 0, row 0")


def page_header(pages: int, *, checksum: int = 0, num_values: int = 9, levels: int = 3) -> bytes:
    return _HEADER % tuple(map(encode_number, (1 << 30, pages, checksum, num_values, 9, levels, levels)))


def test_a_page_that_claims_too_many_values_or_holds_no_data_is_refused() -> None:
    body = bytes(40)
    pages = [memoryview(page_header(40, checksum=zlib.crc32(body), num_values=1 << 30) + body)] * 3
    with pytest.raises(FormatError, match="claim 1,073,741,824 ids"):
        _decode_pack(pages, 50, None)
    with pytest.raises(FormatError, match="does not match its checksum"):
        _decode_pack([memoryview(page_header(40) + body)] * 3, 50, None)
    pages = [memoryview(page_header(40, checksum=zlib.crc32(body)) + body)] * 3
    with pytest.raises(OSError, match="ZSTD"):
        _decode_pack(pages, 50, None)


def test_a_pack_that_no_page_can_contain_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.formats.layouts.parquet_packs._MAX_TOKENS", 4)
    with open_writer(tmp_path / "data", pack_size=8) as writer:
        writer.append(PACKS[1])
        with pytest.raises(FormatError, match="pack 1 has 5 tokens, but a page of Parquet contains at most 4"):
            writer.append(PACKS[0])


def test_a_page_or_a_chunk_that_claims_more_than_its_values_can_have_is_an_error(tmp_path: Path) -> None:
    # A Thrift struct of type 0 (data page), uncompressed_page_size 2**31 - 1 and compressed_page_size 16.
    header = bytes([0x15, 0x00, 0x15, 0xFE, 0xFF, 0xFF, 0xFF, 0x0F, 0x15, 0x20, 0x00])
    (tmp_path / "page").write_bytes(header + bytes(16))
    source, chunk = LocalSource(tmp_path / "page"), Chunk("input_ids", num_values=9, start=0, num_bytes=27)
    with pytest.raises(FormatError, match="claims pages of 2,147,483,647 bytes"):
        fetch_columns(source, [chunk], 1, 27, pack_size=100)
    fetch_columns(source, [chunk], 1, 1 << 24, pack_size=1 << 28)
    with (tmp_path / "chunk").open("wb") as file:
        file.truncate(1 << 30)
    source, chunk = LocalSource(tmp_path / "chunk"), Chunk("input_ids", num_values=9, start=0, num_bytes=1 << 29)
    with pytest.raises(FormatError, match=r"claims 536,870,912 bytes; at most .* are plausible"):
        fetch_columns(source, [chunk], 1, 1 << 29, pack_size=9)
    with pytest.raises(FormatError, match="page header is damaged"):
        fetch_columns(source, [chunk], 1, 1 << 29, pack_size=1 << 28)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + b"\xff\xff\xff\x7fPAR1", b"no parquet at all" * 10])
def test_files_that_are_not_parquet_are_errors(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "data.parquet").write_bytes(data)
    with pytest.raises(FormatError, match="not a Parquet file"):
        open_dataset(tmp_path / "data.parquet")


def make_packs(count: int, *, longest: int) -> list[Pack]:
    rng = np.random.default_rng(longest)
    packs = []
    for _ in range(count):
        n = int(rng.integers(1, longest + 1))
        starts = np.unique(np.append(rng.integers(0, n, int(rng.integers(0, 20))), 0))
        packs.append(Pack(rng.integers(0, 2**31 - 1, n), rng.integers(0, 2, n), starts))
    return packs


@pytest.mark.parametrize(("count", "longest", "rows_per_group"), [(70, 1, 64), (300, 9, 7), (6, 400_000, 3)])
def test_packs_of_one_token_and_of_many_pages_are_read_back(
    tmp_path: Path, count: int, longest: int, rows_per_group: int
) -> None:
    packs = make_packs(count, longest=longest)
    path = tmp_path / "data.parquet"
    write_packs(path, packs, pack_size=longest, rows_per_group=rows_per_group)
    assert list(open_dataset(path)) == packs
    assert [pack for pack, _ in ParquetShard(path).read(range(count))] == packs


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"compression": "zstd", "use_dictionary": True},
        {"compression": "zstd", "use_dictionary": False, "data_page_version": "2.0"},
        {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True, "data_page_size": 64},
        {"compression": "zstd", "use_dictionary": False, "write_page_checksum": False},
    ],
)
@pytest.mark.parametrize("own_types", [True, False])
def test_other_page_layouts_read_the_same(tmp_path: Path, options: dict[str, Any], own_types: bool) -> None:
    packs = make_packs(30, longest=50)
    table = pa.table(
        {name: [getattr(pack, name).tolist() for pack in packs] for name in SCHEMA.names}, SCHEMA if own_types else None
    )
    pq.write_table(table, tmp_path / "data.parquet", **options)
    assert list(open_dataset(tmp_path / "data.parquet")) == packs
