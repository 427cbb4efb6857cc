"""A stream of sequences is packed tightly, with bounded memory, one pack at a time."""

from __future__ import annotations

import numpy as np
import pytest

from harness.prep import Member, StreamPacker, pack_of
from harness.records import Medium, SequenceView


def member(key: int, length: int) -> Member[int]:
    return Member(key, SequenceView(np.full(length, key, np.int32), np.zeros(length, np.uint8)), length)


def packed(lengths: list[int], *, pack_size: int, max_open: int) -> list[list[int]]:
    """Packs in the order of leaving, as indices into `lengths`."""
    packer: StreamPacker[int] = StreamPacker(pack_size, max_open=max_open)
    out = [packer.add(member(number, length)) for number, length in enumerate(lengths)]
    while (left := packer.flush()) is not None:
        out.append(left)
    return [[one.key for one in pack] for pack in out if pack is not None]


def test_a_sequence_goes_to_the_tightest_pack_and_full_packs_or_the_oldest_of_too_many_leave_at_once() -> None:
    assert packed([6, 7, 3, 4], pack_size=10, max_open=4) == [[1, 2], [0, 3]]
    assert packed([6, 7, 8, 5], pack_size=10, max_open=2) == [[0], [1], [2], [3]]
    assert packed([6, 7, 8, 4], pack_size=10, max_open=3) == [[0, 3], [1], [2]]


@pytest.mark.parametrize("max_open", [1, 8, 32])
def test_every_sequence_leaves_once_and_each_one_added_completes_at_most_one_pack(max_open: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 101, 2000).tolist()
    packer: StreamPacker[int] = StreamPacker(100, max_open=max_open)
    out = []
    for number, length in enumerate(lengths):
        full = packer.add(member(number, length))
        out += [full] if full is not None else []
        assert len(packer.open_keys) <= max_open
    while (left := packer.flush()) is not None:
        out.append(left)
    assert sorted(one.key for pack in out for one in pack) == list(range(2000))
    assert max(sum(one.size for one in pack) for pack in out) <= 100


def test_conversations_of_typical_lengths_fill_packs_to_98_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 5000).clip(2, 4096).astype(int).tolist()
    packs = packed(lengths, pack_size=4096, max_open=32)
    assert sum(lengths) / (4096 * len(packs)) > 0.985


def test_restored_packs_continue_like_the_original() -> None:
    lengths = [5, 6, 7, 3, 2, 4, 9, 2, 2]
    whole: StreamPacker[int] = StreamPacker(12, max_open=3)
    part: StreamPacker[int] = StreamPacker(12, max_open=3)
    for number, length in enumerate(lengths[:4]):
        whole.add(member(number, length))
    part.restore([[member(key, lengths[key]) for key in keys] for keys in whole.open_keys])
    for number, length in enumerate(lengths[4:], start=4):
        one, other = whole.add(member(number, length)), part.add(member(number, length))
        assert [m.key for m in one or []] == [m.key for m in other or []]
    assert whole.open_keys == part.open_keys


def test_a_restored_pack_that_is_too_large_by_current_sizes_is_split() -> None:
    packer: StreamPacker[int] = StreamPacker(8, max_open=3)
    packer.restore([[member(0, 4), member(1, 4), member(2, 3)]])
    assert packer.open_keys == [[0, 1], [2]]


def test_packs_restored_beyond_the_maximum_are_completed_one_at_a_time() -> None:
    packer: StreamPacker[int] = StreamPacker(10, max_open=2)
    packer.restore([[member(number, 5)] for number in range(4)])
    done = [packer.add(member(number, 2)) for number in range(4, 7)]
    assert [[one.key for one in pack or []] for pack in done] == [[0, 4], [1, 5], []]
    assert packer.open_keys == [[2, 6], [3]]


def test_a_pack_joins_its_members_end_to_end_and_counts_their_media_from_its_first_token() -> None:
    pack = pack_of([member(7, 3), member(9, 2)])
    assert (pack.input_ids.tolist(), pack.seq_start_id.tolist()) == ([7, 7, 7, 9, 9], [0, 3])
    image = Medium("image", 1, 2, b"abc")
    shown = SequenceView(np.zeros(4, np.int32), np.zeros(4, np.uint8), (image,))
    joined = pack_of([member(1, 3), Member(2, shown, 4), Member(3, shown, 4)])
    assert [one.start for one in joined.media] == [4, 8]
    assert {one.data for one in joined.media} == {b"abc"}
