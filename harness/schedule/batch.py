"""What a scheduler is given, what it costs to train a sequence, and how rows become a Schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError
from harness.records import Int64Array, Schedule

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Work of training one sequence of L model tokens: L * linear + L^2 * quadratic, in any unit.

    The linear term is that of matrix multiplications with weights, the quadratic one that of attention scores. Only
    their ratio matters to a placement. The default has both equal at 8,192 tokens.
    """

    linear: float = 1.0
    quadratic: float = 1.0 / 8192

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and self.linear + self.quadratic > 0):
            raise ConfigError(
                f"a sequence cannot cost {self.linear} a token and {self.quadratic} a token squared",
                where="SequenceCost",
                fix="give two numbers that are not negative, one of them above zero",
            )

    def of(self, lengths: npt.NDArray[np.integer]) -> Float64Array:
        """float64, shape of `lengths`: the cost of sequences of these numbers of model tokens."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens * (self.linear + self.quadratic * tokens)


@dataclass(frozen=True, eq=False, slots=True)
class GlobalBatch:
    """The sequences of one global batch and the ranks that they are placed on.

    Attributes:
        lengths: int64 [sequences], model tokens after padding; each above 0 and at most `row_tokens`.
        dp_size: data-parallel ranks.
        row_tokens: tokens that one row holds: max_tokens_per_rank * cp_size.
        group_size: the number of microbatches is a multiple of this (virtual pipeline stages run them in groups).
        pack_offsets: int64 [packs + 1], where stored packs begin in `lengths`; None where that is not known.
        cost: what a sequence costs to train.
    """

    lengths: Int64Array
    dp_size: int
    row_tokens: int
    group_size: int
    pack_offsets: Int64Array | None
    cost: SequenceCost

    @property
    def rows_per_group(self) -> int:
        """The number of rows of a schedule is a multiple of this."""
        return self.dp_size * self.group_size


def schedule_of_rows(rows: Sequence[npt.ArrayLike], batch: GlobalBatch) -> Schedule:
    """A Schedule of `rows` in order, each indices into `batch.lengths`, with empty rows at the end to fill up."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    order = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
    return Schedule(batch.dp_size, order, row_offsets((array.shape[0] for array in arrays), batch.rows_per_group))


def row_offsets(counts: Iterable[int], multiple: int) -> Int64Array:
    """int64 [rows + 1] for rows of these numbers of sequences; rows is filled up to `multiple` with empty ones."""
    sizes = np.fromiter(counts, dtype=np.int64)
    rows = -(-sizes.shape[0] // multiple) * multiple
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1 : sizes.shape[0] + 1])
    offsets[sizes.shape[0] + 1 :] = offsets[sizes.shape[0]]
    return offsets
