"""The datasets of a run: opened, and refused where they do not go together, before anything is started."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import ConfigError
from harness.formats import PackReader, holds_manifest, open_dataset
from harness.loader.blend import Blend, check_sources
from harness.loader.joined import JoinedReader
from harness.loader.live.config import LiveConfig
from harness.prep.tokenize import ChatTokenizer, tokenizer_hash
from harness.storage import is_uri, join_path

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass
class BlendSource:
    """One dataset of a blend.

    Attributes:
        path: as `DataConfig.path`.
        weight: its share of the packs, on any scale; all sources have one, or none has.
        epochs: how often it is read at most, null for no limit; without weights exactly, null for once.
    """

    path: str = ""
    weight: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        kinds = {"path": (str,), "weight": (int, float, type(None)), "epochs": (int, type(None))}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(
                    f"{name} is {str(value)[:100]!r}",
                    where="data.blend",
                    fix="path is text, weight a number, epochs a whole number",
                )


@dataclass
class DataConfig:
    """What to train on.

    Attributes:
        path: the folder that `recipes.prepare` wrote (with `train` and `validation` in it), or any dataset that
            `harness.formats.open_dataset` takes. Not used where there is a blend.
        live: chunks that are still being made; where `live.path` is set it is what is trained on.
        blend: several datasets, their packs interleaved by weight (`harness.loader.blend`); their formats may differ.
        validation_path: another validation set; None for the `validation` beside `train`, where there is one; of a
            blend, all of these one after the other.
        evaluation: more validation sets, by name; their losses and perplexities are told beside that of the first.
        tokenizer: a tokenizer folder or hub id that the datasets must have been made with; empty asks nothing.
    """

    path: str = "data/pydoc"
    validation_path: str | None = None
    evaluation: dict[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    blend: list[BlendSource] = field(default_factory=list)
    live: LiveConfig = field(default_factory=LiveConfig)

    def __post_init__(self) -> None:
        for name in self.evaluation:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} cannot name a validation set",
                    where="data.evaluation",
                    fix="lower-case letters, digits and underscores, as in +data.evaluation.code=data/code",
                )
        if self.live.path and self.blend:
            raise ConfigError(
                "live chunks are not blended with datasets",
                where="data.live, data.blend",
                fix="leave one of them empty; blend the conversations where chunks are made",
            )
        for number, source in enumerate(self.blend):
            if not source.path:
                raise ConfigError("the source has no path", where=f"data.blend[{number}]", fix="name a dataset")
        names, weights = [source.path for source in self.blend], [source.weight for source in self.blend]
        check_sources(names, weights, [source.epochs for source in self.blend])


@dataclass(frozen=True)
class LiveData:
    """What a run on live chunks reads, as RunData for stored datasets; `tokenizer` is None where they hold packs."""

    train: LiveConfig
    tokenizer: ChatTokenizer | None
    validation: PackReader | None
    evaluation: dict[str, PackReader] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int | None:
        return self.tokenizer.vocab_size if self.tokenizer is not None else None

    def describe(self) -> str:
        """What is trained on, in words."""
        return f"live chunks in {self.train.path}, packs of up to {self.train.pack_size:,} tokens"


@dataclass(frozen=True)
class RunData:
    """Open datasets of a run.

    Attributes:
        train: what is trained on.
        validation: None where there is none.
        vocab_size: of the tokenizer, None where the datasets do not say.
        tokenizer_hash: of what made `train`; empty where it does not say.
        blend: how the packs of `train`, which then is a JoinedReader, are drawn; None where they are one dataset.
        evaluation: more validation sets by name.
    """

    train: PackReader | JoinedReader
    validation: PackReader | JoinedReader | None
    vocab_size: int | None
    tokenizer_hash: str = ""
    blend: Blend | None = None
    evaluation: dict[str, PackReader] = field(default_factory=dict)

    def describe(self) -> str:
        """What is trained on, in words."""
        return (
            f"{self.train.path} ({len(self.train):,} packs of up to {self.train.pack_size:,} tokens, "
            f"fingerprint {self.train.fingerprint})"
        )


def open_datasets(config: DataConfig) -> RunData:
    """Open the datasets of a run.

    Raises:
        FormatError: there is none, or it is damaged.
        ConfigError: training and validation sets, the sources of a blend, or the tokenizer asked for, are not of one
            kind.
    """
    paths = [source.path for source in config.blend] or [config.path]
    opened = [open_train(path) for path in paths]
    trains = [train for train, _ in opened]
    blend = _blend_of(config.blend, trains) if config.blend else None
    train = JoinedReader(trains) if blend is not None else trains[0]
    besides = [beside for _, beside in opened if beside is not None]
    if config.validation_path is not None:
        besides = [config.validation_path]
    validations = [open_dataset(path) for path in besides]
    evaluation = _open_evaluation(config)
    for validation in (*validations, *evaluation.values()):
        for one in trains:
            _check_same_tokenizer(one, validation)
    if config.tokenizer:
        for one in trains:
            _check_tokenizer(one, config.tokenizer)
    sizes = [one.manifest.provenance.counts.get("vocab_size") for one in trains if one.manifest is not None]
    vocab_size = max((size for size in sizes if size is not None), default=None)
    joined = JoinedReader(validations) if len(validations) > 1 else None
    tokenizer_hash = next((hash for hash, _ in map(_hashes, trains) if hash), "")
    validation_set = joined or (validations[0] if validations else None)
    return RunData(train, validation_set, vocab_size, tokenizer_hash, blend, evaluation)


def open_live(config: DataConfig) -> LiveData:
    """What a run on live chunks needs; the chunks need not be there yet.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or the validation set was made with another one.
    """
    settings = config.live.tokenizer
    name = settings.name or config.tokenizer
    tokenizer = ChatTokenizer(settings, name) if name else None
    validation = open_dataset(config.validation_path) if config.validation_path is not None else None
    evaluation = _open_evaluation(config)
    for one in (validation, *evaluation.values()):
        if one is not None and name:
            _check_tokenizer(one, name)
    return LiveData(config.live, tokenizer, validation, evaluation)


def _open_evaluation(config: DataConfig) -> dict[str, PackReader]:
    """Validation sets by name; of a folder with several splits, its `validation`."""
    opened = {}
    for name, path in config.evaluation.items():
        inner = join_path(path, "validation")
        opened[name] = open_dataset(inner if _is_folder(inner) and not holds_manifest(path) else path)
    return opened


def open_train(path: str) -> tuple[PackReader, str | None]:
    """The training set at a path, and where its validation set is."""
    inner, beside = join_path(path, "train"), join_path(path, "validation")
    if not _is_folder(inner) or holds_manifest(path):
        return open_dataset(path), None
    return open_dataset(inner), beside if _is_folder(beside) else None


def _blend_of(sources: list[BlendSource], readers: list[PackReader]) -> Blend:
    weights = tuple(source.weight for source in sources if source.weight is not None)
    return Blend(
        names=tuple(source.path for source in sources),
        sizes=tuple(len(reader) for reader in readers),
        weights=weights or None,
        epochs=tuple(source.epochs for source in sources),
    )


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
    stored, stored_name = _hashes(train)
    if not stored:
        raise ConfigError(
            f"the dataset does not say which tokenizer made it, so it cannot be held against {name}",
            where=str(train.path),
            fix="leave data.tokenizer empty, or prepare the dataset again",
        )
    asked = tokenizer_hash(name)
    if asked != stored:
        raise ConfigError(
            f"the dataset was made with tokenizer {stored_name} ({stored}), and {name} is {asked}",
            where=str(train.path),
            fix="name the dataset's own tokenizer in data.tokenizer, or prepare the data with this one",
        )
