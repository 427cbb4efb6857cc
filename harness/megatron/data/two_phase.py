"""The two-phase pipeline of Megatron's data scheduler, for streams, whose lengths are not known in advance.

`wrap_data_iterator` runs once per global batch: it fetches packs, gathers the lengths of their sequences over
data-parallel ranks, schedules, sends every sequence to its rank and builds packed rows.
`get_batch_on_this_rank_for_sequence_packing` runs once per microbatch: it broadcasts over tensor-parallel ranks, takes
the context-parallel slice and makes PackedSeqParams. Stored datasets need none of it: every rank plans from stored
lengths, reads its own part (`harness.loader`) and gets the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core import parallel_state

from harness.errors import ConfigError
from harness.loader import RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.compat import packed_seq_params
from harness.megatron.data.exchange import (
    broadcast_scalars,
    broadcast_tensor,
    broadcast_to_pp_group,
    build_packed_microbatches,
    create_data_iterator,
    get_batch,
    get_global_seqlens,
    reroute_samples_to_dcp_ranks,
)
from harness.megatron.data.feed import together
from harness.records import Int64Array, Pack, Schedule, SequenceView
from harness.schedule import ScheduleConfig, SequenceCost, schedule
from harness.thd import ThdBatch, padded_lengths


@dataclass(frozen=True)
class PackedGlobalBatch:
    """The result of phase 1.

    Attributes:
        data_iterator: over this rank's rows; a list with virtual pipeline stages; None where phase 2 gets them from
            another rank.
        num_microbatches: after scheduling, the same on every rank.
        seqlen_sum, seqlen_squared_sum: over the model tokens of the global batch's sequences, to count FLOPs.
    """

    data_iterator: Any
    num_microbatches: int
    seqlen_sum: int
    seqlen_squared_sum: int


class BasePackingScheduler:
    """Phase 1 for one schedule.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that one rank holds, `max_tokens_per_rank` elsewhere.
        layout: the place of this rank.
        cost: of training a sequence, for `cost_balanced`.
        device: of the exchanged tensors.
    """

    name: ClassVar[str]

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        *,
        layout: RankLayout,
        device: torch.device,
        cost: SequenceCost | None = None,
    ) -> None:
        self._max_tokens_per_rank = max_seqlen_per_dp_cp_rank
        self._layout = layout
        self._device = device
        self._cost = cost

    def get_groups_and_subsamples(self, lengths: Int64Array) -> Schedule:
        """Schedule the sequences of a global batch: a pure function of their stored lengths."""
        return schedule(
            self.name,
            padded_lengths(lengths, self._layout.pad_to_multiple),
            dp_size=self._layout.dp_size,
            cp_size=self._layout.cp_size,
            max_tokens_per_rank=self._max_tokens_per_rank,
            group_size=self._layout.group_size,
            cost=self._cost,
        )

    def run(self, data_iterator: Iterator[Pack] | None, num_microbatches: int) -> PackedGlobalBatch | None:
        """Fetch, schedule, route, pack and broadcast on every rank of the job; return None at the stream's end.

        Raises:
            HarnessError: on every rank, where any rank's stream or schedule fails.
        """
        dp_group = parallel_state.get_data_parallel_group()
        tp_group = parallel_state.get_tensor_model_parallel_group()
        pp_group = parallel_state.get_pipeline_model_parallel_group()
        reads = data_iterator is not None
        sequences = together(
            lambda: [] if data_iterator is None else get_batch(data_iterator, num_microbatches), device=self._device
        )
        lengths, offsets = None, None
        if reads:
            lengths, offsets = get_global_seqlens(sequences, dp_group, self._device)
        if self._layout.tp_rank == 0:
            lengths = broadcast_to_pp_group(lengths, pp_group, self._device)
        (count,) = broadcast_scalars([0 if lengths is None else lengths.shape[0]], tp_group, self._device)
        if count == 0:
            return None
        placed = together(
            lambda: None if lengths is None else self.get_groups_and_subsamples(lengths), device=self._device
        )
        rows, scalars = None, [0, 0, 0]
        if placed is not None and lengths is not None:
            rows = self._rows(sequences, placed, lengths, offsets)
            model = lengths - 1
            scalars = [placed.num_microbatches, int(model.sum()), int((model * model).sum())]
        scalars = broadcast_scalars(scalars, tp_group, self._device)
        return PackedGlobalBatch(create_data_iterator(rows, self._layout.virtual_stages), *scalars)

    def _rows(
        self, sequences: list[SequenceView], placed: Schedule, lengths: Int64Array, offsets: Int64Array | None
    ) -> list[ThdBatch]:
        dp_rank = self._layout.dp_rank
        if offsets is None:  # a stage that reads nothing
            mine = {
                int(sequence): _blank(int(lengths[sequence]))
                for microbatch in range(placed.num_microbatches)
                for sequence in placed.row(microbatch, dp_rank)
            }
        else:
            dp_group = parallel_state.get_data_parallel_group()
            mine = reroute_samples_to_dcp_ranks(sequences, placed, lengths, offsets, dp_group, self._device)
        return build_packed_microbatches(mine, placed, dp_rank, pad_to_multiple=self._layout.pad_to_multiple)


class DpBalancedScheduler(BasePackingScheduler):
    """Fills rows in order and balances their number."""

    name = "dp_balanced"


class CostBalancedScheduler(BasePackingScheduler):
    """Balances the cost of rows and ranks."""

    name = "cost_balanced"


scheduler_map: Mapping[str, type[BasePackingScheduler]] = MappingProxyType(
    {kind.name: kind for kind in (DpBalancedScheduler, CostBalancedScheduler)}
)


def needs_data_iterator(layout: RankLayout) -> bool:
    """Return True for ranks that read the stream: the first tensor-parallel rank of the first and last stage."""
    return layout.tp_rank == 0 and (layout.is_first_stage or layout.is_last_stage)


def wrap_data_iterator(
    original_data_iterator: Iterator[Pack] | None,
    config: ScheduleConfig,
    num_microbatches: int,
    *,
    layout: RankLayout,
    device: torch.device,
    cost: SequenceCost | None = None,
) -> PackedGlobalBatch | None:
    """Run phase 1, once per global batch, on every rank of the job.

    Args:
        original_data_iterator: the packs of this data-parallel rank, the same on all ranks that share it; None where
            `needs_data_iterator` is False.
        num_microbatches: packs of each data-parallel rank in a global batch.

    Returns:
        This rank's rows, or None at the end of the stream.

    Raises:
        ConfigError: the schedule needs stored packs.
        HarnessError: on every rank, where any rank's stream or the schedule fails.
    """
    if config.name not in scheduler_map:
        raise ConfigError(
            f"the schedule {config.name} does not work on streams",
            where="schedule.name",
            fix=f"choose one of {', '.join(scheduler_map)}",
        )
    scheduler = scheduler_map[config.name](config.max_tokens_per_rank, layout=layout, device=device, cost=cost)
    return scheduler.run(original_data_iterator, num_microbatches)


def get_batch_on_this_rank_for_sequence_packing(
    wrapped_data_iterator: Iterator[ThdBatch] | None, *, layout: RankLayout, device: torch.device
) -> RowTensors:
    """Run phase 2, once per microbatch: return this rank's slice of the next row, with its PackedSeqParams.

    Args:
        wrapped_data_iterator: from phase 1 (one of its list with virtual stages); None except on the first
            tensor-parallel rank.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    row: RowTensors | None = None
    header = [0] * 5
    if wrapped_data_iterator is not None:
        row = to_device(next(wrapped_data_iterator), device, cp_size=layout.cp_size, cp_rank=layout.cp_rank)
        if group.size() == 1:
            return row
        params = row.packed_seq_params
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        header = [
            row.tokens.shape[1],
            params.cu_seqlens_q.shape[0],
            params.max_seqlen_q,
            int(params.cu_seqlens_q_padded is not None),
            int(bounds[-1]),
        ]
    tokens, ends, max_seqlen, is_padded, total = broadcast_scalars(header, group, device)

    def shared(mine: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine
        broadcast_tensor(tensor, group)
        return tensor

    def field(name: str, dtype: torch.dtype) -> torch.Tensor:
        return shared(None if row is None else getattr(row, name), (1, tokens), dtype)

    token_ids, labels, position_ids = (field(name, torch.int64) for name in ("tokens", "labels", "position_ids"))
    loss_mask = field("loss_mask", torch.float32)
    params = None if row is None else row.packed_seq_params
    cu_seqlens = shared(None if params is None else params.cu_seqlens_q, (ends,), torch.int32)
    padded = None
    if is_padded:
        padded = shared(None if params is None else params.cu_seqlens_q_padded, (ends,), torch.int32)
    return RowTensors(
        token_ids,
        labels,
        position_ids,
        loss_mask,
        packed_seq_params(cu_seqlens=cu_seqlens, cu_seqlens_padded=padded, max_seqlen=max_seqlen, total_tokens=total),
    )


def _blank(length: int) -> SequenceView:
    return SequenceView(np.zeros(length, dtype=np.int32), np.zeros(length, dtype=np.uint8))
