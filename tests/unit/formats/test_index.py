"""An index is read back as it was written, over any number of shards; one that does not fit its dataset is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.errors import FormatError
from harness.formats import index
from harness.formats.index import (
    IndexBuilder,
    IndexPart,
    dataset_fingerprint,
    index_names,
    lengths_from_starts,
    load_index,
    pack_digest,
    write_index,
)
from harness.formats.manifest import Totals
from harness.formats.media import media_rows
from harness.records import Medium, Pack
from harness.storage import LocalCache, LocalFolder

IMAGE = Medium("image", 3, 2, b"pixels")
SHARDS = [
    [Pack([1, 2, 3, 4, 5], [1, 0, 1, 0, 0], [0, 2], media=(IMAGE,)), Pack([6, 7], [1, 0], [0])],
    [Pack([8, 9, 10, 11], [1, 0, 1, 0], [0, 2]), Pack([1, 2, 3, 4, 5, 6], [1] * 5 + [0], [0], media=(IMAGE,))],
]
PACKS = [pack for shard in SHARDS for pack in shard]


def write(path: Path, *, with_media: bool) -> tuple[LocalFolder, SimpleNamespace, str, list[IndexPart]]:
    """Write the index of the shards; return its folder, what a manifest has, the fingerprint and the parts."""
    builders = []
    for packs in SHARDS:
        builders.append(builder := IndexBuilder())
        for pack in packs:
            builder.append(pack, media_rows(pack) if with_media else None)
    parts = [builder.build() for builder in builders]
    totals = [builder.totals() for builder in builders]
    media = int(with_media)
    assert totals == [Totals(2, 3, 7, 3, media), Totals(2, 3, 10, 7, media)]
    assert list(map(len, builders)) == [2, 2]
    (path / "index").mkdir(parents=True)
    folder, whole = LocalFolder(path), Totals(4, 6, 17, 10, 2 * media)
    fingerprint = write_index(folder, lambda: iter(parts), whole)
    facts = {"num_packs": 4, "num_sequences": 6, "num_media": 2 * media, "shards": [0, 1], "fingerprint": fingerprint}
    manifest = SimpleNamespace(**facts)
    manifest.index = [*folder.describe(index_names(manifest))]
    return folder, manifest, fingerprint, parts


@pytest.mark.parametrize("block", [1, 2, 1 << 18])
def test_an_index_of_shards_is_read_back_with_its_media_numbered_through(tmp_path, monkeypatch, block) -> None:
    monkeypatch.setattr(index, "_BLOCK", block)
    folder, manifest, fingerprint, _ = write(tmp_path / "plain", with_media=False)
    found = load_index(folder, manifest)
    assert found.pack_offsets.tolist() == [0, 2, 3, 5, 6]
    assert found.sequence_lengths.tolist() == [2, 3, 2, 2, 2, 6]
    assert found.checksums.tolist() == [pack_digest(replace(pack, media=())) for pack in PACKS]
    assert (found.media, fingerprint) == (None, dataset_fingerprint([found.checksums]))
    assert [found.pack_offsets.dtype, found.sequence_lengths.dtype, found.checksums.dtype] == ["<i8", "<i4", "<u8"]
    folder, manifest, _, _ = write(tmp_path / "media", with_media=True)
    with_media = load_index(folder, manifest)
    names = ("sequence", "start", "tokens", "shard", "num_bytes")
    assert [tuple(row[name] for name in names) for row in with_media.media] == [(1, 1, 2, 0, 6), (5, 3, 2, 1, 6)]
    assert with_media.checksums.tolist() == [pack_digest(pack) for pack in PACKS]
    assert (with_media.checksums != found.checksums).tolist() == [True, False, False, True]
    # A plan has no checksums, and its media are of any shard of its store.
    manifest.fingerprint, manifest.shards = "", []
    plan = load_index(folder, manifest)
    assert (plan.checksums, len(plan.media)) == (None, 2)


@pytest.mark.parametrize("with_media", [False, True])
def test_a_part_is_read_back_from_its_bytes_and_other_numbers_are_refused(tmp_path, with_media) -> None:
    for part in write(tmp_path, with_media=with_media)[3]:
        data, media = part.to_bytes(), int(with_media)
        again = IndexPart.from_bytes(data, 2, 3, media)
        for name in ("sequence_counts", "sequence_lengths", "checksums", "media"):
            assert getattr(again, name).tolist() == getattr(part, name).tolist()
        for numbers in ((3, 3, media), (2, 4, media), (2, 3, media + 1), (-1, 12, media), (4, -3, media)):
            with pytest.raises(ValueError, match="bytes for"):
                IndexPart.from_bytes(data, *numbers)
        with pytest.raises(ValueError, match="bytes for"):
            IndexPart.from_bytes(data[:-1], 2, 3, media)


@pytest.mark.parametrize("with_media", [False, True])
def test_an_index_that_is_damaged_or_of_other_sequences_is_refused(tmp_path, with_media) -> None:
    folder, manifest, _, _ = write(tmp_path, with_media=with_media)
    for stored in manifest.index:
        path = tmp_path / stored.path
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(FormatError, match="the manifest lists") as refused:
            load_index(folder, manifest)
        assert refused.value.where == str(path)
        path.unlink()
        with pytest.raises(FormatError, match="a file of the index is missing, or cannot be read"):
            load_index(folder, manifest)
        path.write_bytes(whole)
    manifest.index.clear()  # of an index whose hashes are those of the manifest
    for change in ({"num_packs": 5}, {"num_packs": 3}, {"num_sequences": 7}, {"num_sequences": 5}):
        with pytest.raises(FormatError):
            load_index(folder, SimpleNamespace(**{**vars(manifest), **change}))
    for name in index_names(manifest):
        whole = np.load(tmp_path / name)
        np.save(tmp_path / name, whole[:-1])
        with pytest.raises(FormatError):
            load_index(folder, manifest)
        np.save(tmp_path / name, whole)
    offsets, sizes = index.PACK_OFFSETS, index.SEQUENCE_LENGTHS
    for name, place, value in ((offsets, 0, 1), (offsets, -1, 5), (offsets, 1, 9), (sizes, 0, 0), (sizes, -1, -3)):
        whole = np.load(tmp_path / name)
        changed = whole.copy()
        changed[place] = value
        np.save(tmp_path / name, changed)
        with pytest.raises(FormatError, match=r"the offsets do not rise from 0 to|has no tokens"):
            load_index(folder, manifest)
        np.save(tmp_path / name, whole)
    if with_media:
        manifest.shards.pop()
        with pytest.raises(FormatError, match="medium 1 of 2"):
            load_index(folder, manifest)


def test_the_copy_of_an_index_is_not_evicted_while_it_is_hashed(tmp_path, monkeypatch) -> None:
    folder, manifest, _, parts = write(tmp_path / "data", with_media=False)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HARNESS_CACHE_BYTES", "0")
    cache, hash_files = LocalCache(), index.file_problems

    def make_space_and_hash(*arguments, **options):
        cache._free_space()  # as another process does before it downloads
        return hash_files(*arguments, **options)

    def fetch(files):
        return cache.get(files, lambda stored, path: path.write_bytes((folder.place / stored.path).read_bytes()))

    monkeypatch.setattr(index, "file_problems", make_space_and_hash)
    loaded = load_index(SimpleNamespace(fetch=fetch), manifest)
    assert loaded.sequence_lengths.tolist() == np.concatenate([part.sequence_lengths for part in parts]).tolist()


def lengths(num_tokens: list[int], starts: list[int], offsets: list[int], **options: int) -> list[int]:
    made = lengths_from_starts(
        np.array(num_tokens, np.int64), np.array(starts, np.uint32), np.array(offsets, np.uint32), where="x", **options
    )
    assert made.dtype == np.int32
    return made.tolist()


def test_lengths_are_those_between_starts_and_starts_of_no_sequences_are_refused_by_the_packs_number() -> None:
    assert lengths([], [], [0]) == []
    assert lengths([7, 4, 9], [0, 3, 0, 0, 2, 8], [0, 2, 3, 6]) == [3, 4, 4, 2, 6, 1]
    assert lengths([4], [0, 3, 0, 0, 2, 8], [2, 3]) == [4]
    largest = 2**31 - 1
    assert lengths([largest], [0], [0, 1]) == [largest]
    for num_tokens, starts, offsets, number in (
        ([7, 4], [0, 3, 1], [0, 2, 3], 11),  # does not start at 0
        ([7, 4], [0, 3, 0, 3, 3], [0, 2, 5], 11),  # does not increase
        ([7, 4], [0, 3, 0, 4], [0, 2, 4], 11),  # a last sequence of nothing
        ([7, 4], [0, 8, 0], [0, 2, 3], 10),  # beyond the pack
        ([largest + 1], [0], [0, 1], 10),
        ([7, 4], [0, 3, 0], [0, 3, 3], 11),  # no sequences
        ([7, 4], [0, 3, 0], [0, 2, 4], 11),  # more than are stored
    ):
        with pytest.raises(FormatError, match=f"pack {number} "):
            lengths(num_tokens, starts, offsets, first_row=10)
    with pytest.raises(FormatError, match="pack 1 "):
        lengths([7, 4], [0, 3, 1], [0, 2, 3])


def test_more_zeros_than_packs_are_counted_block_by_block(monkeypatch) -> None:
    monkeypatch.setattr(index, "_BLOCK", 2)
    assert lengths([3] * 9, [0] * 9, [*range(10)]) == [3] * 9
    with pytest.raises(FormatError, match="has 4 sequences that start at 0 in 1 packs"):
        lengths([9], [0] * 9, [0, 9])
