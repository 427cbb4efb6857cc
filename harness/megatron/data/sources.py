"""The sources of a pretraining corpus: packed datasets among them, checks, and facts that identify them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path, parse_s3_path

from harness.errors import ConfigError, FormatError
from harness.formats import PackReader, holds_manifest
from harness.indexed import BIN, HEADER, IDX, MappedIndex, verify_indexed, with_suffix
from harness.loader import CorpusConfig, CorpusSource, open_train


def find_packs(config: CorpusConfig) -> dict[str, PackReader]:
    """Open the packed SFT datasets among the sources, by path.

    Raises:
        HarnessError: one is damaged, or its packs are longer than a sample.
    """
    if config.fast_cache_load:  # each file access costs time, and packs have no index to build
        return {}
    packs = {}
    for source in (source for some in config.sources().values() for source in some):
        if source.path in packs or not _is_packed(source.path):
            continue
        packs[source.path] = reader = open_train(source.path)[0]
        if reader.pack_size - 1 > config.sequence_length:
            raise ConfigError(
                f"packs of up to {reader.pack_size:,} tokens are longer than a sample of {config.sequence_length:,}",
                where=source.path,
                fix=f"set data.sequence_length={reader.pack_size} or more, or prepare smaller packs",
            )
    return packs


def facts_of(opened: Any) -> list[Any]:
    """Return facts that identify a source, read from a few pages of its index."""
    if isinstance(opened, PackReader):
        return [opened.fingerprint]
    lengths, pointers = opened.index.sequence_lengths, opened.index.sequence_pointers
    probes = np.linspace(0, len(lengths) - 1, 64).astype(np.int64)
    return [len(lengths), int(opened.index.document_count), int(pointers[-1]), lengths[probes].tolist()]


def check_size(train: Any, wanted: int, sources: list[CorpusSource]) -> None:
    if train is None or len(train) < wanted:
        raise ConfigError(
            f"the run trains {wanted:,} samples, and the sources have {0 if train is None else len(train):,}"
            + (" in one epoch, which is what a blend without weights gives" if len(sources) > 1 else ""),
            where="data, trainer.steps, loader.global_batch_size",
            fix="give the sources of the blend weights, or train fewer steps",
        )


def check_sources(config: CorpusConfig, packs: dict[str, PackReader]) -> None:
    """Refuse pairs that are missing, and those on a disk whose sizes do not match their index."""
    named = [source.path for some in config.sources().values() for source in some if source.path not in packs]
    remote = [path for path in named if is_object_storage_path(path)]
    _check_storage(config, remote)
    try:
        Path(config.cache).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.cache).close()
    except OSError as error:
        raise ConfigError(
            f"built indices cannot be written: {error.strerror or error}",
            where=str(Path(config.cache)),
            fix="set data.path_to_cache to a writable folder",
        ) from None
    if config.fast_cache_load:
        return
    for path in named:
        if path not in remote:
            _check_pair(Path(path))


def check_split(
    opened: Any, path: str, indices: npt.NDArray[Any], num_samples: int | None, split: str, sequence_length: int
) -> None:
    """Refuse an empty split of a source, for which Megatron would count epochs for ever."""
    if isinstance(opened, PackReader):
        what, enough = f"{indices.shape[0]:,} of {len(opened):,} packs", indices.shape[0] > 0
    else:
        # So many documents are enough with a token each, and reading all lengths takes long.
        if indices.shape[0] > sequence_length:
            return
        tokens = int(opened.sequence_lengths[indices].sum(dtype=np.int64))
        what = f"{indices.shape[0]:,} of {opened.sequence_lengths.shape[0]:,} documents with {tokens:,} tokens"
        enough = tokens > (sequence_length if num_samples is None else 0)
    if not enough:
        raise ConfigError(
            f"{split} gets {what} of a source, which is less than one sample",
            where=path,
            fix="give it a larger part of data.split, or none (\"data.split='100'\"), or its own sources in "
            "data.blend_per_split",
        )


def _check_pair(prefix: Path) -> None:
    missing = [suffix for suffix in (BIN, IDX) if not with_suffix(prefix, suffix).is_file()]
    if missing:
        raise ConfigError(
            f"{with_suffix(prefix, missing[0]).name} is missing",
            where=str(prefix),
            fix="name X of X.bin and X.idx without their suffix, or the folder of a packed dataset",
        )
    index = MappedIndex(with_suffix(prefix, IDX))
    if index.header.num_sequences == 0:
        raise FormatError("the corpus has no sequences", where=str(prefix), fix="remove it from the sources")
    end = int(index.pointers[-1]) + int(index.lengths[-1]) * index.header.dtype.itemsize
    size = with_suffix(prefix, BIN).stat().st_size
    if end > size:
        problems = verify_indexed(prefix)
        raise FormatError(
            problems[0].what if problems else f"the file has {size:,} bytes, and its index needs {end:,}",
            where=str(with_suffix(prefix, BIN)),
            fix="copy the pair again; `harness verify` checks all of it",
        )


def _check_storage(config: CorpusConfig, remote: list[str]) -> None:
    if remote and config.object_storage_cache_path is None:
        raise ConfigError(
            f"{remote[0]} is in object storage, and no folder is set for a local copy of its index",
            where="data.object_storage_cache_path",
            fix="name a folder on this machine",
        )
    in_s3 = [path for path in remote if path.startswith("s3://")]
    if not in_s3:
        return
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ConfigError(
            "Megatron-Core reads from S3 with boto3, which is not installed", where=in_s3[0], fix="pip install '.[s3]'"
        ) from None
    if config.fast_cache_load:
        return
    client = boto3.client("s3")
    for path in in_s3:
        bucket, key = parse_s3_path(path)
        for suffix in (IDX, BIN):
            try:
                client.head_object(Bucket=bucket, Key=key + suffix)
            except (BotoCoreError, ClientError) as error:
                is_gone = isinstance(error, ClientError) and error.response["Error"]["Code"] == "404"
                raise ConfigError(
                    f"{key}{suffix} is not in the bucket"
                    if is_gone
                    else f"object storage refused the request: {error}",
                    where=path + suffix,
                    fix="name X of X.bin and X.idx" if is_gone else "check AWS_ENDPOINT_URL and the credentials",
                ) from None


def check_dtype(dataset: IndexedDataset, path: str, *, has_counts: bool) -> None:
    """Refuse a pair of another dtype than Megatron assumes with counts, when it reads no header."""
    if has_counts and HEADER.unpack_from(dataset.index.bin_buffer)[2] != DType.code_from_dtype(dataset.index.dtype):
        raise FormatError(
            f"with per_dataset_sequences_path Megatron-Core reads {np.dtype(dataset.index.dtype).name} for this "
            "vocabulary, and the pair holds another dtype",
            where=path + IDX,
            fix="leave data.per_dataset_sequences_path null, or write the pair again for model.vocab_size",
        )


def _is_packed(path: str) -> bool:
    if is_object_storage_path(path):  # a lookup costs a request for each of many sources
        return path.endswith("/")
    return holds_manifest(path) or holds_manifest(f"{path}/train")
