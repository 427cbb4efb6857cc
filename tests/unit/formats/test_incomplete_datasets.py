"""Parts of a dataset: refused by everything that reads, listed by verify, repaired from whole shards; never opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_packs import PACKS, write_packs
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import ConfigError, FormatError
from harness.formats import (
    FORMATS,
    Provenance,
    convert_dataset,
    load_format,
    load_manifest,
    open_dataset,
    repair_manifest,
    verify_dataset,
)
from harness.formats.foreign import CONVENTIONS, import_dataset
from harness.formats.inspect import find_datasets, inspect_dataset
from harness.formats.layouts.jsonl import line_of_pack
from harness.formats.verify import diff_datasets
from harness.loader.live.folder import LiveFolder
from harness.records import Pack

MANIFEST = "manifest.json"


def write(path: Path, format: str = "parquet", packs: list[Pack] = PACKS) -> Path:
    return write_packs(path, packs, format=format, pack_size=8, packs_per_shard=2, rows_per_group=2)


def parts_of(path: Path, format: str, number: int) -> list[Path]:
    """The files, or the folder, of a shard."""
    shard = load_format(format).shard_name(number)
    return [one for one in path.iterdir() if one.name == shard or one.name.startswith(f"{shard}.")]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def readers(path: Path, out: Path) -> Iterator[Callable[[], object]]:
    """Everything that reads a dataset."""
    yield lambda: open_dataset(path)
    yield lambda: convert_dataset(path, out, format="parquet")
    yield lambda: diff_datasets(path, path)
    yield lambda: inspect_dataset(str(path))
    for convention in CONVENTIONS:
        yield partial(import_dataset, path, out, convention=convention)


def assert_refused(path: Path, out: Path, problem: str) -> None:
    for read in readers(path, out):
        with pytest.raises(FormatError, match=problem) as caught:
            read()
        assert f"harness verify --repair-manifest {path}" in caught.value.fix
    assert problem in verify_dataset(path)[0].what


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataset_that_lost_parts_is_refused_and_they_are_named(tmp_path: Path, format: str) -> None:
    path, out = write(tmp_path / "data", format), tmp_path / "out"
    (path / MANIFEST).unlink()
    for part in parts_of(path, format, 1):
        remove(part)
    missing = load_format(format).shard_name(1)
    assert_refused(path, out, f"the dataset is incomplete: manifest.json, {missing} missing")
    shutil.rmtree(path / "index")
    for manifest in path.rglob(MANIFEST):  # of memmap shards
        manifest.unlink()
    assert_refused(path, out, "the dataset is incomplete: manifest.json, index/pack_offsets.npy")
    index = write(tmp_path / "index", format)
    for part in [index / MANIFEST, *(one for number in range(4) for one in parts_of(index, format, number))]:
        remove(part)
    assert_refused(index, out, r"the dataset is incomplete: manifest.json missing")
    assert not out.exists()


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    text = (path / MANIFEST).read_text()
    for damaged, problem in (
        (text[: len(text) // 2], "the manifest is not JSON"),
        (text.replace('"fingerprint"', '"fingerprinT"'), "the manifest lacks format, version, fingerprint or shards"),
        (text.replace('"num_packs": 7', '"num_packs": 6', 1), "num_packs 6, .* and 7 packs in its shards"),
        (text.replace('"xxh3"', '"xxH3"', 1), r"there is no setting 'shards\[\].files\[\].xxH3'"),
        (text.replace('"packer": ""', '"packer": "x"'), "its content has '.*': it was damaged or edited"),
    ):
        (path / MANIFEST).write_text(damaged)
        for read in readers(path, tmp_path / "out"):
            with pytest.raises(FormatError, match=problem) as caught:
                read()
            assert f"harness verify --repair-manifest {path}" in caught.value.fix


@pytest.mark.parametrize("format", FORMATS)
def test_a_shard_a_prefix_and_a_pattern_of_an_incomplete_dataset_are_refused(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "data", format)
    places = [str(one) for one in parts_of(path, format, 0)]
    places += [str(path / load_format(format).shard_name(0)), str(path / "*_*"), str(path / "*00[0-9]*")]
    for lost in ((path / MANIFEST).unlink, lambda: shutil.rmtree(path / "index")):
        lost()
        for place in places:
            with pytest.raises(FormatError, match="the dataset is incomplete"):
                open_dataset(place)


def test_a_pattern_over_a_dataset_that_lost_a_shard_is_refused_and_over_a_whole_one_opens(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    assert list(open_dataset(str(path / "*.parquet"))) == PACKS
    (path / "shard_000003.parquet").unlink()
    with pytest.raises(FormatError, match="a file of shard 3 is missing"):
        open_dataset(str(path / "*.parquet"))


def test_a_dataset_of_a_prepared_folder_that_lost_its_manifest_or_all_files_is_not_passed_over(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        write(tmp_path / name)
    (tmp_path / "train" / MANIFEST).unlink()
    assert find_datasets(str(tmp_path)) == [str(tmp_path / "train"), str(tmp_path / "validation")]
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert "the dataset is incomplete: manifest.json missing" in result.stdout
    assert "if all its shards are complete: harness verify --repair-manifest" in result.stdout
    shutil.rmtree(tmp_path / "train")
    (tmp_path / "train").mkdir()
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert (result.exit_code, "interrupted write or no dataset (found nothing)" in result.stdout) == (1, True)


def test_verify_lists_all_that_is_wrong_with_an_incomplete_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "memmap")
    (path / MANIFEST).unlink()
    (path / "index" / "pack_offsets.npy").unlink()
    shutil.rmtree(path / "shard_000001")
    (path / "shard_000002" / "packed_len.npy").unlink()
    ids = path / "shard_000003" / "input_ids.npy"
    ids.write_bytes(ids.read_bytes()[:-1])
    (path / "shard_4").mkdir()
    assert [problem.what for problem in verify_dataset(path)] == [
        "the dataset is incomplete: manifest.json, index/pack_offsets.npy, shard_000001 missing (3 shards found)",
        "shard 1 is missing, but shards up to 3 exist",
        "a file that looks like a shard, with another name",
        "has no packed_len.npy",
        "has 159 bytes, expected 160",
        "the index has 14 entries, but the shards have 4",
        "the index has 7 entries, but the shards have 2",
    ]
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert (result.exit_code, "7 problems" in result.stdout) == (1, True)


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_chunks_of_a_dataset_are_not_taken_for_live_ones(tmp_path: Path, is_whole: bool) -> None:
    path = write(tmp_path / "data", "jsonl")
    if not is_whole:
        (path / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="the folder contains a stored dataset or a part of one"):
        LiveFolder(path).look()
    shutil.rmtree(path / "index")
    assert sorted(LiveFolder(path).look().chunks) == [0, 1, 2, 3]


# ---- repair


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", ["lost", "flipped", "cut"])
def test_a_repaired_dataset_has_its_packs_fingerprint_and_index(tmp_path: Path, format: str, damage: str) -> None:
    path = write(tmp_path / "data", format)
    before = open_dataset(path).manifest
    assert before is not None
    text = (path / MANIFEST).read_text()
    changed = {"lost": "", "flipped": text.replace('"pack_size"', '"pack_sizE"'), "cut": text[:100]}[damage]
    (path / MANIFEST).write_text(changed) if changed else (path / MANIFEST).unlink()
    manifest, problems, notes = repair_manifest(str(path))
    assert problems == []
    assert any("provenance" in note for note in notes)
    assert list(open_dataset(path)) == PACKS
    assert verify_dataset(path) == []
    after = load_manifest(path)
    assert after is not None
    assert after == manifest
    assert (after.fingerprint, after.index, after.num_trained_tokens) == (before.fingerprint, before.index, 14)
    assert [(one.path, one.num_packs, set(one.files)) for one in after.shards] == [
        (one.path, one.num_packs, set(one.files)) for one in before.shards
    ]
    assert after.provenance == Provenance()
    assert after.pack_size == (8 if format == "memmap" else 4)


@pytest.mark.parametrize("format", FORMATS)
def test_without_an_index_only_shards_with_checksums_of_their_own_are_repaired(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "data", format)
    fingerprint = open_dataset(path).fingerprint
    (path / MANIFEST).unlink()
    shutil.rmtree(path / "index")
    manifest, problems, notes = repair_manifest(str(path))
    if format in ("parquet", "virtual"):
        assert manifest is not None
        assert manifest.fingerprint == fingerprint
        assert any("nothing shows whether" in note for note in notes)
        assert verify_dataset(path) == []
    else:
        assert manifest is None
        assert [problem.what for problem in problems] == [
            f"missing, and {format} shards contain no checksums to check them with"
        ]
        assert not (path / MANIFEST).exists()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("format", "damage"),
    [
        *((format, damage) for format in FORMATS for damage in ("middle", "flipped", "swapped")),
        *(("memmap", damage) for damage in ("first", "last", "interrupted", "extra")),
    ],
)
def test_a_repair_without_every_whole_shard_is_refused_and_writes_nothing(
    tmp_path: Path, format: str, damage: str
) -> None:
    path = write(tmp_path / "data", format)
    (path / MANIFEST).unlink()
    shards = [parts_of(path, format, number) for number in range(4)]
    if damage in ("first", "middle", "last"):
        for part in shards[{"first": 0, "middle": 1, "last": 3}[damage]]:
            remove(part)
    elif damage == "flipped":
        place = shards[0][0]
        _flip(next(place.glob("loss_mask*")) if place.is_dir() else max(shards[0], key=lambda one: one.stat().st_size))
    elif damage == "swapped":
        for one, other in zip(sorted(shards[0]), sorted(shards[1]), strict=True):
            one.rename(path / "kept")
            other.rename(one)
            (path / "kept").rename(other)
    elif damage == "interrupted":
        (path / "_writing").touch()
    else:
        for part in shards[3]:
            target = part.with_name(part.name.replace("3", "4", 1))
            shutil.copytree(part, target) if part.is_dir() else shutil.copy(part, target)
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file()}
    manifest, problems, _ = repair_manifest(str(path))
    assert manifest is None
    assert problems
    assert {one: one.read_bytes() for one in path.rglob("*") if one.is_file()} == before


def test_the_command_repairs_a_prepared_folder_and_says_what_is_lost(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        write(tmp_path / name)
    (tmp_path / "train" / MANIFEST).write_text("{")
    result = CliRunner().invoke(app, ["verify", "--repair-manifest", str(tmp_path)])
    assert result.exit_code == 0
    assert "train: manifest and index rebuilt from 4 shards: 7 packs, fingerprint" in result.stdout
    assert "train: provenance (tokenizer, chat template, packer, seed, mask) is lost" in result.stdout
    assert "train: parquet does not store pack_size; it was set to the longest pack, 4" in result.stdout
    assert "validation: the manifest is intact; there is nothing to repair" in result.stdout
    assert "14 packs, nothing wrong" in result.stdout


def test_only_folders_on_a_disk_are_repaired(tmp_path: Path) -> None:
    write(tmp_path / "one.parquet")
    with pytest.raises(ConfigError, match="a manifest can be repaired only in a local folder"):
        repair_manifest(str(tmp_path / "one.parquet"))


def test_a_repair_that_cannot_write_the_index_names_the_folder_and_leaves_no_lock(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "parquet")
    (path / MANIFEST).unlink()
    shutil.rmtree(path / "index")
    (path / "index").write_text("a file where the folder of the index belongs")
    names = sorted(path.iterdir())
    with pytest.raises(FormatError, match="writing failed: File exists") as caught:
        repair_manifest(str(path))
    assert (caught.value.where, sorted(path.iterdir())) == (str(path), names)


def test_an_incomplete_dataset_is_replaced_with_overwrite_if_its_manifest_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "npy")
    (path / MANIFEST).write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        write(path)
    write_packs(path, [PACKS[0]], pack_size=8, overwrite=True)
    assert list(open_dataset(path)) == PACKS[:1]
    assert sorted(one.name for one in path.iterdir()) == ["index", MANIFEST, "shard_000000.parquet"]


# ---- files of other tools, some of which have our names


ROWS: list[dict[str, Any]] = [
    {"input_ids": pack.input_ids.tolist(), "loss_mask": pack.loss_mask.tolist(), "seq_start_id": [0, 2]}
    for pack in PACKS
]


def foreign_parquet(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, path / "shard_000000.parquet")
    pq.write_table(table, path / "shard_000001.parquet", compression="zstd", store_schema=False)


def foreign_npy(path: Path) -> None:
    for number in range(2):
        np.save(path / f"shard_{number:06d}.npy", ROWS, allow_pickle=True)  # type: ignore[arg-type]


def foreign_memmap(path: Path) -> None:
    for number in range(2):
        shard = path / f"shard_{number:06d}"
        shard.mkdir()
        np.save(shard / "input_ids.npy", np.array([row["input_ids"] for row in ROWS], np.int32))
        np.save(shard / "loss_mask.npy", np.array([row["loss_mask"] for row in ROWS], np.uint8))
        np.save(shard / "packed_len.npy", np.full(7, 4, np.uint32))
        np.save(shard / "seq_offsets.npy", np.arange(0, 15, 2, dtype=np.uint32))
        np.save(shard / "seq_starts.npy", np.array([0, 2] * 7, np.uint32))
        (shard / MANIFEST).write_text('{"num_bins": 7, "pack_size": 4, "tool": "another"}')


def foreign_jsonl(path: Path) -> None:
    """Chunks in the layout of live streams, as other tools write them: the same fields with spaces between them."""
    for number in range(2):
        lines = [json.dumps(json.loads(line_of_pack(pack))) + "\n" for pack in PACKS]
        (path / f"chunk_{number:05d}.jsonl").write_text("".join(lines))


def live_jsonl(path: Path) -> None:
    for number in range(2):
        chunk = path / f"chunk_{number:05d}.jsonl"
        chunk.write_bytes(b"".join(map(line_of_pack, PACKS)))
        chunk.with_name(f"{chunk.name}.ready").write_text("{}")


def foreign_memmap_folders(path: Path) -> None:
    """Folders of the RFC's layout and counts under names of the user."""
    foreign_memmap(path)
    for number in range(2):
        (path / f"shard_{number:06d}").rename(path / f"bins_{number}")


@pytest.mark.parametrize(
    "make", [foreign_parquet, foreign_npy, foreign_memmap, foreign_memmap_folders, foreign_jsonl, live_jsonl]
)
def test_files_of_other_tools_open_also_under_our_names(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    reader = open_dataset(tmp_path)
    assert list(reader) == PACKS * 2
    assert reader.manifest is None
    assert verify_dataset(tmp_path) == []
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert "without a manifest, only the invariants of packs were checked" in result.stdout
    assert result.exit_code == 0
    (tmp_path / MANIFEST).write_text('{"version": "1.0", "shards": 2, "format": "packed"}')
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "words.txt").touch()
    assert list(open_dataset(tmp_path)) == PACKS * 2


def test_megatrons_own_indexed_files_under_our_names_are_not_an_incomplete_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "binidx")
    (tmp_path / "megatron").mkdir()
    for suffix in (".bin", ".idx"):
        (path / f"shard_000000{suffix}").rename(tmp_path / "megatron" / f"shard_000000{suffix}")
    for place in (tmp_path / "megatron", tmp_path / "megatron" / "shard_000000"):
        with pytest.raises(FormatError, match=r"shard_000000\.loss\.bin.* missing"):
            open_dataset(place)


def test_a_dataset_of_a_single_file_opens_under_the_name_of_a_shard(tmp_path: Path) -> None:
    write(tmp_path / "shard_000000.parquet")
    assert list(open_dataset(tmp_path)) == PACKS


@pytest.mark.parametrize("damaged", [0, 3])
def test_shards_without_manifest_and_index_are_ours_if_the_first_or_the_last_is(tmp_path: Path, damaged: int) -> None:
    path = write(tmp_path / "data")
    (path / MANIFEST).unlink()
    shutil.rmtree(path / "index")
    [shard] = parts_of(path, "parquet", damaged)
    shard.write_bytes(b"damaged beyond recognition")
    assert_refused(path, tmp_path / "out", "the dataset is incomplete: manifest.json")
