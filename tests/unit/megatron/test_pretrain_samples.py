"""Samples of a pretraining step, compared with Megatron-Core's own datasets and with documents read by hand."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import EOD, SIZE, batches, count_tokens, megatrons, opened, settings, write_sft

from harness.loader.corpus import CorpusSource
from harness.megatron.data.corpus import epochs_of

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize(("positions", "attention"), [(False, False), (True, True), (True, False), (False, True)])
def test_a_step_gets_megatrons_samples_with_their_shapes_shifts_masks_and_positions(
    corpus: Path, positions: bool, attention: bool
) -> None:
    resets = {"reset_position_ids": positions, "reset_attention_mask": attention, "eod_mask_loss": attention}
    config = settings(corpus, eod=EOD, **resets)
    expected = megatrons(config, 64)
    found = [row for batch in batches(opened(config), config) for row in batch.rows]
    assert len(found) == 64
    ends = 0
    for index, row in enumerate(found):
        sample = expected[index]
        assert row.tokens.dtype == row.labels.dtype == row.position_ids.dtype == np.int64
        assert row.loss_mask.dtype == np.float32
        assert row.tokens.shape == row.labels.shape == row.position_ids.shape == row.loss_mask.shape == (SIZE,)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(getattr(row, name), sample[name].numpy(), err_msg=name)
        np.testing.assert_array_equal(row.tokens[1:], row.labels[:-1])
        # True is masked there; here attention is causal between two boundaries.
        document = np.searchsorted(row.cu_seqlens, np.arange(SIZE), side="right")
        seen = (document[:, None] == document[None, :]) & np.tri(SIZE, dtype=bool)
        np.testing.assert_array_equal(~seen, sample["attention_mask"].numpy()[0])
        ends += int((row.tokens == EOD).sum())
        if positions:
            starts = np.flatnonzero(row.tokens[:-1] == EOD) + 1
            assert (row.position_ids[starts] == 0).all()
        else:
            np.testing.assert_array_equal(row.position_ids, np.arange(SIZE))
        if attention:
            assert (row.loss_mask == (row.tokens != EOD)).all()
        else:
            assert row.cu_seqlens.tolist() == [0, SIZE]
            assert row.loss_mask.all()
    assert ends > 20


def test_a_blend_is_megatrons_and_every_split_has_its_own_documents(corpus: Path, other: Path) -> None:
    sources = [CorpusSource(str(corpus), 3.0), CorpusSource(str(other), 1.0)]
    config = settings(blend=sources)
    built, expected = opened(config), megatrons(config, 64)
    assert [int(built.train[i]["dataset_id"]) for i in range(64)] == [int(expected[i]["dataset_id"]) for i in range(64)]
    assert Counter(int(built.train[i]["dataset_id"]) for i in range(64)) == {0: 48, 1: 16}
    for i in range(64):
        torch.testing.assert_close(built.train[i]["tokens"], expected[i]["tokens"])
    trained = {tuple(built.train[i]["tokens"][:8].tolist()) for i in range(64)}
    assert not trained & {tuple(built.validation[i]["tokens"][:8].tolist()) for i in range(8)}
    assert built.test is None


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_divide_a_global_batch_as_megatron_deals_it(corpus: Path, dp_size: int) -> None:
    config = settings(corpus, micro_batch_size=2)
    built = opened(config)
    steps = [batches(built, config, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for number in range(8):
        order = []
        for microbatch in range(8 // 2 // dp_size):
            for rank in range(dp_size):
                batch = steps[rank][number]
                assert batch.num_microbatches == 8 // 2 // dp_size
                assert batch.num_tokens == 8 * SIZE
                assert batch.imbalance.fill == 1.0
                order += batch.sequence_ids[microbatch].tolist()
                assert batch.rows[microbatch].cu_seqlens.tolist() == [0, SIZE, 2 * SIZE]
        assert order == list(range(8 * number, 8 * number + 8))
        assert batch.state.packs_consumed == 8 * number + 8


def test_a_ragged_end_is_filled_with_rows_that_train_nothing(corpus: Path) -> None:
    config = settings(corpus)
    last = [batches(opened(config), config, 13, dp_rank=rank, dp_size=2)[-1] for rank in (0, 1)]
    assert [batch.num_microbatches for batch in last] == [3, 3]
    assert [int(sum(row.num_trained_tokens for row in batch.rows)) for batch in last] == [3 * SIZE, 2 * SIZE]
    assert {batch.num_tokens for batch in last} == {5 * SIZE}


def test_documents_are_padded_one_by_one_where_the_layout_asks(corpus: Path) -> None:
    config = settings(corpus, eod=EOD, reset_attention_mask=True)
    plain = batches(opened(config), config)
    padded = batches(opened(config), config, pad_to_multiple=4)
    for one, other in zip(plain, padded, strict=True):
        for a, b in zip(one.rows, other.rows, strict=True):
            assert not (np.diff(b.cu_seqlens_padded) % 4).any()
            np.testing.assert_array_equal(a.cu_seqlens, b.cu_seqlens)
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name)[~b.padding_mask])


def test_a_blend_of_a_corpus_and_packs_keeps_the_packs_masks_and_boundaries(corpus: Path, tmp_path: Path) -> None:
    packs = write_sft(tmp_path / "sft")
    config = settings(blend=[CorpusSource(str(corpus), 1.0), CorpusSource(str(tmp_path / "sft"), 1.0)], split="100,0,0")
    built = opened(config, train=48)
    found = batches(built, config, 48)
    rows = [row for batch in found for row in batch.rows]
    from_sft = [row for i, row in enumerate(rows) if int(built.train[i]["dataset_id"]) == 1]
    assert len(from_sft) == 24
    # Every pack twice: two epochs, each in an order of its own.
    firsts = [int(row.tokens[0]) for row in from_sft]
    assert sorted(firsts[:12]) == sorted(firsts[12:]) == [int(pack.input_ids[0]) for pack in packs]
    assert firsts[:12] != firsts[12:]
    for row in from_sft:
        pack = packs[int(row.tokens[0])]
        assert row.cu_seqlens.tolist() == [0, 10, 18]
        np.testing.assert_array_equal(row.tokens, np.delete(pack.input_ids, [10, 19]))
        np.testing.assert_array_equal(row.labels, np.delete(pack.input_ids, [0, 11]))
        assert row.loss_mask.tolist() == [0] * 9 + [1] + [1] * 8
    assert sum(batch.num_tokens for batch in found) == 24 * SIZE + 24 * 18


def test_batches_of_a_blend_of_packs_alone_count_the_tokens_of_their_rows(tmp_path: Path) -> None:
    sources = [tmp_path / "first", tmp_path / "second"]
    for source in sources:
        write_sft(source)
    config = settings(blend=[CorpusSource(str(source), 1.0) for source in sources], split="100,0,0")
    for batch in batches(opened(config, train=16), config, 16):
        assert batch.num_tokens == sum(len(row) for row in batch.rows) == 8 * 18


def test_a_packed_dataset_trains_by_itself_and_as_the_plain_pair_that_it_is(tmp_path: Path) -> None:
    packs = write_sft(tmp_path / "sft")
    config = settings(tmp_path / "sft", split="100,0,0")
    rows = [row for batch in batches(opened(config, train=12), config, 12) for row in batch.rows]
    assert sorted(int(row.tokens[0]) for row in rows) == list(range(12))
    (index,) = [path for path in (tmp_path / "sft").glob("*.idx") if not path.name.endswith(".seq.idx")]
    plain = settings(index.with_suffix(""), split="100,0,0")
    stream = np.concatenate([pack.input_ids for pack in packs])
    seen = np.concatenate([row.tokens for batch in batches(opened(plain, train=7), plain, 7) for row in batch.rows])
    assert len(seen) == 7 * SIZE
    assert Counter(seen.tolist()) - Counter(stream.tolist()) == Counter()


@pytest.mark.parametrize("samples", [40, 100, 130, 170, 200, 300, 420])
def test_runs_of_equal_order_see_the_same_samples(corpus: Path, samples: int) -> None:
    """Megatron shuffles anew where more samples take other epochs; the order's name changes exactly then."""
    config = settings(corpus, split="100,0,0")
    few, many = opened(config, train=samples), opened(config, train=samples + 25)
    common = range(min(len(few.train), len(many.train)))
    same = all(torch.equal(few.train[i]["tokens"], many.train[i]["tokens"]) for i in common[:samples])
    assert (few.order == many.order) == same


def test_the_epochs_in_an_orders_name_are_those_of_the_built_index(corpus: Path) -> None:
    config = settings(corpus, split="100,0,0")
    tokens = int(count_tokens(corpus))
    names = []
    for samples in range(20, 3 * tokens // SIZE, 23):
        dataset = opened(config, train=samples).train
        epochs = dataset.document_index.shape[0] // 200
        # The last epoch is set apart where the documents of the others come first.
        apart = epochs > 1 and set(np.unique(dataset.document_index[: 200 * (epochs - 1)], return_counts=True)[1]) == {
            epochs - 1
        }
        names.append((epochs_of(dataset), f"{epochs}{'+' if apart else ''}"))
    assert all(name == expected for name, expected in names)
    assert {name for name, _ in names} >= {"1", "2", "2+", "3"}


def test_a_reader_is_sent_to_workers_and_reads_the_same_there(corpus: Path, other: Path) -> None:
    config = settings(blend=[CorpusSource(str(corpus), 1.0), CorpusSource(str(other), 1.0)])
    built = opened(config)
    copy = pickle.loads(pickle.dumps(built.train))
    for i in range(16):
        torch.testing.assert_close(copy[i]["tokens"], built.train[i]["tokens"])
