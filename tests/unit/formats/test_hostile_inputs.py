"""Small files that claim much: our own errors, within memory that is limited by the system and not by us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_packs import PACKS, write_packs

from harness.errors import FormatError
from harness.formats import open_dataset, verify_dataset
from harness.formats.index import lengths_from_starts
from harness.formats.layouts import parquet_pages as pages
from harness.formats.layouts.npy import _pickle_head
from harness.formats.manifest import content_checksum
from harness.storage import LocalFolder
from harness.storage.arrays import npy_header

# Imports alone take up to 1.5 GB of addresses, nearly all of them unused.
_LIMIT_BYTES = 3 << 30
_CHILD = """
import resource, sys
from harness.errors import FormatError
from harness.formats import load_format, open_dataset, verify_dataset
load_format("parquet")
resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))
resource.setrlimit(resource.RLIMIT_DATA, (1500 << 20, 1500 << 20))
try:
    for pack in open_dataset(sys.argv[1]):
        pass
except FormatError as error:
    print(error.what)
    assert error.fix
else:
    print("opened")
print(len(verify_dataset(sys.argv[1])))
"""


def what_of(path: Path, limit: int = _LIMIT_BYTES) -> str:
    """Read a dataset in a process of limited addresses and memory; returns the error, which verify reports too."""
    code = _CHILD.replace("MOST", str(limit))
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    what, problems = done.stdout.splitlines()
    assert int(problems) == (0 if what == "opened" else 1)
    return what


def write(path: Path, format: str = "parquet") -> Path:
    return write_packs(path, PACKS, format=format, pack_size=8, packs_per_shard=4)


def pickle_of(path: Path, before: bytes, fields: dict[str, bytes], *, count: int = 1) -> Path:
    """A pickled list of one item, given as opcodes; more of them are the same item."""
    item = b"}("
    for name, value in fields.items():
        item += b"X" + len(name).to_bytes(4, "little") + name.encode() + value
    items = item + b"uq\xf0a" + b"h\xf0a" * (count - 1)
    path.write_bytes(npy_header("|O", (count,)) + _pickle_head(count) + before + items + b"tb.")
    return path


ONE, ZERO = b"]K\x01a", b"]K\x00a"


@pytest.mark.parametrize(
    "name", ["input_ids", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("loss_mask", "seq_start_id"))]
)
def test_a_pickle_of_lists_that_share_lists_is_refused(tmp_path: Path, name: str) -> None:
    # Ten levels of ten: 400 bytes that numpy would make ten billion numbers of.
    levels = b"]q\x10(" + b"K\x01" * 10 + b"e0"
    for level in range(1, 10):
        inner = b"h" + bytes([0x0F + level])
        levels += b"]q" + bytes([0x10 + level]) + b"(" + inner * 10 + b"e0"
    fields = {"input_ids": ONE, "loss_mask": ZERO, "seq_start_id": ZERO} | {name: b"h\x19"}
    path = pickle_of(tmp_path / "laughs.npy", levels, fields)
    assert path.stat().st_size < 1000
    assert what_of(path) == f"pack 0 has {name} that are not plain integers"


def test_a_pickle_that_names_one_pack_many_times_is_refused(tmp_path: Path) -> None:
    path = pickle_of(
        tmp_path / "many.npy", b"", {"input_ids": ONE, "loss_mask": ZERO, "seq_start_id": ZERO}, count=50_000
    )
    assert "more than a file of this size can contain" in what_of(path)


def constant_lists(rows: int, length: int, value: int, kind: Any) -> Any:
    offsets = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.full(rows * length, value), kind))


def tiny_parquet(path: Path, rows: int, length: int, groups: int, **options: Any) -> Path:
    columns = [constant_lists(rows, length, 7, pa.int32()), constant_lists(rows, length, 0, pa.uint8())]
    columns.append(constant_lists(rows, 1, 0, pa.int32()))
    table = pa.Table.from_arrays(columns, names=["input_ids", "loss_mask", "seq_start_id"])
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for _ in range(groups):
            writer.write_table(table)
    return path


@pytest.mark.submission
def test_a_tiny_parquet_row_group_or_file_that_expands_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tiny_parquet(tmp_path / "bomb.parquet", 1, 1 << 25, 1)
    assert path.stat().st_size < 100_000
    assert what_of(path) == "the column loss_mask claims 33,554,432 values, but at most 4,194,304 fit"
    path = tiny_parquet(tmp_path / "bomb.parquet", 1, 1 << 20, 80)
    assert path.stat().st_size < 1 << 20
    assert "claims 83,886,080 values in" in what_of(path)


def test_a_page_with_more_values_than_its_footer_says_is_refused(tmp_path: Path) -> None:
    count = 1 << 22
    path = tiny_parquet(tmp_path / "lie.parquet", 1, count, 1, data_page_size=1 << 30, write_statistics=False)
    data = path.read_bytes()
    claim, footer = b"\x80\x80\x80\x04", len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    # As long in the footer, and a list of one value there.
    path.write_bytes(data[:footer] + data[footer:].replace(claim, b"\x82\x80\x80\x00"))
    assert what_of(path) == "pages of the column loss_mask contain 4,194,304 values, not 1"


def test_a_tiny_parquet_shard_of_a_dataset_with_a_huge_pack_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_FREE_KNOWN_VALUES", 1 << 18)
    path = write(tmp_path / "data")
    tiny_parquet(path / "shard_000000.parquet", 4, 1 << 17, 1)
    reseal(path, lambda values: values.update(pack_size=1 << 40))
    with pytest.raises(FormatError, match="claims 524,288 values, but at most 262,144 fit"):
        _ = open_dataset(path)[0]


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as someone who knows how it is sealed, with the sizes and hashes of the files as they are."""
    values = json.loads((path / "manifest.json").read_text())
    for stored in [file for shard in values["shards"] for file in shard["files"]] + values["index"]:
        if (path / stored["path"]).is_file():
            [now] = LocalFolder(path).describe([stored["path"]])
            stored |= {"num_bytes": now.num_bytes, "xxh3": now.xxh3}
    change(values)
    values["checksum"] = content_checksum(values)
    (path / "manifest.json").write_text(json.dumps(values))


@pytest.mark.parametrize("groups", [1_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_thousands_of_row_groups_open_in_the_memory_of_a_few(tmp_path: Path, groups: int) -> None:
    assert what_of(tiny_parquet(tmp_path / "groups.parquet", 1, 3, groups)) == "opened"


def test_a_footer_that_claims_more_rows_than_values_is_refused(tmp_path: Path) -> None:
    path = tiny_parquet(tmp_path / "rows.parquet", 3, 2, 1)
    data = path.read_bytes()
    at = data.rindex(b"\x16\x06", 0, -8)  # num_rows of the row group, 3 as a zigzag number
    path.write_bytes(data[: at + 1] + b"\x7e" + data[at + 2 :])
    assert "do not have 63 rows" in what_of(path)


@pytest.mark.parametrize("rows", [1 << 40, 1 << 31])
def test_memmap_files_that_claim_terabytes_without_taking_space_are_refused(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "bins"
    path.mkdir()
    arrays = {
        "input_ids": ("<i4", (rows, 1)),
        "loss_mask": ("|u1", (rows, 1)),
        "packed_len": ("<u4", (rows,)),
        "seq_offsets": ("<u4", (rows + 1,)),
        "seq_starts": ("<u4", (7,)),
    }
    for name, (kind, shape) in arrays.items():
        with (path / f"{name}.npy").open("wb") as file:
            file.write(npy_header(kind, shape))
            try:
                file.truncate(128 + int(np.prod(shape, dtype=object)) * np.dtype(kind).itemsize)
            except OSError:
                pytest.skip("the disk has no files of this size")
            if name == "seq_offsets":
                file.seek(-4, 2)
                file.write((7).to_bytes(4, "little"))
    # Mapping takes addresses, which are what is limited here.
    assert what_of(path) == "cannot be read: Cannot allocate memory"
    if rows < 1 << 32:
        # Enough for the maps, and not for a copy of the offsets: the first block of rows is refused.
        assert what_of(path, 40 << 30) == "pack 0 claims 0 of 1 tokens"


def test_a_memmap_header_of_a_trillion_rows_over_a_small_file_is_refused(tmp_path: Path) -> None:
    shard = write(tmp_path / "data", "memmap") / "shard_000000"
    shard = shard.rename(tmp_path / "bins")
    data = (shard / "input_ids.npy").read_bytes()
    (shard / "input_ids.npy").write_bytes(npy_header("<i4", (1 << 40, 8)) + data[128:])
    assert what_of(shard) == "holds uint32 [4], expected uint32 [1099511627776]"


def test_more_zeros_among_starts_than_packs_are_refused_before_they_are_converted(tmp_path: Path) -> None:
    starts = np.zeros(1 << 21, np.uint32)
    with pytest.raises(FormatError, match="sequences that start at 0 in 1 packs"):
        lengths_from_starts(np.array([1 << 22]), starts, np.array([0, 1 << 21]), where="seq_starts.npy")


# ---- manifests


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"shard_000000.parquet"', '"shard_\\ud800.parquet"', "not a plain path inside"),
        ('"pack_size": 8', '"pack_size": 8, "pack_size": 9', "contains the key 'pack_size' twice"),
        ('"seed": null', '"seed": NaN', "the manifest is damaged: seed is 'nan', not of type "),
        ('"seed": null', '"seed": 1' + "0" * 5000, "the manifest is not JSON"),
        ('"seed": null', '"deep": ' + "[" * 100_000, "the manifest is not JSON"),
        ('"seed": null', '"deep": ' + "[" * 900 + "]" * 900, "was damaged or edited|is damaged|not JSON"),
    ],
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = write(tmp_path / "data")
    text = (path / "manifest.json").read_text()
    assert old in text
    (path / "manifest.json").write_text(text.replace(old, new, 1))
    for without in (False, True):
        if without:  # As a manifest from before there were checksums.
            values = (path / "manifest.json").read_text()
            (path / "manifest.json").write_text(values[: values.index(',\n "checksum"')] + "\n}\n")
        if without and "deep" in new:
            continue
        with pytest.raises(FormatError, match=problem):
            open_dataset(path)
        problems = verify_dataset(path)
        assert len(problems) == 1


def test_a_manifest_that_claims_numbers_beyond_all_files_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data")

    def change(values: dict[str, Any]) -> None:
        values["shards"] = values["shards"][:1]
        values["shards"][0]["num_packs"] = 1 << 62
        values |= {"num_packs": 1 << 62, "num_sequences": 1 << 62, "num_tokens": 1 << 62}

    (path / "shard_000001.parquet").unlink()
    reseal(path, change)
    assert "expected int64 [4611686018427387905]" in what_of(path)


def test_a_large_manifest_of_nothing_but_brackets_fits_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    (path / "manifest.json").write_bytes(b'{"shards": [' + b"[]," * (1 << 20) + b'0], "index": 1, "provenance": 2}')
    assert "the manifest lacks format, version, fingerprint or shards" in what_of(path)
    with (path / "manifest.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert what_of(path) == "the manifest is larger than 67,108,864 bytes"


def test_a_manifest_that_lists_one_file_a_hundred_thousand_times_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data")

    def change(values: dict[str, Any]) -> None:
        files = [{**values["index"][0], "path": f"index/{number}.npy"} for number in range(100_000)]
        values["index"] = [*files, files[-1]]

    reseal(path, change)
    with pytest.raises(FormatError, match=r"lists 'index/99999\.npy' twice"):
        open_dataset(path)
