"""Schedulers, which place the sequences of a global batch on data-parallel ranks and microbatches.

A scheduler is one file with one function, one line in `SCHEDULERS` and one YAML. It reads only lengths, so every rank
computes the same placement without communication. Read `as_packed` first, then `dp_balanced`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.checks import CheckedSettings, bounded, one_of
from harness.errors import ScheduleError
from harness.records import Float64Array, Schedule
from harness.schedule.as_packed import place_as_packed
from harness.schedule.batch import (
    DYNAMIC,
    GlobalBatch,
    Imbalance,
    SequenceCost,
    check_lengths,
    measure_imbalance,
    most_sequences,
)
from harness.schedule.cost_balanced import place_cost_balanced
from harness.schedule.dp_balanced import place_dp_balanced
from harness.schedule.dynamic_context import place_dynamic_context

__all__ = [
    "DYNAMIC",
    "SCHEDULERS",
    "GlobalBatch",
    "Imbalance",
    "ScheduleConfig",
    "SequenceCost",
    "measure_imbalance",
    "most_sequences",
    "schedule",
]

SCHEDULERS: Mapping[str, Callable[[GlobalBatch], Schedule]] = {
    "as_packed": place_as_packed,
    "dp_balanced": place_dp_balanced,
    "cost_balanced": place_cost_balanced,
    DYNAMIC: place_dynamic_context,
}


@dataclass
class ScheduleConfig(CheckedSettings, section="schedule"):
    """Settings of how the sequences of a global batch become rows.

    Attributes:
        name: schedule that places the sequences of a global batch: `as_packed`, `dp_balanced`, `cost_balanced` or
            `dynamic_context`.
        max_tokens_per_rank: maximum number of tokens per rank and microbatch. A row contains up to this number times
            the context-parallel size of the layout or, with `dynamic_context`, of the row.
    """

    name: str = one_of("dp_balanced", SCHEDULERS)
    max_tokens_per_rank: int = bounded(8192, lowest=1)


def schedule(
    name: str,
    lengths: npt.ArrayLike,
    *,
    dp_size: int,
    cp_size: int = 1,
    max_tokens_per_rank: int,
    group_size: int = 1,
    pack_offsets: npt.NDArray[Any] | None = None,
    cost: SequenceCost | None = None,
    media_cost: Float64Array | None = None,
    pad_to_multiple: int = 1,
    pads_further: bool = True,
) -> Schedule:
    """Place the sequences of one global batch on ranks and microbatches: a pure function, the same on every rank.

    Args:
        name: a key of `SCHEDULERS`.
        lengths: [sequences] integers, model tokens of each sequence after padding.
        dp_size: data-parallel ranks.
        cp_size: context-parallel ranks that share a row; 1 for `dynamic_context`, which chooses it for each row.
        max_tokens_per_rank: tokens that one rank holds; a row holds max_tokens_per_rank * cp_size.
        group_size: the number of microbatches is rounded up to a multiple of this (groups of virtual pipeline stages).
        pack_offsets: [packs + 1] integers, the bounds of stored packs in `lengths`; required by `as_packed`.
        cost: cost of training a sequence, for `cost_balanced` and `dynamic_context`.
        media_cost: float64 [sequences], cost of encoding the media of each, for the same two; None without media.
        pad_to_multiple: every sequence was padded to a multiple of this many tokens; shared rows are padded further.
        pads_further: False if shared rows cannot be padded further; then only costly sequences are shared.

    Returns:
        Every index of `lengths` once, in rows that fit, with the same number of rows for every rank.

    Raises:
        ScheduleError: no sequences, a length below 1 or too long for a row, or packs that do not match the lengths.
    """
    if name not in SCHEDULERS:
        what = f"{name!r} is not a schedule"
        raise ScheduleError(what, where="schedule.name", fix=f"choose one of: {', '.join(SCHEDULERS)}")
    for what, number in (("dp_size", dp_size), ("cp_size", cp_size), ("group_size", group_size)):
        if number < 1:
            raise ScheduleError(f"{what} is {number}", where=what, fix="set it to 1 or more")
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.shape[0] == 0:
        raise ScheduleError("there are no sequences to schedule", where="lengths", fix="schedule at least one sequence")
    offsets = None if pack_offsets is None else np.asarray(pack_offsets, dtype=np.int64)
    if offsets is not None and ([*offsets[:1], *offsets[-1:]] != [0, sizes.shape[0]] or (np.diff(offsets) < 1).any()):
        what = f"pack_offsets do not cut {sizes.shape[0]:,} sequences into packs: "
        what += "they must increase strictly from 0 to the number of sequences"
        fix = "pass the offsets of exactly these sequences, such as reader.pack_offsets"
        raise ScheduleError(what, where="pack_offsets", fix=fix)
    if name == DYNAMIC and cp_size > 1:
        fix = "set it to 1: this schedule decides for each row how many data-parallel ranks share it"
        raise ScheduleError(f"cp_size is {cp_size}, and the schedule is {DYNAMIC}", where="cp_size", fix=fix)
    row, cost = max_tokens_per_rank * cp_size, cost or SequenceCost()
    limits: dict[str, Any] = {"dp_size": dp_size, "cp_size": cp_size, "pad_to_multiple": pad_to_multiple}
    check_lengths(sizes, offsets, name, max_tokens_per_rank, most_ranks=cost.most_ranks, **limits)
    batch = GlobalBatch(sizes, dp_size, row, group_size, offsets, cost, media_cost, pad_to_multiple, pads_further)
    return SCHEDULERS[name](batch)
