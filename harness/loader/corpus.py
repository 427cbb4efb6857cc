"""Settings of a pretraining corpus: pairs of `.bin` and `.idx`, how they are blended, split and read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ConfigError

# As Megatron calls them.
SPLITS = ("train", "valid", "test")
Sources = list["CorpusSource"]


@dataclass
class CorpusSource:
    """One part of a blend.

    Attributes:
        path: X of X.bin and X.idx, on a disk or as `s3://BUCKET/X`; or the folder of a packed SFT dataset (in object
            storage with a `/` at its end), whose packs are samples with their own loss masks.
        weight: its share of the samples, on any scale; all sources of a blend have one, or none has.
    """

    path: str = ""
    weight: float | None = None


@dataclass
class SplitSources:
    """Sources of each split, named as Megatron does.

    Attributes:
        train, valid, test: sources of the split.
    """

    train: list[CorpusSource] = field(default_factory=list)
    valid: list[CorpusSource] = field(default_factory=list)
    test: list[CorpusSource] = field(default_factory=list)


@dataclass
class CorpusConfig:
    """What to pretrain on, as Megatron-Core's GPTDataset and BlendedDataset read it.

    Attributes:
        path: one source, divided by `split`. Not used where there is a blend.
        blend: several sources, each divided by `split`; without weights, all samples of each once.
        split: parts of training, validation and test, of any sum: `969,30,1`.
        blend_per_split: other sources for each split, in place of a blend and a split.
        per_split_data_args_path: these from a JSON file, `{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"]}`.
        sequence_length: S, the tokens of a sample.
        micro_batch_size: samples of one row.
        num_samples: how many to lay out the order for, None for those that the run trains. Where Megatron needs another
            number of epochs for them, it shuffles anew.
        eod: id of the token that ends a document; the next three need it.
        reset_position_ids: count positions anew behind it. Rotary positions follow what attention is given, so that
            this alone would change nothing.
        reset_attention_mask: let no document attend to another one.
        eod_mask_loss: do not train what comes behind it.
        path_to_cache: a folder for the built indices; None for `index_cache` beside the first source, or in
            `object_storage_cache_path` where that is in object storage.
        object_storage_cache_path: a folder for the `.idx` of sources in object storage.
        object_storage_chunk_bytes: of the `.bin` there, read at once. Samples come from anywhere in it.
        num_dataset_builder_threads: that build a blend's indices.
        fast_cache_load: trust that all indices are built: no rank looks, none waits for another.
        defer_npy_index_mmap: map a built index at its first use.
        per_dataset_sequences_path: a JSON file of sequence counts (`harness indexed counts`), read in place of the
            header of every `.idx`.
    """

    path: str = "data/corpus"
    blend: list[CorpusSource] = field(default_factory=list)
    split: str = "99,1,0"
    blend_per_split: SplitSources = field(default_factory=SplitSources)
    per_split_data_args_path: str | None = None
    sequence_length: int = 1024
    micro_batch_size: int = 1
    num_samples: int | None = None
    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    path_to_cache: str | None = None
    object_storage_cache_path: str | None = None
    object_storage_chunk_bytes: int = 4 << 20
    num_dataset_builder_threads: int = 1
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    per_dataset_sequences_path: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "sequence_length",
            "micro_batch_size",
            "object_storage_chunk_bytes",
            "num_dataset_builder_threads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"data.{name}", fix="1 or more")
        if self.num_samples is not None and self.num_samples < 1:
            raise ConfigError(f"num_samples is {self.num_samples}", where="data.num_samples", fix="1 or more, or null")
        self._check_sources()
        needs_eod = [n for n in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self, n)]
        if needs_eod and self.eod is None:
            raise ConfigError(
                f"{', '.join(needs_eod)} cannot be done without knowing which token ends a document",
                where="data.eod",
                fix="set it to that token's id",
            )
        for name in ("fast_cache_load", "defer_npy_index_mmap"):
            if getattr(self, name) and self.path_to_cache is None:
                raise ConfigError(
                    f"{name} needs the folder of the built indices",
                    where="data.path_to_cache",
                    fix="name it, and train once without this setting to build them",
                )
        if self.fast_cache_load and not self.is_per_split:
            raise ConfigError(
                "Megatron-Core does not divide sources by a split where fast_cache_load=true",
                where="data.fast_cache_load",
                fix="name the sources of each split in data.blend_per_split or data.per_split_data_args_path",
            )

    @property
    def is_per_split(self) -> bool:
        return bool(self.per_split_data_args_path or any(vars(self.blend_per_split).values()))

    @property
    def cache(self) -> str:
        """The folder of the built indices."""
        first = next(iter(self.sources().values()))[0].path
        if self.path_to_cache is None and "://" in first:
            return f"{self.object_storage_cache_path}/index_cache"
        return self.path_to_cache or str(Path(first).parent / "index_cache")

    def sources(self) -> dict[str, Sources]:
        """Of each split, where they differ; else all of them, named `all`.

        Raises:
            ConfigError: the JSON file of splits cannot be read, or does not say what it should.
        """
        if self.per_split_data_args_path is not None:
            return _read_splits(Path(self.per_split_data_args_path))
        if self.is_per_split:
            return {name: some for name, some in vars(self.blend_per_split).items() if some}
        return {"all": self.blend or [CorpusSource(self.path)]}

    def counts(self) -> dict[str, list[int]] | None:
        """Sequences and document bounds by source, from `per_dataset_sequences_path`; None where there is none."""
        if self.per_dataset_sequences_path is None:
            return None
        path = Path(self.per_dataset_sequences_path)
        counts = _read_json(path, "data.per_dataset_sequences_path")
        missing = [s.path for some in self.sources().values() for s in some if s.path not in counts]
        if missing:
            raise ConfigError(
                f"there are no counts of {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
                where=str(path),
                fix="count them again, with the paths as they are named here",
            )
        return counts

    def _check_sources(self) -> None:
        per_split = vars(self.blend_per_split)
        unknown = [name for name in per_split if name not in SPLITS]  # Hydra's `+` adds what is not there
        if unknown:
            raise ConfigError(
                f"there is no split {unknown[0]!r}", where="data.blend_per_split", fix=f"one of {', '.join(SPLITS)}"
            )
        named = {
            "blend": self.blend,
            "blend_per_split": any(per_split.values()),
            "per_split_data_args_path": self.per_split_data_args_path,
        }
        given = [name for name, value in named.items() if value]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} both name the sources", where=f"data.{given[1]}", fix="keep one of them"
            )
        if not given and not self.path:
            raise ConfigError(
                "there is nothing to train on",
                where="data.path",
                fix="name X of X.bin and X.idx, or several in data.blend",
            )
        for name, some in {
            "data.blend": self.blend,
            **{f"data.blend_per_split.{k}": v for k, v in per_split.items()},
        }.items():
            check_sources(some, where=name)
        if any(per_split.values()) and not per_split["train"]:
            raise ConfigError("no source is for training", where="data.blend_per_split", fix="name some under train")
        try:
            parts = [float(part) for part in self.split.split(",")]
        except ValueError:
            parts = []
        if not 1 <= len(parts) <= len(SPLITS) or any(not part >= 0 for part in parts) or not parts[0] > 0:
            raise ConfigError(
                f"split is {self.split!r}",
                where="data.split",
                fix="parts of training, validation and test, such as 969,30,1",
            )


def check_sources(sources: Sources, *, where: str) -> None:
    """Refuse sources without a path, or of which only some have a weight, or one of no weight."""
    for number, source in enumerate(sources):
        if not isinstance(source, CorpusSource) or not source.path or not isinstance(source.path, str):
            raise ConfigError("the source has no path", where=f"{where}[{number}]", fix="name X of X.bin and X.idx")
        if source.weight is not None and not source.weight > 0:
            raise ConfigError(f"the weight is {source.weight}", where=f"{where}[{number}]", fix="a number above 0")
    if len({source.weight is None for source in sources}) > 1:
        raise ConfigError("some sources have a weight and some have none", where=where, fix="give all of them one")


def corpus_paths(data: dict[str, Any]) -> list[str]:
    """The sources that plain settings of a corpus name, those of its JSON file where that is on this machine."""
    if data["per_split_data_args_path"]:
        try:
            blends = list(_read_splits(Path(data["per_split_data_args_path"])).values())
        except ConfigError:
            return []
        return [source.path for blend in blends for source in blend]
    plain = [data["blend"], *data["blend_per_split"].values()]
    return [source["path"] for blend in plain for source in blend] or [data["path"]]


def _read_json(path: Path, key: str) -> dict[str, list[int]]:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        fix = "name the file that `harness indexed` wrote"
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=f"{path}, {key}", fix=fix) from None
    except ValueError as error:
        raise ConfigError(f"the file is not JSON: {error}", where=f"{path}, {key}", fix="write it again") from None
    if not isinstance(values, dict):
        raise ConfigError("the file holds no mapping", where=f"{path}, {key}", fix="write it again")
    return values


def _read_splits(path: Path) -> dict[str, Sources]:
    """Megatron's lists, in which a weight may stand before each path."""
    found: dict[str, Sources] = {}
    for name, words in _read_json(path, "data.per_split_data_args_path").items():
        if words is None:
            continue
        if name not in SPLITS or not isinstance(words, list) or not words:
            raise ConfigError(
                f"{name!r} is no split with a list of sources", where=str(path), fix=f"name {', '.join(SPLITS)}"
            )
        told = [str(word) for word in words]
        weights = [_number(word) for word in told[::2]]
        if len(told) % 2 == 0 and all(weight is not None for weight in weights):
            found[name] = [CorpusSource(source, weight) for source, weight in zip(told[1::2], weights, strict=True)]
        else:
            found[name] = [CorpusSource(word) for word in told]
        check_sources(found[name], where=f"{path}, {name}")
    if "train" not in found:
        raise ConfigError("no source is for training", where=str(path), fix="name some under train")
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
