"""Balanced live steps are those of a stored dataset with the same global batches, wherever their rows are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from live_streams import CAPACITY, some_chats, some_packs, train, write_stream

from harness.errors import ScheduleError
from harness.formats import open_dataset, open_writer
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.tokenize.bpe import train_bpe
from harness.records import Pack
from harness.schedule import ScheduleConfig

# Twelve chunks of four packs make four steps of twelve packs on 1, 2, 3 and 4 ranks.
SIZE, SIZES = 12, [4] * 12
BALANCED = ["dp_balanced", "cost_balanced"]


@pytest.fixture(scope="module")
def packs() -> list[Pack]:
    return some_packs(sum(SIZES), seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, packs: list[Pack]) -> Path:
    path = tmp_path_factory.mktemp("live")
    write_stream(path, packs, SIZES)
    return path


def pack_number(id_: int) -> int:
    return (id_ >> 40) * 4 + (id_ >> 18 & (1 << 22) - 1)


@pytest.mark.parametrize(
    ("schedule", "dp_size", "layout"),
    [
        *(("dp_balanced", dp_size, {}) for dp_size in (1, 2, 3, 4)),
        ("dp_balanced", 2, {"cp_size": 2, "pad_to_multiple": 4}),
        ("dp_balanced", 4, {"group_size": 2, "pad_to_multiple": 2}),
        ("cost_balanced", 3, {}),
        ("cost_balanced", 2, {"cp_size": 2, "pad_to_multiple": 4}),
    ],
)
def test_rows_are_those_of_a_stored_dataset(folder, packs, tmp_path, schedule, dp_size, layout):
    trained = train(folder, dp_size=dp_size, size=SIZE, schedule=schedule, layout=layout)
    assert len(trained.steps) == 4
    order = [pack_number(int(id_)) for step in trained.steps for id_ in step[0].pack_ids]
    assert sorted(order) == list(range(len(packs)))
    with open_writer(tmp_path / "stored", format="memmap", pack_size=64) as writer:
        for number in order:
            writer.append(packs[number])
    for rank in range(dp_size):
        stored = Loader(
            open_dataset(tmp_path / "stored"),
            LoaderConfig(global_batch_size=SIZE, shuffle=False, num_workers=0),
            schedule=ScheduleConfig(schedule, max_tokens_per_rank=CAPACITY // layout.get("cp_size", 1)),
            layout=RankLayout(dp_rank=rank, dp_size=dp_size, **layout),
            num_epochs=1,
        )
        for mine, theirs in zip([step[rank] for step in trained.steps], stored, strict=True):
            assert mine.digest() == theirs.digest()
            assert (mine.num_tokens, mine.num_sequences) == (theirs.num_tokens, theirs.num_sequences)
            assert mine.imbalance.rank_tokens.tolist() == theirs.imbalance.rank_tokens.tolist()
            assert mine.imbalance.cost_ratio == theirs.imbalance.cost_ratio


def test_a_step_balanced_by_cost_is_more_even_than_one_as_packed(folder):
    packed, balanced = (
        sum(step[0].imbalance.cost_ratio for step in train(folder, dp_size=4, size=SIZE, schedule=name).steps)
        for name in ("as_packed", "cost_balanced")
    )
    assert balanced < packed


@pytest.mark.parametrize("schedule", BALANCED)
def test_uneven_chunks_and_other_ranks_after_a_stop_train_every_sequence_once(tmp_path, packs, schedule):
    sizes = [5, 1, 7, 3, 4, 2, 6, 3]
    write_stream(tmp_path, packs[: sum(sizes)], sizes)
    whole = train(tmp_path, dp_size=1, size=5).sequences
    first = train(tmp_path, dp_size=3, size=5, steps=2, schedule=schedule)
    rest = train(tmp_path, dp_size=2, size=5, state=first.state(), schedule=schedule)
    assert sorted(first.sequences + rest.sequences) == whole
    for step in [*first.steps, *rest.steps]:
        assert len({batch.num_microbatches for batch in step}) == 1


def test_conversations_are_balanced_and_each_is_trained_once(tmp_path, tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["question alpha beta gamma delta 0123456789 "] * 20, tokens, vocab_size=300)
    tokenizer = ChatTokenizer(TokenizerConfig(name=str(tokens)))
    write_stream(tmp_path / "live", some_chats(31), [5, 1, 7, 3, 4, 2, 6, 3])
    expected = train(tmp_path / "live", tokenizer=tokenizer).sequences
    trained = train(tmp_path / "live", dp_size=3, size=6, tokenizer=tokenizer, schedule="dp_balanced")
    assert trained.sequences == expected


def test_a_pack_over_a_row_is_divided_and_a_sequence_over_a_row_is_named(tmp_path):
    lengths = np.full(4, 100)
    starts = np.cumsum(lengths) - lengths
    write_stream(tmp_path / "long", [Pack(np.arange(400), np.zeros(400), starts)] * 2, [1, 1])
    assert len(train(tmp_path / "long", dp_size=2, size=2, schedule="dp_balanced").steps) == 1
    with pytest.raises(ScheduleError, match="the pack has 396 tokens"):
        train(tmp_path / "long", dp_size=2, size=2)
    write_stream(tmp_path / "longer", [Pack(np.arange(400), np.zeros(400), [0])] * 2, [1, 1])
    with pytest.raises(ScheduleError, match="a sequence of the pack has 399 tokens"):
        train(tmp_path / "longer", dp_size=2, size=2, schedule="dp_balanced")
