"""Over-long sequences are dropped, cut, or split at turn boundaries; a trained token is lost only if it is counted."""

from __future__ import annotations

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.prep import fit_to_pack
from harness.records import SequenceView

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


def sequence(*mask: int) -> SequenceView:
    return SequenceView(np.arange(len(mask), dtype=np.int32), np.array(mask, np.uint8))


def chat(*turns: tuple[str, int]) -> tuple[SequenceView, list[int], list[str]]:
    """Turns of the given roles and numbers of tokens; of an answer, all tokens but the first are trained."""
    starts = np.cumsum([0, *(length for _, length in turns)]).tolist()
    trained = np.zeros(starts[-1], np.uint8)
    for (role, _), start, end in zip(turns, starts, starts[1:], strict=False):
        trained[start + 1 : end] = role == ASSISTANT
    view = SequenceView(np.arange(starts[-1], dtype=np.int32), np.append(trained[1:], np.uint8(0)))
    return view, starts[:-1], [role for role, _ in turns]


def split(view: SequenceView, turns: list[int], roles: list[str], pack_size: int):
    fitted = fit_to_pack(view, pack_size=pack_size, over_long="split", turns=turns, roles=roles)
    return [piece.input_ids.tolist() for piece in fitted.pieces], fitted


def trained_ids(view: SequenceView) -> list[int]:
    return view.input_ids[1:][view.loss_mask[:-1] == 1].tolist()


def test_over_long_sequences_are_dropped_or_cut_and_the_last_token_is_untrained():
    long = sequence(0, 1, 1, 1, 0)
    kept = fit_to_pack(long, pack_size=5, over_long="drop")
    assert (kept.pieces, kept.outcome) == ((long,), "kept")
    dropped = fit_to_pack(long, pack_size=4, over_long="drop")
    assert (dropped.pieces, dropped.outcome, dropped.num_lost) == ((), "over_long", 3)
    for name in ("cut", "truncate"):
        fitted = fit_to_pack(long, pack_size=3, over_long=name)
        assert (fitted.outcome, fitted.num_lost) == ("cut", 2)
        assert fitted.pieces[0].input_ids.tolist() == [0, 1, 2]
        assert fitted.pieces[0].loss_mask.tolist() == [0, 1, 0]
    assert long.loss_mask.tolist() == [0, 1, 1, 1, 0]
    untrained = fit_to_pack(sequence(0, 0, 1, 1, 0), pack_size=3, over_long="cut")
    assert (untrained.pieces, untrained.outcome) == ((), "untrained")
    with pytest.raises(ConfigError, match="over_long"):
        fit_to_pack(long, pack_size=3, over_long="wrap")


def test_a_split_repeats_the_system_prompt_and_cuts_before_a_user_turn():
    parts = chat((SYSTEM, 2), (USER, 2), (ASSISTANT, 3), (USER, 2), (ASSISTANT, 3), (USER, 1), (ASSISTANT, 2))
    pieces, fitted = split(*parts, pack_size=11)
    # The second user turn fits as well, but its answer does not.
    assert pieces == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 7, 8, 9, 10, 11, 12, 13, 14]]
    assert (fitted.outcome, fitted.num_lost) == ("split", 0)
    assert fitted.pieces[1].loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 0]


def test_without_room_for_a_question_and_its_answer_a_piece_begins_with_a_tool_result_or_an_answer():
    pieces, _ = split(*chat((USER, 2), (ASSISTANT, 3), (TOOL, 2), (ASSISTANT, 3)), pack_size=6)
    assert pieces == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    pieces, fitted = split(*chat((SYSTEM, 1), (USER, 5), (ASSISTANT, 5)), pack_size=8)
    assert pieces == [[0, 6, 7, 8, 9, 10]]
    assert fitted.num_lost == 0


def test_a_turn_that_is_too_long_alone_is_cut_and_the_rest_is_kept():
    parts = chat((SYSTEM, 1), (USER, 2), (ASSISTANT, 20), (USER, 2), (ASSISTANT, 3))
    pieces, fitted = split(*parts, pack_size=8)
    assert pieces == [[0, 3, 4, 5, 6, 7, 8, 9], [0, 23, 24, 25, 26, 27]]
    assert fitted.num_lost == 13


def test_what_comes_long_before_the_only_trained_turn_is_left_out():
    # As one sequence of a conversation of which only the last turn is trained.
    view, turns, roles = chat((SYSTEM, 1), (USER, 4), (ASSISTANT, 4), (USER, 4), (ASSISTANT, 4))
    mask = view.loss_mask.copy()
    mask[:12] = 0
    pieces, fitted = split(SequenceView(view.input_ids, mask), turns, roles, pack_size=10)
    assert pieces == [[0, 9, 10, 11, 12, 13, 14, 15, 16]]
    assert (fitted.outcome, fitted.num_lost) == ("split", 0)


def test_tools_that_the_template_writes_before_the_first_turn_are_repeated():
    # 90 begins a conversation, 91 a turn; 92 names the user.
    ids = [90, 91, 7, 7, 7, 91, 92, 1, 1, 91, 93, 2, 2, 91, 92, 3, 91, 93, 4]
    trained = [0] * 11 + [1, 1] + [0] * 5 + [1]
    view = SequenceView(np.array(ids, np.int32), np.array([*trained[1:], 0], np.uint8))
    pieces, _ = split(view, [0, 9, 13, 16], [USER, ASSISTANT, USER, ASSISTANT], pack_size=14)
    assert pieces == [ids[:13], ids[:5] + ids[13:]]


def test_text_without_turns_is_divided_every_pack():
    view = sequence(*[1] * 9, 0)
    pieces, fitted = split(view, [], [], pack_size=4)
    assert pieces == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(piece.loss_mask[-1] == 0 and piece.loss_mask[:-1].all() for piece in fitted.pieces)
    # The first token of a piece has nothing before it.
    assert fitted.num_lost == 2


def test_a_system_prompt_that_fills_a_pack_leaves_nothing_to_split():
    _, fitted = split(*chat((SYSTEM, 9), (USER, 2), (ASSISTANT, 2)), pack_size=10)
    assert (fitted.pieces, fitted.outcome, fitted.num_lost) == ((), "over_long", 1)


def test_the_pieces_together_train_every_token_of_the_conversation_once_unless_it_is_counted_as_lost():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        others = rng.choice([USER, ASSISTANT, TOOL], rng.integers(2, 12)).tolist()
        view, turns, roles = chat(
            *((role, int(rng.integers(1, 14))) for role in [SYSTEM] * int(rng.integers(0, 2)) + others)
        )
        if rng.random() < 0.3:
            view.loss_mask[: rng.integers(0, len(view))] = 0
        pack_size = int(rng.integers(6, 30))
        if len(view) <= pack_size:
            continue
        pieces, fitted = split(view, turns, roles, pack_size)
        head = turns[1] if roles[0] == SYSTEM else 0
        trained = [token for piece in fitted.pieces for token in trained_ids(piece)]
        assert len(trained) == len(set(trained))
        assert set(trained) <= set(trained_ids(view))
        assert len(trained) + fitted.num_lost == len(trained_ids(view))
        if all(length + head <= pack_size for length in np.diff([*turns, len(view)])):
            assert fitted.num_lost == 0
        for piece, ids in zip(fitted.pieces, pieces, strict=True):
            assert len(ids) <= pack_size
            assert ids[:head] == list(range(head))
            assert ids[head] in turns
            assert piece.loss_mask.any()
            assert piece.loss_mask[-1] == 0
