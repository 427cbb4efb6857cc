"""The input of a scheduler, and the cost of training a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError
from harness.records import Float64Array, Int64Array


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Work of training one sequence of L model tokens: L * linear + L^2 * quadratic, in any unit.

    The linear term is that of matrix multiplications with weights, the quadratic term that of attention scores. Only
    their ratio matters to a placement. By default they are equal at 8,192 tokens.
    """

    linear: float = 1.0
    quadratic: float = 1.0 / 8192

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and self.linear + self.quadratic > 0):
            what = f"a sequence cannot cost {self.linear} a token and {self.quadratic} a token squared"
            raise ConfigError(what, where="SequenceCost", fix="set both to 0 or more, and one of them above 0")

    def of(self, lengths: npt.NDArray[np.integer]) -> Float64Array:
        """Return the cost of sequences of these numbers of model tokens, float64 in the shape of `lengths`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens * (self.linear + self.quadratic * tokens)


@dataclass(frozen=True, eq=False, slots=True)
class GlobalBatch:
    """The sequences of one global batch and the ranks that they are placed on.

    Attributes:
        lengths: int64 [sequences], model tokens after padding; each above 0 and at most `max_tokens_per_row`.
        dp_size: data-parallel ranks.
        max_tokens_per_row: tokens that one row holds: max_tokens_per_rank * cp_size.
        group_size: the number of microbatches is a multiple of this (virtual pipeline stages run them in groups).
        pack_offsets: int64 [packs + 1], the bounds of stored packs in `lengths`; None where they are unknown.
        cost: of training a sequence.
    """

    lengths: Int64Array
    dp_size: int
    max_tokens_per_row: int
    group_size: int
    pack_offsets: Int64Array | None
    cost: SequenceCost

    @property
    def rows_per_group(self) -> int:
        """The number of rows of a schedule is a multiple of this."""
        return self.dp_size * self.group_size


def row_offsets(counts: Iterable[int], multiple: int) -> Int64Array:
    """Return offsets of rows of these numbers of sequences, int64 [rows + 1]; empty rows fill up to `multiple`."""
    sizes = [*counts]
    return np.cumsum([0, *sizes, *[0] * (-len(sizes) % multiple)], dtype=np.int64)
