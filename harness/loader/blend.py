"""One dataset, or several interleaved by weight: a pure function from position to packs of each source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.checks import bounded, check_numbers
from harness.errors import ConfigError, LoaderError
from harness.loader.config import LoaderConfig
from harness.loader.order import BatchRange, EpochOrder, derive_seed
from harness.printing import count_of
from harness.records import Int64Array

# More packs than any run trains; drawing them takes a minute.
_MOST_PACKS = 1 << 26


@dataclass(frozen=True)
class Blend:
    """Rule by which packs of several sources are drawn.

    The next pack always comes from the source that is furthest behind its share. At any point, no source is a whole
    pack ahead of its share; it is behind by less than one pack with two sources and by less than two with more. Each
    source has its own shuffled epochs. With weights, the stream is one epoch that ends only when the `epochs` of a
    source are exhausted. Without weights, an epoch contains every source `epochs` times, in proportion to its packs.

    Attributes:
        names: names of the sources, for messages.
        sizes: number of packs in each source.
        weights: weight of each source, on any positive scale; None draws in proportion to sizes times epochs.
        epochs: passes over each source; with weights an upper limit (None for no limit), without weights exact (None
            for 1).
        shares: weights scaled to a sum of 1.

    Raises:
        ConfigError: a weight is not above 0, a source is empty, or the lists differ in length.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...] = bounded(lowest=1, highest=None)
    weights: tuple[float, ...] | None = bounded(above=0, highest=None)
    epochs: tuple[int | None, ...] = bounded(lowest=1)
    shares: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        check_numbers(self, "data.blend")
        lists = {"names": self.names, "sizes": self.sizes, "weights": self.weights, "epochs": self.epochs}
        counts = {name: len(values) for name, values in lists.items() if values is not None}
        if len({*counts.values()}) > 1 or not self.names:
            what = "a blend has " + ", ".join(f"{count} {name}" for name, count in counts.items())
            fix = "give each source its name, its size and its epochs, and a weight where any has one"
            raise ConfigError(what, where="data.blend", fix=fix)
        # Sum in numpy like Megatron-Core: another order of summation would change the last bit.
        scaled = np.asarray(self.weights or self.limits, dtype=np.float64)
        object.__setattr__(self, "shares", tuple((scaled / np.sum(scaled)).tolist()))

    @classmethod
    def of_one(cls, num_packs: int) -> Blend:
        """Return the blend of a single dataset: its shuffled epochs in succession."""
        return cls(("the dataset",), (num_packs,), None, (None,))

    @property
    def num_packs(self) -> int | None:
        """Packs of one epoch; None with weights."""
        return None if self.weights is not None else sum(limit or 0 for limit in self.limits)

    @property
    def signature(self) -> str:
        """Text that, with the content of the sources, determines the draws."""
        weights = "sizes" if self.weights is None else ",".join(repr(float(weight)) for weight in self.weights)
        return f"weights={weights} epochs={','.join(str(epochs) for epochs in self.epochs)}"

    @property
    def limits(self) -> list[int | None]:
        """Packs that may be drawn from each source in one epoch of the blend; None for no limit."""
        pairs = zip(self.sizes, self.epochs, strict=True)
        return [None if self.weights is not None and epochs is None else size * (epochs or 1) for size, epochs in pairs]

    def draw(self, counts: list[int], num_packs: int) -> Int64Array:
        """Return the source of each of the next packs, int64 [packs]; fewer than requested at the end.

        `counts`, the packs drawn so far from each source, is updated in place. Measured with three sources: 0.3
        microseconds per pack, so a run that resumes after 10 million packs redraws them in 3.3 s.

        Source: `build_blending_indices` and, without weights, `build_exhaustive_blending_indices` of Megatron-Core,
        `core/datasets/helpers.cpp`; equal including ties that rounding decides.
        """
        limits = self.limits
        is_weighted = self.weights is not None
        if len(counts) == 1 and limits[0] is not None:
            taken = min(num_packs, limits[0] - counts[0])
            counts[0] += taken
            return np.zeros(taken, dtype=np.int64)
        unspent = [(i, share) for i, share in enumerate(self.shares) if is_weighted or counts[i] != limits[i]]
        drawn: list[int] = []
        first = sum(counts)
        for position in range(first, first + num_packs):
            if not unspent:
                break
            at = float(position) if position else 1.0
            most, chosen = -math.inf, -1
            for source, share in unspent:
                lag = share * at - counts[source]
                if lag > most:
                    most, chosen = lag, source
            if is_weighted and counts[chosen] == limits[chosen]:
                break
            counts[chosen] += 1
            drawn.append(chosen)
            if not is_weighted and counts[chosen] == limits[chosen]:
                unspent = [pair for pair in unspent if pair[0] != chosen]
        return np.asarray(drawn, dtype=np.int64)

    def steps(self, config: LoaderConfig, *, epoch: int, packs_consumed: int) -> Iterator[BatchRange]:
        """Yield the global batches after a position, across epochs, until `draw` returns none."""
        size = config.global_batch_size
        if config.drop_last and self.num_packs is not None and self.num_packs < size:
            what = f"{count_of(self.num_packs, 'pack')} cannot fill a global batch of {size:,} without drop_last=false"
            fix = "lower global_batch_size, or set drop_last to false"
            raise ConfigError(what, where="loader.global_batch_size", fix=fix)
        # After resuming with another batch size too, every pack is read once per epoch.
        start, counts = packs_consumed, self._counts_after(packs_consumed)
        while True:
            index = -(-start // size)
            before = tuple(counts)
            while drawn := self.draw(counts, size).shape[0]:
                if config.drop_last and drawn < size:
                    break
                yield BatchRange(epoch, index, start, start + drawn, before)
                start, index, before = start + drawn, index + 1, tuple(counts)
            if self.weights is not None:
                return
            epoch, start, counts = epoch + 1, 0, [0] * len(self.sizes)

    def check_lasts(self, num_packs: int) -> None:
        """Raise ConfigError if the epochs of a source are exhausted before `num_packs` are drawn."""
        # No source is ever a whole pack ahead of its share, so most blends pass without drawing packs.
        pairs = zip(self.shares, self.limits, strict=True)
        if self.weights is None or all(limit is None or share * num_packs + 1 <= limit for share, limit in pairs):
            return
        if sum(self._counts_after(num_packs)) < num_packs:
            error = self.used_up()
            raise ConfigError(f"the run trains {num_packs:,} packs, but {error.what}", where=error.where, fix=error.fix)

    def ends_after(self) -> int | None:
        """Return the number of packs until the epochs of a source are exhausted; None if no run trains that many."""
        pairs = zip(self.shares, self.limits, strict=True)
        if self.weights is None or all(limit is None or limit > share * _MOST_PACKS for share, limit in pairs):
            return None
        return sum(self._counts_after())

    def used_up(self) -> LoaderError:
        """Return the error for a weighted blend that has ended."""
        counts = self._counts_after()
        triples = enumerate(zip(self.shares, counts, self.limits, strict=True))
        total = max(sum(counts), 1)
        _, source = max((share * total - count, i) for i, (share, count, limit) in triples if count == limit)
        return LoaderError(
            f"{self.names[source]} ({count_of(self.epochs[source] or 1, 'epoch')} of "
            f"{count_of(self.sizes[source], 'pack')}) is exhausted after {count_of(sum(counts), 'pack')} of the blend",
            where=f"data.blend, {self.names[source]}",
            fix="increase its epochs, lower its weight, or train fewer steps",
        )

    def _counts_after(self, num_packs: float = math.inf) -> list[int]:
        """Return the packs drawn from each source among the first `num_packs`, or in a whole epoch."""
        counts = [0] * len(self.sizes)
        while self.draw(counts, int(min(1 << 16, num_packs - sum(counts)))).shape[0]:
            pass
        return counts


def check_sources(sources: Sequence[Any], where: str) -> None:
    """Raise ConfigError if a source has no path or a number out of bounds, or if only some sources have a weight."""
    for number, source in enumerate(sources):
        place, path = f"{where}[{number}]", getattr(source, "path", None)
        if not path or not isinstance(path, str):
            raise ConfigError("the source has no path", where=place, fix="specify a dataset, a corpus or a folder")
        check_numbers(source, place)
    if len({source.weight is None for source in sources}) > 1:
        fix = "set a weight for every source or for none; without weights, each is read `epochs` times"
        raise ConfigError("only some of the sources have a weight", where=where, fix=fix)


class BlendOrder:
    """The packs of a blend's batches. Each source has its own epochs (`EpochOrder`)."""

    def __init__(self, config: LoaderConfig, blend: Blend) -> None:
        self._blend = blend
        # One seed would shuffle sources of equal length alike, so that translations of a text would coincide.
        self._configs = [replace(config, seed=derive_seed(config.seed, source)) for source in range(len(blend.sizes))]
        self._starts = np.cumsum([0, *blend.sizes[:-1]], dtype=np.int64)
        self._orders: dict[int, EpochOrder] = {}

    def packs(self, batch: BatchRange) -> Int64Array:
        """Return the pack ids of a batch, numbered across all sources, int64 [packs]."""
        drawn = batch.drawn or (batch.start,)
        sources = self._blend.draw(list(drawn), batch.stop - batch.start)
        packs = np.zeros(sources.shape[0], dtype=np.int64)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            size, parts = self._blend.sizes[source], []
            start = drawn[source] + batch.epoch * (self._blend.limits[source] or 0)
            stop = start + places.shape[0]
            while start < stop:  # across the epochs of the source
                epoch, position = divmod(start, size)
                end = min(position + stop - start, size)
                order = self._orders.get(source)
                if order is None or order.epoch != epoch:
                    order = self._orders[source] = EpochOrder(self._configs[source], size, epoch)
                parts.append(order.packs(position, end))
                start += end - position
            packs[places] = self._starts[source] + np.concatenate(parts)
        return packs
