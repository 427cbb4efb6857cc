"""What a pretraining step receives, held against Megatron-Core's own datasets and against documents read by hand."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from harness.errors import ConfigError, FormatError, HarnessError, LoaderError
from harness.formats import open_writer
from harness.formats.indexed_merge import count_sequences, save_counts
from harness.formats.indexed_writer import IndexedWriter
from harness.formats.megatron_index import UINT16
from harness.loader.config import LoaderConfig
from harness.loader.corpus import CorpusConfig, CorpusSource, SplitSources
from harness.loader.state import LoaderState
from harness.loader.step import Layout, StepBatch
from harness.megatron import runtime
from harness.megatron.bench_corpus import QUICK, bench_corpus
from harness.megatron.compat import gpt_dataset_config
from harness.megatron.pretrain_data import Corpus, TokenIds, build_corpus, epochs_of, open_corpus
from harness.megatron.pretrain_samples import SampleLoader, SampleReader
from harness.megatron.pretrain_sources import find_packs
from harness.records import Pack
from harness.report.bench.workspace import Workspace

EOD, VOCAB, SIZE = 0, 300, 32
ALONE = runtime.Runtime(torch.device("cpu"), 0, 1, 0)


@pytest.fixture(autouse=True)
def job() -> Any:
    with runtime.start("cpu") as started:
        yield started


def write_corpus(prefix: Path, documents: int, *, seed: int) -> Path:
    """Documents of 3 to 60 tokens of 1 to 299, each ended by an EOD."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype=UINT16) as writer:
        for length in rng.integers(3, 60, documents):
            document = np.append(rng.integers(1, VOCAB, length), EOD)
            writer.append(document, np.array([len(document)]))
    return prefix


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "a", 200, seed=1)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "b", 60, seed=2)


def settings(path: Path | str = "", **changes: Any) -> CorpusConfig:
    return CorpusConfig(path=str(path), **{"sequence_length": SIZE, "split": "90,10,0", **changes})


def opened(config: CorpusConfig, *, train: int = 64, valid: int | None = 8, seed: int = 7) -> Corpus:
    """As every rank opens it, here a single one."""
    found = open_corpus(
        config,
        seed=seed,
        sizes=(train, valid, valid),
        vocab_size=VOCAB,
        packs=find_packs(config),
        reads=True,
        ranks=ALONE,
    )
    assert found is not None
    return found


def batches(corpus: Corpus, config: CorpusConfig, count: int = 64, **layout: int) -> list[StepBatch]:
    places = Layout(**layout)
    reader = SampleReader(
        corpus.train,
        layout=places,
        sequence_length=SIZE,
        micro_batch_size=config.micro_batch_size,
        boundary=config.eod if config.reset_attention_mask else None,
    )
    start = LoaderState(7, fingerprint=corpus.fingerprint, order=corpus.order)
    loading = LoaderConfig(global_batch_size=8, num_workers=0)
    with SampleLoader(reader, loading, layout=places, num_samples=count, start=start) as loader:
        return list(loader)


def megatrons(config: CorpusConfig, train: int, **changes: Any) -> Any:
    """The training set as a user of Megatron-Core builds it, with the mask that attention would be given."""
    blend = [config.path] if not config.blend else [source.path for source in config.blend]
    weights = [source.weight for source in config.blend] or None
    made = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SIZE,
        blend=(blend, weights),
        split=config.split,
        tokenizer=TokenIds(EOD, VOCAB),
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        **changes,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [train, 8, 8], lambda: True, made).build()[0]


@pytest.mark.parametrize(("positions", "attention"), [(False, False), (True, True), (True, False), (False, True)])
def test_a_step_gets_megatrons_samples_with_their_shapes_shifts_masks_and_positions(
    corpus: Path, positions: bool, attention: bool
) -> None:
    told = {"reset_position_ids": positions, "reset_attention_mask": attention, "eod_mask_loss": attention}
    config = settings(corpus, eod=EOD, **told)
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
            behind = np.flatnonzero(row.tokens[:-1] == EOD) + 1
            assert (row.position_ids[behind] == 0).all()
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


def test_sources_of_each_split_come_from_settings_or_from_megatrons_json(
    tmp_path: Path, corpus: Path, other: Path
) -> None:
    by_hand = settings(
        blend_per_split=SplitSources(
            train=[CorpusSource(str(corpus), 0.5), CorpusSource(str(other), 0.5)], valid=[CorpusSource(str(other))]
        ),
    )
    written = {"train": ["0.5", str(corpus), "0.5", str(other)], "valid": [str(other)], "test": None}
    (tmp_path / "splits.json").write_text(json.dumps(written))
    by_file = settings(per_split_data_args_path=str(tmp_path / "splits.json"))
    one, two = opened(by_hand), opened(by_file)
    for name in ("train", "validation"):
        for i in range(8):
            torch.testing.assert_close(getattr(one, name)[i]["tokens"], getattr(two, name)[i]["tokens"])
    assert one.test is two.test is None
    assert (one.order, one.fingerprint) == (two.order, two.fingerprint)


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
    padded = batches(opened(config), config, multiple=4)
    for one, other in zip(plain, padded, strict=True):
        for a, b in zip(one.rows, other.rows, strict=True):
            assert not (np.diff(b.cu_seqlens_padded) % 4).any()
            np.testing.assert_array_equal(a.cu_seqlens, b.cu_seqlens)
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name)[~b.padding_mask])


def write_sft(folder: Path) -> list[Pack]:
    packs = [
        Pack(np.arange(20) + number, np.r_[np.zeros(9), 1, 0, np.ones(8), 0].astype(np.uint8), [0, 11])
        for number in range(12)
    ]
    with open_writer(folder, format="binidx", pack_size=24) as writer:
        for pack in packs:
            writer.append(pack)
    return packs


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
    told = []
    for samples in range(20, 3 * tokens // SIZE, 23):
        dataset = opened(config, train=samples).train
        epochs = dataset.document_index.shape[0] // 200
        # The last epoch is set apart where the documents of the others come first.
        apart = epochs > 1 and set(np.unique(dataset.document_index[: 200 * (epochs - 1)], return_counts=True)[1]) == {
            epochs - 1
        }
        told.append((epochs_of(dataset), f"{epochs}{'+' if apart else ''}"))
    assert all(one == two for one, two in told)
    assert {one for one, _ in told} >= {"1", "2", "2+", "3"}


def count_tokens(prefix: Path) -> int:
    return Path(f"{prefix}.bin").stat().st_size // 2


def test_fast_options_give_the_same_samples_once_the_indices_are_built(
    tmp_path: Path, corpus: Path, other: Path
) -> None:
    cache = str(tmp_path / "cache")
    sources = SplitSources(train=[CorpusSource(str(corpus), 0.7), CorpusSource(str(other), 0.3)])
    plain = settings(blend_per_split=sources, path_to_cache=cache)
    save_counts(count_sequences([str(corpus), str(other)], vocab_size=VOCAB), tmp_path / "counts.json")
    fast = replace(
        plain,
        fast_cache_load=True,
        defer_npy_index_mmap=True,
        per_dataset_sequences_path=str(tmp_path / "counts.json"),
    )
    with pytest.raises(LoaderError, match="a built index is not there") as refused:
        opened(replace(fast, defer_npy_index_mmap=False))
    assert "num_samples" in refused.value.fix
    trusting = opened(fast)
    with pytest.raises(LoaderError, match="a built index is not there"):
        batches(trusting, fast)
    one = opened(plain)
    two = opened(fast)
    assert two.train.dataset_index is None
    for mine, theirs in zip(batches(one, plain), batches(two, fast), strict=True):
        assert mine.digest() == theirs.digest()
    assert (one.order, one.fingerprint) == (two.order, two.fingerprint)


def test_counts_for_another_vocabulary_are_refused_and_not_misread(tmp_path: Path, corpus: Path) -> None:
    save_counts(count_sequences([str(corpus)]), tmp_path / "counts.json")
    config = settings(corpus, per_dataset_sequences_path=str(tmp_path / "counts.json"))
    with pytest.raises(FormatError, match="another dtype"):
        open_corpus(config, seed=1, sizes=(8, 8, 8), vocab_size=70_000, packs={}, reads=True, ranks=ALONE)


def test_a_reader_is_sent_to_workers_and_reads_the_same_there(corpus: Path, other: Path) -> None:
    config = settings(blend=[CorpusSource(str(corpus), 1.0), CorpusSource(str(other), 1.0)])
    built = opened(config)
    copy = pickle.loads(pickle.dumps(built.train))
    for i in range(16):
        torch.testing.assert_close(copy[i]["tokens"], built.train[i]["tokens"])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"path": "nowhere"}, "there is no nowhere.bin"),
        ({"path": ""}, "nothing to train on"),
        ({"split": "0,1"}, "split is"),
        ({"reset_attention_mask": True}, "which token ends a document"),
        ({"fast_cache_load": True, "path_to_cache": "c"}, "does not divide"),
        ({"defer_npy_index_mmap": True}, "folder of the built indices"),
        ({"blend": [CorpusSource("a", 1.0), CorpusSource("b")]}, "some have none"),
        ({"blend": [CorpusSource("a", -1.0)]}, "the weight is -1.0"),
        ({"blend_per_split": SplitSources(valid=[CorpusSource("a")])}, "no source is for training"),
        ({"split": "999,1,0"}, "valid gets 0 of 200 documents"),
        ({"path_to_cache": "/proc/nowhere"}, "built indices cannot be kept"),
        ({"blend": [CorpusSource("a")], "per_split_data_args_path": "x"}, "both name the sources"),
        ({"per_split_data_args_path": "nowhere.json"}, "cannot be read"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"path": "s3://bucket/x"}, "is in object storage"),
    ],
)
def test_settings_that_cannot_train_are_refused_by_name(corpus: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(HarnessError) as refused:
        opened(settings(**{"path": str(corpus), **changes}))
    assert what in refused.value.what
    assert refused.value.fix


def test_a_split_without_a_whole_sample_is_refused_where_all_of_it_is_asked_for(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="valid gets 2 of 200 documents with") as refused:
        opened(settings(corpus, split="99,1,0", sequence_length=500), valid=None)
    assert "data.split" in refused.value.fix


def test_another_corpus_at_the_same_path_gets_indices_of_its_own(tmp_path: Path, corpus: Path) -> None:
    before = batches(opened(settings(corpus)), settings(corpus))
    for suffix in (".bin", ".idx"):
        Path(f"{corpus}{suffix}").unlink()
    write_corpus(corpus, 300, seed=9)
    after = batches(opened(settings(corpus)), settings(corpus))
    fresh = settings(corpus, path_to_cache=str(tmp_path / "fresh"))
    right = batches(opened(fresh), fresh)
    assert [one.digest() for one in after] == [one.digest() for one in right]
    assert [one.digest() for one in after] != [one.digest() for one in before]


@pytest.mark.parametrize("defer", [False, True])
def test_a_damaged_index_is_an_error_that_names_its_folder(tmp_path: Path, corpus: Path, defer: bool) -> None:
    config = settings(corpus, path_to_cache=str(tmp_path / "cache"))
    opened(config)
    for path in (tmp_path / "cache").glob("*train-shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(HarnessError) as refused:
        batches(opened(replace(config, defer_npy_index_mmap=defer)), config)
    assert "mmap length is greater than file size" in refused.value.what
    assert "built again" in refused.value.fix


@pytest.mark.parametrize("damage", ["short", "header", "empty"])
def test_a_damaged_pair_is_refused_by_name(corpus: Path, damage: str) -> None:
    if damage == "short":
        with Path(f"{corpus}.bin").open("r+b") as file:
            file.truncate(100)
    elif damage == "header":
        with Path(f"{corpus}.idx").open("r+b") as file:
            file.write(b"nonsense")
    else:
        Path(f"{corpus}.idx").write_bytes(b"")
    with pytest.raises(FormatError) as refused:
        opened(settings(corpus))
    assert str(corpus) in str(refused.value)


def test_more_samples_than_a_blend_without_weights_has_are_refused(corpus: Path, other: Path) -> None:
    config = settings(blend=[CorpusSource(str(corpus)), CorpusSource(str(other))])
    with pytest.raises(ConfigError, match="one epoch") as refused:
        opened(config, train=10_000)
    assert "weights" in refused.value.fix


def test_a_node_that_shares_no_folder_builds_indices_of_its_own(tmp_path: Path, corpus: Path) -> None:
    config = settings(corpus, path_to_cache=str(tmp_path / "of" / "this" / "node"))
    built = build_corpus(config, 7, (64, 8, 8), VOCAB, {})
    assert len(built.train) >= 64
    assert list((tmp_path / "of" / "this" / "node").glob("*train-sample_index.npy"))


def test_an_option_that_megatron_core_has_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"megatron-core .* has no warp_speed") as refused:
        gpt_dataset_config({"warp_speed": True})
    assert refused.value.where == "data.warp_speed"


def test_the_bench_of_many_sources_gives_its_figures(tmp_path: Path) -> None:
    with Workspace(tmp_path) as workspace:
        report = bench_corpus(replace(QUICK, sources=3, rounds=1), workspace, lambda line: None)
    assert report.figure("indices built for the first time").value > 0
    assert report.figure("all fast options").of == ("indices found", "and defer_npy_index_mmap")
