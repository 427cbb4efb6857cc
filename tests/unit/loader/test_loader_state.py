from __future__ import annotations

import pytest

from harness.errors import LoaderError
from harness.loader import LoaderState

START = LoaderState(seed=7, fingerprint="aaaa", order="stored")


def test_a_state_survives_json_and_one_saved_without_a_tokenizer_still_resumes() -> None:
    state = LoaderState(seed=7, epoch=2, packs_consumed=31, fingerprint="aaaa", order="stored")
    assert LoaderState.from_json(state.to_json()) == state
    assert LoaderState.from_json(START.to_json()) == START
    text = '{"seed": 7, "epoch": 1, "packs_consumed": 3, "fingerprint": "aaaa", "order": "stored"}'
    assert LoaderState.from_json(text) == LoaderState(7, 1, 3, "aaaa", "stored")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"seed": 1, "epoks": 2}',
        START.to_json().replace("7", '"7"'),
        START.to_json().replace("7", "true"),
        "[" * 9999,
        *(START.to_json().replace(f'"{name}": 0', f'"{name}": -1') for name in ("epoch", "packs_consumed")),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(LoaderError, match=r"^the loader state is damaged: ") as caught:
        LoaderState.from_json(text)
    assert (caught.value.where, caught.value.fix) == ("the loader state", "resume from another checkpoint")


def test_the_end_of_an_epoch_begins_the_next_and_a_run_resumes_where_it_stopped() -> None:
    state = START.advance(6, of=10)
    assert (state.epoch, state.packs_consumed) == (0, 6)
    state = state.advance(4, of=10)
    assert (state.epoch, state.packs_consumed) == (1, 0)
    with pytest.raises(LoaderError, match="11 packs of an epoch were read, but it has 10"):
        state.advance(11, of=10)
    for state in (START.advance(6, of=10), LoaderState(7, 2, 9, "aaaa", "stored")):
        assert state.resumed(START, num_packs=10) == state.resumed(START, num_packs=None) == state


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (LoaderState(seed=7, fingerprint="bbbb", order="stored"), "fingerprint was 'aaaa' and is 'bbbb'"),
        (LoaderState(seed=8, fingerprint="aaaa", order="stored"), "seed was 7 and is 8"),
        (LoaderState(seed=7, fingerprint="aaaa", order="block_packs=1"), "order was 'stored' and is 'block_packs=1'"),
    ],
)
def test_other_data_seed_or_order_is_refused_unless_named(now: LoaderState, message: str) -> None:
    state = START.advance(6, of=10)
    with pytest.raises(LoaderError, match=message) as caught:
        state.resumed(now, num_packs=10)
    assert "allow_other_data" in caught.value.fix
    went_on = state.resumed(now, num_packs=10, allow_other_data=True)
    assert (went_on.epoch, went_on.packs_consumed) == (0, 6)
    assert (went_on.seed, went_on.fingerprint, went_on.order) == (now.seed, now.fingerprint, now.order)


def test_another_tokenizer_is_refused_where_both_are_known() -> None:
    now = LoaderState(seed=7, fingerprint="aaaa", order="stored", tokenizer="t2")
    with pytest.raises(LoaderError, match="the tokenizer was 't1' and is 't2'"):
        LoaderState(seed=7, fingerprint="aaaa", order="stored", tokenizer="t1").resumed(now, num_packs=10)
    assert START.resumed(now, num_packs=10) == now
    assert now.resumed(START, num_packs=10) == now


def test_a_position_past_the_end_of_other_data_begins_its_next_epoch() -> None:
    other = LoaderState(seed=7, fingerprint="bbbb", order="stored")
    for there in (other, other.advance(1, of=5)):
        for consumed in (5, 6):
            went_on = START.advance(consumed, of=10).resumed(there, num_packs=5, allow_other_data=True)
            assert (went_on.epoch, went_on.packs_consumed) == (1, 0)
