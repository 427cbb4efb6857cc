"""Windows of arrived sequences, and folders blended by weight: the same steps as stored data, each row once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_streams import CAPACITY, Trained, long_chats, some_chats, some_packs, train, write_stream

from harness.errors import ConfigError, LoaderError
from harness.formats import open_dataset, open_writer
from harness.loader import LiveConfig, Loader, LoaderConfig, RankLayout
from harness.loader.datasets import LiveSource
from harness.loader.live.position import positions_from_json
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.tokenize.bpe import train_bpe
from harness.records import Pack, SequenceView
from harness.schedule import ScheduleConfig

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
    return {name: made / name for name in ("packs", "chats", "divided")}


SETTINGS = {"packs": {}, "chats": {}, "divided": {"over_long": "split", "pack_size": 64}}


def sequences_of(trained: Trained) -> dict[int, SequenceView]:
    """Return the stored sequences that rows were made of, by id."""
    found = {}
    for step in trained.steps:
        for batch in step:
            for row, ids in zip(batch.rows, batch.sequence_ids, strict=True):
                bounds = row.cu_seqlens_padded.tolist()
                for id_, start, count in zip(ids.tolist(), bounds, np.diff(row.cu_seqlens).tolist(), strict=False):
                    tokens, end = row.tokens[start : start + count], start + count - 1
                    mask = row.loss_mask[start : start + count].astype(np.uint8)
                    found[id_] = SequenceView(
                        np.append(tokens, row.labels[end]).astype(np.int32), np.append(mask, 0).astype(np.uint8)
                    )
    return found


@pytest.mark.parametrize(("kind", "dp_size", "layout"), [("packs", 2, {}), *(("divided", *one) for one in LAYOUTS)])
def test_a_window_is_trained_as_the_global_batch_of_a_stored_dataset(
    folders, tokenizer, tmp_path, kind, dp_size, layout
):
    options = {"schedule": "dp_balanced", "tokenizer": tokenizer, **SETTINGS[kind]}
    trained = train(folders[kind], dp_size=dp_size, window=12, layout=layout, **options)
    sizes = [len(step[0].pack_ids) for step in trained.steps]
    assert set(sizes[:-1]) == {12}
    assert [step[0].num_sequences for step in trained.steps] == sizes
    stored = sequences_of(trained)
    with open_writer(tmp_path / "stored", format="memmap", pack_size=128) as writer:
        for step in trained.steps:
            for id_ in step[0].pack_ids.tolist():
                writer.append(Pack(stored[id_].input_ids, stored[id_].loss_mask, [0]))
    for rank in range(dp_size):
        loader = Loader(
            open_dataset(tmp_path / "stored"),
            LoaderConfig(global_batch_size=12, shuffle=False, num_workers=0),
            schedule=ScheduleConfig("dp_balanced", max_tokens_per_rank=CAPACITY // layout.get("cp_size", 1)),
            layout=RankLayout(dp_rank=rank, dp_size=dp_size, **layout),
            num_epochs=1,
        )
        for mine, theirs in zip([step[rank] for step in trained.steps], loader, strict=True):
            assert mine.digest() == theirs.digest()
            assert mine.imbalance.rank_tokens.tolist() == theirs.imbalance.rank_tokens.tolist()
    assert trained.sequences == train(folders[kind], tokenizer=tokenizer, **SETTINGS[kind]).sequences


@pytest.mark.parametrize("kind", ["packs", "divided"])
def test_stopping_after_any_window_changes_nothing(folders, tokenizer, kind):
    options = {"dp_size": 2, "window": 7, "schedule": "cost_balanced", "tokenizer": tokenizer, **SETTINGS[kind]}
    whole = train(folders[kind], **options)
    for stop in range(1, len(whole.steps)):
        rest = train(folders[kind], state=whole.state(stop - 1), **options)
        assert rest.digests == whole.digests[stop:]
        assert rest.state() == whole.state()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_over_changes_between_packs_and_windows_and_of_ranks_every_sequence_is_trained_once(folders, tokenizer, data):
    kind = data.draw(st.sampled_from(sorted(folders)))
    expected = train(folders[kind], tokenizer=tokenizer, **SETTINGS[kind]).sequences
    trained, state = Trained(), None
    for _ in range(40):
        steps, made = data.draw(st.integers(1, 4)), len(trained.steps)
        train(
            folders[kind],
            dp_size=data.draw(st.integers(1, 4)),
            size=data.draw(st.integers(4, 7)),
            window=data.draw(st.sampled_from([None, 5, 8])),
            schedule="dp_balanced",
            steps=steps,
            state=state,
            tokenizer=tokenizer,
            into=trained,
            **SETTINGS[kind],
        )
        if len(trained.steps) - made < steps:
            break
        state = trained.state()
    assert trained.sequences == expected


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
    options = {"schedule": "cost_balanced", "tokenizer": tokenizer, "weights": (2.0, 1.0, 1.5), "window": 9}
    options |= SETTINGS["divided"]
    whole = train(three, dp_size=2, **options)
    for stop in range(1, len(whole.steps)):
        rest = train(three, dp_size=2, state=whole.state(stop - 1), **options)
        assert rest.digests == whole.digests[stop:]
        other = train(three, dp_size=3, state=whole.state(stop - 1), **options)
        done = {id_ for step in whole.steps[:stop] for batch in step for row in batch.sequence_ids for id_ in row}
        assert sorted([*done, *other.sequences]) == whole.sequences
        # The mixture of a step does not depend on the ranks until a stream ends.
        assert shares_of(other.steps[0], 3) == shares_of(rest.steps[0], 3)


def test_a_blend_waits_for_the_folder_that_is_late_and_names_it(tmp_path):
    write_stream(tmp_path / "fast", some_packs(16), [8, 8])
    write_stream(tmp_path / "late", some_packs(2), [2], end=False)
    trained = Trained()
    with pytest.raises(LoaderError, match=r"for chunk_00001 of .*late") as caught:
        train(
            [tmp_path / "fast", tmp_path / "late"],
            size=4,
            weights=(1.0, 1.0),
            schedule="dp_balanced",
            timeout_s=1.0,
            into=trained,
        )
    assert caught.value.where == str(tmp_path / "late")
    write_stream(tmp_path / "late", some_packs(2), [2])
    rest = train([tmp_path / "fast", tmp_path / "late"], size=4, weights=(1.0, 1.0), schedule="dp_balanced")
    assert [shares_of(step, 2) for step in rest.steps[:2]] == [[2, 2], [2, 2]]


def test_a_position_in_another_number_of_folders_is_refused(folders, tokenizer):
    both = [folders["packs"], folders["chats"]]
    state = train(both, weights=(1.0, 1.0), steps=1, schedule="dp_balanced", tokenizer=tokenizer).state()
    assert len(positions_from_json(state.live, 2)) == 2
    with pytest.raises(LoaderError, match="has positions in 2 folders of live chunks, and 1 are named"):
        positions_from_json(state.live, 1)
    with pytest.raises(ConfigError, match="is named twice"):
        LiveConfig(blend=[LiveSource("data/a"), LiveSource("data/b"), LiveSource("data/./a", 2.0)])


def test_a_folder_in_which_nothing_was_written_is_named(tmp_path):
    (tmp_path / "lvie").mkdir()
    with pytest.raises(LoaderError, match=r"lvie is empty: check its name"):
        train(tmp_path / "lvie", timeout_s=0.2)
