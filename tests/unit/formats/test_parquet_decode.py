"""Our own decoding of Parquet pages: the same as pyarrow's, or left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import FormatError
from harness.formats import open_dataset, open_writer
from harness.formats.parquet.decode import row_begins
from harness.formats.parquet.reader import ParquetShard
from harness.formats.parquet.writer import SCHEMA
from harness.records import Pack


def make_packs(count: int, *, longest: int, highest: int = 2**31 - 1) -> list[Pack]:
    rng = np.random.default_rng(longest)
    packs = []
    for _ in range(count):
        n = int(rng.integers(1, longest + 1))
        starts = np.unique(np.append(rng.integers(0, n, int(rng.integers(0, 20))), 0))
        packs.append(Pack(rng.integers(0, highest, n), rng.integers(0, 2, n), starts))
    return packs


@pytest.fixture
def refuse_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("left to pyarrow")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", refuse)


@pytest.mark.usefixtures("refuse_pyarrow")
@pytest.mark.parametrize(
    ("count", "longest", "highest", "rows_per_group"),
    [(70, 1, 9, 64), (300, 40, 255, 64), (300, 9, 65535, 7), (40, 9000, 50000, 16), (6, 400_000, 2**31 - 1, 3)],
)
def test_what_we_write_is_decoded_without_pyarrow(
    tmp_path: Path, count: int, longest: int, highest: int, rows_per_group: int
) -> None:
    packs = make_packs(count, longest=longest, highest=highest)
    path = tmp_path / "data.parquet"
    with open_writer(path, pack_size=longest, rows_per_group=rows_per_group) as writer:
        for pack in packs:
            writer.append(pack)
    assert list(open_dataset(path)) == packs
    assert ParquetShard(path).read(range(count)) == packs


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
def test_other_layouts_read_the_same(tmp_path: Path, options: dict[str, Any], own_types: bool) -> None:
    packs = make_packs(30, longest=50)
    table = pa.table(
        {name: [getattr(pack, name).tolist() for pack in packs] for name in SCHEMA.names},
        SCHEMA if own_types else None,
    )
    pq.write_table(table, tmp_path / "data.parquet", **options)
    assert list(open_dataset(tmp_path / "data.parquet")) == packs


def test_a_value_that_does_not_fit_a_mask_is_an_error(tmp_path: Path) -> None:
    schema = SCHEMA.set(1, pa.field("loss_mask", pa.list_(pa.field("element", pa.int32(), nullable=False)), False))
    table = pa.table([[[1, 2]], [[256, 0]], [[0]]], schema)
    pq.write_table(table, tmp_path / "data.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(FormatError, match="holds values from 0 to 256"):
        list(open_dataset(tmp_path / "data.parquet"))


def test_no_flipped_bit_of_a_row_group_becomes_wrong_data(tmp_path: Path) -> None:
    packs = make_packs(3, longest=12)
    folder = tmp_path / "data"
    with open_writer(folder, pack_size=12) as writer:
        for pack in packs:
            writer.append(pack)
    path = folder / "shard_000000.parquet"
    whole = path.read_bytes()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    silent = []
    for at in range(4, end):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            if list(open_dataset(folder)) != packs:
                silent.append(at)
        except FormatError:
            pass
    assert silent == []


def test_rows_begin_at_the_zeros_of_the_levels() -> None:
    # A run of two packed bytes (0, 3 and 9 begin rows), a run of five ones, and one of two zeros.
    levels = bytes([2 << 1 | 1, 0b11110110, 0b11111101, 5 << 1, 1, 2 << 1, 0])
    found = row_begins(levels, 23)
    assert found is not None
    assert found.tolist() == [0, 3, 9, 21, 22]


@pytest.mark.parametrize(
    "levels",
    [b"", b"\x03", b"\x00\x01", b"\xff\xff\xff\xff\xff\xff\xff\x01", b"\x08\x01\x00", b"\x06", b"\x03\xff\x03\xff"],
)
def test_damaged_levels_are_left_to_pyarrow(levels: bytes) -> None:
    assert row_begins(levels, 4) is None
