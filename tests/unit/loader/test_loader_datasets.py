"""The datasets of a run are opened together and refused where they do not belong together."""

from __future__ import annotations

import pickle

import pytest
from small_packs import write_packs

from harness.errors import ConfigError
from harness.formats import Provenance, open_writer
from harness.loader import DataConfig, LiveConfig, open_datasets
from harness.loader.datasets import BlendSource, open_live
from harness.records import Pack


def write(path, *, tokenizer_hash="a" * 16, format="parquet"):
    provenance = Provenance(tokenizer="tok", tokenizer_hash=tokenizer_hash, counts={"vocab_size": 90})
    write_packs(path, [Pack([1, 2, 3], [1, 1, 0], [0])], format=format, pack_size=4, provenance=provenance)


def test_a_prepared_folder_gives_both_sets_and_the_vocabulary(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "validation")
    data = open_datasets(DataConfig(path=str(tmp_path)))
    assert (len(data.train), len(data.validation), data.vocab_size) == (1, 1, 90)


def test_any_dataset_can_be_trained_on_without_a_validation_set(tmp_path):
    write(tmp_path / "mine", format="binidx")
    data = open_datasets(DataConfig(path=str(tmp_path / "mine")))
    assert (len(data.train), data.validation, data.vocab_size) == (1, None, 90)


def test_a_validation_set_of_another_tokenizer_and_data_of_one_that_was_not_requested_are_refused(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "other", tokenizer_hash="b" * 16)
    with pytest.raises(ConfigError, match=r"tokenizer tok \(a{16}\), the validation set with tok \(b{16}\)"):
        open_datasets(DataConfig(path=str(tmp_path), validation_path=str(tmp_path / "other")))
    from harness.prep.tokenize.bpe import train_bpe

    train_bpe(["some text to learn from"] * 20, tmp_path / "tokenizer", vocab_size=300)
    with pytest.raises(ConfigError, match=r"the dataset was made with tokenizer tok \(a{16}\)"):
        open_datasets(DataConfig(path=str(tmp_path), tokenizer=str(tmp_path / "tokenizer")))


def test_a_further_validation_set_does_not_replace_the_one_of_the_training_data(tmp_path):
    for name in ("train", "validation", "other"):
        write(tmp_path / name)
    named = {"validation": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match="is the name of the training data's own validation set") as refused:
        open_datasets(DataConfig(path=str(tmp_path), evaluation=named))
    assert "data.validation_path" in refused.value.fix
    live = LiveConfig(path=str(tmp_path / "live"))
    with pytest.raises(ConfigError, match="is the name of the training data's own validation set"):
        open_live(DataConfig(live=live, validation_path=str(tmp_path / "validation"), evaluation=named))
    assert len(open_datasets(DataConfig(path=str(tmp_path / "train"), evaluation=named)).evaluation["validation"]) == 1


def blend(*sources, **other):
    return DataConfig(blend=[BlendSource(*source) for source in sources], **other)


def test_a_blend_joins_sets_of_any_format_and_their_validation_sets(tmp_path):
    for name, format in (("one", "parquet"), ("two", "binidx")):
        write(tmp_path / name / "train", format=format)
        write(tmp_path / name / "validation", format=format)
    write(tmp_path / "three", format="npy")
    sources = [(str(tmp_path / name), weight) for name, weight in (("one", 1.0), ("two", 2.0), ("three", 1.0))]
    data = open_datasets(blend(*sources))
    assert (len(data.train), len(data.validation), data.vocab_size) == (3, 2, 90)
    assert data.blend.shares == (0.25, 0.5, 0.25)
    again = pickle.loads(pickle.dumps(data.train))
    assert again.fingerprint == data.train.fingerprint
    assert again.read([2, 0, 1, 2]) == [Pack([1, 2, 3], [1, 1, 0], [0])] * 4
    assert again.pack_offsets.tolist() == [0, 1, 2, 3]
    assert again.sequence_lengths.tolist() == [3, 3, 3]
    with pytest.raises(IndexError):
        again.read([3])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a", "a", "a"], ("a", "a (2)", "a (3)")),
        (["a (2)", "a", "a"], ("a (2)", "a", "a (3)")),
        (["a", "a", "a (2)"], ("a", "a (2)", "a (2) (2)")),
    ],
)
def test_sources_have_names_of_their_own(tmp_path, monkeypatch, paths, names):
    monkeypatch.chdir(tmp_path)
    for path in set(paths):
        write(tmp_path / path)
    assert open_datasets(blend(*((path,) for path in paths))).named_sources.names == names


def test_sources_of_other_tokenizers_or_pack_sizes_are_refused(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", tokenizer_hash="b" * 16)
    with pytest.raises(ConfigError, match=r"same tokenizer: .*a has a{16}, .*b has b{16}"):
        open_datasets(blend((str(tmp_path / "a"),), (str(tmp_path / "b"),)))
    write_packs(tmp_path / "c", [Pack([1, 2, 3], [1, 1, 0], [0])], pack_size=8)
    with pytest.raises(ConfigError, match=r"same pack_size: .*a has 4, .*c has 8"):
        open_datasets(blend((str(tmp_path / "a"),), (str(tmp_path / "c"),)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (("b", 0.0), "weight is 0.0"),
        (("b", float("nan")), "weight is nan"),
        (("b", None), "only some of the sources have a weight"),
        (("b", 1.0, 0), "epochs is 0"),
        (("", 1.0), "the source has no path"),
    ],
)
def test_a_blend_that_cannot_be_drawn_is_refused_before_anything_is_opened(source, message):
    with pytest.raises(ConfigError, match=message) as caught:
        blend(("a", 1.0), source)
    assert caught.value.where.startswith("data.blend")
    assert caught.value.fix


def test_an_epoch_of_a_blend_is_that_of_its_definition_and_refused_where_there_is_none(tmp_path):
    for name, packs in (("a", 4), ("b", 2)):
        with open_writer(tmp_path / name, format="parquet", pack_size=8) as writer:
            for _ in range(packs):
                writer.append(Pack([1, 2], [1, 0], [0]))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert open_datasets(DataConfig(path=a)).check_epochs(3) == 4
    assert open_datasets(blend((a,), (b, None, 2))).check_epochs(3) == 4 + 2 * 2
    # With weights, one epoch ends where the passes over a source are used up.
    limited = open_datasets(blend((a, 1.0), (b, 1.0, 2)))
    assert limited.check_epochs(1) == 9
    with pytest.raises(ConfigError, match="has one epoch, until a source is exhausted, but the run has 2"):
        limited.check_epochs(2)
    with pytest.raises(ConfigError, match="a weighted blend has no end that a run reaches, but the run has 1 epoch"):
        open_datasets(blend((a, 1.0), (b, 1.0))).check_epochs(1)
