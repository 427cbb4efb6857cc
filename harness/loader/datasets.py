"""The datasets of a run: opened, joined, and refused if they are incompatible, before anything is started."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from harness.checks import LONGEST_S, CheckedSettings, bounded, one_of
from harness.errors import ConfigError
from harness.formats import PackReader, Provenance, open_dataset
from harness.formats.opening import find_splits
from harness.loader.blend import Blend, check_sources
from harness.prep import MIN_SEQUENCE_TOKENS, OVER_LONG, ChatTokenizer, TokenizerConfig, as_prepared, tokenizer_hash
from harness.prep.media import MediaRules
from harness.prep.tokenize.config import refuse_weighted
from harness.printing import count_of
from harness.records import Int32Array, Int64Array, Medium, Pack
from harness.storage.local_copies import local_copy

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass
class BlendSource:
    """One dataset of a blend.

    Attributes:
        path: dataset, as in `data.path`.
        weight: weight of the dataset, on any scale. Set it for all sources or for none.
        epochs: number of passes over the dataset. With weights, this is an upper limit (null for none); without
            weights, it is exact (null for 1).
    """

    path: str = ""
    weight: float | None = bounded(None, above=0, highest=10**12)
    epochs: int | None = bounded(None, lowest=1)


@dataclass
class LiveSource:
    """One folder of a blend of live chunks.

    Attributes:
        path: folder of live chunks.
        weight: weight of the folder in a global batch, on any scale.
    """

    path: str = ""
    weight: float = bounded(1.0, above=0, highest=10**12)


@dataclass
class LiveConfig(CheckedSettings, section="data.live"):
    """Settings of chunks that are read while they are written.

    Attributes:
        path: folder of live chunks, on a shared disk or as `s3://BUCKET/KEY`. Empty trains on stored datasets. Ignored
            if a blend is set.
        blend: several folders, interleaved by weight in every global batch. Requires a balancing schedule. The run
            waits for a folder without new chunks; when a stream ends, its share goes to the other folders.
        window_sequences: number of sequences in a global batch. Sequences are then scheduled directly into rows,
            without packs. Requires a balancing schedule. Null counts packs instead (`loader.global_batch_size`).
        pack_size: maximum number of tokens in a pack, or in a sequence if `window_sequences` is set.
        tokenizer: for chunks of conversations; chunks of packs need none. With the tokenizer folder of a prepared
            dataset, and masking settings left at their defaults, conversations are masked as that dataset was.
        over_long: `drop`, `cut` or `split` conversations of more than `pack_size` tokens, as in `harness prepare`.
        on_bad: `refuse` stops at an invalid conversation; `skip` omits and counts it.
        open_packs: number of packs per rank that wait for conversations to fill them.
        timeout_s: maximum time in seconds to wait for a chunk.
        require_ready: accept only chunks with a ready record. If false, for producers that write none, a chunk is
            complete when the next one exists or when it was not modified for `settle_s` seconds.
        settle_s: see `require_ready`.
        completed: point at which a chunk is marked as completed, so that its producer may delete it. `trained`: when
            all kept checkpoints include its rows, so that a crash loses no data. `read`: as soon as its rows are in
            batches, which keeps fewer chunks; after a crash, rows of deleted chunks that follow the newest checkpoint
            are not trained again, and the resumed run logs the number of these chunks.
    """

    path: str = ""
    blend: list[LiveSource] = field(default_factory=list)
    window_sequences: int | None = bounded(None, lowest=1, highest=10**9)
    pack_size: int = bounded(4096, lowest=MIN_SEQUENCE_TOKENS)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    over_long: str = one_of("drop", OVER_LONG)
    on_bad: str = one_of("refuse", ("refuse", "skip"))
    open_packs: int = bounded(16, lowest=1, highest=1_000_000)
    timeout_s: float = bounded(1800.0, above=0, highest=LONGEST_S)
    require_ready: bool = True
    settle_s: float = bounded(5.0, lowest=0, highest=LONGEST_S)
    completed: str = one_of("trained", ("trained", "read"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sources(self.blend, "data.live.blend")
        if twice := [path for path, times in Counter(map(os.path.normpath, self.folders)).items() if times > 1]:
            fix = "list it once, with the sum of the weights"
            raise ConfigError(f"{twice[0]} is listed twice", where="data.live.blend", fix=fix)

    @property
    def folders(self) -> list[str]:
        """The folders to read; none where the run trains on stored datasets."""
        return [source.path for source in self.blend] or ([self.path] if self.path else [])

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(source.weight for source in self.blend) or (1.0,)


@dataclass
class DataConfig:
    """Settings of the data to train on.

    Attributes:
        path: folder written by `harness prepare` (with `train` and `validation`), or any dataset that
            `harness.formats.open_dataset` accepts. Ignored if a blend is set.
        live: chunks that are still being written; a run with `live.path` or `live.blend` trains on them.
        blend: several datasets of any formats, interleaved by weight (`harness.loader.Blend`).
        validation_path: validation dataset. Null uses the `validation` folder next to `train` if it exists; for a
            blend, those of all sources in order.
        evaluation: additional validation datasets, by name, whose losses and perplexities are reported too.
        tokenizer: folder or hub id of the tokenizer that the datasets must have been prepared with; empty accepts any.
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
                what = f"{name!r} is not a valid name for a validation set"
                fix = "use lower-case letters, digits and underscores, as in +data.evaluation.code=data/code"
                raise ConfigError(what, where="data.evaluation", fix=fix)
        if self.live.folders and self.blend:
            fix = "leave one of them empty; `harness live produce` converts a dataset to chunks for data.live.blend"
            raise ConfigError("live chunks cannot be blended with datasets", where="data.live, data.blend", fix=fix)
        check_sources(self.blend, "data.blend")


class JoinedReader:
    """Several datasets read as one: the packs of the first, then those of the second, and so on.

    Picklable like its readers. The joined index is a copy of 8 bytes per pack and 4 per sequence, in every process that
    is not forked.

    Attributes:
        pack_size: largest pack size of the datasets.
        max_weight: largest weight of the datasets; masks of 0 and 1 are scaled to it.
        pack_offsets, sequence_lengths: int64 [packs + 1] and int32 [sequences], as in `PackReader`.

    Raises:
        ConfigError: there is no dataset, or they differ in pack size, tokenizer or media rules.
    """

    def __init__(self, readers: Sequence[PackReader]) -> None:
        if not readers:
            raise ConfigError("the blend is empty", where="data.blend", fix="specify at least one dataset")
        first: dict[str, tuple[str, PackReader]] = {}
        for reader in readers:
            if reader.manifest is None:  # bare files have no provenance
                continue
            tokenizer, media = _tokenizer_of(reader)[0], _media_rules(reader)
            facts = {"data.pack_size": str(reader.pack_size), "tokenizer": tokenizer, "rules of media": media}
            for name, value in facts.items():
                before, owner = first.setdefault(name, (value, reader)) if value else (value, reader)
                if before != value:
                    what = f"sources of a blend need the same {name.removeprefix('data.')}: "
                    what += f"{owner.path} has {before}, {reader.path} has {value}"
                    fix = f"prepare all sources with the same {name}"
                    raise ConfigError(what, where=f"data.blend, {reader.path}", fix=fix)
        self.readers = tuple(readers)
        self.path = ", ".join(reader.path for reader in readers)
        self.pack_size = max(reader.pack_size for reader in readers)
        self.max_weight = max(reader.max_weight for reader in readers)
        self.has_media = any(reader.has_media for reader in readers)
        self._starts = [0, *np.cumsum([len(reader) for reader in readers]).tolist()]
        self._first_sequences = [0, *np.cumsum([len(reader.sequence_lengths) for reader in readers]).tolist()]
        self.sequence_lengths: Int32Array = np.concatenate([reader.sequence_lengths for reader in readers])
        counts = np.concatenate([np.diff(reader.pack_offsets) for reader in readers])
        self.pack_offsets: Int64Array = np.concatenate([[0], np.cumsum(counts)])
        self.sequence_lengths.flags.writeable = self.pack_offsets.flags.writeable = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Joining the mapped files again is faster than pickling the copy.
        return JoinedReader, (self.readers,)

    @property
    def fingerprint(self) -> str:
        """Digest of the datasets' fingerprints in order; independent of their formats."""
        return xxhash.xxh3_128_hexdigest(" ".join(reader.fingerprint for reader in self.readers).encode())

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Pack:
        return self.read([index])[0]

    def read(self, indices: list[int]) -> list[Pack]:
        """Return packs in the requested order, with one read per dataset; raise as `PackReader.read` does."""
        return self._read(indices, lambda reader, own, places: reader.read(own))

    def read_tokens(self, indices: list[int]) -> list[Pack]:
        """Return packs like `read`, without their media."""
        return self._read(indices, lambda reader, own, places: reader.read_tokens(own))

    def read_parts(self, indices: list[int], spans: Sequence[Int64Array]) -> list[Pack]:
        """Return parts of packs like `PackReader.read_parts`."""
        return self._read(indices, lambda reader, own, places: reader.read_parts(own, [spans[at] for at in places]))

    def read_media(self, sequence_ids: Int64Array) -> list[tuple[Medium, ...]]:
        """Return the media of sequences, numbered across all datasets, like `PackReader.read_media`."""
        ids = np.asarray(sequence_ids, np.int64)
        found: dict[int, tuple[Medium, ...]] = {}
        if (outside := ids[(ids < 0) | (ids >= len(self.sequence_lengths))]).size:
            raise IndexError(f"sequence {outside[0]} of {len(self.sequence_lengths)} in {self.path}")
        for reader, places, own in self._divided(ids, self._first_sequences):
            found.update(zip(places.tolist(), reader.read_media(own), strict=True))
        return [found[place] for place in range(len(ids))]

    def media_tokens(self, sequence_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the places and token counts of media like `PackReader.media_tokens`, dataset by dataset."""
        found = []
        for reader, places, own in self._divided(sequence_ids, self._first_sequences):
            numbers, tokens = reader.media_tokens(own)
            found.append((places[numbers], tokens))
        return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])

    def _read(self, indices: list[int], read: Callable[[PackReader, Int64Array, list[int]], list[Pack]]) -> list[Pack]:
        if outside := [index for index in indices if not 0 <= index < len(self)]:
            raise IndexError(f"pack {outside[0]} of {len(self)} in {self.path}")
        packs: dict[int, Pack] = {}
        for reader, places, own in self._divided(np.asarray(indices, np.int64), self._starts):
            found, scale = read(reader, own, places.tolist()), self.max_weight // reader.max_weight
            if scale > 1:
                found = [replace(pack, loss_mask=pack.loss_mask * np.uint8(scale)) for pack in found]
            packs.update(zip(places.tolist(), found, strict=True))
        return [packs[place] for place in range(len(indices))]

    def _divided(self, numbers: Int64Array, starts: list[int]) -> Iterator[tuple[PackReader, Int64Array, Int64Array]]:
        """Yield each dataset, the places of its entries in `numbers`, and their numbers within the dataset."""
        for reader, (start, stop) in zip(self.readers, itertools.pairwise(starts), strict=True):
            places = np.flatnonzero((numbers >= start) & (numbers < stop))
            yield reader, places, numbers[places] - start

    def close(self) -> None:
        """Close all files; reading opens them again."""
        for reader in self.readers:
            reader.close()


@dataclass(frozen=True, eq=False)
class Sources:
    """Unique names of the datasets of a blend, and the number of the first sequence of each, int64 [datasets]."""

    names: tuple[str, ...]
    starts: Int64Array

    def of(self, sequence_ids: Int64Array) -> Int64Array:
        """Return the index of the dataset of each sequence."""
        return np.searchsorted(self.starts, sequence_ids, side="right") - 1


@dataclass(frozen=True)
class LiveData:
    """The data of a run on live chunks, the counterpart of RunData; chunks of packs need no tokenizer."""

    train: LiveConfig
    tokenizer: ChatTokenizer | None
    validation: PackReader | None
    evaluation: dict[str, PackReader] = field(default_factory=dict)
    mask_of: Path | None = None  # the dataset whose masking settings replace the run's

    @property
    def vocab_size(self) -> int | None:
        return self.tokenizer.vocab_size if self.tokenizer is not None else None

    @property
    def media_rules(self) -> MediaRules | None:
        return self.tokenizer.media_rules if self.tokenizer is not None else None

    def describe(self) -> str:
        """Return one line about the training data."""
        weights = f", weights {', '.join(f'{weight:g}' for weight in self.train.weights)}" if self.train.blend else ""
        window = self.train.window_sequences
        unit = "packs" if window is None else f"windows of {count_of(window, 'sequence')}"
        described = f"live chunks in {', '.join(self.train.folders)}{weights}, {unit} of up to"
        described += f" {self.train.pack_size:,} tokens"
        if self.tokenizer is not None:
            described += f", mask {self.tokenizer.mask_rule}" + (f" as of {self.mask_of}" if self.mask_of else "")
        return described


@dataclass(frozen=True)
class RunData:
    """Open datasets of a run.

    Attributes:
        vocab_size: vocabulary size of the tokenizer; None if the datasets do not record it.
        tokenizer_hash: hash of the tokenizer that made `train`; empty if not recorded.
        blend: rule by which packs are drawn from `train`, a JoinedReader; None for a single dataset.
        evaluation: additional validation sets by name.
    """

    train: PackReader | JoinedReader
    validation: PackReader | JoinedReader | None
    vocab_size: int | None
    tokenizer_hash: str = ""
    blend: Blend | None = None
    evaluation: dict[str, PackReader] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[PackReader, ...]:
        return self.train.readers if isinstance(self.train, JoinedReader) else (self.train,)

    @property
    def media_rules(self) -> MediaRules | None:
        """Rules with which the media of the data were prepared; None for text."""
        text = next(filter(None, map(_media_rules, self.sources)), "")
        return MediaRules.from_text(text) if text else None

    @property
    def named_sources(self) -> Sources | None:
        """Datasets of a blend, named by the paths in its settings; None if there is only one."""
        if self.blend is None or len(self.sources) < 2:
            return None
        counts = [reader.sequence_lengths.shape[0] for reader in self.sources]
        names: list[str] = []
        for name in self.blend.names:
            choices = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
            names.append(next(choice for choice in choices if choice not in names))
        return Sources(tuple(names), np.cumsum([0, *counts[:-1]]))

    @property
    def epoch_packs(self) -> int | None:
        """Packs of one epoch; a weighted blend ends at the limit of a source. None if endless."""
        if self.blend is None:
            return len(self.train)
        return self.blend.num_packs or self.blend.ends_after()

    def check_epochs(self, epochs: int) -> int:
        """Return the packs of one epoch; raise ConfigError if the data does not support `epochs` epochs."""
        packs = self.epoch_packs
        if packs is None or (epochs > 1 and self.blend is not None and self.blend.weights is not None):
            ends = "has no end that a run reaches" if packs is None else "has one epoch, until a source is exhausted"
            what = f"a weighted blend {ends}, but the run has {count_of(epochs, 'epoch')}"
            fix = "trainer.steps=N trainer.epochs=null, or omit the weights to read each source `epochs` times"
            raise ConfigError(what, where="trainer.epochs, data.blend", fix=fix)
        return packs

    def describe(self) -> str:
        return (
            f"{self.train.path} ({len(self.train):,} packs of up to {self.train.pack_size:,} tokens, "
            f"fingerprint {self.train.fingerprint})"
        )


def open_datasets(config: DataConfig) -> RunData:
    """Open the datasets of a run, or their local copies; raise FormatError if one is missing or damaged.

    Raise ConfigError if training and validation sets, sources of a blend, or the required tokenizer do not match.
    """
    opened = [open_train(local_copy(path)) for path in [source.path for source in config.blend] or [config.path]]
    trains = [train for train, _ in opened]
    blend = None
    if config.blend:
        blend = Blend(
            names=tuple(source.path for source in config.blend),
            sizes=tuple(len(reader) for reader in trains),
            weights=tuple(source.weight for source in config.blend if source.weight is not None) or None,
            epochs=tuple(source.epochs for source in config.blend),
        )
    train = JoinedReader(trains) if blend is not None else trains[0]
    besides = [beside for _, beside in opened if beside is not None]
    if config.validation_path is not None:
        besides = [local_copy(config.validation_path)]
    validations = [open_dataset(path) for path in besides]
    evaluation = _open_evaluation(config, bool(validations))
    for reader, validation in itertools.product(trains, (*validations, *evaluation.values())):
        (hash_, name), (other, other_name) = _tokenizer_of(reader), _tokenizer_of(validation)
        if hash_ and other and hash_ != other:
            what = f"the training set was made with tokenizer {name} ({hash_}), the validation set with "
            what += f"{other_name} ({other})"
            fix = "prepare both with the same tokenizer"
            raise ConfigError(what, where=f"{reader.path} and {validation.path}", fix=fix)
        if (rules := _media_rules(reader)) and (others := _media_rules(validation)) and rules != others:
            what = f"the media of the training set were made with {rules}, those of the validation set with {others}"
            fix = "prepare both for the same model"
            raise ConfigError(what, where=f"{reader.path} and {validation.path}", fix=fix)
    if config.tokenizer:
        for reader in trains:
            _check_tokenizer(reader, config.tokenizer)
    sizes = [train.manifest.provenance.counts.get("vocab_size") for train in trains if train.manifest is not None]
    vocab_size = max((size for size in sizes if size is not None), default=None)
    validation_set = JoinedReader(validations) if len(validations) > 1 else next(iter(validations), None)
    tokenizer_hash = next((hash_ for hash_, _ in map(_tokenizer_of, trains) if hash_), "")
    return RunData(train, validation_set, vocab_size, tokenizer_hash, blend, evaluation)


def open_live(config: DataConfig) -> LiveData:
    """Open the data of a run on live chunks, which may not exist yet.

    Raise ConfigError if the tokenizer cannot be loaded, or if the validation set was made with another one.
    """
    settings = config.live.tokenizer
    name = settings.name or config.tokenizer
    mask_of: Path | None = None
    if name:
        settings, mask_of = as_prepared(settings, name)
    refuse_weighted(settings, "data.live.tokenizer")
    tokenizer = ChatTokenizer(settings, name) if name else None
    validation = open_dataset(local_copy(config.validation_path)) if config.validation_path is not None else None
    evaluation = _open_evaluation(config, validation is not None)
    for reader in (validation, *evaluation.values()):
        if reader is not None and name:
            _check_tokenizer(reader, name)
    return LiveData(config.live, tokenizer, validation, evaluation, mask_of)


def _open_evaluation(config: DataConfig, has_validation: bool) -> dict[str, PackReader]:
    """Open the named validation sets; for a folder with several splits, open its `validation` split."""
    if has_validation and "validation" in config.evaluation:
        what = "'validation' is the name of the training data's own validation set"
        fix = "choose another name, or set data.validation_path to replace that set"
        raise ConfigError(what, where="data.evaluation", fix=fix)
    paths = {name: local_copy(path) for name, path in config.evaluation.items()}
    return {name: open_dataset(find_splits(path).get("validation", path)) for name, path in paths.items()}


def open_train(path: str) -> tuple[PackReader, str | None]:
    """Open the training set at a path; also return the path of its validation set, if there is one."""
    splits = find_splits(path)
    return open_dataset(splits.get("train", path)), splits.get("validation") if "train" in splits else None


def _tokenizer_of(reader: PackReader) -> tuple[str, str]:
    """Return the hash and name of the tokenizer that made a dataset; empty if not recorded."""
    provenance = reader.manifest.provenance if reader.manifest is not None else Provenance()
    return provenance.tokenizer_hash, provenance.tokenizer


def _media_rules(reader: PackReader) -> str:
    return "" if reader.manifest is None else reader.manifest.provenance.mask.get("media", "")


def _check_tokenizer(train: PackReader, name: str) -> None:
    stored, stored_name = _tokenizer_of(train)
    if not stored:
        what = f"the dataset does not specify its tokenizer, so it cannot be compared with {name}"
        raise ConfigError(what, where=str(train.path), fix="leave data.tokenizer empty, or prepare the dataset again")
    required = tokenizer_hash(name)
    if required != stored:
        what = f"the dataset was made with tokenizer {stored_name} ({stored}), and {name} is {required}"
        fix = "set data.tokenizer to the tokenizer of the dataset, or prepare the data with this one"
        raise ConfigError(what, where=str(train.path), fix=fix)
