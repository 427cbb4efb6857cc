"""The datasets of a run: opened, and refused where they do not go together, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigError
from harness.formats import PackReader, holds_manifest, open_dataset
from harness.formats.uris import is_uri, join_path


@dataclass
class DataConfig:
    """What to train on.

    Attributes:
        path: the folder that `recipes.prepare` wrote (with `train` and `validation` in it), or any dataset that
            `harness.formats.open_dataset` takes.
        validation_path: another validation set; None for the `validation` beside `train`, where there is one.
        tokenizer: a tokenizer folder or hub id that the datasets must have been made with; empty asks nothing.
    """

    path: str = "data/pydoc"
    validation_path: str | None = None
    tokenizer: str = ""


@dataclass(frozen=True)
class RunData:
    """Open datasets of a run.

    Attributes:
        train: what is trained on.
        validation: None where there is none.
        vocab_size: of the tokenizer, None where the datasets do not say.
    """

    train: PackReader
    validation: PackReader | None
    vocab_size: int | None


def open_datasets(config: DataConfig) -> RunData:
    """Open the datasets of a run.

    Raises:
        FormatError: there is none, or it is damaged.
        ConfigError: training and validation set, or the tokenizer asked for, are not of one kind.
    """
    inner, beside = join_path(config.path, "train"), join_path(config.path, "validation")
    prepared = _is_folder(inner) and not holds_manifest(config.path)
    train = open_dataset(inner if prepared else config.path)
    validation_path = config.validation_path
    if validation_path is None and prepared and _is_folder(beside):
        validation_path = beside
    validation = open_dataset(validation_path) if validation_path is not None else None
    if validation is not None:
        _check_same_tokenizer(train, validation)
    if config.tokenizer:
        _check_tokenizer(train, config.tokenizer)
    manifest = train.manifest
    vocab_size = manifest.provenance.counts.get("vocab_size") if manifest is not None else None
    return RunData(train, validation, vocab_size)


def _is_folder(path: str) -> bool:
    # Object storage has no folders; there a dataset of ours is told by its manifest.
    return holds_manifest(path) if is_uri(path) else Path(path).is_dir()


def _hashes(reader: PackReader) -> tuple[str, str]:
    manifest = reader.manifest
    if manifest is None:
        return "", ""
    return manifest.provenance.tokenizer_hash, manifest.provenance.tokenizer


def _check_same_tokenizer(train: PackReader, validation: PackReader) -> None:
    (one, one_name), (other, other_name) = _hashes(train), _hashes(validation)
    if one and other and one != other:
        raise ConfigError(
            f"the training set was made with tokenizer {one_name} ({one}), the validation set with "
            f"{other_name} ({other})",
            where=f"{train.path} and {validation.path}",
            fix="prepare both with one tokenizer",
        )


def _check_tokenizer(train: PackReader, name: str) -> None:
    from harness.prep.tokenize import ChatTokenizer, TokenizerConfig

    stored, stored_name = _hashes(train)
    if not stored:
        raise ConfigError(
            f"the dataset does not say which tokenizer made it, so it cannot be held against {name}",
            where=str(train.path),
            fix="leave data.tokenizer empty, or prepare the dataset again",
        )
    asked = ChatTokenizer(TokenizerConfig(name=name, mask="all")).tokenizer_hash
    if asked != stored:
        raise ConfigError(
            f"the dataset was made with tokenizer {stored_name} ({stored}), and {name} is {asked}",
            where=str(train.path),
            fix="name the dataset's own tokenizer in data.tokenizer, or prepare the data with this one",
        )
