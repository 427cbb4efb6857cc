"""Sequences stored once, and datasets that are plans over them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import ConfigError, FormatError, PrepError
from harness.formats import Provenance, convert_dataset, open_dataset, open_writer, verify_dataset
from harness.formats.index import KeptFingerprint
from harness.formats.layouts.virtual import open_store, write_plan
from harness.formats.verify import diff_datasets
from harness.prep import plan_packs
from harness.prep.pipeline import repack_store
from harness.records import Pack
from harness.storage import file_digest

SEQUENCES = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13, 14], [15, 16], [17, 18, 19, 20, 21, 22], [23, 24]]


def pack_of(sequences: list[list[int]]) -> Pack:
    ends = np.cumsum([len(one) for one in sequences])
    mask = np.ones(int(ends[-1]), np.uint8)
    mask[ends - 1] = 0
    return Pack(np.concatenate(sequences), mask, np.concatenate([[0], ends[:-1]]))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """SEQUENCES, one a pack, in shards of three."""
    path = tmp_path / "store"
    provenance = Provenance(tokenizer="../tokenizer")
    (tmp_path / "tokenizer").mkdir()
    with open_writer(path, format="virtual", pack_size=8, packs_per_shard=3, provenance=provenance) as writer:
        for sequence in SEQUENCES:
            writer.append(pack_of([sequence]))
    return path


def materialise(path: Path, *, pack_size: int, seed: int = 0, format: str = "parquet") -> Path:
    """Write the same sequences like `prepare` with the same settings."""
    plan = plan_packs([len(one) for one in SEQUENCES], pack_size=pack_size, seed=seed)
    with open_writer(path, format=format, pack_size=pack_size) as writer:
        for index in range(plan.num_packs):
            writer.append(pack_of([SEQUENCES[number] for number in plan.pack(index).tolist()]))
    return path


@pytest.mark.parametrize(("pack_size", "seed"), [(8, 0), (8, 1), (16, 0), (100, 7)])
def test_a_plan_reads_like_the_materialized_packs(tmp_path: Path, store: Path, pack_size: int, seed: int) -> None:
    repack_store(str(store), str(tmp_path / "plan"), pack_size=pack_size, seed=seed)
    written = materialise(tmp_path / "written", pack_size=pack_size, seed=seed)
    plan, packs = open_dataset(tmp_path / "plan"), open_dataset(written)
    assert list(plan) == list(packs)
    assert plan.fingerprint == packs.fingerprint
    assert plan.pack_offsets.tolist() == packs.pack_offsets.tolist()
    assert plan.sequence_lengths.tolist() == packs.sequence_lengths.tolist()
    assert plan.read([-1, 0, 0]) == packs.read([-1, 0, 0])
    assert diff_datasets(tmp_path / "plan", written) is None
    assert verify_dataset(tmp_path / "plan") == []
    assert plan.manifest is not None
    assert packs.manifest is not None
    for name in ("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "pack_size"):
        assert getattr(plan.manifest, name) == getattr(packs.manifest, name)


def test_a_plan_copies_no_token(tmp_path: Path, store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert sorted(path.relative_to(tmp_path / "plan").as_posix() for path in (tmp_path / "plan").rglob("*.*")) == [
        "index/pack_offsets.npy",
        "index/sequence_lengths.npy",
        "manifest.json",
        "shard_000000/pack_offsets.npy",
        "shard_000000/plan.json",
        "shard_000000/sequence_ids.npy",
    ]


def test_a_plan_of_a_plan_uses_the_same_store(tmp_path: Path, store: Path) -> None:
    repack_store(str(store), str(tmp_path / "first"), pack_size=8)
    repack_store(str(tmp_path / "first"), str(tmp_path / "deep" / "second"), pack_size=16, seed=3)
    assert diff_datasets(tmp_path / "deep" / "second", materialise(tmp_path / "w", pack_size=16, seed=3)) is None
    plan = json.loads((tmp_path / "deep" / "second" / "shard_000000" / "plan.json").read_text())
    assert plan["store"] == "../../store"
    assert plan["shards"] == [["shard_000000", 3], ["shard_000001", 3], ["shard_000002", 1]]


def test_any_dataset_becomes_a_store_once(tmp_path: Path) -> None:
    source = materialise(tmp_path / "memmap", pack_size=8, format="memmap")
    with pytest.raises(FormatError, match="a dataset of format memmap, expected a sequence store") as caught:
        repack_store(str(source), str(tmp_path / "plan"), pack_size=16)
    assert "harness convert" in caught.value.fix
    convert_dataset(source, tmp_path / "store", format="virtual")
    repack_store(str(tmp_path / "store"), str(tmp_path / "plan"), pack_size=16)
    found = [one.input_ids.tolist() for pack in open_dataset(tmp_path / "plan") for one in pack.sequences()]
    assert sorted(found) == SEQUENCES


@pytest.mark.parametrize("format", ["parquet", "virtual"])
def test_a_plan_converts_to_packs_and_to_a_store(tmp_path: Path, store: Path, format: str) -> None:
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    manifest = convert_dataset(tmp_path / "plan", tmp_path / "out", format=format)
    assert manifest.fingerprint == open_dataset(tmp_path / "plan").fingerprint
    assert verify_dataset(tmp_path / "out") == []


def test_the_fingerprint_is_computed_once_and_kept(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "plan"
    repack_store(str(store), str(path), pack_size=8)
    fingerprint = open_dataset(path).fingerprint
    kept = json.loads((path / "fingerprint.json").read_text())
    (path / "fingerprint.json").write_text(json.dumps(kept | {"fingerprint": "0" * 32}))
    assert ["has fingerprint 000" in one.what for one in verify_dataset(path)] == [True]
    (path / "fingerprint.json").write_text(json.dumps(kept))
    # Without its tokens it could not be taken again.
    for name in ("shard_000000", "shard_000001", "shard_000002"):
        (store / name / "input_ids.npy").unlink()
    assert open_dataset(path).fingerprint == fingerprint
    assert pickle.loads(pickle.dumps(open_dataset(path))).fingerprint == fingerprint
    # What was kept of another plan does not count.
    (path / "fingerprint.json").write_text(json.dumps(kept | {"manifest_xxh3": "0" * 16}))
    with pytest.raises(FormatError, match="cannot be read"):
        _ = open_dataset(path).fingerprint


def test_one_of_several_processes_computes_the_fingerprint(tmp_path: Path, store: Path) -> None:
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    kept = KeptFingerprint(tmp_path / "plan", file_digest(tmp_path / "plan" / "manifest.json"))
    started_out, started_in = os.pipe()
    all_started_out, all_started_in = os.pipe()

    def compute(number: int) -> str:
        with (tmp_path / "computed").open("a") as file:
            file.write("x")
        os.read(all_started_out, 1)
        return f"{number:032x}"

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            os.write(started_in, b".")
            kept.take(lambda number=number: compute(number))
            os._exit(0)
        children.append(child)
    for _ in children:
        os.read(started_out, 1)
    os.write(all_started_in, b"....")
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "computed").read_text() == "x"
    assert kept.load() is not None


def test_a_plan_finds_its_store_after_both_move(tmp_path: Path, store: Path) -> None:
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    packs = list(open_dataset(tmp_path / "plan"))
    (tmp_path / "elsewhere").mkdir()
    for name in ("store", "plan"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    assert list(open_dataset(tmp_path / "elsewhere" / "plan")) == packs
    # A link to the plan finds the store where the plan itself is.
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "plan")
    assert list(open_dataset(tmp_path / "link")) == packs


def test_a_missing_or_different_store_is_an_error_with_its_path(tmp_path: Path, store: Path) -> None:
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    store.rename(tmp_path / "moved")
    with pytest.raises(FormatError, match="sequence store cannot be read: No such file") as caught:
        open_dataset(tmp_path / "plan")[0]
    assert caught.value.where == str(store)
    assert "restore the store at ../store" in caught.value.fix
    with open_writer(store, format="virtual", pack_size=8) as writer:
        for sequence in SEQUENCES:
            writer.append(pack_of([sequence[::-1]]))
    with pytest.raises(FormatError, match="not the sequence store of the plan") as caught:
        open_dataset(tmp_path / "plan")[0]
    assert f"harness repack {store} {tmp_path / 'plan'} --overwrite" in caught.value.fix
    assert "not the sequence store of the plan" in verify_dataset(tmp_path / "plan")[0].what


def test_a_changed_token_is_an_error_with_the_number_of_its_sequence(tmp_path: Path, store: Path) -> None:
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    file = store / "shard_000001" / "input_ids.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match="sequence 2 does not match its checksum") as caught:
        list(open_dataset(tmp_path / "plan"))
    assert caught.value.where == str(file)
    problems = verify_dataset(tmp_path / "plan")
    assert [problem.what for problem in problems] == ["sequence 2 does not match its checksum"]


def test_equally_long_sequences_that_change_places_in_a_plan_are_found(tmp_path: Path, store: Path) -> None:
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    file = tmp_path / "plan" / "shard_000000" / "sequence_ids.npy"
    ids = np.load(file)
    one, other = np.flatnonzero((ids == 1) | (ids == 4))
    ids[[one, other]] = ids[[other, one]]
    np.save(file, ids)
    with pytest.raises(FormatError, match="the sequence ids of the plan have hash"):
        open_dataset(tmp_path / "plan")[0]


def test_a_plan_must_hold_each_sequence_once(tmp_path: Path, store: Path) -> None:
    found = open_store(store)
    for ids in ([0, 1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 4, 5]):
        with pytest.raises(ConfigError, match="each of the 7 sequences exactly once"):
            write_plan(
                tmp_path / "plan",
                found,
                pack_offsets=np.arange(len(ids) + 1),
                sequence_ids=np.array(ids),
                pack_size=8,
                packer="own",
                seed=0,
            )
    assert not (tmp_path / "plan").exists()


def test_a_failed_plan_leaves_nothing(tmp_path: Path, store: Path) -> None:
    with pytest.raises(PrepError, match="longer than pack_size 4"):
        repack_store(str(store), str(tmp_path / "plan"), pack_size=4)
    with pytest.raises(ConfigError, match="the store itself"):
        repack_store(str(store), str(store), pack_size=8, overwrite=True)
    with pytest.raises(FormatError, match="not a dataset, expected a sequence store"):
        repack_store(str(tmp_path / "none"), str(tmp_path / "plan"), pack_size=8)
    assert not (tmp_path / "plan").exists()
    repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    with pytest.raises(FormatError, match="already contains a dataset"):
        repack_store(str(store), str(tmp_path / "plan"), pack_size=16)
    repack_store(str(store), str(tmp_path / "plan"), pack_size=16, overwrite=True)
    assert open_dataset(tmp_path / "plan").pack_size == 16


def test_a_plan_elsewhere_than_its_store_and_one_of_an_incomplete_store_are_refused(
    tmp_path: Path, store: Path
) -> None:
    with pytest.raises(ConfigError, match="a plan in object storage requires its sequence store") as refused:
        repack_store(str(store), "s3://bucket/plan", pack_size=8)
    assert f"harness convert {store} s3://bucket/plan-store virtual" in refused.value.fix
    (store / "manifest.json").unlink()
    shutil.rmtree(store / "shard_000001")
    with pytest.raises(
        FormatError, match=r"incomplete: manifest.json, shard_000001 missing \(\d shards found\)"
    ) as caught:
        repack_store(str(store), str(tmp_path / "plan"), pack_size=8)
    assert "--repair-manifest" in caught.value.fix


def test_the_command_plans_again_and_inspect_finds_the_tokenizer(tmp_path: Path, store: Path) -> None:
    run = CliRunner()
    plan = tmp_path / "deep" / "plan"
    done = run.invoke(app, ["repack", str(store), str(plan), "data.pack_size=16", "data.seed=5"])
    assert done.exit_code == 0, done.output
    assert "2 packs, 7 sequences, 24 tokens as virtual" in done.output
    shown = run.invoke(app, ["inspect", str(plan), "--json"])
    provenance = json.loads(shown.output)[0]["provenance"]
    assert (provenance["seed"], provenance["packer"]) == (5, "best_fit_decreasing")
    assert provenance["tokenizer"] == "../../tokenizer"
    assert (plan / provenance["tokenizer"]).resolve() == tmp_path / "tokenizer"
    assert run.invoke(app, ["verify", str(plan)]).exit_code == 0
    shutil.rmtree(store)
    assert run.invoke(app, ["verify", str(plan)]).exit_code == 1
