"""Megatron's GPTDataset in an order that reads neighboring documents together, for corpora that no cache can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDataset

from harness.loader import EpochOrder, LoaderConfig
from harness.loader.order import shuffle_in_windows
from harness.records import Int64Array

_PART = 1 << 22


class BlockGPTDataset(GPTDataset):  # type: ignore[misc]
    """A GPTDataset whose documents are shuffled in blocks and windows, as packs of SFT data are (`EpochOrder`).

    Samples are cut from the documents, and indexed, as Megatron does. Then samples are shuffled within windows that
    hold as many tokens as a window of documents. Every epoch has an order of its own, which depends on the seed, the
    documents and the two sizes alone: with more samples the earlier ones stay the same.

    Args:
        dataset, path, indices, num_samples, split, config: those of GPTDataset.
        block_documents: neighboring documents of a block.
        window_blocks: blocks that documents are mixed across.
    """

    def __init__(
        self,
        dataset: Any,
        path: str,
        indices: Any,
        num_samples: int | None,
        split: Any,
        config: Any,
        *,
        block_documents: int,
        window_blocks: int,
    ) -> None:
        # The identity of the source keeps sources of equal length from one order.
        source = int(config.tokenizer.unique_identifiers["source"] or "0", 16)
        self.order_config = LoaderConfig(
            seed=config.random_seed ^ source, block_packs=block_documents, window_blocks=window_blocks
        )
        super().__init__(dataset, path, indices, num_samples, split, config)

    def _build_document_sample_shuffle_indices(self) -> Any:
        """Write the indices where Megatron looks for built ones, unless they are there, and let it map them."""
        if not (self.config.defer_npy_index_mmap or self.config.fast_cache_load):
            base = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
            folder = Path(self.config.path_to_cache)
            paths = [folder / f"{base}-{name}_index.npy" for name in ("document", "sample", "shuffle")]
            description = folder / f"{base}-description.txt"
            if not all(path.is_file() for path in (description, *paths)):
                for path, index in zip(paths, self._build_indices(), strict=True):
                    np.save(path, index)
                description.write_text(self.unique_description)
        return super()._build_document_sample_shuffle_indices()

    def _build_indices(self) -> tuple[npt.NDArray[Any], ...]:
        size, lengths = self.config.sequence_length, self.dataset.sequence_lengths
        documents = np.arange(lengths.shape[0]) if self.indices is None else np.asarray(self.indices)
        mine = lengths[documents].astype(np.int64)
        count, tokens = documents.shape[0], int(mine.sum())
        epochs = max(1, -(-((self.num_samples or 0) * size + 1) // tokens))
        orders = [EpochOrder(self.order_config, count, epoch).packs(0, count) for epoch in range(epochs)]
        order = np.concatenate(orders)
        # Token number at which each document ends. A sample has one token of the next one.
        ends = np.cumsum(mine[order])
        bounds = [(epoch * tokens - 1) // size if epoch else 0 for epoch in range(epochs + 1)]
        sample_index = np.empty((bounds[-1] + 1, 2), np.int32 if order.shape[0] < 2**31 else np.int64)
        for first in range(0, bounds[-1] + 1, _PART):
            starts = np.arange(first, min(first + _PART, bounds[-1] + 1), dtype=np.int64) * size
            at = np.searchsorted(ends, starts, side="right")
            sample_index[first : first + _PART, 0] = at
            sample_index[first : first + _PART, 1] = starts - (ends[at] - mine[order[at]])
        # A sample that crosses the end of an epoch is the first of the next one, so that each epoch keeps its order
        # when there are more.
        window = self.order_config.block_packs * self.order_config.window_blocks
        window_samples = max(1, window * tokens // (count * size))
        seed = self.order_config.seed
        shuffled: list[Int64Array] = [
            bounds[epoch] + shuffle_in_windows(bounds[epoch + 1] - bounds[epoch], window_samples, seed, epoch)
            for epoch in range(epochs)
        ]
        shuffle_index = np.concatenate(shuffled)
        dtype = np.uint32 if bounds[-1] < np.iinfo(np.uint32).max - 1 else np.int64
        return documents[order].astype(np.int32), sample_index, shuffle_index.astype(dtype)
