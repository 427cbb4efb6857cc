"""Damaged files of every kind: readers answer with our own errors, or with data that was written."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from damage import damage_bytes

from harness.errors import FormatError
from harness.formats import FORMATS, load_format, open_dataset, open_writer
from harness.formats.verify import verify_dataset
from harness.records import Pack

PACKS = [Pack([number, 2, 300, 70_000, 5], [1, 0, 1, 1, 0], [0, 2]) for number in range(6)]


def write(path: Path, format: str) -> Path:
    with open_writer(path, format=format, pack_size=8, packs_per_shard=3, rows_per_group=2) as writer:
        for pack in PACKS:
            writer.append(pack)
    return path


def read_everything(path: Path) -> list[Pack]:
    reader = open_dataset(path)
    try:
        assert reader.pack_offsets.shape[0] == len(reader) + 1
        return [reader[index] for index in range(len(reader))]
    finally:
        reader.close()


def fuzz(path: Path, files: list[Path], count: int, *, checked: bool) -> int:
    """Damage one file at a time; returns how many were refused."""
    generator = np.random.default_rng(len(files))
    originals = {file: file.read_bytes() for file in files}
    refused = 0
    for number in range(count):
        file = files[int(generator.integers(len(files)))]
        file.write_bytes(damage_bytes(originals[file], generator))
        try:
            packs = read_everything(path)
            if checked:
                assert packs == PACKS, f"wrong data from mutation {number} of {file}"
            else:
                assert all(pack.problem() is None for pack in packs)
        except FormatError:
            refused += 1
        if checked and number % 20 == 0:
            verify_dataset(path)
        file.write_bytes(originals[file])
    return refused


def fuzz_dataset(tmp_path: Path, format: str, count: int) -> None:
    path = write(tmp_path / "data", format)
    files = sorted(one for one in path.rglob("*") if one.is_file())
    refused = fuzz(path, files, count, checked=True)
    assert refused > count // 4


def fuzz_bare(tmp_path: Path, format: str, count: int) -> None:
    """Without a manifest there are no checksums: what is read may be wrong, but must keep the invariants."""
    path = write(tmp_path / "data", format)
    (path / "manifest.json").unlink()
    shutil.rmtree(path / "index")
    for file in list(path.iterdir()):  # The names of our shards would be those of an incomplete dataset.
        file.rename(path / file.name.replace("shard_", "part").replace("chunk_", "part"))
    files = sorted(one for one in path.rglob("*") if one.is_file())
    assert len(read_everything(path)) == len(PACKS)
    refused = fuzz(path, files, count, checked=False)
    assert refused > count // 10


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_datasets_give_the_written_packs_or_our_errors(tmp_path: Path, format: str) -> None:
    fuzz_dataset(tmp_path, format, 200)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_bare_files_give_valid_packs_or_our_errors(tmp_path: Path, format: str) -> None:
    fuzz_bare(tmp_path, format, 200)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("format", FORMATS)
def test_ten_thousand_damaged_files_give_valid_packs_or_our_errors(tmp_path: Path, format: str) -> None:
    fuzz_dataset(tmp_path / "dataset", format, 5_000)
    fuzz_bare(tmp_path / "bare", format, 5_000)


@pytest.mark.parametrize("format", [name for name in FORMATS if load_format(name).single_file_suffix])
def test_damaged_single_files_give_valid_packs_or_our_errors(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"one{load_format(format).single_file_suffix}"
    with open_writer(path, format=format, pack_size=8, rows_per_group=2) as writer:
        for pack in PACKS:
            writer.append(pack)
    assert fuzz(path, [path], 200, checked=False) > 20


def test_noise_is_refused_by_every_reader(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    starts = [
        b"",
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 118),
        b"PAR1",
        b"MMIDIDX\x00\x00" + struct.pack("<Q", 1),
        b"{",
    ]
    for start in starts:
        for suffix in (".npy", ".parquet", ".jsonl", ".idx"):
            path = tmp_path / f"noise{suffix}"
            path.write_bytes(start + generator.bytes(300))
            (tmp_path / "noise.bin").write_bytes(generator.bytes(40))
            with pytest.raises(FormatError):
                read_everything(path)
            path.unlink()
