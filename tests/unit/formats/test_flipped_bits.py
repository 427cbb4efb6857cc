"""A flipped bit anywhere in a dataset: refused, or without any effect."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from small_packs import write_packs
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import FormatError
from harness.formats import FORMATS, Provenance, open_dataset, verify_dataset
from harness.formats.layouts.virtual import open_store, write_plan
from harness.formats.manifest import content_checksum
from harness.records import Pack

PACKS = [Pack([number, 2, 300, 4], [1, 0, 1, 0], [0, 2]) for number in range(1, 5)]
PROVENANCE = Provenance(
    tokenizer="../tokenizer",
    tokenizer_hash="a1b2",
    chat_template_hash="c3",
    packer="best_fit_decreasing",
    seed=7,
    settings_hash="d4",
    counts={"read": 9, "dropped": 5},
    mask={"rule": "generation", "why": "the template marks it é", "end_tokens": "[2]"},
)
KINDS = [*FORMATS, "plan"]


def write(path: Path, kind: str) -> Path:
    format, where = ("virtual", path.with_name("store")) if kind == "plan" else (kind, path)
    write_packs(where, PACKS, format=format, pack_size=8, packs_per_shard=2, provenance=PROVENANCE)
    if kind == "plan":
        offsets, ids = np.arange(0, 9, 2), np.arange(8)
        write_plan(path, open_store(where), pack_offsets=offsets, sequence_ids=ids, pack_size=8, packer="p", seed=1)
    return path


def flip_manifest(path: Path, *, step: int, bits: range) -> tuple[int, int]:
    """Flip bits of every `step`-th byte, one at a time; returns how many were refused, and how many had no effect."""
    manifest = path / "manifest.json"
    original = manifest.read_bytes()
    reader = open_dataset(path)
    facts, packs = asdict(reader.manifest or pytest.fail("no manifest")), list(reader)
    refused = harmless = 0
    try:
        for position in range(0, len(original), step):
            for bit in bits:
                damaged = bytearray(original)
                damaged[position] ^= 1 << (bit + position) % 8
                manifest.write_bytes(damaged)
                try:
                    changed = open_dataset(path)
                except FormatError:
                    refused += 1
                    continue
                # It opens: then what was read is what was written, in every field.
                assert asdict(changed.manifest or pytest.fail("no manifest")) == facts, (position, bit)
                assert json.loads(damaged) == json.loads(original)
                assert list(changed) == packs
                harmless += 1
    finally:
        manifest.write_bytes(original)
    assert list(open_dataset(path)) == packs
    return refused, harmless


# The nightly run flips every bit of a manifest, every byte of a file, and more bits of shards.
nightly = partial(pytest.param, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "bits"), [pytest.param(3, 2, marks=pytest.mark.submission), nightly(1, 8)])
def test_a_flipped_bit_of_a_manifest_is_refused_or_has_no_effect(
    tmp_path: Path, kind: str, step: int, bits: int
) -> None:
    refused, harmless = flip_manifest(write(tmp_path / "data", kind), step=step, bits=range(bits))
    assert refused > 600
    assert harmless < 10 * bits  # The case of digits in an escape, such as \u00e9 and \u00E9.


def flip_files(path: Path, files: list[Path], count: int) -> None:
    """Flip bits of files, one at a time: verify reports each; reading gives what was written, or an error."""
    generator = np.random.default_rng(count)
    for number in range(count):
        file = files[number % len(files)]
        original = file.read_bytes()
        damaged = bytearray(original)
        position = int(generator.integers(len(original)))
        damaged[position] ^= 1 << int(generator.integers(8))
        file.write_bytes(damaged)
        assert verify_dataset(path), f"bit of byte {position} of {file}"
        try:
            packs = list(open_dataset(path))
        except FormatError:
            pass
        else:
            assert packs == PACKS, f"bit of byte {position} of {file}"
        file.write_bytes(original)
    assert verify_dataset(path) == []


def stored_files(path: Path) -> list[Path]:
    """All files but the manifest."""
    return sorted(one for one in path.rglob("*") if one.is_file() and one != path / "manifest.json")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [60, nightly(4000)])
def test_a_flipped_bit_of_shards_and_index_is_reported(tmp_path: Path, format: str, count: int) -> None:
    path = write(tmp_path / "data", format)
    flip_files(path, stored_files(path), count)


def flip_single_file(path: Path, *, step: int) -> int:
    """Flip a bit of every `step`-th byte of a dataset of one Parquet file; returns how many were refused."""
    write_packs(path, PACKS, pack_size=8, provenance=PROVENANCE)
    original = path.read_bytes()
    refused = 0
    for position in range(0, len(original), step):
        damaged = bytearray(original)
        damaged[position] ^= 1 << (position // step) % 8
        path.write_bytes(damaged)
        try:
            reader = open_dataset(path)
            assert list(reader) == PACKS, position
            assert reader.manifest is not None, position
            assert reader.manifest.provenance == PROVENANCE, position
        except FormatError:
            refused += 1
    path.write_bytes(original)
    return refused


@pytest.mark.parametrize(("step", "most"), [(7, 100), nightly(1, 700)])
def test_a_flipped_bit_of_a_single_file_is_refused_or_has_no_effect(tmp_path: Path, step: int, most: int) -> None:
    assert flip_single_file(tmp_path / "one.parquet", step=step) > most


# ---- the checksum itself


def test_every_key_of_a_manifest_counts_for_its_checksum(tmp_path: Path) -> None:
    values = json.loads((write(tmp_path / "data", "parquet") / "manifest.json").read_text())
    assert values["checksum"] == content_checksum(values)
    assert content_checksum({**values, "later": [{"key": 1}]}) != values["checksum"]
    assert content_checksum(dict(reversed(values.items()))) == values["checksum"]
    assert content_checksum({"a": 1, "é": "\ud800"}) == "e511d2f4b106e015514e6818a841c03a"


def test_a_manifest_of_a_later_version_with_more_keys_opens_if_its_checksum_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "parquet")
    values = json.loads((path / "manifest.json").read_text()) | {"later": [{"key": 1}]}
    (path / "manifest.json").write_text(json.dumps({**values, "checksum": content_checksum(values)}))
    assert list(open_dataset(path)) == PACKS
    (path / "manifest.json").write_text(json.dumps({**values, "chEcksum": content_checksum(values), "checksum": ""}))
    with pytest.raises(FormatError, match="has the unknown key 'chEcksum' and no checksum"):
        open_dataset(path)


def test_a_manifest_from_before_there_were_checksums_opens_and_verify_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "parquet")
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"]
    (path / "manifest.json").write_text(json.dumps(values, indent=1) + "\n")
    reader = open_dataset(path)
    assert list(reader) == PACKS
    assert reader.manifest is not None
    assert (reader.manifest.checksum, reader.manifest.provenance) == ("", PROVENANCE)
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 0
    assert "the manifest has no checksum, because it was written by an earlier version" in result.stdout


@pytest.mark.parametrize("key", [b"harness.manifest", b"harness.index"])
def test_a_single_file_whose_metadata_lost_a_name_is_refused(tmp_path: Path, key: bytes) -> None:
    path = tmp_path / "one.parquet"
    write_packs(path, [PACKS[0]], pack_size=8)
    for new in (key.upper(), key.replace(b".", b"/"), key[:-1] + b"X"):
        original = path.read_bytes()
        path.write_bytes(original.replace(key, new))
        with pytest.raises(FormatError, match="the dataset metadata of this file is damaged"):
            open_dataset(path)
        path.write_bytes(original)


def test_the_index_inside_a_single_file_must_make_the_fingerprint_of_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.parquet"
    monkeypatch.setattr("harness.formats.writer.dataset_fingerprint", lambda _: "0" * 32)
    write_packs(path, [PACKS[0]], pack_size=8)
    with pytest.raises(FormatError, match="do not match the fingerprint"):
        open_dataset(path)
