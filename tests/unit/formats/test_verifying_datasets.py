"""All problems of a dataset, and the first difference between two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash
from small_packs import PACKS, write_packs

from harness.errors import Problem
from harness.formats.verify import PackDifference, diff_datasets, verify_dataset
from harness.records import Pack


def write(path: Path, *, format: str = "parquet", packs: list[Pack] = PACKS) -> Path:
    return write_packs(path, packs, format=format, pack_size=8, packs_per_shard=2)


def test_all_problems_are_reported_and_not_only_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a", format="memmap")
    shard = path / "shard_000000"
    data = bytearray((shard / "input_ids.npy").read_bytes())
    data[128] ^= 1
    (shard / "input_ids.npy").write_bytes(data)
    (path / "shard_000001" / "loss_mask.npy").unlink()
    with (path / "shard_000002" / "packed_len.npy").open("ab") as file:
        file.write(b"x")
    (path / "shard_000009").mkdir()
    whats = [problem.what for problem in verify_dataset(path)]
    assert "a file of shard 1 is missing, or cannot be read: No such file or directory" in whats
    assert "a file of shard 2 has 137 bytes, the manifest says 136" in whats
    assert "shards not in the manifest: 1, such as shard_000009" in whats
    assert "pack 0 does not match its checksum" in whats
    assert len(whats) == 7  # and the hash of input_ids.npy, and that shards 1 and 2 cannot be read


def test_an_index_of_other_lengths_than_the_packs_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    stored = path / "index" / "sequence_lengths.npy"
    data = bytearray(stored.read_bytes())
    data[-4] ^= 1
    stored.write_bytes(data)
    # The manifest agrees with the index, as where a writer had been wrong.
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"]
    next(one for one in values["index"] if one["path"].endswith("lengths.npy"))["xxh3"] = xxhash.xxh3_64_hexdigest(data)
    (path / "manifest.json").write_text(json.dumps(values))
    assert [one.what for one in verify_dataset(path)] == ["pack 6 contains sequences of other lengths than the index"]


def test_counts_and_fingerprint_of_the_manifest_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"]
    values["num_tokens"] += 1
    values["num_trained_tokens"] -= 1
    values["fingerprint"] = "0" * 32
    (path / "manifest.json").write_text(json.dumps(values))
    whats = [problem.what for problem in verify_dataset(path)]
    assert whats[:2] == [
        "the manifest has num_tokens 29, but the packs have 28",
        "the manifest has num_trained_tokens 13, but the packs have 14",
    ]
    assert "fingerprint 000" in whats[2]


def test_a_path_without_a_dataset_is_one_problem(tmp_path: Path) -> None:
    assert verify_dataset(tmp_path / "none") == [
        Problem("there is no dataset", str(tmp_path / "none"), "`harness prepare` writes one")
    ]
    path, seen = write(tmp_path / "a"), list[tuple[int, int]]()
    assert verify_dataset(path, progress=lambda *values: seen.append(values)) == []
    assert seen[-1] == (7, 7)
    (path / "manifest.json").write_text("{")
    assert len(verify_dataset(path)) == 1


@pytest.mark.parametrize(
    ("other", "field", "position", "ours", "theirs"),
    [
        (Pack([5, 2, 8, 4], [1, 0, 1, 0], [0, 2]), "input_ids", 2, 3, 8),
        (Pack([5, 2, 3, 4], [0, 0, 1, 0], [0, 2]), "loss_mask", 0, 1, 0),
        (Pack([5, 2, 3, 4], [1, 0, 1, 0], [0, 1]), "seq_start_id", 1, 2, 1),
        (Pack([5, 2, 3, 4], [1, 0, 1, 0], [0]), "seq_start_id.length", None, 2, 1),
        (Pack([5, 2, 3], [1, 0, 0], [0, 2]), "input_ids.length", None, 4, 3),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, other: Pack, field, position, ours, theirs) -> None:
    changed = [*PACKS[:4], other, *PACKS[5:6], PACKS[0]]
    found = diff_datasets(write(tmp_path / "a"), write(tmp_path / "b", format="memmap", packs=changed))
    assert found == PackDifference(4, field, position, ours, theirs)
    place = "" if position is None else f"[{position}]"
    assert str(found) == f"pack 4, {field}{place}: {ours} and {theirs}"


def test_a_longer_dataset_differs_in_its_number_of_packs(tmp_path: Path) -> None:
    found = diff_datasets(write(tmp_path / "a"), write(tmp_path / "b", packs=PACKS[:5]))
    assert found == PackDifference(None, "num_packs", None, 7, 5)
    assert str(found) == "num_packs: 7 and 5"
