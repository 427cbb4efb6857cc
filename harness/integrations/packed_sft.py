"""The names of the RFC "Scalable Packed SFT Data Format" over `open_dataset` and `open_writer`.

    dataset = create_sft_dataset("data/sft/train", tokenizer, seq_length=4096)    any format
    dataset[0]        {"input_ids": int32 [n], "loss_mask": uint8 [n], "seq_boundaries": [0, ..., n]}
    with open_packed_writer("out", packed_storage="memmap", pack_size=4096) as writer:
        writer.append(pack)

Items have the keys of Megatron-Bridge's GPTSFTPackedDataset. New code takes `harness.integrations.torch`, whose rows
are ready for a model, and keep their position.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from harness.checks import require_choice
from harness.errors import ConfigError
from harness.formats import PackReader, open_dataset, open_writer
from harness.formats.reader import require_plain
from harness.formats.writer import PackWriter

# The RFC's names of storages, and our formats.
PACKED_STORAGE = MappingProxyType(
    {"legacy_npy_pickle": "npy", "parquet": "parquet", "memmap": "memmap", "bin_idx": "binidx"}
)


class GPTSFTDataset:
    """Map-style dataset of stored packs, for `torch.utils.data.DataLoader` and loops of your own.

    Only the index is opened here; packs are read one by one. It can be sent to workers, which open their own files.

    Args:
        path: of the dataset, as `open_dataset` takes it; or an open one.
        tokenizer: checked against the vocabulary that the dataset records, if it has a `vocab_size`; kept as it is.
        seq_length: tokens that a pack may have; None for the dataset's `pack_size`.

    Raises:
        FormatError: the dataset cannot be opened.
        ConfigError: it has another format than the class, longer packs, or tokens that the tokenizer does not have.
    """

    format: ClassVar[str] = ""

    def __init__(
        self, path: str | os.PathLike[str] | PackReader, tokenizer: Any = None, seq_length: int | None = None
    ) -> None:
        reader = path if isinstance(path, PackReader) else open_dataset(path)
        name, where = type(self).__name__, str(reader.path)
        require_plain(reader, name)
        if self.format not in ("", reader.format):
            other = _CLASSES.get(reader.format, GPTSFTDataset).__name__
            what = f"the dataset's format is {reader.format}, but {name} reads {self.format}"
            raise ConfigError(what, where=where, fix=f"use {other}, or create_sft_dataset, which accepts any format")
        if seq_length is not None and reader.pack_size > seq_length:
            what = f"the dataset's pack_size is {reader.pack_size:,}, above the seq_length of {seq_length:,}"
            raise ConfigError(what, where=where, fix="increase seq_length, or pack again with `harness repack`")
        counts = reader.manifest.provenance.counts if reader.manifest is not None else {}
        stored, known = counts.get("vocab_size"), getattr(tokenizer, "vocab_size", None)
        if isinstance(stored, int) and isinstance(known, int) and known < stored:
            what = f"the tokenizer has {known:,} tokens, but the dataset was prepared with {stored:,}"
            raise ConfigError(what, where=where, fix="pass the tokenizer of the dataset")
        self.reader, self.tokenizer = reader, tokenizer

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one pack; a negative index counts from the end and has a mask of zeros, as in Megatron-Bridge.

        Returns:
            `input_ids` int32 [n], `loss_mask` uint8 [n], and `seq_boundaries`, the first positions of the sequences
            and n, as a list of integers.
        """
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        pack = self.reader[index % len(self)]
        mask = pack.loss_mask if index >= 0 else np.zeros_like(pack.loss_mask)
        boundaries = [*pack.seq_start_id.tolist(), len(pack)]
        return {"input_ids": pack.input_ids, "loss_mask": mask, "seq_boundaries": boundaries}


class GPTSFTPackedDataset(GPTSFTDataset):
    """`GPTSFTDataset` of the legacy format, a pickled `.npy`, read without running what a pickle may hold."""

    format = "npy"


class GPTSFTPackedParquetDataset(GPTSFTDataset):
    """`GPTSFTDataset` of Parquet."""

    format = "parquet"


class GPTSFTPackedMemmapDataset(GPTSFTDataset):
    """`GPTSFTDataset` of memory-mapped arrays."""

    format = "memmap"


_CLASSES: MappingProxyType[str, type[GPTSFTDataset]] = MappingProxyType(
    {kind.format: kind for kind in (GPTSFTPackedDataset, GPTSFTPackedParquetDataset, GPTSFTPackedMemmapDataset)}
)


def create_sft_dataset(
    path: str | os.PathLike[str], tokenizer: Any = None, seq_length: int | None = None
) -> GPTSFTDataset:
    """Return the dataset at a path, in the class of its format; see `GPTSFTDataset`."""
    reader = open_dataset(path)
    return _CLASSES.get(reader.format, GPTSFTDataset)(reader, tokenizer, seq_length)


def open_packed_writer(
    path: str | os.PathLike[str], *, packed_storage: str = "legacy_npy_pickle", pack_size: int, **settings: Any
) -> PackWriter:
    """Return `open_writer` for a storage by the RFC's name, a key of PACKED_STORAGE; raise ConfigError for others."""
    require_choice(packed_storage, tuple(PACKED_STORAGE), setting="packed_storage")
    return open_writer(path, format=PACKED_STORAGE[packed_storage], pack_size=pack_size, **settings)
