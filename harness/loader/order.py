"""The order of packs: a permutation that is a pure function of seed and epoch, divided into global batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.loader.config import LoaderConfig
from harness.records import Int64Array, UInt64Array

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Separate streams, so that the order of blocks is independent of the order of packs.
_BLOCKS, _PACKS, _SOURCES, _WINDOWS = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class BatchRange:
    """One global batch, as a range of positions in an epoch's order.

    Attributes:
        epoch: from 0.
        index: number of the batch in its epoch.
        start, stop: positions in the epoch's order.
        drawn: packs of this epoch drawn from each source before this batch; empty for a single source.
    """

    epoch: int
    index: int
    start: int
    stop: int
    drawn: tuple[int, ...] = ()


class EpochOrder:
    """The order of packs in one epoch. Construction takes O(blocks) time, a batch O(window).

    Blocks of `block_packs` neighboring packs are shuffled; then packs are shuffled within every `window_blocks`
    consecutive blocks of that order. A reader therefore needs only `window_blocks` regions of a file at a time and
    decodes each once. The order depends only on these settings, the seed and the number of packs, not on the format.
    """

    def __init__(self, config: LoaderConfig, num_packs: int, epoch: int) -> None:
        self.epoch = epoch
        self._config = config
        self._num_packs = num_packs
        self._window_index = -1
        self._window = np.zeros(0, dtype=np.int64)
        if not config.shuffle:
            return
        self._pack_key = _key(config.seed, epoch, _PACKS)
        num_blocks = -(-num_packs // config.block_packs)
        numbers = np.arange(num_blocks, dtype=np.uint64)
        self._blocks: Int64Array = np.argsort(_hash(numbers, _key(config.seed, epoch, _BLOCKS)), kind="stable")
        sizes = np.full(num_blocks, config.block_packs, dtype=np.int64)
        sizes[-1:] = num_packs - (num_blocks - 1) * config.block_packs
        windows = np.add.reduceat(sizes[self._blocks], np.arange(0, num_blocks, config.window_blocks))
        self._window_starts: Int64Array = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(windows)])

    def packs(self, start: int, stop: int) -> Int64Array:
        """Return the ids of the packs at positions start to stop of this epoch, int64 [stop - start]."""
        if not 0 <= start < stop <= self._num_packs:
            raise IndexError(f"positions {start} to {stop} of {self._num_packs} packs")
        if not self._config.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first = int(np.searchsorted(self._window_starts, start, side="right")) - 1
        last = int(np.searchsorted(self._window_starts, stop, side="left"))
        # A block may be larger than the dataset.
        parts, size, of_window = [], min(self._config.block_packs, self._num_packs), self._config.window_blocks
        for window in range(first, last):
            # Consecutive batches are mostly in one window; a full shuffle has a single window.
            if window != self._window_index:
                blocks = self._blocks[window * of_window : (window + 1) * of_window]
                packs = (blocks[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)
                packs = packs[packs < self._num_packs]
                keys = _hash(packs.astype(np.uint64), self._pack_key)
                self._window = packs[np.argsort(keys, kind="stable")]
                self._window_index = window
            parts.append(self._window)
        offset = int(self._window_starts[first])
        return np.concatenate(parts)[start - offset : stop - offset]


def shuffle_in_windows(count: int, window: int, seed: int, epoch: int) -> Int64Array:
    """Return the integers below `count`, int64 [count], shuffled within each run of `window`."""
    numbers = np.arange(count, dtype=np.uint64)
    keys = _hash(numbers, _key(seed, epoch, _WINDOWS))
    return np.lexsort((keys, numbers // np.uint64(window))).astype(np.int64)


def steps_per_epoch(config: LoaderConfig, num_packs: int) -> int:
    """Return the number of global batches in an epoch, including a partial last one unless `drop_last`."""
    if config.drop_last:
        return num_packs // config.global_batch_size
    return -(-num_packs // config.global_batch_size)


def steps_until(config: LoaderConfig, num_packs: int, epochs: int, *, epoch: int, packs_consumed: int) -> int:
    """Return the number of global batches from a position to the end of `epochs` epochs."""
    if epoch >= epochs:
        return 0
    # A position past the end, from larger data, means the start of the next epoch: see `LoaderState.resumed`.
    in_epoch = steps_per_epoch(config, max(0, num_packs - packs_consumed))
    return in_epoch + (epochs - epoch - 1) * steps_per_epoch(config, num_packs)


def epochs_after(config: LoaderConfig, num_packs: int, steps: int, *, epoch: int, packs_consumed: int) -> float:
    """Return the number of epochs completed `steps` global batches after a position; the inverse of `steps_until`."""
    in_epoch = steps_per_epoch(config, max(0, num_packs - packs_consumed))
    if steps >= in_epoch:
        whole, steps = divmod(steps - in_epoch, max(1, steps_per_epoch(config, num_packs)))
        epoch, packs_consumed = epoch + 1 + whole, 0
    return epoch + (packs_consumed + steps * config.global_batch_size) / num_packs


def derive_seed(seed: int, source: int) -> int:
    """Return the seed of source `source` of a blend; source 0 keeps the seed of the blend."""
    return seed if source == 0 else _key(seed, source, _SOURCES)


def _key(seed: int, epoch: int, stream: int) -> int:
    """Return a 64-bit key that depends on every bit of its inputs."""
    key = 0
    for number in (seed, epoch, stream):
        key = int(_hash(np.asarray([number & _MASK], dtype=np.uint64), key)[0])
    return key


def _hash(numbers: UInt64Array, key: int) -> UInt64Array:
    """Return SplitMix64 of numbers + key, uint64 in the shape of `numbers`.

    Implemented here because numpy does not guarantee the permutations of a Generator across versions, and a run that is
    resumed years later must continue in the same order.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014); constants of Stafford's
    variant 13.
    """
    with np.errstate(over="ignore"):
        x = (numbers + np.uint64(key)) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)
