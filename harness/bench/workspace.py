"""Data of the benches: made once, in a folder that is removed at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harness.errors import ConfigError, os_errors_as
from harness.prep import MIN_SEQUENCE_TOKENS, plan_packs
from harness.records import Int64Array, Pack

_VOCABULARY = 50_000
_TABLE = 1 << 20
# Gives 6.5 sequences a pack: 13 million in 2 million packs.
_MEDIAN_SHARE = 0.093
_PROMPT_SHARE = 0.4


class Workspace:
    """A folder for a bench's data, in `parent` or the system's temporary folder; a context manager.

    With `keep`, it is not removed, and the data of earlier runs is reused.
    """

    def __init__(self, parent: Path | None = None, *, keep: bool = False) -> None:
        self._keep, parent = keep, parent or Path(tempfile.gettempdir())
        with os_errors_as(ConfigError, "the folder for the data cannot be used", where=parent, fix="--dir FOLDER"):
            parent.mkdir(parents=True, exist_ok=True)
            if keep:
                self.folder = parent / "harness-bench"
                self.folder.mkdir(exist_ok=True)
            else:
                self.folder = Path(tempfile.mkdtemp(prefix="harness-bench-", dir=parent))

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def lognormal_lengths(count: int, *, median: float, longest: int, seed: int) -> Int64Array:
    """Return lengths of conversations, int64 [count], from `MIN_SEQUENCE_TOKENS` to `longest`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, count)
    return np.clip(drawn, MIN_SEQUENCE_TOKENS, longest).astype(np.int64)


def make_packs(count: int, pack_size: int) -> Iterator[Pack]:
    """Yield packs as full as best-fit decreasing makes them, of Zipf-distributed tokens.

    The start of each sequence is not trained. Real text compresses better.
    """
    median = max(MIN_SEQUENCE_TOKENS, pack_size * _MEDIAN_SHARE)
    # Drawn until there are enough packs; the mean is above the median, so a few draws suffice.
    num_sequences, plan = 4 * count + 64, None
    while plan is None or plan.num_packs < count:
        lengths = lognormal_lengths(num_sequences, median=median, longest=pack_size, seed=0)
        plan = plan_packs(lengths, pack_size=pack_size, seed=0)
        num_sequences *= 2
    lengths, offsets = lengths[plan.sequence_ids], plan.pack_offsets
    frequency = 1 / np.arange(1, _VOCABULARY + 1)
    ids = np.searchsorted(np.cumsum(frequency) / frequency.sum(), (np.arange(_TABLE) + 0.5) / _TABLE)
    # Each token as often as Zipf's law has it. Frequent ones have ids anywhere, like those of a tokenizer.
    table = np.random.default_rng(0).permutation(_VOCABULARY).astype(np.int32)[ids]
    random = np.random.default_rng(0)
    for index in range(count):
        sizes = lengths[offsets[index] : offsets[index + 1]]
        ends = np.cumsum(sizes)
        starts = (ends - sizes).astype(np.int32)
        num_tokens = int(ends[-1])
        position = np.arange(num_tokens) - np.repeat(starts, sizes)
        mask = (position >= np.repeat(sizes * _PROMPT_SHARE, sizes)).astype(np.uint8)
        mask[ends - 1] = 0
        yield Pack(table[random.integers(0, _TABLE, num_tokens, dtype=np.uint32)], mask, starts)
