"""Conversion of any format to any other, and the errors of a failed conversion."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from small_packs import PACKS, write_packs

from harness.errors import ConfigError, FormatError
from harness.formats import FORMATS, Provenance, open_dataset
from harness.formats.convert import convert_dataset
from harness.formats.inspect import find_tokenizer_folder
from harness.prep.pipeline import repack_store
from harness.records import Pack


def write(path: Path, *, format: str = "parquet", packs: list[Pack] = PACKS) -> Path:
    provenance = Provenance(tokenizer="bpe", seed=3, counts={"dropped": 1})
    return write_packs(path, packs, format=format, pack_size=8, packs_per_shard=3, provenance=provenance)


@pytest.mark.parametrize(("source", "target"), [*itertools.pairwise([*FORMATS, next(iter(FORMATS))])])
def test_every_format_becomes_another(tmp_path: Path, source: str, target: str) -> None:
    manifest = convert_dataset(write(tmp_path / "a", format=source), tmp_path / "b", format=target, packs_per_shard=2)
    reader = open_dataset(tmp_path / "b")
    assert list(reader) == PACKS
    assert (reader.format, reader.pack_size) == (target, 8)
    assert reader.manifest == manifest
    assert manifest.provenance == Provenance(tokenizer="bpe", seed=3, counts={"dropped": 1})
    assert manifest.fingerprint == open_dataset(tmp_path / "a").fingerprint


def test_a_finished_conversion_is_not_written_again(tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    first = convert_dataset(source, tmp_path / "b", format="memmap", pack_size=16)
    before = (tmp_path / "b" / "manifest.json").stat().st_mtime_ns
    assert convert_dataset(source, tmp_path / "b", format="memmap", pack_size=16) == first
    assert (tmp_path / "b" / "manifest.json").stat().st_mtime_ns == before
    for other, settings in (
        (source, {"format": "jsonl", "pack_size": 16}),
        (source, {"format": "memmap"}),  # another size of packs
        (write(tmp_path / "c", packs=PACKS[:2]), {"format": "memmap", "pack_size": 16}),
    ):
        with pytest.raises(FormatError, match="already contains a dataset"):
            convert_dataset(other, tmp_path / "b", **settings)


def test_a_destination_that_differs_names_the_first_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a")
    other = write(tmp_path / "other", packs=[*PACKS[:4], Pack([9, 2, 3, 4], [1, 0, 1, 0], [0, 2]), *PACKS[5:]])
    monkeypatch.setattr(
        "harness.formats.convert.open_dataset", lambda path: open_dataset(other if Path(path).name == "b" else path)
    )
    with pytest.raises(FormatError, match=r"first difference: pack 4, input_ids\[0\]: 5 and 9"):
        convert_dataset(source, tmp_path / "b", format="memmap", overwrite=True)


def test_a_dataset_is_not_converted_onto_itself(tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    with pytest.raises(ConfigError, match="source and destination are the same"):
        convert_dataset(source, tmp_path / "x" / ".." / "a", format="npy", overwrite=True)
    assert list(open_dataset(source)) == PACKS


@pytest.mark.parametrize("destination", ["elsewhere/deep/memmap", "elsewhere/one.parquet"])
def test_the_tokenizer_beside_the_source_is_found_from_the_destination(tmp_path, destination):
    (tmp_path / "made" / "tokenizer").mkdir(parents=True)
    source = tmp_path / "made" / "train"
    write_packs(
        source,
        [Pack([1, 2, 3], [1, 1, 0], [0])],
        format="parquet",
        pack_size=8,
        provenance=Provenance(tokenizer="../tokenizer"),
    )
    format = "parquet" if destination.endswith(".parquet") else "memmap"
    (tmp_path / destination).parent.mkdir(parents=True, exist_ok=True)
    convert_dataset(source, tmp_path / destination, format=format)
    folder = find_tokenizer_folder(open_dataset(tmp_path / destination))
    assert folder.resolve() == tmp_path / "made" / "tokenizer"
    # One that is not there keeps its name.
    (tmp_path / "made" / "tokenizer").rmdir()
    manifest = convert_dataset(source, tmp_path / "copy", format="binidx")
    assert manifest.provenance.tokenizer == "../tokenizer"


def test_what_the_source_reads_is_not_replaced(tmp_path: Path) -> None:
    store, plan = tmp_path / "store", tmp_path / "plan"
    convert_dataset(write(tmp_path / "a"), store, format="virtual")
    repack_store(str(store), str(plan), pack_size=8)
    packs = list(open_dataset(plan))
    for source in (plan, store / "shard_000000", str(store / "shard_*")):
        with pytest.raises(ConfigError, match="contains the packs of the source"):
            convert_dataset(source, store, format="parquet", overwrite=True)
    assert list(open_dataset(plan)) == packs


def test_the_other_name_of_npy_writes_a_file_which_goes_back_and_finds_a_finished_folder(tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    for _ in range(2):
        assert convert_dataset(source, tmp_path / "b", format="legacy_npy_pickle").format == "npy"
    convert_dataset(tmp_path / "b", tmp_path / "one.npy", format="legacy_npy_pickle")
    assert open_dataset(tmp_path / "one.npy").manifest is None
    convert_dataset(tmp_path / "one.npy", tmp_path / "c", format="memmap", pack_size=8)
    assert open_dataset(tmp_path / "c").fingerprint == open_dataset(source).fingerprint


def test_a_destination_that_is_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FormatError):
        convert_dataset(write(tmp_path / "a"), tmp_path / "loop", format="jsonl")
    store = write(tmp_path / "store", format="virtual")
    with pytest.raises(FormatError):
        repack_store(str(store), str(tmp_path / "loop"), pack_size=8)
