"""Sources of a pretraining run and their built indices: what is opened, found again, and refused."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import ALONE, VOCAB, batches, opened, settings, write_corpus

from harness.errors import ConfigError, FormatError, HarnessError, LoaderError
from harness.indexed.convert import count_sequences, save_counts
from harness.indexed.index import HEADER
from harness.loader import CorpusConfig, LoaderConfig
from harness.loader.corpus import CorpusSource, SplitSources
from harness.megatron.compat import gpt_dataset_config
from harness.megatron.data.corpus import build_corpus, open_corpus
from harness.megatron.run.pretraining import _check_samples
from harness.plan import PretrainConfig, TrainerConfig
from tests.samples.small_packs import batch_digest

pytestmark = pytest.mark.usefixtures("job")


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


@pytest.mark.parametrize("divided", [False, True])
def test_fast_options_give_the_same_samples_once_the_indices_are_built(
    tmp_path: Path, corpus: Path, other: Path, divided: bool
) -> None:
    sources = [CorpusSource(str(corpus), 0.7), CorpusSource(str(other), 0.3)]
    of_splits: dict[str, Any] = {"blend": sources, "split": "80,20"}
    if not divided:
        of_splits = {"blend_per_split": SplitSources(train=sources)}
    plain = settings(**of_splits, path_to_cache=str(tmp_path / "cache"))
    save_counts(count_sequences([str(corpus), str(other)], vocab_size=VOCAB), tmp_path / "counts.json")
    fast = replace(
        plain, fast_cache_load=True, defer_npy_index_mmap=True, per_dataset_sequences_path=str(tmp_path / "counts.json")
    )
    with pytest.raises(LoaderError, match="a built index is missing") as refused:
        opened(replace(fast, defer_npy_index_mmap=False))
    assert "num_samples" in refused.value.fix
    if not divided:
        with pytest.raises(LoaderError, match="a built index is missing"):
            batches(opened(fast), fast)
    one, two = opened(plain), opened(fast)
    assert two.train.dataset_index is None
    for mine, theirs in zip(batches(one, plain), batches(two, fast), strict=True):
        assert batch_digest(mine) == batch_digest(theirs)
    if divided:
        torch.testing.assert_close(one.validation[7]["tokens"], two.validation[7]["tokens"])
    assert (one.order, one.fingerprint) == (two.order, two.fingerprint)


def test_samples_are_the_same_from_files_that_are_not_mapped(tmp_path: Path) -> None:
    prefix = tmp_path / "unmapped"
    write_corpus(prefix, 200, seed=4)
    config = settings(prefix, mmap_bin_files=False)
    one = batches(opened(config), config)
    assert f"{prefix}.bin" not in Path("/proc/self/maps").read_text()
    two = batches(opened(settings(prefix)), settings(prefix))
    assert [batch_digest(batch) for batch in one] == [batch_digest(batch) for batch in two]


def test_counts_for_another_vocabulary_are_refused_and_not_misread(tmp_path: Path, corpus: Path) -> None:
    save_counts(count_sequences([str(corpus)]), tmp_path / "counts.json")
    config = settings(corpus, per_dataset_sequences_path=str(tmp_path / "counts.json"))
    with pytest.raises(FormatError, match="another dtype"):
        open_corpus(config, seed=1, sizes=(8, 8, 8), vocab_size=70_000, packs={}, reads=True, ranks=ALONE)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"path": "nowhere"}, "nowhere.bin is missing"),
        ({"path": ""}, "no source is specified"),
        *(({"split": split}, "split is") for split in ("0,1", "", "9e1,1", "1_0,1", "inf,1", "1,nan", "9" * 400)),
        ({"window_blocks": 8}, "window_blocks is 8, but block_documents is not set"),
        ({"reset_attention_mask": True}, "requires the id of the end-of-document"),
        ({"defer_npy_index_mmap": True}, "a folder of built indices"),
        ({"blend": [CorpusSource("a", 1.0), CorpusSource("b")]}, "have a weight"),
        ({"blend": [CorpusSource("a", -1.0)]}, "weight is -1.0"),
        ({"blend_per_split": SplitSources(valid=[CorpusSource("a")])}, "there is no training source"),
        ({"split": "999,1,0"}, "valid gets 0 of 200 documents"),
        ({"path_to_cache": "/proc/nowhere"}, "built indices cannot be written"),
        ({"blend": [CorpusSource("a")], "per_split_data_args_path": "x"}, "both set the sources"),
        ({"per_split_data_args_path": "nowhere.json"}, "cannot be read"),
        ({"path": "s3://bucket/x"}, "is in object storage"),
    ],
)
def test_settings_that_cannot_train_are_refused_by_name(
    corpus: Path, tmp_path: Path, monkeypatch, changes: dict[str, Any], what: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(HarnessError) as refused:
        opened(settings(**{"path": str(corpus), **changes}))
    assert what in refused.value.what
    assert refused.value.fix
    assert list(Path.cwd().iterdir()) == []  # such as the folder of the indices


def test_a_mean_over_the_conversations_of_a_corpus_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="a corpus has no conversations") as refused:
        PretrainConfig(trainer=TrainerConfig(loss_average="conversation")).check(1)
    assert refused.value.where == "trainer.loss_average"


def test_a_split_without_a_whole_sample_is_refused_when_all_of_it_is_requested(corpus: Path) -> None:
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
    assert [batch_digest(one) for one in after] == [batch_digest(one) for one in right]
    assert [batch_digest(one) for one in after] != [batch_digest(one) for one in before]


@pytest.mark.parametrize("defer", [False, True])
def test_a_damaged_index_is_an_error_that_names_its_folder(tmp_path: Path, corpus: Path, defer: bool) -> None:
    config = settings(corpus, path_to_cache=str(tmp_path / "cache"))
    opened(config)
    for path in (tmp_path / "cache").glob("*train-shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(HarnessError) as refused:
        batches(opened(replace(config, defer_npy_index_mmap=defer)), config)
    assert "mmap length is greater than file size" in refused.value.what
    assert "build" in refused.value.fix


def test_indices_whose_builder_was_killed_are_built_again(tmp_path: Path, corpus: Path, monkeypatch) -> None:
    config = settings(corpus, path_to_cache=str(tmp_path / "cache"))
    whole = settings(corpus, path_to_cache=str(tmp_path / "other"))
    expected = [batch_digest(one) for one in batches(opened(whole), whole)]
    save = np.save

    def die_half_way(path: Any, values: Any, **more: Any) -> None:
        save(path, values, **more)
        if "shuffle_index" in str(path):
            os.truncate(path, 200)
            os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / "cache").mkdir()
    of_others = tmp_path / "cache" / "hash-GPTDataset-train-shuffle_index.npy"
    save(of_others, np.arange(50))
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(np, "save", die_half_way)
        try:
            build_corpus(config, 7, (64, 8, 8), VOCAB, {})
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [path.stat().st_size for path in (tmp_path / "cache").glob("*train-shuffle_index.npy")].count(200) == 1
    assert [batch_digest(one) for one in batches(opened(config), config)] == expected
    assert of_others.exists()


def test_a_failed_build_is_an_error_and_the_next_run_builds_the_whole_index(
    tmp_path: Path, corpus: Path, monkeypatch
) -> None:
    """Fill the disk while an index is written."""
    config = settings(corpus, path_to_cache=str(tmp_path / "cache"))
    save = np.save

    def full(path: Any, values: Any, **more: Any) -> None:
        save(path, values, **more)
        if "sample_index" in str(path):
            os.truncate(path, 100)
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        with pytest.raises(ConfigError, match="No space left on device"):
            opened(config)
    whole = settings(corpus, path_to_cache=str(tmp_path / "other"))
    found, right = batches(opened(config), config), batches(opened(whole), whole)
    assert [batch_digest(one) for one in found] == [batch_digest(one) for one in right]


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


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PretrainConfig(loader=LoaderConfig(global_batch_size=2**31 - 1)), "trainer.steps"),
        (PretrainConfig(data=CorpusConfig(num_samples=10**12)), "data.num_samples"),
        (PretrainConfig(trainer=TrainerConfig(eval_batches=2**31 - 1)), "trainer.eval_batches"),
    ],
)
def test_more_samples_than_memory_can_index_are_refused_by_name(config, name):
    with pytest.raises(ConfigError, match="samples, whose index requires") as error:
        _check_samples(config)
    assert error.value.where.startswith(name)
    _check_samples(PretrainConfig())


@pytest.mark.timeout(60)  # of epochs that are counted forever
def test_more_documents_than_a_sample_has_tokens_are_refused_if_none_has_a_token(corpus: Path) -> None:
    with Path(f"{corpus}.idx").open("r+b") as file:
        file.seek(HEADER.size)
        file.write(bytes(4 * 200))
    with pytest.raises(ConfigError, match="train gets 200 of 200 documents with 0 tokens"):
        opened(settings(corpus, split="100,0,0"))
