"""Guarantees of every format, over the registry: a new format needs no edit here."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_packs import write_packs

from harness.errors import FormatError
from harness.formats import FORMATS, PackReader, load_format, open_dataset, open_writer
from harness.records import Pack

PACK_SIZE = 16


@st.composite
def valid_packs(draw: st.DrawFn) -> Pack:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda found: sum(found) <= PACK_SIZE))
    ends = np.cumsum(lengths)
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=int(ends[-1]), max_size=int(ends[-1])))
    mask = np.array(draw(st.lists(st.integers(0, 1), min_size=int(ends[-1]), max_size=int(ends[-1]))))
    mask[ends - 1] = 0
    return Pack(ids, mask, np.concatenate([[0], ends[:-1]]))


def stored_files(dataset: Path) -> list[Path]:
    """The files that hold packs."""
    reader = open_dataset(dataset)
    return [dataset / stored.path for shard in reader.manifest.shards for stored in shard.files]


def read_all(dataset: Path) -> list[Pack]:
    reader = open_dataset(dataset)
    try:
        return [reader[index] for index in range(len(reader))]
    finally:
        reader.close()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(made=st.lists(valid_packs(), min_size=1, max_size=7), packs_per_shard=st.integers(1, 4))
def test_any_valid_packs_come_back_as_they_were_written(
    tmp_path: Path, format_name: str, made: list[Pack], packs_per_shard: int
) -> None:
    path = tmp_path / "data"
    writer = open_writer(
        path, format=format_name, pack_size=PACK_SIZE, packs_per_shard=packs_per_shard, rows_per_group=2, overwrite=True
    )
    with writer:
        for pack in made:
            writer.append(pack)
    found = read_all(path)
    assert found == made
    assert {(pack.input_ids.dtype.name, pack.loss_mask.dtype.name) for pack in found} == {("int32", "uint8")}


def test_lengths_come_from_the_index_without_reading_packs(reader: PackReader) -> None:
    assert reader.pack_offsets.tolist() == [0, 3, 4, 5, 7, 12]
    assert reader.sequence_lengths.tolist() == [5, 4, 7, 1, 3, 2, 2, 1, 1, 1, 1, 1]
    assert (reader.pack_offsets.dtype, reader.sequence_lengths.dtype) == (np.int64, np.int32)
    assert reader.pack_size == PACK_SIZE


def test_packs_are_read_in_any_order_with_duplicates(reader: PackReader, packs: list[Pack]) -> None:
    assert reader.read([4, 0, 4, 2, -1]) == [packs[4], packs[0], packs[4], packs[2], packs[4]]
    assert reader.read(np.array([3, 1])) == [packs[3], packs[1]]
    assert reader.read([]) == []


@pytest.mark.parametrize("index", [5, -6, 2**40])
def test_an_index_past_either_end_is_an_index_error(reader: PackReader, index: int) -> None:
    with pytest.raises(IndexError, match=f"pack {index} of 5"):
        reader[index]
    with pytest.raises(IndexError, match=f"pack {index} of 5"):
        reader.read([0, index])


def test_a_pack_can_be_changed_without_changing_the_next_read(reader: PackReader, packs: list[Pack]) -> None:
    reader[0].input_ids[:] = 77
    reader.read([0, 0])[0].loss_mask[:] = 1
    assert reader.read([0, 0]) == [packs[0], packs[0]]


def test_the_fingerprint_is_the_same_in_every_format_and_depends_on_the_order(tmp_path, packs) -> None:
    fingerprints = set()
    for name in FORMATS:
        for shards in (2, 100):
            path = tmp_path / f"{name}-{shards}"
            write_packs(path, packs, format=name, pack_size=PACK_SIZE, packs_per_shard=shards)
            fingerprints.add(open_dataset(path).fingerprint)
    assert fingerprints == {"e9538e051df76f9a1d4743136f8b8380"}
    write_packs(tmp_path / "turned", reversed(packs), pack_size=PACK_SIZE)
    assert open_dataset(tmp_path / "turned").fingerprint not in fingerprints


def test_a_reader_pickles_before_and_after_use(dataset: Path, packs: list[Pack]) -> None:
    reader = open_dataset(dataset)
    before = pickle.dumps(reader)
    assert reader[3] == packs[3]
    after = pickle.dumps(reader)
    for data in (before, after):
        copy = pickle.loads(data)
        assert list(copy) == packs
        assert copy.fingerprint == reader.fingerprint
        assert copy.sequence_lengths.tolist() == reader.sequence_lengths.tolist()
    assert len(after) < 20_000


def test_a_forked_child_reads_with_its_own_files(reader: PackReader, packs: list[Pack]) -> None:
    assert reader[0] == packs[0]
    pipe_out, pipe_in = os.pipe()
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                ok = all(reader[index % 5] == packs[index % 5] for index in range(40))
                os.write(pipe_in, b"y" if ok else b"n")
            finally:
                os._exit(0)
        children.append(child)
    assert all(reader[index % 5] == packs[index % 5] for index in range(40))
    for child in children:
        os.waitpid(child, 0)
    os.close(pipe_in)
    assert os.read(pipe_out, 10) == b"yyy"
    os.close(pipe_out)


def test_few_files_stay_open_however_many_shards_are_read(write: Callable[..., Path], packs: list[Pack]) -> None:
    many = (packs * 15)[:70]
    reader = open_dataset(write(many, packs_per_shard=1))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert list(reader) == many
    assert len(os.listdir("/proc/self/fd")) - before <= 64  # noqa: PTH208
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert reader[69] == many[69]
    reader.close()


def test_a_pack_that_breaks_an_invariant_is_refused_with_its_number_and_nothing_is_left(tmp_path, format_name) -> None:
    good = Pack([1, 2, 3], [0, 1, 0], [0])
    bad = {
        "pack 1 has 17 tokens, more than pack_size 16": Pack(range(17), [0] * 17, [0]),
        "pack 1 has 3 tokens but 2 loss_mask entries": Pack([1, 2, 3], [0, 0], [0]),
        "pack 1 has the negative token id -5": Pack([1, -5], [0, 0], [0]),
        "pack 1 has seq_start_id": Pack([1, 2], [0, 0], [0, 0]),
    }
    for problem, pack in bad.items():
        with (  # noqa: PT012
            pytest.raises(FormatError, match=problem),
            open_writer(tmp_path / "data", format=format_name, pack_size=PACK_SIZE, packs_per_shard=1) as writer,
        ):
            writer.append(good)
            writer.append(pack)
        assert list(tmp_path.iterdir()) == []


def test_a_resumed_write_continues_after_the_last_whole_shard(tmp_path, format_name, packs) -> None:
    path = tmp_path / "data"

    def start() -> object:
        return open_writer(path, format=format_name, pack_size=PACK_SIZE, packs_per_shard=2, resume_key="same")

    with pytest.raises(KeyboardInterrupt), start() as writer:  # noqa: PT012
        for pack in packs:
            writer.append(pack)
        raise KeyboardInterrupt
    with pytest.raises(FormatError, match="interrupted"):
        open_dataset(path)
    with start() as writer:
        assert writer.num_packs == 4
        writer.append(packs[4])
    assert read_all(path) == packs


def test_a_changed_pack_is_an_error_with_its_file(dataset: Path, format_name: str) -> None:
    path = dataset / "index" / "pack_checksums.npy"
    data = bytearray(path.read_bytes())
    data[-3 * 8] ^= 1
    path.write_bytes(data)
    # The manifest agrees with the index, so that the difference is left for the pack to show.
    manifest = json.loads((dataset / "manifest.json").read_text())
    del manifest["checksum"]
    stored = next(one for one in manifest["index"] if one["path"] == "index/pack_checksums.npy")
    stored["xxh3"] = xxhash.xxh3_64_hexdigest(data)
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    reader = open_dataset(dataset)
    for read in (lambda: reader[2], lambda: reader.read([0, 2])):
        with pytest.raises(FormatError, match="pack 2 does not match its checksum") as caught:
            read()
        assert load_format(format_name).shard_name(1) in caught.value.where


def test_a_changed_byte_of_the_index_is_an_error_on_open(dataset: Path, packs: list[Pack]) -> None:
    for path in sorted((dataset / "index").iterdir()):
        original = path.read_bytes()
        for position in range(0, len(original), 5):
            damaged = bytearray(original)
            damaged[position] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(FormatError, match="the file has the hash") as caught:
                open_dataset(dataset)
            assert caught.value.where == str(path)
        path.write_bytes(original)
    assert read_all(dataset) == packs


def test_a_missing_shard_and_one_cut_short_are_errors_on_open(dataset: Path) -> None:
    for path in stored_files(dataset):
        original = path.read_bytes()
        path.unlink()
        with pytest.raises(FormatError, match="missing"):
            open_dataset(dataset)
        path.write_bytes(original[:-1])
        with pytest.raises(FormatError, match=f"has {len(original) - 1:,} bytes, the manifest says"):
            open_dataset(dataset)
        path.write_bytes(original)


def test_an_extra_shard_is_an_error_on_open(dataset: Path, format_name: str) -> None:
    source = dataset / load_format(format_name).shard_name(0)
    extra = dataset / load_format(format_name).shard_name(7)
    for path in dataset.glob(f"{source.name}*"):
        target = dataset / path.name.replace(source.name, extra.name)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copy(path, target)
    with pytest.raises(FormatError, match=r"not in the manifest: \d, such as .*7"):
        open_dataset(dataset)
