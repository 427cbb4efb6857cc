"""Layouts on disk of memmap, binidx and jsonl, with and without our manifest."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_packs import write_packs

from harness.errors import FormatError
from harness.formats import open_dataset, open_writer
from harness.formats.layouts.jsonl import line_of_pack, pack_of_line
from harness.formats.layouts.memmap import MemmapShard, MemmapWriter
from harness.records import Pack
from harness.storage import LocalFolder, natural_key

PACKS = [Pack([1, 2, 300, 70_000, 5], [0, 1, 0, 1, 0], [0, 3]), Pack([9], [0], [0]), Pack([4, 4, 4], [1, 1, 0], [0])]


def write(path: Path, format: str, **options: Any) -> Path:
    return write_packs(path, PACKS, format=format, pack_size=6, **options)


def test_memmap_is_plain_numpy_arrays_padded_with_zeros(tmp_path: Path) -> None:
    shard = write(tmp_path / "data", "memmap") / "shard_000000"
    loaded = {path.stem: np.load(path, mmap_mode="r") for path in shard.glob("*.npy")}
    assert {name: (str(array.dtype), array.tolist()) for name, array in loaded.items()} == {
        "input_ids": ("int32", [[1, 2, 300, 70_000, 5, 0], [9, 0, 0, 0, 0, 0], [4, 4, 4, 0, 0, 0]]),
        "loss_mask": ("uint8", [[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]),
        "packed_len": ("uint32", [5, 1, 3]),
        "seq_offsets": ("uint32", [0, 2, 3, 4]),
        "seq_starts": ("uint32", [0, 3, 0, 0]),
    }
    assert json.loads((shard / "manifest.json").read_text())["num_bins"] == 3


@pytest.mark.parametrize("manifest", [None, '{"num_bins": 3}', "[]"])
def test_a_memmap_folder_of_another_tool_opens_with_any_manifest(tmp_path: Path, manifest: str | None) -> None:
    shard = write(tmp_path / "data", "memmap") / "shard_000000"
    bare = tmp_path / "bare"
    shard.rename(bare)
    (bare / "manifest.json").unlink()
    if manifest is not None:
        (bare / "manifest.json").write_text(manifest)
    reader = open_dataset(bare)
    assert list(reader) == PACKS
    assert (reader.format, reader.pack_size, reader.manifest) == ("memmap", 6, None)


@pytest.mark.parametrize("format", ["memmap", "binidx", "parquet"])
def test_a_folder_of_shards_of_other_names_opens_in_natural_order(tmp_path: Path, format: str) -> None:
    data = write(tmp_path / "data", format, packs_per_shard=1)
    shutil.rmtree(data / "index")
    (tmp_path / "bare").mkdir()
    for number, name in ((0, "x_2"), (1, "x_10"), (2, "x_11")):
        for path in data.glob(f"shard_{number:06d}*"):
            path.rename(tmp_path / "bare" / path.name.replace(f"shard_{number:06d}", name))
    assert list(open_dataset(tmp_path / "bare")) == PACKS


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("packed_len.npy", np.array([5, 7, 3], np.uint32), "pack 1|7 tokens"),
        ("packed_len.npy", np.array([5, 1], np.uint32), "expected uint32"),
        ("packed_len.npy", np.array([5, 1, 3], np.int64), "expected uint32"),
        ("seq_offsets.npy", np.array([0, 2, 3, 2**32 - 1], np.uint32), "expected uint32"),
        ("seq_offsets.npy", np.array([0, 3, 2, 4], np.uint32), "pack 1"),
        ("seq_starts.npy", np.array([0, 9, 0, 0], np.uint32), "pack 0"),
        ("loss_mask.npy", np.zeros((3, 5), np.uint8), "expected uint8"),
        ("input_ids.npy", np.zeros(18, np.int32), "two dimensions"),
    ],
)
def test_inconsistent_memmap_arrays_are_errors(
    tmp_path: Path, name: str, values: np.ndarray[Any, Any], problem: str
) -> None:
    shard = write(tmp_path / "data", "memmap") / "shard_000000"
    np.save(shard / name, values)
    with pytest.raises(FormatError, match=problem):
        list(open_dataset(shard))


def test_more_sequences_than_the_offsets_of_a_memmap_shard_hold_are_refused(tmp_path: Path) -> None:
    writer = MemmapWriter(LocalFolder(tmp_path), "shard", 6, 64)
    writer._num_starts = 2**32 - 2
    writer.append(PACKS[1])
    with pytest.raises(FormatError, match="4,294,967,296 sequences"):
        writer.append(PACKS[1])
    writer.abort()


def test_a_packed_length_beyond_its_row_is_refused_where_only_one_pack_is_read(tmp_path: Path) -> None:
    shard = write(tmp_path / "data", "memmap") / "shard_000000"
    np.save(shard / "packed_len.npy", np.array([5, 7, 3], np.uint32))
    with closing(MemmapShard(shard)) as reader, pytest.raises(FormatError, match="claims 7 of 6"):
        reader.read_row(1)


def test_megatron_core_opens_our_index_and_reads_the_same_tokens(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    data = write(tmp_path / "data", "binidx", packs_per_shard=2)
    tokens, documents = [], []
    for prefix in ("shard_000000", "shard_000001"):
        dataset = indexed.IndexedDataset(str(data / prefix), mmap=True)
        tokens += [dataset[index].tolist() for index in range(len(dataset))]
        documents.append(dataset.document_indices.tolist())
        assert dataset.index.dtype is np.int32
    assert tokens == [pack.input_ids.tolist() for pack in PACKS]
    assert documents == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize("name", ["shard_000000", "shard_000000.bin", "shard_000000.idx", "shard_000000.seq.idx"])
def test_a_bare_prefix_opens(tmp_path: Path, name: str) -> None:
    data = write(tmp_path / "data", "binidx")
    reader = open_dataset(data / name)
    assert list(reader) == PACKS
    assert reader.manifest is None


def _index(count: int, documents: int, *, version: int = 1, code: int = 4, magic: bytes = b"MMIDIDX\0\0") -> bytes:
    return struct.pack("<9sQBQQ", magic, version, code, count, documents)


LENGTHS = np.array([5, 1, 3], "<i4").tobytes()
POINTERS = np.array([0, 20, 24], "<i8").tobytes()
DOCUMENTS = np.arange(4, dtype="<i8").tobytes()
REST = POINTERS + DOCUMENTS


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not with the header of a Megatron index of version 1"),
        (_index(3, 4, magic=b"MMIDIDX\0X") + LENGTHS + POINTERS + DOCUMENTS, "not with the header of a Megatron"),
        (_index(3, 4, version=2) + LENGTHS + POINTERS + DOCUMENTS, "header of a Megatron index of version 1"),
        (_index(3, 4, code=8) + LENGTHS + POINTERS + DOCUMENTS, "holds uint16 tokens, expected int32"),
        (_index(2**32, 2**32 + 1) + LENGTHS + POINTERS + DOCUMENTS, "counts of 4,294,967,296 sequences"),
        (_index(2**63, 2**63) + LENGTHS, "counts of"),
        (_index(3, 4) + np.array([5, -1, 3], "<i4").tobytes() + POINTERS + DOCUMENTS, "sequence 1 has the length -1"),
        (_index(3, 4) + np.array([5, 2**31 - 1, 3], "<i4").tobytes() + REST, "sequence 2 is 24"),
        (_index(3, 4) + LENGTHS + np.array([0, 20, 2**62], "<i8").tobytes() + DOCUMENTS, "the pointer of sequence 2"),
    ],
)
def test_an_index_that_claims_missing_data_is_an_error(tmp_path: Path, data: bytes, problem: str) -> None:
    path = write(tmp_path / "data", "binidx")
    (path / "shard_000000.idx").write_bytes(data)
    with pytest.raises(FormatError, match=problem):
        open_dataset(path / "shard_000000")


@pytest.mark.parametrize("offsets", [[0, 2, 2, 4], [1, 2, 3, 4], [0, 2, 3, 2**40], [0, 2, 3, -4], [0, 4, 3, 4]])
def test_sequence_offsets_that_do_not_rise_are_errors(tmp_path: Path, offsets: list[int]) -> None:
    path = write(tmp_path / "data", "binidx")
    (path / "shard_000000.seq.idx").write_bytes(np.array(offsets, "<i8").tobytes())
    with pytest.raises(FormatError):
        open_dataset(path / "shard_000000")


def test_jsonl_labels_are_aligned_with_tokens(tmp_path: Path) -> None:
    data = write(tmp_path / "data", "jsonl", packs_per_shard=2)
    assert sorted(path.name for path in data.glob("*.jsonl")) == ["chunk_00000.jsonl", "chunk_00001.jsonl"]
    first = json.loads((data / "chunk_00000.jsonl").read_text().splitlines()[0])
    assert first == {
        "input_ids": [1, 2, 300, 70_000, 5],
        "labels": [-100, -100, 300, -100, 5],
        "position_ids": [0, 1, 2, 0, 1],
        "lengths": [3, 2],
        "pack_length": 5,
        "num_samples": 2,
    }


def test_a_closed_folder_of_chunks_opens_without_a_manifest(tmp_path: Path) -> None:
    for number, pack in ((10, PACKS[2]), (2, PACKS[1]), (1, PACKS[0])):
        (tmp_path / f"chunk_{number:05d}.jsonl").write_bytes(line_of_pack(pack))
    (tmp_path / "chunk_00001.jsonl.completed").touch()
    reader = open_dataset(tmp_path)
    assert list(reader) == PACKS
    assert reader.sequence_lengths.tolist() == [3, 2, 1, 3]


def test_a_trained_last_position_cannot_be_written_as_labels(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(FormatError, match="pack 1 trains position 2, the last of its sequence"),
        open_writer(tmp_path / "data", format="jsonl", pack_size=6) as writer,
    ):
        writer.append(PACKS[0])
        writer.append(Pack([1, 2, 3, 4], [0, 0, 1, 0], [0, 3]))


LINE = json.loads(line_of_pack(PACKS[0]))


def test_sequences_begin_where_positions_restart_if_a_line_has_no_lengths() -> None:
    for pack in PACKS:
        fields = json.loads(line_of_pack(pack))
        del fields["lengths"]
        assert pack_of_line(json.dumps(fields).encode()) == pack


NO_LENGTHS = {name: values for name, values in LINE.items() if name != "lengths"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (json.dumps({**NO_LENGTHS, "position_ids": [1, 2, 3, 0, 1]}).encode(), "lengths that sum to 2"),
        (json.dumps({**NO_LENGTHS, "position_ids": [0, 1, 2]}).encode(), "3 position_ids"),
        (json.dumps({"input_ids": [1], "labels": [-100]}).encode(), "has no lengths"),
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"input_ids": NaN}', "has input_ids of type float"),
        (json.dumps({**LINE, "lengths": [3, 3]}).encode(), "lengths that sum to 6"),
        (json.dumps({**LINE, "lengths": [6, -1]}).encode(), "not positive"),
        (json.dumps({**LINE, "lengths": []}).encode(), "lengths that sum to 0"),
        (json.dumps({**LINE, "lengths": [2**62, 2**62, 2**62, 2**62, 5]}).encode(), "lengths that sum to"),
        (json.dumps({**LINE, "labels": [-100]}).encode(), "1 labels"),
        (json.dumps({**LINE, "labels": [-100, 7, 300, -100, 5]}).encode(), "the label 7 at position 1"),
        (json.dumps({**LINE, "labels": [-100, -100, 300, 70_000, 5]}).encode(), "trains position 3, the first"),
        (json.dumps({**LINE, "position_ids": [0, 1, 2, 3, 4]}).encode(), "do not restart"),
        (json.dumps({**LINE, "pack_length": 6}).encode(), "pack_length 6, expected 5"),
        (json.dumps({**LINE, "num_samples": 1}).encode(), "num_samples 1, expected 2"),
        (json.dumps({**LINE, "input_ids": [1, 2, 300, 70_000, 5.5]}).encode(), "not all integers"),
        (json.dumps({**LINE, "input_ids": [1, 2, 300, 2**40, 5], "labels": [-100] * 5}).encode(), "do not fit int32"),
        (json.dumps({**LINE, "input_ids": [[1], 2, 300, 2, 5]}).encode(), "not all integers"),
    ],
)
def test_an_inconsistent_line_is_an_error(line: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        pack_of_line(line)


def test_a_binidx_shard_without_packs_is_refused_as_any_other_file_without_them(tmp_path: Path) -> None:
    files = {"bin": b"", "loss.bin": b"", "seq.bin": b"", "seq.idx": bytes(8), "idx": _index(0, 1) + bytes(8)}
    for suffix, data in files.items():
        (tmp_path / f"x.{suffix}").write_bytes(data)
    with pytest.raises(FormatError, match="the file contains no packs"):
        open_dataset(tmp_path / "x")


def test_files_whose_names_differ_in_zeros_alone_have_one_order_on_every_machine() -> None:
    names = ["shard", "shard_001", "shard_01", "shard_1", "shard_2"]
    orders = {tuple(sorted(listed, key=natural_key)) for listed in itertools.permutations(names)}
    assert orders == {tuple(names)}


def test_a_pack_that_would_be_too_long_a_line_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.formats.layouts.jsonl.MAX_LINE_BYTES", len(line_of_pack(PACKS[0])) - 1)
    with pytest.raises(FormatError, match=r"pack 0 takes \d+ bytes as a line"):
        write(tmp_path / "data", "jsonl")
