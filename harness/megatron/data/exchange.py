"""The parts of the two-phase pipeline: gather lengths, route sequences, build rows, broadcast.

Names and roles are those of Megatron's `data_schedule_utils`. Lengths, counts and sizes travel as int64: float32 would
round a count above 2^24.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from harness.errors import LoaderError
from harness.records import Int64Array, Pack, Schedule, SequenceView
from harness.thd import ThdBatch, build_thd_batch, zero_loss_row


def get_batch(data_iterator: Iterator[Pack], num_microbatches: int) -> list[SequenceView]:
    """Return the sequences of the next `num_microbatches` packs, in order; none at the end of the stream.

    Raises:
        LoaderError: the stream ends within a global batch.
    """
    packs: list[Pack] = []
    for pack in data_iterator:
        packs.append(pack)
        if len(packs) == num_microbatches:
            break
    if 0 < len(packs) < num_microbatches:
        raise LoaderError(
            f"the stream ended after {len(packs)} of {num_microbatches} packs of a global batch",
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
    rows = []
    for microbatch in range(schedule.num_microbatches):
        ids = schedule.row(microbatch, dp_rank)
        sequences = [samples[int(sequence)] for sequence in ids]
        rows.append(
            build_thd_batch(sequences, pad_to_multiple=pad_to_multiple) if sequences else zero_loss_row(pad_to_multiple)
        )
    return rows


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
    if virtual_stages is None:
        return None if rows is None else iter(rows)
    return [None if rows is None else iter(rows) for _ in range(virtual_stages)]
