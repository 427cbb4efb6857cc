"""Packed data of other tools, in files made the way those tools make them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_packs import write_packs

from harness.errors import ConfigError, FormatError
from harness.formats import open_dataset
from harness.formats.foreign import import_dataset
from harness.records import Pack

# Two conversations of 4 and 3 tokens, and one of 5; masks aligned with labels as Megatron-Bridge stores them.
ROWS: list[dict[str, Any]] = [
    {"input_ids": [1, 2, 3, 9, 4, 5, 9], "loss_mask": [0, 1, 1, 0, 1, 1, 0], "seq_start_id": [0, 4]},
    {"input_ids": [6, 7, 8, 8, 9], "loss_mask": [0, 0, 1, 1, 0], "seq_start_id": [0]},
]
PACKS = [Pack(row["input_ids"], row["loss_mask"], row["seq_start_id"]) for row in ROWS]


def bridge_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write like `write_packed_parquet`: Python lists, types inferred or int8 masks, snappy, row groups of 500."""
    table = pa.table({name: [row[name] for row in rows] for name in ("input_ids", "loss_mask", "seq_start_id")})
    mask = table.schema.get_field_index("loss_mask")
    table = table.set_column(mask, "loss_mask", table.column("loss_mask").cast(pa.list_(pa.int8())))
    pq.write_table(table, path, row_group_size=500)
    return path


def test_megatron_bridge_parquet_is_imported(tmp_path: Path) -> None:
    source = bridge_parquet(tmp_path / "training_4.idx.parquet", ROWS)
    assert pq.ParquetFile(source).metadata.row_group(0).column(0).compression == "SNAPPY"
    manifest = import_dataset(source, tmp_path / "out", convention="megatron_bridge")
    reader = open_dataset(tmp_path / "out")
    assert list(reader) == PACKS
    assert manifest.provenance.counts == {}
    # 4 + 3 tokens count as 3 + 2 there: the pack made for a size of 5 holds 7.
    assert reader.pack_size == 7


def test_megatron_bridge_npy_is_imported_and_trained_last_positions_are_cleared_and_counted(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "loss_mask": [0, 1, 1, 1, 1, 1, True]}, ROWS[1]]
    np.save(tmp_path / "training.npy", rows, allow_pickle=True)  # type: ignore[arg-type]
    manifest = import_dataset(
        tmp_path / "training.npy", tmp_path / "out", convention="megatron_bridge", format="memmap"
    )
    reader = open_dataset(tmp_path / "out")
    assert list(reader) == PACKS
    assert manifest.provenance.counts == {"import_cleared_last_positions": 2}
    assert manifest.provenance.packer == "megatron_bridge"


def test_megatron_bridge_indexed_rows_are_imported(tmp_path: Path) -> None:
    items = []
    for row in ROWS:
        words = np.array(row["input_ids"], np.uint32) | (np.array(row["loss_mask"], np.uint32) << np.uint32(31))
        head = np.array([0x53465442, 1, len(row["seq_start_id"]), *row["seq_start_id"]], np.int32)
        items.append(np.concatenate([head, words.view(np.int32)]))
    # The index as Megatron's `IndexedDatasetBuilder` writes it for int32 items of one document each.
    lengths = np.array([item.shape[0] for item in items])
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(items), len(items) + 1) + lengths.astype("<i4").tobytes()
    index += (4 * (np.cumsum(lengths) - lengths)).astype("<i8").tobytes() + np.arange(len(items) + 1).astype(
        "<i8"
    ).tobytes()
    (tmp_path / "train.sft.idx").write_bytes(index)
    (tmp_path / "train.sft.bin").write_bytes(b"".join(item.tobytes() for item in items))
    for name in ("train.sft", "train.sft.bin"):
        out = tmp_path / f"from-{name}"
        import_dataset(tmp_path / name, out, convention="megatron_bridge")
        assert list(open_dataset(out)) == PACKS
    data = bytearray((tmp_path / "train.sft.bin").read_bytes())
    data[8] = 200
    (tmp_path / "train.sft.bin").write_bytes(data)
    with pytest.raises(FormatError, match="the row claims 200 sequences in 12 words"):
        import_dataset(tmp_path / "train.sft", tmp_path / "x", convention="megatron_bridge")


@pytest.mark.parametrize("convention", ["megatron_bridge", "nemotron", "ms_swift", "megatron_lm"])
def test_a_dataset_of_the_harness_is_not_imported_as_another_tools(tmp_path: Path, convention: str) -> None:
    write_packs(tmp_path / "ours", [PACKS[0]], format="jsonl", pack_size=8)
    with pytest.raises(FormatError, match="this dataset was written by the harness") as raised:
        import_dataset(tmp_path / "ours", tmp_path / "out", convention=convention)
    assert "harness convert" in raised.value.fix
    write_packs(tmp_path / "ours.parquet", [PACKS[0]], pack_size=8)
    with pytest.raises(FormatError, match="this dataset was written by the harness"):
        import_dataset(tmp_path / "ours.parquet", tmp_path / "out", convention="megatron_bridge")


def nemotron_run(path: Path) -> Path:
    """Write a run like its pipeline: int32/uint8/int32 shards with zstd, and links to them in a folder a split."""
    kinds = (pa.int32(), pa.uint8(), pa.int32())
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in zip(ROWS[0], kinds, strict=True)])
    (path / "data").mkdir(parents=True)
    for number, row in enumerate(ROWS):
        shard = path / "data" / f"shard_{number:06d}.parquet"
        pq.write_table(pa.Table.from_pylist([row], schema=schema), shard, compression="zstd")
        split = path / "splits" / ("train", "valid")[number]
        split.mkdir(parents=True)
        (split / shard.name).symlink_to(Path("..") / ".." / "data" / shard.name)
    return path


def test_nemotron_splits_are_imported(tmp_path: Path) -> None:
    run = nemotron_run(tmp_path / "run")
    import_dataset(run, tmp_path / "train", convention="nemotron", pack_size=8)
    import_dataset(run, tmp_path / "valid", convention="nemotron", split="valid", format="binidx")
    import_dataset(run / "data", tmp_path / "all", convention="nemotron")
    assert list(open_dataset(tmp_path / "train")) == PACKS[:1]
    assert list(open_dataset(tmp_path / "valid")) == PACKS[1:]
    assert list(open_dataset(tmp_path / "all")) == PACKS
    with pytest.raises(FormatError, match="no split 'test'") as caught:
        import_dataset(run, tmp_path / "test", convention="nemotron", split="test")
    assert caught.value.fix == "use one of train, valid"


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SWIFT = {
    "input_ids": [1, 2, 3, 9, 4, 5, 9, 0, 0],
    "labels": [-100, -100, 3, 9, -100, 5, 9, -100, -100],
    "position_ids": [0, 1, 2, 3, 0, 1, 2, 0, 1],
    "lengths": [4, 3],
    "pack_length": 9,
    "num_samples": 2,
}


def test_swift_chunks_are_imported_without_their_padding(tmp_path: Path) -> None:
    second = {"input_ids": [6, 7, 8, 8, 9], "labels": [6, -100, -100, 8, 9], "lengths": [5]}
    write_lines(tmp_path / "chunks" / "chunk_00010.jsonl", [second])
    write_lines(tmp_path / "chunks" / "chunk_00002.jsonl", [SWIFT])
    (tmp_path / "chunks" / "chunk_00002.jsonl.completed").touch()
    manifest = import_dataset(tmp_path / "chunks", tmp_path / "out", convention="ms_swift")
    assert list(open_dataset(tmp_path / "out")) == PACKS
    assert manifest.provenance.counts == {"import_removed_padding_tokens": 2, "import_cleared_first_labels": 1}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"labels": [-100] * 3}, "9 input_ids, 3 labels"),
        ({"lengths": [4, 30]}, "lengths that sum to 34"),
        ({"lengths": []}, "lengths that sum to 0"),
        ({"labels": [-100, -100, 4, 9, -100, 5, 9, -100, -100]}, "the label 4 at position 2, expected the token 3"),
        ({"input_ids": ["a"] * 9}, "not all integers"),
        ({"input_ids": [-1, 2, 3, 9, 4, 5, 9, 0, 0]}, "has the negative token id -1 at position 0"),
    ],
)
def test_inconsistent_swift_lines_are_errors_with_their_line(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    write_lines(tmp_path / "chunk_00000.jsonl", [SWIFT, {**SWIFT, **change}])
    with pytest.raises(FormatError, match=problem) as caught:
        import_dataset(tmp_path, tmp_path / "out", convention="ms_swift")
    assert caught.value.where.endswith("chunk_00000.jsonl, line 2")


def megatron_lm_row(**changes: Any) -> dict[str, Any]:
    """Sequences [1 2 3 9] and [4 5 9 7], padded with 0 to 10, after the cut by one that aligns labels."""
    row = {
        "tokens": [1, 2, 3, 9, 4, 5, 9, 7, 0],
        "labels": [-100, 3, 9, -100, 5, 9, 7, 0, 0],
        "loss_mask": [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4],
        "cu_seqlens": [0, 4, 9],
    }
    return {**row, **changes}


def test_megatron_lm_rows_are_imported_with_padding_that_looks_like_tokens(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [megatron_lm_row()])
    manifest = import_dataset(tmp_path / "rows.jsonl", tmp_path / "out", convention="megatron_lm")
    assert list(open_dataset(tmp_path / "out")) == [
        Pack([1, 2, 3, 9, 4, 5, 9, 7, 0], [0, 1, 1, 0, 1, 1, 1, 0, 0], [0, 4])
    ]
    assert manifest.provenance.counts == {}


def test_megatron_lm_labels_at_boundaries_are_cleared_and_a_trained_last_one_is_kept(tmp_path: Path) -> None:
    row = megatron_lm_row(
        tokens=[1, 2, 3, 9, 4, 5],
        labels=[-100, 3, 9, 4, 5, 9],
        loss_mask=[0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        cu_seqlens=[0, 4, 6],
    )
    write_lines(tmp_path / "rows.jsonl", [row])
    manifest = import_dataset(tmp_path / "rows.jsonl", tmp_path / "out", convention="megatron_lm")
    assert list(open_dataset(tmp_path / "out")) == [Pack([1, 2, 3, 9, 4, 5, 9], [0, 1, 1, 0, 1, 1, 0], [0, 4])]
    assert manifest.provenance.counts == {"import_cleared_last_positions": 1, "import_appended_last_labels": 1}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cu_seqlens": [0, 4, 90]}, "cu_seqlens"),
        ({"cu_seqlens": [0, 4, 4, 9]}, "cu_seqlens"),
        ({"labels": [-100, 8, 9, -100, 5, 9, 7, 0, 0]}, "the label 8 at position 1, expected the token 3"),
        ({"loss_mask": [0.5] * 9}, "not a 0 or 1"),
        ({"tokens": []}, "0 tokens but 9 labels"),
    ],
)
def test_inconsistent_megatron_lm_rows_are_errors(tmp_path: Path, change: Any, problem: str) -> None:
    write_lines(tmp_path / "rows.jsonl", [megatron_lm_row(**change)])
    with pytest.raises(FormatError, match=problem):
        import_dataset(tmp_path / "rows.jsonl", tmp_path / "out", convention="megatron_lm")


def test_an_unknown_convention_or_an_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown convention 'mosaic'"):
        import_dataset(tmp_path, tmp_path / "out", convention="mosaic")
    with pytest.raises(FormatError, match=r"no \.jsonl file"):
        import_dataset(tmp_path, tmp_path / "out", convention="ms_swift")


@pytest.mark.parametrize("convention", ["ms_swift", "megatron_lm"])
def test_a_row_of_nothing_but_brackets_is_refused_before_it_is_parsed(tmp_path, monkeypatch, convention: str) -> None:
    monkeypatch.setattr("harness.formats.layouts.jsonl._MAX_MARKS", 50)
    row = {"ms_swift": SWIFT, "megatron_lm": megatron_lm_row()}[convention]
    write_lines(tmp_path / "rows.jsonl", [{**row, "notes": [[]] * 50}])
    with pytest.raises(FormatError, match=r"the row has \d+ quotes and brackets, too many for lists of numbers"):
        import_dataset(tmp_path / "rows.jsonl", tmp_path / "out", convention=convention)


def test_the_current_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge_parquet(tmp_path / "rows.idx.parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    import_dataset(".", tmp_path / "out", convention="megatron_bridge")
    assert list(open_dataset(tmp_path / "out")) == PACKS
