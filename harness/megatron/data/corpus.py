"""Pretraining corpora, built with Megatron-Core's own builder: GPTDataset, BlendedDataset and their indices.

Megatron builds on rank 0 while the others wait in a barrier, forever if rank 0 fails. Here each rank builds as if
it were alone: rank 0 first, then the first rank of every node, which finds the indices of rank 0 if they share the
folder, and then the others. An error on one rank is raised on all.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, is_object_storage_path
from megatron.core.datasets.utils import Split

from harness.errors import ConfigError, FormatError, HarnessError, os_errors_as
from harness.formats import PackReader, holds_manifest
from harness.formats.reader import refuse_media
from harness.indexed.index import BIN, HEADER, IDX, MappedIndex, with_suffix
from harness.loader import CorpusConfig
from harness.loader.corpus import SPLITS, CorpusSource
from harness.loader.datasets import open_train
from harness.megatron.compat import gpt_dataset_config
from harness.megatron.data.feed import together
from harness.megatron.data.samples import BlendPart, BlockGPTDataset, PackDataset, missing_index
from harness.megatron.data.shared_indices import Fetch, SharedIndices, shared_kind
from harness.megatron.job import runtime
from harness.storage import is_uri, parse_place, stamp_of
from harness.storage.connections import s3_endpoint


@dataclass(frozen=True)
class Corpus:
    """Open datasets of a run; samples are in training order.

    Attributes:
        train, validation, test: GPTDataset, PackDataset or BlendedDataset; None if the split is empty.
        fingerprint: hash of facts about the content of the sources, read from their indices.
        order: facts that decide the order of samples; runs with equal order and fingerprint see the same samples.
    """

    train: Any
    validation: Any
    test: Any
    fingerprint: str
    order: str


class TokenIds:
    """Stand-in for the tokenizer of a corpus that is stored as tokens.

    Megatron finds a built index by the source's path, its settings and the tokenizer. `facts` about the source are
    part of the identifiers here; otherwise Megatron would trust an index of other data at the same path.
    """

    def __init__(self, eod: int | None, vocab_size: int | None, facts: str = "") -> None:
        self.eod, self.vocab_size = eod, vocab_size
        self.unique_identifiers = OrderedDict({"class": "TokenIds", "source": facts})


class OwnClient:
    """Megatron's S3 client, opened once per process: forked processes must not share connections."""

    def __init__(self, client: Any) -> None:
        self._client, self._owner = client, os.getpid()

    def get_object(self, **request: Any) -> Any:
        if self._owner != os.getpid():
            import boto3

            self._client, self._owner = boto3.client("s3"), os.getpid()
        return self._client.get_object(**request)

    def close(self) -> None:
        self._client.close()


class _Sources:
    """Stand-in for the dataset class of Megatron's builder: GPTDataset for corpora, PackDataset for packs.

    `fetch` copies built indices from shared storage; None if they are not shared.
    """

    __name__ = "GPTDataset"

    def __init__(self, config: CorpusConfig, packs: dict[str, PackReader], fetch: Fetch | None) -> None:
        self._config, self._packs, self.fetch = config, packs, fetch
        self.opened: dict[str, Any] = {}
        self.facts: dict[str, str] = {}
        self.built: dict[tuple[str, Split], Any] = {}
        blends = [{source.path for source in some} for some in config.sources().values()]
        self.is_mixed = any(0 < len(paths & packs.keys()) < len(paths) for paths in blends)

    def build_low_level_dataset(self, path: str, config: Any) -> Any:
        if path not in self.opened:
            self.opened[path] = opened = self._packs[path] if path in self._packs else self._open(path, config)
            self.facts[path] = json.dumps(_facts_of(opened))
        return self.opened[path]

    def _open(self, path: str, config: Any) -> IndexedDataset:
        if not is_object_storage_path(path):
            dataset = GPTDataset.build_low_level_dataset(path, config)
            # With counts, Megatron does not read the header and assumes a dtype.
            stored = HEADER.unpack_from(dataset.index.bin_buffer)[2]
            if self._config.counts() is not None and stored != DType.code_from_dtype(dataset.index.dtype):
                what = f"with per_dataset_sequences_path Megatron-Core reads {np.dtype(dataset.index.dtype).name} for "
                what += "this vocabulary, but the pair has another dtype"
                fix = "set data.per_dataset_sequences_path=null, or write the pair again for model.vocab_size"
                raise FormatError(what, where=path + IDX, fix=fix)
            return dataset
        cache, chunk = config.object_storage_cache_path, self._config.object_storage_chunk_bytes
        storage = ObjectStorageConfig(path_to_idx_cache=cache, bin_chunk_nbytes=chunk)
        dataset = IndexedDataset(path, mmap=False, object_storage_config=storage)
        if path.startswith("s3://"):
            dataset.bin_reader._client = OwnClient(dataset.bin_reader._client)
        return dataset

    def numel_low_level_dataset(self, dataset: Any) -> int:
        return len(dataset) if isinstance(dataset, PackReader) else GPTDataset.numel_low_level_dataset(dataset)

    def __call__(self, dataset: Any, path: str, indices: Any, num_samples: Any, split: Split, config: Any) -> Any:
        kind: Any = PackDataset if path in self._packs else GPTDataset
        facts, options = self.facts[path], {}
        if kind is GPTDataset and split is Split.train and self._config.block_documents is not None:
            options = {name: getattr(self._config, name) for name in ("block_documents", "window_blocks")}
            kind, facts = BlockGPTDataset, facts + json.dumps(options)
        kind = shared_kind(kind, self.fetch)
        if indices is None and not self._config.is_per_split:
            # Later versions may pass no indices with fast_cache_load.
            size = self.numel_low_level_dataset(dataset)
            first, last = (round(bound * size) for bound in config.split_matrix[split.value])
            indices = np.arange(first, last, dtype=np.int32)
        if indices is not None:
            _check_split(dataset, path, indices, num_samples, split.name, config.sequence_length)
        config = copy.copy(config)
        # Only a digest: at every start, Megatron writes the identifiers as indented JSON for every blend of sources.
        digest = xxhash.xxh3_64_hexdigest(facts.encode())
        config.tokenizer = TokenIds(config.tokenizer.eod, config.tokenizer.vocab_size, digest)
        built = kind(dataset, path, indices, num_samples, split, config, **options)
        self.built[path, split] = built
        return BlendPart(built) if self.is_mixed else built


class _Builder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]
    def build_generic_dataset(self, cls: Any, *arguments: Any) -> Any:
        """Build a dataset as Megatron does, fetching blend indices from shared storage."""
        kind = shared_kind(cls, self.cls.fetch) if cls is BlendedDataset else cls
        return super().build_generic_dataset(kind, *arguments)


def open_corpus(
    config: CorpusConfig,
    seed: int,
    sizes: tuple[int, int | None, int | None],
    vocab_size: int,
    packs: dict[str, PackReader],
    *,
    reads: bool,
    ranks: runtime.Runtime,
) -> Corpus | None:
    """Open the datasets of a run on every rank, and build missing indices; return None on ranks without `reads`.

    `sizes` are the samples of training, validation and test; None for one pass over all of them. Raise HarnessError on
    every rank if sources are missing or damaged, or Megatron-Core refuses the settings.
    """
    shared = SharedIndices(config.cache) if is_uri(config.cache) else None
    if shared is not None:
        config = replace(config, path_to_cache=str(shared.folder))
    runtime.on_rank_0(lambda: _check_sources(config, packs))
    mine = 0 if ranks.rank == 0 else 1 if ranks.local_rank == 0 else 2
    build = partial(build_corpus, config, seed, sizes, vocab_size, packs, finds_built=mine == 2)
    if shared is not None and mine < 2:
        build = partial(shared.run, build, builds=mine == 0)
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
    fetch: Fetch | None = None,
) -> Corpus:
    """Open the datasets, and build missing indices, in this process only; see `open_corpus`."""
    blends = config.sources()
    sources = _Sources(config, packs, fetch)
    as_a_lone_process = mock.patch.multiple(torch.distributed, is_initialized=lambda: False, get_rank=lambda *group: 0)
    try:
        with as_a_lone_process, _alone_in(Path(config.cache), shared=finds_built or config.fast_cache_load):
            made = _megatron_config(config, seed, vocab_size, packs)
            train, validation, test = _Builder(sources, list(sizes), lambda: True, made).build()
    except HarnessError:
        raise
    except FileNotFoundError as error:
        raise missing_index(error) from error
    except Exception as error:
        named = sorted({source.path for some in blends.values() for source in some})
        what = f"Megatron-Core cannot build the datasets: {type(error).__name__}: {error}"
        where = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        fix = f"if an index in {config.cache} is damaged, remove that folder to build it again; "
        fix += "`harness verify X.idx` checks a pair"
        raise ConfigError(what, where=where, fix=fix) from error
    first = blends.get("train", blends.get("all", []))
    if train is None or len(train) < sizes[0]:
        what = f"the run trains {sizes[0]:,} samples, but the sources contain {0 if train is None else len(train):,}"
        what += " in one epoch, the limit of a blend without weights" * (len(first) > 1)
        fix = "set weights for the sources of the blend, or train fewer steps"
        raise ConfigError(what, where="data, trainer.steps, loader.global_batch_size", fix=fix)
    order = {
        "samples of": config.sequence_length,
        "split": None if config.is_per_split else config.split,
        "weights": [source.weight for source in first],
        "epochs": [epochs_of(sources.built[source.path, Split.train]) for source in first],
    }
    facts = f"[{', '.join(sources.facts[source.path] for source in first)}]"
    return Corpus(train, validation, test, str(xxhash.xxh3_128(facts.encode()).hexdigest()), json.dumps(order))


def _megatron_config(config: CorpusConfig, seed: int, vocab_size: int, packs: dict[str, PackReader]) -> Any:
    """Return Megatron's config of the datasets, and set the S3 endpoint that its clients use."""
    blends, counts = config.sources(), config.counts()
    named = {source.path for some in blends.values() for source in some}
    is_remote = any(is_object_storage_path(path) and path not in packs for path in named)
    if is_remote and not os.environ.get("AWS_ENDPOINT_URL") and (endpoint := s3_endpoint()):
        # Megatron creates its own clients, here and in workers; they read only the environment variables of AWS.
        os.environ.setdefault("AWS_ENDPOINT_URL_S3", endpoint)
    same = ["sequence_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"]
    same += ["object_storage_cache_path", "num_dataset_builder_threads"]
    values: dict[str, Any] = {name: getattr(config, name) for name in same} | {
        "random_seed": seed,
        "tokenizer": TokenIds(config.eod, vocab_size),
        # Attention gets bounds instead: a mask would take S * S bytes per sample.
        "create_attention_mask": False,
        "path_to_cache": config.cache,
        "mmap_bin_files": config.mmap_bin_files and not is_remote,
    }
    if config.is_per_split:
        values["blend_per_split"] = [_megatrons(blends[name]) if name in blends else None for name in SPLITS]
    else:
        values |= {"blend": _megatrons(blends["all"]), "split": config.split}
    fast = {name: True for name in ("fast_cache_load", "defer_npy_index_mmap") if getattr(config, name)}
    # If a split divides the sources, Megatron refuses fast_cache_load, but works with it if it is set afterwards.
    afterwards = {} if config.is_per_split or not fast.pop("fast_cache_load", False) else {"fast_cache_load": True}
    values |= fast
    if counts is not None:
        values["sequences_per_dataset"] = counts
    made = gpt_dataset_config(values)
    vars(made).update(afterwards)
    return made


def epochs_of(dataset: Any) -> str:
    """Return the number of epochs of a GPTDataset in a form that identifies the order of its samples.

    `3+` means two epochs shuffled as one, and a third shuffled separately.

    Source: GPTDataset, which shuffles the last epoch separately if fewer than 80% of its samples are needed.
    """
    if isinstance(dataset, PackDataset):
        return "each"
    if isinstance(dataset, BlockGPTDataset):
        order = dataset.order_config
        return f"each in blocks of {order.block_packs} documents, {order.window_blocks} in a window"
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
    """Lock the folder of the indices, and remove indices that a killed builder left truncated.

    Megatron writes indices in place and trusts any that it finds.
    """
    folder.mkdir(parents=True, exist_ok=True)  # one per node if the folder is local
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        if shared:
            yield
            return
        building = folder / ".building"
        for path in folder.glob("*Dataset-*.npy") if building.exists() else ():
            try:
                np.load(path, mmap_mode="r")
            except (ValueError, EOFError, OSError):
                path.unlink(missing_ok=True)
        building.touch()
        yield
        building.unlink(missing_ok=True)  # another node may have removed it, if locks are local to a node


def find_packs(config: CorpusConfig) -> dict[str, PackReader]:
    """Open the packed SFT datasets among the sources, by path; raise HarnessError if packs are longer than a sample."""
    if config.fast_cache_load:  # packs have no index to build, so skip the file accesses
        return {}
    packs = {}
    for path in dict.fromkeys(source.path for some in config.sources().values() for source in some):
        if is_object_storage_path(path):  # checking would cost a request per source, and there can be many
            is_packed = path.endswith("/")
        else:
            is_packed = holds_manifest(path) or holds_manifest(f"{path}/train")
        if not is_packed:
            continue
        packs[path] = reader = open_train(path)[0]
        refuse_media(reader, "pretraining")
        if reader.pack_size - 1 > config.sequence_length:
            what = f"packs of up to {reader.pack_size:,} tokens are longer than a sample of {config.sequence_length:,}"
            fix = f"set data.sequence_length={reader.pack_size} or more, or prepare smaller packs"
            raise ConfigError(what, where=path, fix=fix)
    return packs


def _facts_of(opened: Any) -> list[Any]:
    """Return facts that identify a source, read from a few pages of its index."""
    if isinstance(opened, PackReader):
        return [opened.fingerprint]
    lengths, pointers = opened.index.sequence_lengths, opened.index.sequence_pointers
    probes = np.linspace(0, len(lengths) - 1, 64).astype(np.int64)
    return [len(lengths), int(opened.index.document_count), int(pointers[-1]), lengths[probes].tolist()]


def _check_sources(config: CorpusConfig, packs: dict[str, PackReader]) -> None:
    """Raise HarnessError for missing pairs, and for local pairs whose sizes do not match their index."""
    named = [source.path for some in config.sources().values() for source in some if source.path not in packs]
    remote = [path for path in named if is_object_storage_path(path)]
    if remote and config.object_storage_cache_path is None:
        what = f"{remote[0]} is in object storage, but no folder is set for a local copy of its index"
        raise ConfigError(what, where="data.object_storage_cache_path", fix="set a folder on this machine")
    in_s3 = next((path for path in remote if path.startswith("s3://")), None)
    if in_s3 is not None and find_spec("boto3") is None:
        fix = "pip install 'megatron-sft-harness[s3]'"
        raise ConfigError("Megatron-Core reads from S3 with boto3, which is not installed", where=in_s3, fix=fix)
    # Check before creating the index folder, which may be next to a source that does not exist.
    for path in named if not config.fast_cache_load else ():
        if path in remote:
            for suffix in (IDX, BIN):
                stamp_of(parse_place(path + suffix))
            continue
        bin_path, idx_path = with_suffix(Path(path), BIN), with_suffix(Path(path), IDX)
        if missing := [one.name for one in (bin_path, idx_path) if not one.is_file()]:
            fix = "specify X of X.bin and X.idx without suffix, or the folder of a packed dataset"
            raise ConfigError(f"{missing[0]} is missing", where=path, fix=fix)
        index = MappedIndex(idx_path)
        if index.header.num_sequences == 0:
            raise FormatError("the corpus contains no sequences", where=path, fix="remove it from the sources")
        end = int(index.pointers[-1]) + int(index.lengths[-1]) * index.header.dtype.itemsize
        if (size := bin_path.stat().st_size) < end:
            what = f"the file has {size:,} bytes, but its index requires {end:,}"
            fix = "copy the pair again; `harness verify` checks all of it"
            raise FormatError(what, where=str(bin_path), fix=fix)
    fix = "set data.path_to_cache to a writable folder"
    with os_errors_as(ConfigError, "built indices cannot be written", where=Path(config.cache), fix=fix):
        Path(config.cache).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.cache).close()


def _check_split(
    opened: Any, path: str, indices: npt.NDArray[Any], num_samples: int | None, split: str, sequence_length: int
) -> None:
    """Raise ConfigError for an empty split of a source, for which Megatron would count epochs forever."""
    if isinstance(opened, PackReader):
        if indices.shape[0]:
            return
        what = f"0 of {len(opened):,} packs"
    else:
        needed = sequence_length if num_samples is None else 0
        # This many documents suffice if each has a token; reading all lengths takes long.
        for some in (indices[: sequence_length + 1], indices):
            if (tokens := int(opened.sequence_lengths[some].sum(dtype=np.int64))) > needed:
                return
        what = f"{indices.shape[0]:,} of {opened.sequence_lengths.shape[0]:,} documents with {tokens:,} tokens"
    fix = "increase its weight in data.split, omit it (\"data.split='100'\"), or set its own sources in "
    fix += "data.blend_per_split"
    raise ConfigError(f"{split} gets {what} of a source, less than one sample", where=path, fix=fix)
