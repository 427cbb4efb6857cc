"""Everything that a path can be, and the errors for a path to nothing."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_packs import write_packs

from harness.errors import ConfigError, FormatError
from harness.formats import FORMATS, Provenance, open_dataset, open_writer
from harness.records import Pack

PACKS = [Pack([1, 2, 3], [1, 1, 0], [0]), Pack([4, 5], [0, 0], [0, 1])]


def write(path: Path, **options: Any) -> Path:
    return write_packs(path, PACKS, pack_size=4, **options)


def error_of(path: Path | str) -> FormatError:
    with pytest.raises(FormatError) as caught:
        open_dataset(path)
    return caught.value


def test_a_missing_dataset_suggests_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "sft-train")
    error = error_of(tmp_path / "sft-trian")
    assert error.what == "there is no dataset"
    assert error.fix == f"did you mean {tmp_path / 'sft-train'}?"
    assert error_of(tmp_path / "no" / "such").fix == "`harness prepare` writes one"


def test_a_folder_without_a_manifest_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "interrupted write or no dataset (found notes.txt)" in error_of(tmp_path).what
    (tmp_path / "empty").mkdir()
    assert "found nothing" in error_of(tmp_path / "empty").what


def test_files_that_all_hold_no_packs_are_refused(tmp_path: Path) -> None:
    for count in (1, 2):
        (tmp_path / f"{count}.jsonl").touch()
        assert error_of(tmp_path).what == f"the {'file contains' if count == 1 else '2 files contain'} no packs"
    assert error_of(tmp_path / "*.jsonl").what == "the 2 files contain no packs"


def test_a_folder_of_datasets_suggests_one_of_them(tmp_path: Path) -> None:
    for name in ("validation", "train"):
        write(tmp_path / name)
    error = error_of(tmp_path)
    assert error.what == "a folder of 2 datasets, not a dataset itself"
    assert error.fix == f"specify one of them: {tmp_path / 'train'}, {tmp_path / 'validation'}"


def test_an_unknown_suffix_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "data.arrows").write_text("1,2")
    error = error_of(tmp_path / "data.arrows")
    assert "'.arrows'" in error.what
    assert ".parquet" in error.fix


def test_a_glob_without_matches_or_of_two_formats_is_an_error(tmp_path: Path) -> None:
    assert "no file matches" in error_of(str(tmp_path / "*.parquet")).what
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.npy", format="npy")
    assert "1 of 2 files are not" in error_of(str(tmp_path / "*")).what


def change_manifest(path: Path, change: Callable[[Any], None]) -> FormatError:
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"]  # As manifests were before they had one.
    change(values)
    (path / "manifest.json").write_text(json.dumps(values))
    return error_of(path)


def _set(*keys: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in keys[:-2]:
            values = values[key]
        values[keys[-2]] = keys[-1]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set("version", 1), "has version 1; this program reads version 2"),
        (_set("format", "tar"), "unknown format, 'tar'"),
        (_set("pack_size", "4"), "pack_size is '4', not of type int"),
        (_set("pack_size", 2), "contradict each other: pack_size 2, num_packs 2, "),
        (_set("num_packs", 3), "contradict each other: pack_size 4, num_packs 3, "),
        (_set("num_sequences", 1), "contradict each other: pack_size 4, num_packs 2, num_sequences 1, num_tokens 5, "),
        (_set("num_trained_tokens", 9), "num_tokens 5, num_trained_tokens 9, num_media 0, and 2 packs in its shards"),
        (_set("num_tokens", 1 << 70), "one of 2^63 or more"),
        (_set("fingerprint", "abc"), "has the fingerprint 'abc'"),
        (_set("shards", []), "lists no shards"),
        (
            lambda values: values["shards"].append({**values["shards"][0], "path": "x", "num_packs": 0}),
            "or a shard without packs",
        ),
        (_set("shards", 0, "files", []), "lists a shard without files"),
        (_set("shards", 0, "files", 0, "num_bytes", -1), "has a negative count"),
        (_set("shards", 0, "files", 0, "path", "../x.parquet"), "not a plain path inside"),
        (_set("shards", 0, "files", 0, "path", "/etc/passwd"), "not a plain path inside"),
        (_set("shards", 0, "path", "a/../../x"), "not a plain path inside"),
        (_set("shards", 0, "files", 0, "path", "a\\..\\b"), "not a plain path inside"),
        (_set("shards", 0, "files", 0, "xxh3", "zz"), "file hash 'zz'"),
        (_set("shards", 0, "files", 0, "num_bytes", 1), "the manifest says 1"),
        (_set("index", []), "index"),
        (_set("index", 2, "path", "index/pack_cheCksums.npy"), "the manifest lists 3 index files, expected"),
        (_set("provenance", 5), "the file contains '5' instead of settings"),
        (_set("provenance", "counts", {"a": "b"}), "counts[] is 'b'"),
        (_set("provenance", "seed", "x"), "seed is 'x'"),
    ],
)
def test_a_manifest_that_breaks_an_invariant_is_an_error(tmp_path: Path, change: Any, problem: str) -> None:
    assert problem in change_manifest(write(tmp_path / "data"), change).what


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    shard = path / "shard_000000.parquet"
    shard.rename(tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    assert "leaves the dataset's folder" in error_of(path).what
    (tmp_path / "outside").rename(path / "inside")
    shard.unlink()
    shard.symlink_to("inside")
    assert list(open_dataset(path)) == PACKS


def test_a_destination_in_use_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    with pytest.raises(FormatError, match="already contains a dataset"), open_writer(path, pack_size=4):
        pass
    assert list(open_dataset(path)) == PACKS
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.txt").write_text("years of work")
    with pytest.raises(FormatError, match=r"such as thesis\.txt"):
        write(tmp_path / "docs")
    assert [entry.name for entry in (tmp_path / "docs").iterdir()] == ["thesis.txt"]
    with pytest.raises(FormatError, match="is a file"):
        write(tmp_path / "docs" / "thesis.txt")


def test_an_interrupted_write_is_not_resumed_with_other_settings_nor_after_a_damaged_shard(tmp_path: Path) -> None:
    def start(key: str) -> Any:
        return open_writer(tmp_path / "data", pack_size=4, packs_per_shard=1, resume_key=key)

    def interrupt(key: str) -> None:
        with pytest.raises(KeyboardInterrupt), start(key) as writer:  # noqa: PT012
            for pack in PACKS[writer.num_packs :]:
                writer.append(pack)
            raise KeyboardInterrupt

    interrupt("a")
    with start("b") as writer:
        assert writer.num_packs == 0
        writer.append(PACKS[1])
    assert list(open_dataset(tmp_path / "data")) == [PACKS[1]]
    shutil.rmtree(tmp_path / "data")
    interrupt("a")
    shard = tmp_path / "data" / "shard_000001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"X")
    with start("a") as writer:
        assert writer.num_packs == 1
        writer.append(PACKS[1])
    assert list(open_dataset(tmp_path / "data")) == PACKS


def test_unusable_settings_and_an_empty_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown format 'tar'"):
        open_writer(tmp_path / "data", format="tar", pack_size=4)
    with pytest.raises(ConfigError, match="pack_size is 0"):
        open_writer(tmp_path / "data", pack_size=0)
    with pytest.raises(ConfigError, match="not open"):
        open_writer(tmp_path / "data", pack_size=4).append(PACKS[0])
    with pytest.raises(ConfigError, match=r"ends in \.npy but the format is parquet"):
        open_writer(tmp_path / "data.npy", pack_size=4)
    with pytest.raises(FormatError, match="no packs were written"), open_writer(tmp_path / "data", pack_size=4):
        pass
    assert not (tmp_path / "data").exists()


def test_a_uri_of_no_known_store_is_refused_and_makes_no_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for work in (open_dataset, lambda uri: open_writer(uri, pack_size=4)):
        with pytest.raises(ConfigError, match="no object storage with the scheme 'ftp'"):
            work("ftp://bucket/data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_pattern_takes_each_shard_once_whatever_files_it_has(tmp_path: Path, format: str) -> None:
    path = write_packs(tmp_path / "data", PACKS, pack_size=4, packs_per_shard=1, format=format)
    assert list(open_dataset(str(path / "*_0*"))) == PACKS


def test_a_pattern_over_folders_opens_no_dataset_as_bare_files(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    assert error_of(str(tmp_path / "dat*")).what == "the pattern matches the folder of a dataset, expected files"
    (path / "manifest.json").unlink()
    assert "the dataset is incomplete: manifest.json missing" in error_of(str(tmp_path / "dat*")).what


def test_two_stars_match_files_at_any_depth_and_each_once(tmp_path: Path) -> None:
    for folder in ("", "a", "a/b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        write(tmp_path / folder / "one.parquet")
    for pattern in ("**/*.parquet", "**/*"):
        assert list(open_dataset(str(tmp_path / pattern))) == PACKS * 3


def test_text_beside_packs_is_none_of_them(tmp_path: Path) -> None:
    data = write(tmp_path / "packed" / "training_8.npy", format="npy")
    (tmp_path / "packed" / "8_metadata.jsonl").write_text("{}\n")
    assert len(open_dataset(tmp_path / "packed")) == len(open_dataset(data))


@pytest.mark.parametrize(("format", "count"), [("jsonl", 150), ("memmap", 40)])
def test_more_files_than_a_process_may_have_open_are_one_dataset(tmp_path: Path, format: str, count: int) -> None:
    shard = next(write(tmp_path / "data", format=format).glob("*_0*"))
    (tmp_path / "bare").mkdir()
    for number in range(count):
        copy = shutil.copytree if shard.is_dir() else shutil.copy
        copy(shard, tmp_path / "bare" / f"{number}{shard.suffix}")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 100, limits[1]))
    try:
        assert list(open_dataset(tmp_path / "bare")) == PACKS * count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("format", ["memmap", "virtual"])
def test_the_current_folder_can_be_a_shard_and_is_refused_as_one(tmp_path: Path, monkeypatch, format: str) -> None:
    path = write(tmp_path / "data", format=format)
    shutil.copytree(path / "shard_000000", tmp_path / "bare")
    monkeypatch.chdir(tmp_path / "bare")
    assert list(open_dataset(".")) == PACKS
    (path / "manifest.json").unlink()
    monkeypatch.chdir(path / "shard_000000")
    assert "the dataset is incomplete" in error_of(".").what


@pytest.mark.parametrize(
    "fields", [{"counts": {"rate": 0.5}}, {"counts": {"read": np.int64(3)}}, {"seed": "1"}, {"tokenizer": Path("bpe")}]
)
def test_what_a_manifest_cannot_hold_is_refused_before_the_first_pack(tmp_path: Path, fields: Any) -> None:
    with pytest.raises(ConfigError, match="the provenance cannot be stored"):
        open_writer(tmp_path / "data", pack_size=4, provenance=Provenance(**fields))


def test_sizes_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    sizes = {name: np.int64(4) for name in ("pack_size", "packs_per_shard", "rows_per_group")}
    assert open_dataset(write_packs(tmp_path / "data", PACKS, **sizes, resume_key="a")).pack_size == 4
