"""The two-phase pipeline of Megatron's data scheduler, for streams, whose lengths are not known in advance.

`wrap_data_iterator` runs once per global batch: it fetches packs, gathers the lengths of their sequences over
data-parallel ranks, schedules, sends every sequence to its rank and builds packed rows.
`get_batch_on_this_rank_for_sequence_packing` runs once per microbatch: it broadcasts over tensor-parallel ranks, takes
the context-parallel slice and makes PackedSeqParams. Stored datasets need none of it: every rank plans from stored
lengths, reads its own part (`harness.loader`) and gets the same rows.

The parts below have the names and roles of Megatron's `data_schedule_utils`. Lengths, counts and sizes travel as
int64: float32 would round a count above 2^24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from harness.errors import ConfigError, LoaderError
from harness.loader import RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.compat import packed_seq_params
from harness.megatron.data.feed import together
from harness.records import Int64Array, Pack, Schedule, SequenceView
from harness.schedule import ScheduleConfig, SequenceCost, schedule
from harness.thd import ThdBatch, build_thd_batch, padded_lengths, zero_loss_row


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


@dataclass(frozen=True)
class BasePackingScheduler:
    """Phase 1 for one schedule.

    Attributes:
        max_seqlen_per_dp_cp_rank: tokens that one rank holds, `max_tokens_per_rank` elsewhere.
        layout: the place of this rank.
        cost: of training a sequence, for `cost_balanced`.
        device: of the exchanged tensors.
    """

    name: ClassVar[str]

    max_seqlen_per_dp_cp_rank: int
    layout: RankLayout
    device: torch.device
    cost: SequenceCost | None = None

    def get_groups_and_subsamples(self, lengths: Int64Array) -> Schedule:
        """Schedule the sequences of a global batch: a pure function of their stored lengths."""
        return schedule(
            self.name,
            padded_lengths(lengths, self.layout.pad_to_multiple),
            dp_size=self.layout.dp_size,
            cp_size=self.layout.cp_size,
            max_tokens_per_rank=self.max_seqlen_per_dp_cp_rank,
            group_size=self.layout.group_size,
            cost=self.cost,
        )

    def run(self, data_iterator: Iterator[Pack] | None, num_microbatches: int) -> PackedGlobalBatch | None:
        """Fetch, schedule, route, pack and broadcast on every rank of the job; return None at the stream's end.

        Raises:
            HarnessError: on every rank, where any rank's stream or schedule fails.
        """
        dp_group = parallel_state.get_data_parallel_group()
        tp_group = parallel_state.get_tensor_model_parallel_group()
        pp_group = parallel_state.get_pipeline_model_parallel_group()
        sequences = together(
            lambda: [] if data_iterator is None else get_batch(data_iterator, num_microbatches), device=self.device
        )
        lengths, offsets = None, None
        if data_iterator is not None:
            lengths, offsets = get_global_seqlens(sequences, dp_group, self.device)
        if self.layout.tp_rank == 0:
            lengths = broadcast_to_pp_group(lengths, pp_group, self.device)
        (count,) = broadcast_scalars([0 if lengths is None else lengths.shape[0]], tp_group, self.device)
        if count == 0:
            return None
        placed = together(
            lambda: None if lengths is None else self.get_groups_and_subsamples(lengths), device=self.device
        )
        rows, scalars = None, [0, 0, 0]
        if placed is not None and lengths is not None:
            rows = self._rows(sequences, placed, lengths, offsets)
            model = lengths - 1
            scalars = [placed.num_microbatches, int(model.sum()), int((model * model).sum())]
        scalars = broadcast_scalars(scalars, tp_group, self.device)
        return PackedGlobalBatch(create_data_iterator(rows, self.layout.virtual_stages), *scalars)

    def _rows(
        self, sequences: list[SequenceView], placed: Schedule, lengths: Int64Array, offsets: Int64Array | None
    ) -> list[ThdBatch]:
        dp_rank = self.layout.dp_rank
        if offsets is None:  # a stage that reads nothing
            ids = np.concatenate([placed.row(microbatch, dp_rank) for microbatch in range(placed.num_microbatches)])
            mine = {int(i): SequenceView(np.zeros(lengths[i], np.int32), np.zeros(lengths[i], np.uint8)) for i in ids}
        else:
            dp_group = parallel_state.get_data_parallel_group()
            mine = reroute_samples_to_dcp_ranks(sequences, placed, lengths, offsets, dp_group, self.device)
        return build_packed_microbatches(mine, placed, dp_rank, pad_to_multiple=self.layout.pad_to_multiple)


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
        fix = f"choose one of {', '.join(scheduler_map)}"
        raise ConfigError(f"the schedule {config.name} does not work on streams", where="schedule.name", fix=fix)
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

    def shared(owner: object, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device) if owner is None else getattr(owner, name)
        broadcast_tensor(tensor, group)
        return tensor

    fields = {name: shared(row, name, (1, tokens), torch.int64) for name in ("tokens", "labels", "position_ids")}
    loss_mask = shared(row, "loss_mask", (1, tokens), torch.float32)
    params = row and row.packed_seq_params
    cu_seqlens = shared(params, "cu_seqlens_q", (ends,), torch.int32)
    padded = shared(params, "cu_seqlens_q_padded", (ends,), torch.int32) if is_padded else None
    params = packed_seq_params(
        cu_seqlens=cu_seqlens, cu_seqlens_padded=padded, max_seqlen=max_seqlen, total_tokens=total
    )
    return RowTensors(**fields, loss_mask=loss_mask, packed_seq_params=params)


def get_batch(data_iterator: Iterator[Pack], num_microbatches: int) -> list[SequenceView]:
    """Return the sequences of the next `num_microbatches` packs, in order; none at the end of the stream.

    Raises:
        LoaderError: the stream ends within a global batch.
    """
    packs = list(islice(data_iterator, num_microbatches))
    if 0 < len(packs) < num_microbatches:
        raise LoaderError(
            f"the stream ended after {len(packs)} of {num_microbatches} packs of a global batch",
            where="the stream of packs",
            fix="end the stream after a whole global batch, or pad it with packs without trained tokens",
        )
    return [sequence for pack in packs for sequence in pack.sequences()]


def get_global_seqlens(
    sequences: Sequence[SequenceView], dp_group: ProcessGroup, device: torch.device
) -> tuple[Int64Array, Int64Array]:
    """Gather stored lengths over the data-parallel ranks.

    Returns:
        int64 [sequences of all ranks], rank after rank; and int64 [ranks + 1], the bounds of the ranks in it.
    """
    mine = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64, device=device)
    counts = _all_gather(torch.tensor([mine.shape[0]], dtype=torch.int64, device=device), dp_group).view(-1)
    padded = torch.zeros(int(counts.max()), dtype=torch.int64, device=device)
    padded[: mine.shape[0]] = mine
    gathered = _all_gather(padded, dp_group)
    sizes = counts.tolist()
    lengths = torch.cat([row[:size] for row, size in zip(gathered, sizes, strict=True)])
    return lengths.cpu().numpy(), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _all_gather(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """[ranks, *shape]"""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


def reroute_samples_to_dcp_ranks(
    sequences: Sequence[SequenceView],
    schedule: Schedule,
    lengths: Int64Array,
    offsets: Int64Array,
    dp_group: ProcessGroup,
    device: torch.device,
) -> dict[int, SequenceView]:
    """Send every sequence to the data-parallel rank that trains it.

    Ranks that share a row by context parallelism do the same, each in its own data-parallel group.

    Args:
        sequences: of this rank, with the global ids from `offsets[rank]` on.
        lengths: int64, stored tokens of every sequence of the global batch.

    Returns:
        This rank's sequences by global id.
    """
    rank, size = dp_group.rank(), dp_group.size()
    first = int(offsets[rank])
    # Sender and receiver both order their sequences by id, so no ids have to be sent.
    wanted = [
        np.sort(np.concatenate([schedule.row(m, destination) for m in range(schedule.num_microbatches)]))
        for destination in range(size)
    ]
    outgoing = [ids[(ids >= first) & (ids < offsets[rank + 1])] for ids in wanted]
    incoming = [wanted[rank][(wanted[rank] >= offsets[s]) & (wanted[rank] < offsets[s + 1])] for s in range(size)]
    sent = [int(lengths[ids].sum()) for ids in outgoing]
    received = [int(lengths[ids].sum()) for ids in incoming]
    order = [int(sequence) - first for ids in outgoing for sequence in ids]
    columns = []
    for field, dtype in (("input_ids", torch.int32), ("loss_mask", torch.uint8)):
        parts = [torch.from_numpy(np.ascontiguousarray(getattr(sequences[index], field))) for index in order]
        data = torch.cat(parts).to(device) if parts else torch.empty(0, dtype=dtype, device=device)
        target = torch.empty(sum(received), dtype=dtype, device=device)
        torch.distributed.all_to_all_single(target, data, received, sent, group=dp_group)
        columns.append(target.cpu().numpy())
    ids = [int(sequence) for part in incoming for sequence in part]
    ends = np.cumsum(lengths[ids]) if ids else np.zeros(0, dtype=np.int64)
    return {
        sequence: SequenceView(columns[0][end - lengths[sequence] : end], columns[1][end - lengths[sequence] : end])
        for sequence, end in zip(ids, ends.tolist(), strict=True)
    }


def build_packed_microbatches(
    samples: dict[int, SequenceView], schedule: Schedule, dp_rank: int, *, pad_to_multiple: int
) -> list[ThdBatch]:
    """Return this rank's rows, one per microbatch; a row without sequences is one of zero loss."""
    placed = (schedule.row(microbatch, dp_rank) for microbatch in range(schedule.num_microbatches))
    rows = ([samples[int(sequence)] for sequence in ids] for ids in placed)
    return [
        build_thd_batch(row, pad_to_multiple=pad_to_multiple) if row else zero_loss_row(pad_to_multiple) for row in rows
    ]


def broadcast_to_pp_group(lengths: Int64Array | None, pp_group: ProcessGroup, device: torch.device) -> Int64Array:
    """Send stored lengths from the first stage of a pipeline to those that read nothing.

    These stages need only lengths: the schedule follows from them, and the bounds of rows from the schedule.
    """
    (count,) = broadcast_scalars([0 if lengths is None else int(lengths.shape[0])], pp_group, device)
    if lengths is not None and pp_group.rank() == 0:
        carried = torch.from_numpy(lengths).to(device)
    else:
        carried = torch.empty(count, dtype=torch.int64, device=device)
    broadcast_tensor(carried, pp_group)
    return carried.cpu().numpy() if lengths is None else lengths


def broadcast_scalars(values: Sequence[int], group: ProcessGroup, device: torch.device) -> list[int]:
    """Return the whole numbers of the group's first rank on every rank."""
    if group.size() == 1:
        return list(values)
    carried = torch.tensor(list(values), dtype=torch.int64, device=device)
    broadcast_tensor(carried, group)
    return [int(value) for value in carried.tolist()]


def broadcast_tensor(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Overwrite `tensor` with that of the group's first rank."""
    if group.size() > 1:
        torch.distributed.broadcast(tensor, torch.distributed.get_process_group_ranks(group)[0], group=group)


def create_data_iterator(rows: list[ThdBatch] | None, virtual_stages: int | None) -> Any:
    """Return an iterator over rows, or a list with one per virtual pipeline stage; None for each without rows."""
    iterators = [None if rows is None else iter(rows) for _ in range(virtual_stages or 1)]
    return iterators[0] if virtual_stages is None else iterators
