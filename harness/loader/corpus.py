"""Settings of a pretraining corpus: pairs of `.bin` and `.idx`, their blend, their split, and how they are read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checks import CheckedSettings, bounded
from harness.errors import ConfigError, os_errors_as
from harness.loader.blend import check_sources
from harness.settings import load
from harness.storage import is_uri

SPLITS = ("train", "valid", "test")
Sources = list["CorpusSource"]
_WINDOW_BLOCKS = 16


@dataclass
class CorpusSource:
    """One part of a blend.

    Attributes:
        path: prefix X of X.bin and X.idx, on a disk, as `s3://BUCKET/X` or as `msc://PROFILE/X`; or the folder of a
            packed SFT dataset (in object storage with a trailing `/`), whose packs become samples with their masks.
        weight: weight of the source, on any scale. Set it for all sources of a blend or for none.
    """

    path: str = ""
    weight: float | None = bounded(None, above=0, highest=10**12)


@dataclass
class SplitSources:
    """Sources of each split, under the names of Megatron.

    Attributes:
        train, valid, test: sources of the split.
    """

    train: list[CorpusSource] = field(default_factory=list)
    valid: list[CorpusSource] = field(default_factory=list)
    test: list[CorpusSource] = field(default_factory=list)


@dataclass
class CorpusConfig(CheckedSettings, section="data"):
    """Settings of the data to pretrain on, as Megatron-Core's GPTDataset and BlendedDataset read it.

    Attributes:
        path: a single source, divided by `split`. Ignored if a blend is set.
        blend: several sources, each divided by `split`. Without weights, all samples of each source are read once.
        split: ratio of training, validation and test data, on any scale, such as `969,30,1`.
        blend_per_split: different sources for each split, instead of a blend and a split.
        per_split_data_args_path: JSON file with sources by split, such as `{"train": ["0.3", "a", "0.7", "b"]}`.
        sequence_length: number of tokens in a sample.
        micro_batch_size: number of samples in a row.
        num_samples: number of samples that the order is computed for; null uses the number that the run trains. It
            changes the order if it changes Megatron's number of epochs.
        block_documents: number of documents in a block of the training shuffle, for a corpus larger than the page
            cache. Neighboring documents are then read together, as with `loader.block_packs`. Null uses Megatron's
            order, which shuffles all documents and then all samples.
        window_blocks: number of blocks over which documents, and the samples cut from them, are shuffled.
        eod: id of the end-of-document token. Required by reset_position_ids, reset_attention_mask and eod_mask_loss.
        reset_position_ids: restart positions after each document. Requires reset_attention_mask, because rotary
            positions follow the bounds of attention.
        reset_attention_mask: prevent attention between documents.
        eod_mask_loss: exclude the token after the end of a document from the loss.
        path_to_cache: folder for the built indices. Null uses `index_cache` next to the first source, or
            `object_storage_cache_path` if the source is in object storage. A prefix `s3://BUCKET/KEY` is shared: one
            run builds missing indices while others wait, and each node copies the ones it needs to HARNESS_CACHE.
        object_storage_cache_path: folder for the `.idx` files of sources in object storage.
        object_storage_chunk_bytes: number of bytes per read of a `.bin` in object storage. A larger one rarely helps,
            because samples are scattered.
        num_dataset_builder_threads: number of threads that build the indices of a blend.
        fast_cache_load: assume that all indices are built: ranks do not check this, and do not wait for each other.
        defer_npy_index_mmap: memory-map a built index at its first use.
        mmap_bin_files: memory-map each `.bin` on a file system. With false, the file is opened for every
            sample, which is slower; for network file systems on which memory maps fail.
        per_dataset_sequences_path: JSON file of sequence counts (`harness indexed counts`), read instead of the header
            of every `.idx`.
    """

    path: str = "data/corpus"
    blend: list[CorpusSource] = field(default_factory=list)
    split: str = "99,1,0"
    blend_per_split: SplitSources = field(default_factory=SplitSources)
    per_split_data_args_path: str | None = None
    sequence_length: int = bounded(1024, lowest=1)
    micro_batch_size: int = bounded(1, lowest=1)
    num_samples: int | None = bounded(None, lowest=1, highest=10**12)
    block_documents: int | None = bounded(None, lowest=1, highest=10**9)
    window_blocks: int = bounded(_WINDOW_BLOCKS, lowest=1, highest=10**6)
    eod: int | None = bounded(None)
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    path_to_cache: str | None = None
    object_storage_cache_path: str | None = None
    object_storage_chunk_bytes: int = bounded(4 << 20, lowest=1)
    num_dataset_builder_threads: int = bounded(1, lowest=1, highest=1024)
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    mmap_bin_files: bool = True
    per_dataset_sequences_path: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        per_split = vars(self.blend_per_split)  # Hydra's `+` adds new names
        is_per_split, in_file = any(per_split.values()), self.per_split_data_args_path
        named = {"blend": self.blend, "blend_per_split": is_per_split, "per_split_data_args_path": in_file}
        given = [name for name, value in named.items() if value]
        if len(given) > 1:
            what = f"{' and '.join(given)} both set the sources"
            raise ConfigError(what, where=f"data.{given[1]}", fix="keep one of them")
        if not given and not self.path:
            fix = "set X of X.bin and X.idx, or several in data.blend"
            raise ConfigError("no source is specified", where="data.path", fix=fix)
        check_sources(self.blend, "data.blend")
        if is_per_split:
            _check_splits(per_split, "data.blend_per_split")
        if self.block_documents is None and self.window_blocks != _WINDOW_BLOCKS:
            what = f"window_blocks is {self.window_blocks}, but block_documents is not set"
            fix = "set data.block_documents too, or omit window_blocks to use Megatron's order"
            raise ConfigError(what, where="data.window_blocks", fix=fix)
        texts = self.split.split(",")
        try:
            # Megatron-Core parses each run of digits and dots as a number, so 9e1 would be two numbers.
            parts = [float(text) if re.fullmatch(r"\s*[.0-9]+\s*", text) else math.nan for text in texts]
        except ValueError:
            parts = []
        if not 1 <= len(parts) <= len(SPLITS) or not parts[0] > 0 or not sum(parts) < math.inf:
            fix = "use a ratio of training, validation and test data, such as 969,30,1"
            raise ConfigError(f"split is {self.split!r}", where="data.split", fix=fix)
        needs_eod = [n for n in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self, n)]
        if needs_eod and self.eod is None:
            what = f"{', '.join(needs_eod)} requires the id of the end-of-document token"
            raise ConfigError(what, where="data.eod", fix="set data.eod")
        for name in ("fast_cache_load", "defer_npy_index_mmap"):
            if getattr(self, name) and (self.path_to_cache is None or is_uri(self.path_to_cache)):
                what = f"{name} requires all indices on this machine, in a folder of built indices"
                fix = f"set a local folder, and train once with data.{name}=false to build them"
                raise ConfigError(what, where="data.path_to_cache", fix=fix)

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
        """Return the sources by split, or all as `all`; raise ConfigError for an invalid JSON file of splits."""
        if self.per_split_data_args_path is not None:
            return _read_splits(Path(self.per_split_data_args_path))
        if self.is_per_split:
            return {name: sources for name, sources in vars(self.blend_per_split).items() if sources}
        return {"all": self.blend or [CorpusSource(self.path)]}

    def counts(self) -> dict[str, list[int]] | None:
        """Return the sequence and document counts of each source from `per_dataset_sequences_path`, if it is set."""
        if self.per_dataset_sequences_path is None:
            return None
        path = Path(self.per_dataset_sequences_path)
        counts = _read_json(path, "data.per_dataset_sequences_path")
        missing = [s.path for sources in self.sources().values() for s in sources if s.path not in counts]
        if missing:
            what = f"the counts of {missing[0]} are missing" + (f" and {len(missing) - 1} more" if missing[1:] else "")
            raise ConfigError(what, where=str(path), fix="count them again with these paths")
        return counts


def corpus_paths(data: dict[str, Any]) -> list[str]:
    """Return the source paths in a dict of corpus settings, or in its JSON file if that is on this machine."""
    if data["per_split_data_args_path"]:
        try:
            blends = list(_read_splits(Path(data["per_split_data_args_path"])).values())
        except ConfigError:
            return []
        return [source.path for blend in blends for source in blend]
    plain = [data["blend"], *data["blend_per_split"].values()]
    return [source["path"] for blend in plain for source in blend] or [data["path"]]


def _check_splits(splits: dict[str, Sources], where: str) -> None:
    """Raise ConfigError unless the names are Megatron's splits and there are training sources."""
    for name, sources in splits.items():
        if name not in SPLITS:
            raise ConfigError(f"{name!r} is not a split", where=where, fix=f"choose one of {', '.join(SPLITS)}")
        check_sources(sources, f"{where}{'.' if where.startswith('data.') else ', '}{name}")
    if not splits.get("train"):
        raise ConfigError("there is no training source", where=where, fix="add train sources")


def _read_json(path: Path, key: str) -> dict[str, list[int]]:
    what, where = "the file cannot be read", f"{path}, {key}"
    with os_errors_as(ConfigError, what, where=where, fix="specify the file written by `harness indexed`"):
        return load(dict[str, Any], path.read_bytes(), where=where, fix="write it again", what=what, error=ConfigError)


def _read_splits(path: Path) -> dict[str, Sources]:
    """Read Megatron's lists of sources, in which each path may follow a weight."""
    splits: dict[str, Sources] = {}
    for name, words in _read_json(path, "data.per_split_data_args_path").items():
        if words is None:
            continue
        if not isinstance(words, list) or not words:
            fix = "list paths, or weights and paths"
            raise ConfigError(f"{name!r} is no list of sources", where=str(path), fix=fix)
        texts = [str(word) for word in words]
        try:
            weights = [float(text) for text in texts[::2]]
            splits[name] = [CorpusSource(source, weight) for source, weight in zip(texts[1::2], weights, strict=True)]
        except ValueError:  # without weights
            splits[name] = [CorpusSource(text) for text in texts]
    _check_splits(splits, str(path))
    return splits
