"""Megatron's indexed datasets: written in a stream, merged, counted, and every planted damage detected."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.errors import ConfigError, FormatError
from harness.formats import open_writer
from harness.indexed.convert import count_sequences, merge_indexed, save_counts
from harness.indexed.index import HEADER, INT32, MAGIC, UINT16, VERSION, IndexedWriter, verify_indexed
from harness.records import Pack
from harness.storage.files import AtomicFile

# Three documents of 2, 1 and 1 sequences.
TOKENS = [[5, 6, 7], [8], [9, 10], [65_535, 1]]
DOCUMENTS = [2, 1, 1]


def write(prefix: Path, *, dtype=UINT16, tokens=TOKENS, documents=DOCUMENTS, **options) -> Path:
    with IndexedWriter(prefix, dtype=dtype, **options) as writer:
        writer.append(np.concatenate(tokens), np.array([len(one) for one in tokens]), np.array(documents))
    return prefix


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def built_by_megatron(prefix: Path, *, dtype=np.uint16, tokens=TOKENS, documents=DOCUMENTS) -> Path:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    left = list(tokens)
    for count in documents:
        for sequence in left[:count]:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
        del left[:count]
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_tokens_are_uint16_until_one_needs_more(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "narrow") as writer:
        writer.append(np.array([1, 65_535]), np.array([2]))
    assert writer.dtype == UINT16
    with IndexedWriter(tmp_path / "wide") as writer:
        writer.append(np.array([1, 65_535]), np.array([2]))
        writer.append(np.array([65_536, 2**31 - 1]), np.array([1, 1]))
    assert writer.dtype == INT32
    theirs = built_by_megatron(
        tmp_path / "theirs", dtype=np.int32, tokens=[[1, 65_535], [65_536], [2**31 - 1]], documents=[1, 1, 1]
    )
    assert files(tmp_path / "wide") == files(theirs)


@pytest.mark.parametrize(
    "tokens", [np.array([1, -1]), np.array([1, -1], np.int8), np.array([2**31]), np.array([2**63], np.uint64)]
)
def test_an_invalid_token_is_refused_and_leaves_no_files(tmp_path: Path, tokens) -> None:
    with pytest.raises(FormatError, match="negative or above"), IndexedWriter(tmp_path / "x") as writer:
        writer.append(tokens, np.array([len(tokens)]))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_pair_is_replaced_only_with_overwrite_and_only_at_the_end(tmp_path: Path) -> None:
    before = files(write(tmp_path / "x"))
    with pytest.raises(FormatError, match=r"x\.bin already exists"):
        write(tmp_path / "x", dtype=INT32)
    assert files(tmp_path / "x") == before
    # Until the end the pair that was there stays.
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "x", overwrite=True) as writer:  # noqa: PT012
        writer.append(np.array([1]), np.array([1]))
        raise ZeroDivisionError
    assert files(tmp_path / "x") == before
    assert files(write(tmp_path / "x", dtype=INT32, overwrite=True)) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_an_old_index_never_stays_beside_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x")
    finish = AtomicFile.finish

    def fail_for_the_index(file: AtomicFile) -> None:
        if file.path.suffix == ".idx":
            raise OSError(28, "No space left on device", str(file.path))
        finish(file)

    monkeypatch.setattr(AtomicFile, "finish", fail_for_the_index)
    with pytest.raises(FormatError, match="writing failed: No space left on device"):
        write(tmp_path / "x", dtype=INT32, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_of_the_same_pair_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x") as writer:
        writer.append(np.array([1]), np.array([1]))
        with pytest.raises(FormatError, match="another process is writing"), IndexedWriter(tmp_path / "x"):
            pass
    assert verify_indexed(tmp_path / "x") == []


def test_a_killed_writer_leaves_no_pair_and_the_next_writer_finishes(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with IndexedWriter(tmp_path / "x") as writer:
            writer.append(np.array([1, 2, 3]), np.array([3]))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (tmp_path / "x.bin").exists()
    assert not (tmp_path / "x.idx").exists()
    assert [one.what for one in verify_indexed(tmp_path / "x")] == ["x.bin is missing", "x.idx is missing"]
    write(tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_an_intact_pair_has_no_problems(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for path in (write(tmp_path / "a.b"), tmp_path / "a.b.idx", tmp_path / "a.b.bin"):
        assert verify_indexed(path, vocab_size=65_536, progress=lambda *values: seen.append(values)) == []
    assert seen == [(8, 8)] * 3


# Offsets in the index of TOKENS: header 34, lengths at 34, pointers at 50, documents at 82.
def _put(path: Path, at: int, kind: str, value: object) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{kind}", data, at, value)
    path.write_bytes(data)


def _cut(suffix: str, by: int) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}{suffix}")
        path.write_bytes(path.read_bytes()[:-by] if by > 0 else path.read_bytes() + b"\0" * -by)

    return damage


def _set(at: int, kind: str, value: object, suffix: str = ".idx") -> Callable[[Path], None]:
    return lambda prefix: _put(Path(f"{prefix}{suffix}"), at, kind, value)


DAMAGES = {
    "no bin": (lambda prefix: Path(f"{prefix}.bin").unlink(), "x.bin is missing"),
    "no idx": (lambda prefix: Path(f"{prefix}.idx").unlink(), "x.idx is missing"),
    "empty idx": (_cut(".idx", 114), "not with the header of a Megatron index of version 1"),
    "magic": (_set(0, "c", b"X"), "not with the header of a Megatron index of version 1"),
    "dtype of another size": (_set(17, "B", 8), "is 12, expected 6 from the lengths before it"),
    "dtype of no tokens": (_set(17, "B", 7), "declares tokens as float32, which cannot hold token ids"),
    "sequence count": (_set(18, "Q", 5), "its counts of 5 sequences and 4 document bounds require 126"),
    "counts that make the same size": (
        lambda prefix: (_set(18, "Q", 2)(prefix), _set(26, "Q", 7)(prefix)),
        "the pointer of sequence 0 is",
    ),
    "huge count": (_set(18, "Q", 2**62), "its counts of 4,611,686,018,427,387,904 sequences"),
    "idx cut short": (_cut(".idx", 8), "106 bytes, but its counts of 4 sequences and 4 document bounds require 114"),
    "length of zero": (_set(38, "i", 0), "sequence 1 has the length 0"),
    "another length": (_set(38, "i", 2), "the pointer of sequence 2 is 16, expected 20 from the lengths before it"),
    "last length": (_set(46, "i", 3), "has 32 bytes, expected 36 from the lengths in the index"),
    "falling pointer": (_set(66, "q", 4), "the pointer of sequence 2 is 4, expected 16 from the lengths"),
    "bin cut short": (_cut(".bin", 1), "has 31 bytes, expected 32 from the lengths in the index"),
    "bin too long": (_cut(".bin", -4), "has 36 bytes, expected 32 from the lengths in the index"),
    "first document": (_set(82, "q", 1), "the first document begins at sequence 1, expected 0"),
    "falling documents": (_set(90, "q", 4), "document bound 2 is 3, below the one before it"),
    "last document": (_set(106, "q", 5), "the last document ends at sequence 5 of 4"),
    "negative token": (_set(19, "B", 255, ".bin"), "sequence 2 has the token -16,777,207 at position 0"),
    "token out of the vocabulary": (_set(22, "B", 1, ".bin"), "sequence 2 has the token 65,546 at position 1"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_planted_damage_is_reported_with_its_place(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    prefix = write(tmp_path / "x", dtype=INT32)
    damage(prefix)
    problems = verify_indexed(prefix, vocab_size=65_536)
    assert any(message in problem.what for problem in problems), problems
    assert all(problem.where.startswith(str(prefix)) for problem in problems)


def test_every_flipped_bit_of_an_index_is_detected_where_it_changes_the_structure(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", dtype=INT32)
    path = tmp_path / "x.idx"
    original = path.read_bytes()
    undetected = []
    for position in range(len(original)):
        for bit in (0, 7):
            damaged = bytearray(original)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            if not verify_indexed(prefix):
                undetected.append((position, bit))
    # An inner bound that moves by one sequence makes other, legal documents.
    assert undetected == [(90, 0), (98, 0)]


def test_merged_pairs_have_the_bytes_of_megatrons_add_index(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    first, second = write(tmp_path / "a"), write(tmp_path / "b", tokens=[[1], [2, 3]], documents=[1, 1])
    wide = write(tmp_path / "c", dtype=INT32, tokens=[[70_000]], documents=[1])
    assert merge_indexed([str(first), str(wide)], str(tmp_path / "both")).dtype == INT32
    theirs = built_by_megatron(tmp_path / "d", dtype=np.int32, tokens=[*TOKENS, [70_000]], documents=[*DOCUMENTS, 1])
    assert files(tmp_path / "both") == files(theirs)
    merged = merge_indexed([str(first), f"{second}.idx"], str(tmp_path / "ours"))
    assert (merged.num_sequences, merged.num_documents, merged.num_tokens) == (6, 5, 11)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    builder.add_index(str(first))
    builder.add_index(str(second))
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_merged_multimodal_pairs_keep_their_modes_as_megatrons_add_index_does(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    prefixes = []
    for name, documents in (("a", [[[1, 2], [3]], [[4, 5, 6]]]), ("b", [[[7], [8, 9], [10]]])):
        builder = indexed.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32, multimodal=True)
        for number, document in enumerate(documents):
            tokens = torch.tensor([token for sequence in document for token in sequence])
            modes = [(number + place) % 3 for place in range(len(document))]
            builder.add_document(tokens, list(map(len, document)), modes)
        builder.finalize(str(tmp_path / f"{name}.idx"))
        prefixes.append(str(tmp_path / name))
    merge_indexed(prefixes, str(tmp_path / "ours"))
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32, multimodal=True)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    merged = indexed.IndexedDataset(str(tmp_path / "ours"), multimodal=True)
    assert [int(merged[index][1]) for index in range(6)] == [0, 1, 1, 0, 1, 2]
    assert verify_indexed(tmp_path / "ours") == []


def test_a_multimodal_pair_and_a_pair_of_text_are_not_merged(tmp_path: Path) -> None:
    text, media = write(tmp_path / "a"), write(tmp_path / "b")
    with Path(f"{media}.idx").open("ab") as file:
        file.write(bytes([0, 1, 0, 1]))
    for pairs, words in (([text, media], "has modes, unlike the first pair"), ([media, text], "has no modes")):
        with pytest.raises(FormatError, match=words):
            merge_indexed(list(map(str, pairs)), str(tmp_path / "ab"))
    assert not (tmp_path / "ab.bin").exists()


def test_more_pairs_are_merged_than_files_can_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    prefix = str(write(tmp_path / "a"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, hard))  # noqa: PTH208
    try:
        assert merge_indexed([prefix] * 50, str(tmp_path / "all")).num_documents == 150
        assert len(count_sequences([prefix] * 50)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert verify_indexed(tmp_path / "all") == []


def test_damaged_pairs_packed_pairs_and_the_destination_itself_are_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    _set(38, "i", 2)(tmp_path / "b")
    with pytest.raises(FormatError, match="the pointer of sequence 2"):
        merge_indexed([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "ab"))
    with pytest.raises(ConfigError, match="one of the sources"):
        merge_indexed([str(tmp_path / "a")], f"{tmp_path}/a.bin")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FormatError, match="is missing"):
        merge_indexed([str(tmp_path / "none")], str(tmp_path / "loop"))
    with open_writer(tmp_path / "packs", format="binidx", pack_size=4) as writer:
        writer.append(Pack([1, 2], [1, 0], [0]))
    with pytest.raises(FormatError, match="contains packs"):
        merge_indexed([str(tmp_path / "packs" / "shard_000000")], str(tmp_path / "ab"))
    assert not (tmp_path / "ab.bin").exists()


def test_counts_are_written_as_megatron_reads_them(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = str(write(tmp_path / "a"))
    other = str(write(tmp_path / "b", tokens=[[1], [2, 3]], documents=[1, 1]))
    assert count_sequences([prefix], vocab_size=65_536) == {prefix: (4, 4)}
    with pytest.raises(FormatError, match="holds uint16, but Megatron will read int32"):
        count_sequences([prefix], vocab_size=65_537)
    save_counts(count_sequences([prefix, other]), tmp_path / "counts.json")
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts == {prefix: [4, 4], other: [2, 3]}
    dataset = indexed.IndexedDataset(prefix, sequences_per_dataset=counts[prefix], dtype_code=8)
    assert [dataset[index].tolist() for index in range(4)] == TOKENS
    assert dataset.document_indices.tolist() == [0, 2, 3, 4]


def test_memory_does_not_grow_with_the_number_of_sequences(tmp_path: Path) -> None:
    tokens, lengths = np.zeros(1 << 16, np.int32), np.ones(1 << 16, np.int32)

    def peak(name: str, batches: int) -> int:
        """Most bytes that Python and numpy had allocated at once."""
        tracemalloc.start()
        with IndexedWriter(tmp_path / name) as writer:
            for _ in range(batches):
                writer.append(tokens, lengths)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # Both fill at least one block; 4 million sequences have ledgers of 80 MB.
    assert peak("large", 64) - peak("small", 16) < 1 << 20


def test_a_sparse_pair_of_terabytes_is_refused_by_its_first_sequence(tmp_path):
    count = 2**32
    header = HEADER.pack(MAGIC, VERSION, 8, count, count + 1)
    (tmp_path / "huge.idx").write_bytes(header)
    try:
        os.truncate(tmp_path / "huge.idx", len(header) + 12 * count + 8 * (count + 1))
        (tmp_path / "huge.bin").touch()
        os.truncate(tmp_path / "huge.bin", 2**42)
    except OSError:
        pytest.skip("this file system has no sparse files of this size")
    assert [problem.what for problem in verify_indexed(tmp_path / "huge")] == ["sequence 0 has the length 0"]


@pytest.mark.parametrize("prefix", ["", ".", "..", "/", ".bin", "out/.."])
def test_a_prefix_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.chdir(tmp_path)
    for work in (lambda: merge_indexed(["a"], prefix), lambda: verify_indexed(prefix)):
        with pytest.raises(ConfigError, match="is not what the names of two files begin with"):
            work()
