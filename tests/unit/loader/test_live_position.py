"""A position in live chunks counts every row once, whatever ranks read it and whichever chunks are lost."""

from __future__ import annotations

import pytest

from harness.errors import LoaderError
from harness.loader.live.position import LivePosition, positions_from_json, positions_to_json

# Chunks 0 and 1 are read, 3 too; of 2 two rows and one sequence of the third; two packs wait for more.
BEFORE = LivePosition(
    done_below=2,
    finished=frozenset({3}),
    taken={2: 2},
    begun={2: 1},
    open_packs=(((1, 5, 0), (3, 0, 1)), ((2, 0, 0),)),
    rows=20,
    steps=4,
    lost=1,
    drawn=9,
)


def test_a_step_adds_what_each_rank_has_read() -> None:
    parts = [
        LivePosition(finished=frozenset({2}), taken={4: 1}, open_packs=(((2, 2, 0),),), rows=3),
        LivePosition(taken={5: 2}, begun={5: 3}, open_packs=(((3, 1, 0),), ((5, 1, 0), (5, 2, 0))), rows=4),
    ]
    expected = LivePosition(
        done_below=4,
        taken={4: 1, 5: 2},
        begun={5: 3},
        open_packs=(((2, 2, 0),), ((3, 1, 0),), ((5, 1, 0), (5, 2, 0))),
        rows=27,
        steps=5,
        lost=1,
        drawn=14,
        ended=True,
    )
    after = BEFORE.after(parts, drawn=14, ended=True)
    assert after == expected
    assert (BEFORE.first_unread, after.first_unread) == (2, 4)
    gap = after.after([LivePosition(finished=frozenset({5, 6}))], drawn=14, ended=False)
    assert (gap.done_below, gap.finished, gap.ended) == (4, {5, 6}, False)


def test_a_chunk_is_trained_once_all_of_it_is_read_and_nothing_of_it_waits() -> None:
    assert BEFORE.trained_chunks(range(6)) == [0]
    assert LivePosition(done_below=2, finished=frozenset({3})).trained_chunks([3, 2, 1, 0]) == [3, 1, 0]


def test_lost_chunks_leave_nothing_behind_and_are_counted() -> None:
    after = BEFORE.without([2, 4])
    assert after == LivePosition(done_below=5, open_packs=(((1, 5, 0), (3, 0, 1)),), rows=20, steps=4, lost=3, drawn=9)
    assert BEFORE.without([3]).open_packs == (((1, 5, 0),), ((2, 0, 0),))
    assert (BEFORE.without([3]).taken, BEFORE.without([3]).begun) == ({2: 2}, {2: 1})


def test_positions_are_the_same_from_their_text_and_another_number_of_folders_is_refused() -> None:
    other = LivePosition(ended=True)
    for positions in ([BEFORE], [BEFORE, other]):
        text = positions_to_json(positions)
        assert positions_from_json(text, len(positions)) == positions
        with pytest.raises(LoaderError, match=f"positions in {len(positions)} folders"):
            positions_from_json(text, 3)
    assert positions_from_json("", 2) == [LivePosition()] * 2
