"""The datasets of a run are opened together and refused where they do not belong together."""

from __future__ import annotations

import pytest

from harness.errors import ConfigError, FormatError
from harness.formats import Provenance, open_writer
from harness.loader.datasets import DataConfig, open_datasets
from harness.records import Pack


def write(path, *, tokenizer_hash="a" * 16, format="parquet"):
    provenance = Provenance(tokenizer="tok", tokenizer_hash=tokenizer_hash, counts={"vocab_size": 90})
    with open_writer(path, format=format, pack_size=4, provenance=provenance) as writer:
        writer.append(Pack([1, 2, 3], [1, 1, 0], [0]))


def test_a_prepared_folder_gives_both_sets_and_the_vocabulary(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "validation")
    data = open_datasets(DataConfig(path=str(tmp_path)))
    assert (len(data.train), len(data.validation), data.vocab_size) == (1, 1, 90)


@pytest.mark.parametrize("format", ["npy", "memmap", "binidx", "jsonl"])
def test_any_dataset_can_be_trained_on_without_a_validation_set(tmp_path, format):
    write(tmp_path / "mine", format=format)
    data = open_datasets(DataConfig(path=str(tmp_path / "mine")))
    assert (len(data.train), data.validation, data.vocab_size) == (1, None, 90)


def test_a_validation_set_of_another_tokenizer_is_refused(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "other", tokenizer_hash="b" * 16)
    with pytest.raises(ConfigError, match=r"tokenizer tok \(a{16}\), the validation set with tok \(b{16}\)"):
        open_datasets(DataConfig(path=str(tmp_path), validation_path=str(tmp_path / "other")))


def test_a_dataset_of_another_tokenizer_than_the_one_asked_for_is_refused(tmp_path):
    from harness.prep.bpe import train_bpe

    train_bpe(["some text to learn from"] * 20, tmp_path / "tokenizer", vocab_size=300)
    write(tmp_path / "train")
    with pytest.raises(ConfigError, match=r"the dataset was made with tokenizer tok \(a{16}\)"):
        open_datasets(DataConfig(path=str(tmp_path), tokenizer=str(tmp_path / "tokenizer")))


def test_a_missing_dataset_is_one_clear_error(tmp_path):
    with pytest.raises(FormatError) as error:
        open_datasets(DataConfig(path=str(tmp_path / "nothing")))
    assert "nothing" in error.value.where
    assert error.value.fix
