"""Balanced live steps, windows of sequences, folders blended by weight: the steps of stored data, each row once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_streams import CAPACITY, Trained, long_chats, some_chats, some_packs, train, write_stream
from small_packs import write_packs

from harness.errors import ConfigError, LoaderError, ScheduleError
from harness.formats import open_dataset
from harness.loader import LiveConfig, Loader, LoaderConfig, RankLayout
from harness.loader.datasets import LiveSource
from harness.loader.live.position import positions_from_json
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.tokenize.bpe import train_bpe
from harness.records import Pack
from harness.schedule import ScheduleConfig
from tests.samples.small_packs import batch_digest

SIZES = [5, 1, 7, 3, 4, 2, 6, 3]
LAYOUTS = [
    (1, {}),
    (2, {}),
    (3, {}),
    (4, {}),
    (2, {"cp_size": 2, "pad_to_multiple": 4}),
    (4, {"group_size": 2, "pad_to_multiple": 2}),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["question alpha beta gamma delta 0123456789 "] * 20, folder, vocab_size=300)
    return ChatTokenizer(TokenizerConfig(name=str(folder)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Streams of packs, of conversations, and of conversations that are split into several sequences."""
    made = tmp_path_factory.mktemp("streams")
    for name, rows in (("packs", some_packs), ("chats", some_chats), ("divided", long_chats)):
        write_stream(made / name, rows(sum(SIZES), seed=7), SIZES)
    write_stream(made / "even", EVEN, [4] * 12)
    return {name: made / name for name in SETTINGS}


@pytest.fixture(scope="module")
def wholes(folders, tokenizer) -> dict[str, tuple[list[int], dict[int, Pack]]]:
    """Return for each stream the sequences that one rank trains at once."""
    made = {name: train(folders[name], tokenizer=tokenizer, **SETTINGS[name]) for name in SETTINGS}
    return {name: (whole.sequences, whole.stored) for name, whole in made.items()}


EVEN = some_packs(48, seed=5)
SETTINGS = {"packs": {}, "even": {}, "chats": {}, "divided": {"over_long": "split", "pack_size": 64}}


@pytest.mark.parametrize(
    ("kind", "window", "schedule", "dp_size", "layout"),
    [
        *(("even", None, "dp_balanced", *one) for one in LAYOUTS),
        ("even", None, "cost_balanced", 3, {}),
        ("even", None, "cost_balanced", 2, {"cp_size": 2, "pad_to_multiple": 4}),
        ("packs", 12, "dp_balanced", 2, {}),
        *(("divided", 12, "dp_balanced", *one) for one in LAYOUTS),
    ],
)
def test_a_step_is_the_global_batch_of_a_stored_dataset(
    folders, tokenizer, tmp_path, kind, window, schedule, dp_size, layout
):
    """A window holds single sequences. Without one, twelve packs are a step on 1, 2, 3 and 4 ranks."""
    options = {"schedule": schedule, "size": 12, "tokenizer": tokenizer, **SETTINGS[kind]}
    trained = train(folders[kind], dp_size=dp_size, window=window, layout=layout, **options)
    ids = [step[0].pack_ids.tolist() for step in trained.steps]
    assert {len(of_step) for of_step in ids[:-1]} == {12}
    if window is None:
        packs = {id_: EVEN[(id_ >> 40) * 4 + (id_ >> 18 & (1 << 22) - 1)] for of_step in ids for id_ in of_step}
        assert len(packs) == len(EVEN)
    else:
        assert [step[0].num_sequences for step in trained.steps] == list(map(len, ids))
        packs = trained.stored
        assert trained.sequences == train(folders[kind], tokenizer=tokenizer, **SETTINGS[kind]).sequences
    write_packs(tmp_path / "stored", [packs[id_] for of_step in ids for id_ in of_step], format="memmap", pack_size=128)
    for rank in range(dp_size):
        stored = Loader(
            open_dataset(tmp_path / "stored"),
            LoaderConfig(global_batch_size=12, shuffle=False, num_workers=0),
            schedule=ScheduleConfig(schedule, max_tokens_per_rank=CAPACITY // layout.get("cp_size", 1)),
            layout=RankLayout(dp_rank=rank, dp_size=dp_size, **layout),
            num_epochs=1,
        )
        for mine, theirs in zip([step[rank] for step in trained.steps], stored, strict=True):
            assert batch_digest(mine) == batch_digest(theirs)
            assert (mine.num_tokens, mine.num_sequences) == (theirs.num_tokens, theirs.num_sequences)
            assert mine.imbalance.rank_tokens.tolist() == theirs.imbalance.rank_tokens.tolist()
            assert mine.imbalance.cost_ratio == theirs.imbalance.cost_ratio


def test_a_pack_over_a_row_is_divided_and_a_sequence_over_a_row_is_named(tmp_path):
    starts = np.arange(0, 400, 100)
    write_stream(tmp_path / "long", [Pack(np.arange(400), np.zeros(400), starts)] * 2, [1, 1])
    assert len(train(tmp_path / "long", dp_size=2, size=2, schedule="dp_balanced").steps) == 1
    with pytest.raises(ScheduleError, match="the pack has 396 tokens"):
        train(tmp_path / "long", dp_size=2, size=2)
    write_stream(tmp_path / "longer", [Pack(np.arange(400), np.zeros(400), [0])] * 2, [1, 1])
    with pytest.raises(ScheduleError, match="a sequence of the pack has 399 tokens"):
        train(tmp_path / "longer", dp_size=2, size=2, schedule="dp_balanced")


@pytest.mark.parametrize(
    ("kind", "size", "window", "schedule"),
    [
        *((kind, 4, None, "as_packed") for kind in ("packs", "chats", "divided")),
        *((kind, 4, 7, "cost_balanced") for kind in ("packs", "divided")),
    ],
)
def test_stopping_after_any_step_changes_nothing(folders, tokenizer, kind, size, window, schedule):
    options = {"dp_size": 2, "size": size, "window": window, "schedule": schedule, "tokenizer": tokenizer}
    options |= SETTINGS[kind]
    whole = train(folders[kind], **options)
    digests = whole.digests
    for stop in range(1, len(digests)):
        rest = train(folders[kind], state=whole.state(stop - 1), **options)
        assert rest.digests == digests[stop:]
        assert rest.state() == whole.state()


@pytest.mark.submission
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_over_any_stops_and_changes_of_ranks_schedules_and_windows_every_sequence_is_trained_once(
    folders, wholes, tokenizer, data
):
    kind = data.draw(st.sampled_from(["packs", "chats", "divided"]))
    whole = wholes[kind]
    trained, state = Trained(), None
    for _ in range(40):
        steps, made = data.draw(st.integers(1, 4)), len(trained.steps)
        schedule = data.draw(st.sampled_from(["as_packed", "dp_balanced", "cost_balanced"]))
        train(
            folders[kind],
            dp_size=data.draw(st.integers(1, 4)),
            size=data.draw(st.integers(4, 7)),
            window=None if schedule == "as_packed" else data.draw(st.sampled_from([None, 5, 8])),
            schedule=schedule,
            steps=steps,
            state=state,
            tokenizer=tokenizer,
            layout={"pad_to_multiple": data.draw(st.sampled_from([1, 4])), "group_size": data.draw(st.integers(1, 2))},
            into=trained,
            **SETTINGS[kind],
        )
        if len(trained.steps) - made < steps:
            break
        state = trained.state()
    assert (trained.sequences, trained.stored) == whole
    position = positions_from_json(trained.state().live, 1)[0]
    assert (position.done_below, position.finished, position.open_packs) == (8, frozenset(), ())
    assert (position.taken, position.begun) == ({}, {})


def shares_of(step, num_folders: int) -> list[int]:
    """Return the packs, or sequences of a window, of each folder in a step."""
    count = Counter((int(id_) >> 40) % num_folders for id_ in step[0].pack_ids)
    return [count[source] for source in range(num_folders)]


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_folders_have_their_shares_of_every_step_and_an_ended_one_leaves_it_to_the_others(
    folders, tokenizer, dp_size, window
):
    both = [folders["packs"], folders["chats"]]
    options = {"schedule": "dp_balanced", "tokenizer": tokenizer, "weights": (7.0, 1.0), "size": 8}
    trained = train(both, dp_size=dp_size, window=window, **options)
    shares = [shares_of(step, 2) for step in trained.steps]
    both_are_there = shares[: next(n for n, share in enumerate(shares) if share != [7, 1])]
    assert len(both_are_there) >= 3
    # All steps are full but the last, wherever the first stream ended.
    assert {sum(share) for share in shares[:-1]} == {8}
    assert [share[0] for share in shares[len(both_are_there) + 1 :]] == [0] * (len(shares) - len(both_are_there) - 1)
    alone = [train(folder, tokenizer=tokenizer).sequences for folder in both]
    expected = [(((id_ >> 40) * 2 + n) << 40) | (id_ & (1 << 40) - 1) for n, ids in enumerate(alone) for id_ in ids]
    assert trained.sequences == sorted(expected)
    ends = [line for line in trained.log if "ended" in line]
    assert ends[0] == f"the stream of {both[0]} ended: 31 rows in 8 chunks; its share now goes to the other folders"
    assert ends[1].startswith(f"the stream of {both[1]} ended: 31 rows in 8 chunks")
    assert {line.rpartition(" of ")[2].rstrip(")") for line in trained.loaded} == set(map(str, both))


def test_a_blend_resumes_after_any_step_and_on_other_ranks(folders, tokenizer):
    three = [folders["packs"], folders["chats"], folders["divided"]]
    options = {"schedule": "cost_balanced", "tokenizer": tokenizer, "weights": (2.0, 1.0, 1.5), "window": 15}
    options |= SETTINGS["divided"]
    whole = train(three, dp_size=2, **options)
    digests, sequences = whole.digests, whole.sequences
    assert len(digests) > 10
    for stop in range(1, len(digests)):
        rest = train(three, dp_size=2, state=whole.state(stop - 1), **options)
        assert rest.digests == digests[stop:]
        other = train(three, dp_size=3, state=whole.state(stop - 1), **options)
        done = {id_ for step in whole.steps[:stop] for batch in step for row in batch.sequence_ids for id_ in row}
        assert sorted([*done, *other.sequences]) == sequences
        # The mixture of a step does not depend on the ranks until a stream ends.
        assert shares_of(other.steps[0], 3) == shares_of(rest.steps[0], 3)


def test_a_blend_waits_for_the_folder_that_is_late_and_names_it(tmp_path):
    write_stream(tmp_path / "fast", some_packs(16), [8, 8])
    write_stream(tmp_path / "late", some_packs(2), [2], end=False)
    options = {"size": 4, "weights": (1.0, 1.0), "schedule": "dp_balanced"}
    with pytest.raises(LoaderError, match=r"for chunk_00001 of .*late") as caught:
        train([tmp_path / "fast", tmp_path / "late"], timeout_s=1.0, **options)
    assert caught.value.where == str(tmp_path / "late")
    write_stream(tmp_path / "late", some_packs(2), [2])
    rest = train([tmp_path / "fast", tmp_path / "late"], **options)
    assert [shares_of(step, 2) for step in rest.steps[:2]] == [[2, 2], [2, 2]]


def test_a_position_in_another_number_of_folders_is_refused(folders, tokenizer):
    both = [folders["packs"], folders["chats"]]
    state = train(both, weights=(1.0, 1.0), steps=1, schedule="dp_balanced", tokenizer=tokenizer).state()
    assert len(positions_from_json(state.live, 2)) == 2
    with pytest.raises(LoaderError, match="has positions in 2 folders of live chunks, and 1 are named"):
        positions_from_json(state.live, 1)
    with pytest.raises(ConfigError, match="is listed twice"):
        LiveConfig(blend=[LiveSource("data/a"), LiveSource("data/b"), LiveSource("data/./a", 2.0)])


def test_a_folder_in_which_nothing_was_written_is_named(tmp_path):
    (tmp_path / "lvie").mkdir()
    with pytest.raises(LoaderError, match=r"lvie is empty: check its name"):
        train(tmp_path / "lvie", timeout_s=0.2)
