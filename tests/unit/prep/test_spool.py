"""Sequences of shards are divided among splits and joined to packs, however many shards, sequences and media."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.prep.spool import INPUT_IDS, LOSS_MASK, MEDIA, MEDIA_DATA, MEDIUM, SEQUENCE, SEQUENCES, Spool, divide


def write_shard(folder: Path, hashes: list[int], *, has_media: bool = False) -> tuple[Path, int, int]:
    """A shard of conversations with these hashes, each of one sequence of two tokens; each with a medium or none."""
    folder.mkdir()
    count = len(hashes)
    rows, media = np.zeros(count, SEQUENCE), np.zeros(count * has_media, MEDIUM)
    rows["offset"], rows["hash"], rows["length"], rows["trained"] = 2 * np.arange(count), hashes, 2, 1
    media["sequence"], media["tokens"], media["num_bytes"] = np.arange(len(media)), 1, 1
    media["offset"] = np.arange(len(media))
    contents = {SEQUENCES: rows, MEDIA: media, MEDIA_DATA: np.zeros(len(media), "u1")}
    contents |= {INPUT_IDS: np.arange(2 * count, dtype="<i4"), LOSS_MASK: np.tile(np.array([1, 0], "u1"), count)}
    for name, values in contents.items():
        values.tofile(folder / name)
    return folder, count, 2 * count


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
def test_open_shards_take_no_file_descriptors(tmp_path):
    """A process may have 1,024, and a preparation 4,096 shards."""
    shards = [write_shard(tmp_path / str(number), [number], has_media=True) for number in range(40)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    spool = Spool(shards)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    pack = spool.pack(np.arange(40))
    assert pack.input_ids.tolist() == [0, 1] * 40
    assert len(pack.media) == 40


@pytest.mark.timeout(30)
def test_a_pack_of_many_sequences_takes_time_in_proportion(tmp_path):
    """Minutes where the time grows with the square of the sequences of a pack, or of the media of a shard."""
    count = 150_000
    spool = Spool([write_shard(tmp_path / "0", list(range(count)), has_media=True)])
    pack = spool.pack(np.arange(count))
    assert pack.input_ids.tolist() == list(range(2 * count))
    assert [one.start for one in pack.media] == list(range(0, 2 * count, 2))


def test_equal_conversations_are_in_one_split_also_where_one_is_moved_into_an_empty_split(tmp_path):
    high = 2**63
    spool = Spool([write_shard(tmp_path / "0", [high + 1, high, high + 2, high])])
    splits, _ = divide(spool, {"validation": 0.02}, rest="train", drop_duplicates=False)
    assert {name: split.ids.tolist() for name, split in splits.items()} == {"train": [0, 2], "validation": [1, 3]}
    # Copies of a single conversation, as in a first try, are divided all the same.
    spool = Spool([write_shard(tmp_path / "1", [high] * 3)])
    splits, _ = divide(spool, {"validation": 0.02}, rest="train", drop_duplicates=False)
    assert {name: split.ids.tolist() for name, split in splits.items()} == {"train": [1, 2], "validation": [0]}
