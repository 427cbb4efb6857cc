"""A pretraining corpus through Megatron-Core's own builder: GPTDataset, BlendedDataset and their built indices.

Megatron builds on rank 0 while the others wait in a barrier, for good where rank 0 fails. Here each rank builds as if
it were alone: rank 0 first, then the first rank of every node, which finds the indices of rank 0 where they share the
folder, and then the others. An error of one is an error of all.
"""

from __future__ import annotations

import copy
import fcntl
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, is_object_storage_path
from megatron.core.datasets.utils import Split

from harness.errors import ConfigError, HarnessError
from harness.formats import PackReader
from harness.loader import SPLITS, CorpusConfig, CorpusSource
from harness.megatron.compat import gpt_dataset_config
from harness.megatron.data.feed import together
from harness.megatron.data.samples import BlendPart, PackDataset, missing_index
from harness.megatron.data.sources import check_dtype, check_size, check_sources, check_split, facts_of
from harness.megatron.job import runtime


@dataclass(frozen=True)
class Corpus:
    """Open datasets of a run; samples are in training order.

    Attributes:
        train, validation, test: GPTDataset, PackDataset or BlendedDataset; None where the split has no share.
        fingerprint: of the content of the sources, as far as it shows in their indices.
        order: facts that decide the order of samples; runs of equal order and fingerprint see the same samples.
    """

    train: Any
    validation: Any
    test: Any
    fingerprint: str
    order: str


class TokenIds:
    """A stand-in for the tokenizer of a corpus that is stored as tokens.

    Megatron finds a built index by the source's path, its settings and the tokenizer. Facts about the source go in
    here, because otherwise an index of other data at the same path would be trusted.
    """

    def __init__(self, eod: int | None, vocab_size: int | None, facts: Sequence[Any] = ()) -> None:
        self.eod, self.vocab_size = eod, vocab_size
        self.unique_identifiers = OrderedDict({"class": "TokenIds", "source": list(facts)})


class _Sources:
    """A stand-in for the dataset class of Megatron's builder: GPTDataset for corpora, PackDataset for packs.

    Args:
        packs: the sources that are packed SFT datasets.
        counts: from `CorpusConfig.counts`.

    Attributes:
        opened: low-level datasets by path.
        built: mid-level ones by path and split.
        is_mixed: one blend has both corpora and packs.
    """

    __name__ = "GPTDataset"

    def __init__(self, config: CorpusConfig, packs: dict[str, PackReader], counts: dict[str, list[int]] | None) -> None:
        self._config, self._packs, self._counts = config, packs, counts
        self.opened: dict[str, Any] = {}
        self.built: dict[tuple[str, Split], Any] = {}
        self.is_mixed = False

    def build_low_level_dataset(self, path: str, config: Any) -> Any:
        if path not in self.opened:
            self.opened[path] = self._packs[path] if path in self._packs else self._open(path, config)
        return self.opened[path]

    def _open(self, path: str, config: Any) -> IndexedDataset:
        if not is_object_storage_path(path):
            dataset = GPTDataset.build_low_level_dataset(path, config)
            check_dtype(dataset, path, has_counts=self._counts is not None)
            return dataset
        cache, chunk = config.object_storage_cache_path, self._config.object_storage_chunk_bytes
        storage = ObjectStorageConfig(path_to_idx_cache=cache, bin_chunk_nbytes=chunk)
        return IndexedDataset(path, mmap=False, object_storage_config=storage)

    def numel_low_level_dataset(self, dataset: Any) -> int:
        return len(dataset) if isinstance(dataset, PackReader) else GPTDataset.numel_low_level_dataset(dataset)

    def __call__(self, dataset: Any, path: str, indices: Any, num_samples: Any, split: Split, config: Any) -> Any:
        kind = PackDataset if path in self._packs else GPTDataset
        if indices is not None:
            check_split(dataset, path, indices, num_samples, split.name, config.sequence_length)
        config = copy.copy(config)
        config.tokenizer = TokenIds(config.tokenizer.eod, config.tokenizer.vocab_size, facts_of(dataset))
        built = kind(dataset, path, indices, num_samples, split, config)
        self.built[path, split] = built
        return BlendPart(built) if self.is_mixed else built


def open_corpus(
    config: CorpusConfig,
    *,
    seed: int,
    sizes: tuple[int, int | None, int | None],
    vocab_size: int,
    packs: dict[str, PackReader],
    reads: bool,
    ranks: runtime.Runtime,
) -> Corpus | None:
    """Open the datasets of a run on every rank, and build the indices that are missing.

    Args:
        sizes: samples of training, validation and test; None for all of them, once.
        packs: from `find_packs`.
        reads: this rank needs the datasets; the others get None.

    Raises:
        HarnessError: on every rank: sources are missing or damaged, or Megatron-Core refuses the settings.
    """
    runtime.on_rank_0(lambda: check_sources(config, packs))
    mine = 0 if ranks.rank == 0 else 1 if ranks.local_rank == 0 else 2
    build = partial(build_corpus, config, seed, sizes, vocab_size, packs, finds_built=mine == 2)
    turns = [build if turn == mine and (reads or mine < 2) else lambda: None for turn in range(3)]
    built = [together(turn, device=ranks.device) for turn in turns]
    return built[mine] if reads else None


def build_corpus(
    config: CorpusConfig,
    seed: int,
    sizes: tuple[int, int | None, int | None],
    vocab_size: int,
    packs: dict[str, PackReader],
    *,
    finds_built: bool = False,
) -> Corpus:
    """Do the same as `open_corpus` in this process alone.

    Args:
        finds_built: the indices exist, so that others may read them meanwhile.
    """
    blends, counts = config.sources(), config.counts()
    sources = _Sources(config, packs, counts)
    named = {source.path for some in blends.values() for source in some}
    sources.is_mixed = any(
        0 < sum(source.path in packs for source in some) < len({source.path for source in some})
        for some in blends.values()
    )
    remote = sorted(path for path in named if is_object_storage_path(path) and path not in packs)
    values: dict[str, Any] = {
        "random_seed": seed,
        "sequence_length": config.sequence_length,
        "tokenizer": TokenIds(config.eod, vocab_size),
        "reset_position_ids": config.reset_position_ids,
        "reset_attention_mask": config.reset_attention_mask,
        "eod_mask_loss": config.eod_mask_loss,
        # Attention gets bounds instead: a mask would be S * S bytes a sample.
        "create_attention_mask": False,
        "path_to_cache": config.cache,
        "mmap_bin_files": not remote,
        "object_storage_cache_path": config.object_storage_cache_path,
        "num_dataset_builder_threads": config.num_dataset_builder_threads,
    }
    if config.is_per_split:
        values["blend_per_split"] = [_megatrons(blends[name]) if name in blends else None for name in SPLITS]
    else:
        values |= {"blend": _megatrons(blends["all"]), "split": config.split}
    fast = {name: getattr(config, name) for name in ("fast_cache_load", "defer_npy_index_mmap")}
    values |= {name: value for name, value in fast.items() if value}
    if counts is not None:
        values["sequences_per_dataset"] = counts
    as_a_lone_process = mock.patch.multiple(torch.distributed, is_initialized=lambda: False, get_rank=lambda *group: 0)
    try:
        with as_a_lone_process, _alone_in(Path(config.cache), shared=finds_built or config.fast_cache_load):
            made = gpt_dataset_config(values)
            builder = BlendedMegatronDatasetBuilder(sources, list(sizes), lambda: True, made)
            train, validation, test = builder.build()
    except HarnessError:
        raise
    except FileNotFoundError as error:
        raise missing_index(error) from error
    except Exception as error:
        raise ConfigError(
            f"Megatron-Core cannot build the datasets: {type(error).__name__}: {error}",
            where=", ".join(sorted(named)[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else ""),
            fix=f"if an index in {config.cache} is damaged, remove that folder to build it again; "
            "`harness verify X.idx` checks a pair",
        ) from error
    first = blends.get("train", blends.get("all", []))
    check_size(train, sizes[0], first)
    order = {
        "samples of": config.sequence_length,
        "split": None if config.is_per_split else config.split,
        "weights": [source.weight for source in first],
        "epochs": [epochs_of(sources.built[source.path, Split.train]) for source in first],
    }
    facts = json.dumps([facts_of(sources.opened[source.path]) for source in first])
    fingerprint = str(xxhash.xxh3_128(facts.encode()).hexdigest())
    return Corpus(train, validation, test, fingerprint, json.dumps(order))


def epochs_of(dataset: Any) -> str:
    """Return the part of the requested number of samples that decides the order of a GPTDataset.

    `3+` means two epochs shuffled as one, and a third shuffled alone.

    Source: GPTDataset, which sets the last epoch apart where fewer than 80% of its samples are needed.
    """
    if isinstance(dataset, PackDataset):
        return "each"
    lengths, size = dataset.dataset.sequence_lengths, dataset.config.sequence_length
    count = lengths.shape[0] if dataset.indices is None else dataset.indices.shape[0]
    if dataset.document_index is not None and dataset.document_index.shape[0] == count:
        return "1"
    tokens = int((lengths if dataset.indices is None else lengths[dataset.indices]).sum(dtype=np.int64))
    epochs = max(1, -(-((dataset.num_samples or 0) * size + 1) // tokens))
    if epochs == 1:
        return "1"
    last = dataset.num_samples - ((epochs - 1) * tokens - 1) // size
    return f"{epochs}{'+' if last < int(0.8 * ((tokens - 1) // size)) else ''}"


def _megatrons(sources: list[CorpusSource]) -> tuple[list[str], list[float] | None]:
    weights = [source.weight for source in sources if source.weight is not None]
    return [source.path for source in sources], weights or None


@contextmanager
def _alone_in(folder: Path, *, shared: bool) -> Iterator[None]:
    """Lock the folder of the indices, and remove those that a killed builder left cut short.

    Megatron writes indices in place and trusts those that it finds.
    """
    folder.mkdir(parents=True, exist_ok=True)  # one per node, where nodes share none
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        if shared:
            yield
            return
        building = folder / ".building"
        if building.exists():
            for path in folder.glob("*Dataset-*.npy"):
                if _is_cut_short(path):
                    path.unlink(missing_ok=True)
        building.touch()
        yield
        building.unlink(missing_ok=True)  # other nodes get in where locks are local to a node


def _is_cut_short(index: Path) -> bool:
    try:
        np.load(index, mmap_mode="r")
    except (ValueError, EOFError, OSError):
        return True
    return False
