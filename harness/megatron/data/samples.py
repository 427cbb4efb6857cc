"""Samples of a pretraining corpus as rows of a step, in Megatron's order; workers read them, runs resume by number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from harness.errors import LoaderError
from harness.loader import BatchRange, EpochOrder, LoaderConfig, LoaderState, RankBatch, RankLayout, build_batch
from harness.loader.order import shuffle_in_windows
from harness.loader.plan import RawBatch
from harness.loader.workers import BatchStream
from harness.records import Int64Array, Schedule
from harness.schedule import SequenceCost, measure_imbalance
from harness.thd import build_thd_batch, padded_lengths


def missing_index(error: FileNotFoundError) -> LoaderError:
    """Return the error for a missing index; the fast options assume that it exists."""
    path = Path(error.filename or "")
    fix = "to build it, train once with data.fast_cache_load=false and data.defer_npy_index_mmap=false and the same "
    fix += "other settings, including the number of samples (trainer.steps, data.num_samples)"
    return LoaderError(f"a built index is missing: {path.name}", where=str(path.parent), fix=fix)


class PackDataset(MegatronDataset):  # type: ignore[misc]
    """Packs of an SFT dataset as samples, shuffled again in every epoch, for Megatron's builder and blends.

    A sample has the entries of a GPTDataset sample, up to `sequence_length` tokens, and `lengths`, int64 [S], of its
    sequences. Arguments are the same as for MegatronDataset; the low-level dataset is a PackReader.
    """

    def __init__(self, dataset: Any, path: str, indices: Any, num_samples: int | None, split: Any, config: Any) -> None:
        super().__init__(dataset, path, indices, num_samples, split, config)
        self.packs = np.arange(len(dataset), dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        self.unique_identifiers["fingerprint"] = dataset.fingerprint
        self._epoch, self._order = -1, self.packs

    def __len__(self) -> int:
        wanted = self.num_samples or len(self.packs)
        return -(-wanted // len(self.packs)) * len(self.packs)

    def pack_of(self, index: int) -> int:
        """Return the number of the pack of sample `index`."""
        epoch, place = divmod(int(index), len(self.packs))
        if epoch != self._epoch:
            generator = np.random.RandomState([self.config.random_seed, epoch])
            self._epoch, self._order = epoch, generator.permutation(self.packs)
        return int(self._order[place])

    def lengths_of(self, index: int) -> Int64Array:
        """Return the model tokens of each sequence of the sample, int64 [S], from the dataset's index only."""
        pack = self.pack_of(index)
        offsets = self.dataset.pack_offsets
        stored = self.dataset.sequence_lengths[int(offsets[pack]) : int(offsets[pack + 1])]
        return cast(Int64Array, stored.astype(np.int64) - 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pack = self.dataset[self.pack_of(index)]
        row = build_thd_batch(pack.sequences())
        return {name: getattr(row, name) for name in _DTYPES} | {"lengths": np.diff(row.cu_seqlens).astype(np.int64)}


_PART = 1 << 22
# Fields of a sample, and their dtypes in a worker's result.
_DTYPES = {"tokens": np.int32, "labels": np.int32, "loss_mask": np.uint8, "position_ids": np.int32}


class BlockGPTDataset(GPTDataset):  # type: ignore[misc]
    """A GPTDataset whose documents are shuffled in blocks and windows, like packs of SFT data (`EpochOrder`).

    Neighboring documents are read together, for corpora that do not fit in any cache. Samples are cut from the
    documents and indexed as in Megatron, then shuffled within windows with as many tokens as a window of documents.
    Every epoch has its own order, which depends only on the seed, the documents and the two sizes: requesting more
    samples does not change the earlier ones.
    """

    def __init__(self, *arguments: Any, block_documents: int, window_blocks: int) -> None:
        config = arguments[-1]
        # The identity of the source gives sources of equal length different orders.
        source = int(config.tokenizer.unique_identifiers["source"] or "0", 16)
        self.order_config = LoaderConfig(
            seed=config.random_seed ^ source, block_packs=block_documents, window_blocks=window_blocks
        )
        super().__init__(*arguments)

    def _build_document_sample_shuffle_indices(self) -> Any:
        """Write missing indices to the paths where Megatron looks for built ones, and let it map them."""
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
        order = np.concatenate([EpochOrder(self.order_config, count, epoch).packs(0, count) for epoch in range(epochs)])
        # Token number at which each document ends. A sample includes the first token of the next one.
        ends = np.cumsum(mine[order])
        bounds = [(epoch * tokens - 1) // size if epoch else 0 for epoch in range(epochs + 1)]
        sample_index = np.empty((bounds[-1] + 1, 2), np.int32 if order.shape[0] < 2**31 else np.int64)
        for first in range(0, bounds[-1] + 1, _PART):
            starts = np.arange(first, min(first + _PART, bounds[-1] + 1), dtype=np.int64) * size
            at = np.searchsorted(ends, starts, side="right")
            sample_index[first : first + _PART, 0] = at
            sample_index[first : first + _PART, 1] = starts - (ends[at] - mine[order[at]])
        # A sample that crosses the end of an epoch is the first of the next one, so that more epochs do not change the
        # order of earlier ones.
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


class BlendPart(MegatronDataset):  # type: ignore[misc]
    """One source of a blend of corpora and packs: Megatron's BlendedDataset requires the same type for all sources."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.index_split = inner, inner.index_split
        self.unique_identifiers, self.num_samples = inner.unique_identifiers, inner.num_samples

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return cast(dict[str, Any], self.inner[index])


@dataclass(frozen=True)
class SampleReader:
    """Reader of one rank's samples in a step. Sent to every worker.

    Element i of a row is sample `start + (microbatch * dp_size + dp_rank) * micro_batch_size + i`, as in Megatron-LM.
    Attention restarts after each token equal to `boundary`, if it is set.
    """

    dataset: Any
    layout: RankLayout
    sequence_length: int
    micro_batch_size: int
    boundary: int | None = None
    cost: SequenceCost | None = None

    def rows(self, step: BatchRange) -> list[range]:
        """Return the sample numbers of every row of the job; an empty row trains nothing."""
        rows_per_round = self.layout.dp_size * self.layout.group_size
        needed = -(-(step.stop - step.start) // self.micro_batch_size)
        count = -(-needed // rows_per_round) * rows_per_round
        starts = range(step.start, step.start + count * self.micro_batch_size, self.micro_batch_size)
        return [range(min(at, step.stop), min(at + self.micro_batch_size, step.stop)) for at in starts]

    def read(self, step: BatchRange) -> RawBatch:
        """Read this rank's rows of `step`; raise LoaderError for a sample that is not as Megatron-Core builds it."""
        rows = self.rows(step)
        mine = rows[self.layout.dp_rank :: self.layout.dp_size]
        samples = {index: self._sample(index) for row in mine for index in row}
        lengths = [_end_to_end([self.lengths_of(index) for index in row]) for row in rows]
        padded = [padded_lengths(row + 1, self.layout.pad_to_multiple) for row in lengths]
        ends = np.cumsum([0, *map(len, padded)])
        schedule = Schedule(self.layout.dp_size, np.arange(ends[-1], dtype=np.int64), ends)
        full = int(padded_lengths(np.asarray([self.sequence_length + 1]), self.layout.pad_to_multiple)[0])
        return RawBatch(
            step=step,
            pack_ids=np.arange(step.start, step.stop, dtype=np.int64),
            tokens={
                name: np.concatenate([np.zeros(0, dtype), *(sample[name].astype(dtype) for sample in samples.values())])
                for name, dtype in _DTYPES.items()
            },
            row_lengths=[_end_to_end([samples[index]["lengths"] for index in row]) for row in mine],
            sequence_ids=[
                np.repeat(np.asarray(row, np.int64), [samples[index]["lengths"].shape[0] for index in row])
                for row in mine
            ],
            num_sequences=step.stop - step.start,
            num_tokens=int(sum(row.sum() for row in lengths)),
            imbalance=measure_imbalance(
                schedule, np.concatenate(padded), max_tokens_per_row=self.micro_batch_size * full, cost=self.cost
            ),
        )

    def lengths_of(self, index: int) -> Int64Array:
        """Return the tokens of each sequence of a sample, int64, without reading it; `sequence_length` for a corpus."""
        part = self.dataset
        if isinstance(part, BlendedDataset):
            if not isinstance(part.datasets[0], BlendPart | PackDataset):
                return np.asarray([self.sequence_length], np.int64)
            if part.dataset_index is None:  # mapped on first use
                self._sample(index)
            part, index = part.datasets[part.dataset_index[index]], part.dataset_sample_index[index]
            part = part.inner if isinstance(part, BlendPart) else part
        return part.lengths_of(index) if isinstance(part, PackDataset) else np.asarray([self.sequence_length])

    def _sample(self, index: int) -> dict[str, npt.NDArray[Any]]:
        try:
            entry = self.dataset[index]
        except FileNotFoundError as error:
            raise missing_index(error) from None
        except (ValueError, EOFError, IndexError) as error:
            what = f"sample {index} cannot be read: {type(error).__name__}: {error}"
            fix = "a built index is damaged, or the corpus changed while it was read: delete the index "
            fix += "folder (data.path_to_cache) to build it again"
            raise LoaderError(what, where="the corpus", fix=fix) from error
        sample = {name: np.asarray(entry[name]) for name in _DTYPES}
        count = sample["tokens"].shape[0]
        wrong = [name for name, values in sample.items() if values.shape != (count,)]
        if wrong or (count != self.sequence_length and "lengths" not in entry):
            what = f"sample {index} has {count:,} tokens, not the {self.sequence_length:,} that were requested"
            what += f", and {wrong[0]} of shape {sample[wrong[0]].shape}" if wrong else ""
            fix = "the index was built with other settings: remove it from data.path_to_cache"
            raise LoaderError(what, where="the corpus", fix=fix)
        if (lengths := entry.get("lengths")) is None:
            bounds = np.asarray([0, count])
            if self.boundary is not None:
                bounds = np.union1d(bounds, np.flatnonzero(sample["tokens"] == self.boundary) + 1)
            lengths = np.diff(bounds).astype(np.int64)
        return sample | {"lengths": lengths}


class SampleLoader(BatchStream[RawBatch]):
    """Global batches of samples in Megatron's order, starting at a state whose `packs_consumed` counts samples.

    The last batch ends at `num_samples` and may be smaller.
    """

    def __init__(
        self, reader: SampleReader, config: LoaderConfig, *, layout: RankLayout, num_samples: int, start: LoaderState
    ) -> None:
        where = f"data-parallel rank {layout.dp_rank}, {config.num_workers} workers"
        super().__init__(reader.read, config, where=where)
        self._layout, self._num_samples, self._size, self.state = layout, num_samples, config.global_batch_size, start

    def __iter__(self) -> Iterator[RankBatch]:
        starts = range(self.state.packs_consumed, self._num_samples, self._size)
        steps = (BatchRange(0, -(-at // self._size), at, min(at + self._size, self._num_samples)) for at in starts)
        for raw in self.read(steps):
            yield build_batch(raw, layout=self._layout, before=self.state, num_packs=None)


def _end_to_end(lengths: list[Int64Array]) -> Int64Array:
    return np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
