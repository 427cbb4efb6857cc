"""Parts of Megatron-LM's packing scheduler, by the names of its `megatron.core.datasets.data_schedule_utils`.

A *sample* is one sequence as a dict of tensors: `tokens`, `labels`, `position_ids` (int64 [n]), `loss_mask` (float32
[n]), `original_seq_len` and `padded_seq_len` (integers [1]; n is the padded length). A *row* is the samples of one
microbatch laid end to end, with `cu_seqlens`, `cu_seqlens_padded` (int32 [S + 1]), `max_seqlen` (int32 scalar) and
`padding_mask` (bool [T], True at padding); with dynamic context parallelism also `local_cp_size` (int32 scalar), the
ranks that share it.

Counts and sums travel as int64 or float64: float32 would round a count above 2^24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from torch.distributed import ProcessGroup

from harness.errors import HarnessError, LoaderError
from harness.records import Pack
from harness.thd import build_thd_batch, visible_bounds, zero_loss_row

Sample = dict[str, torch.Tensor]
Row = dict[str, torch.Tensor]

FIELDS: Mapping[str, torch.dtype] = MappingProxyType(
    {"tokens": torch.int64, "position_ids": torch.int64, "labels": torch.int64, "loss_mask": torch.float32}
)
_LENGTHS = ("original_seq_len", "padded_seq_len")
_BOUNDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_NUMBERS = (*_BOUNDS, "local_cp_size")
_FAILED, _ENDED = -1, -2  # in place of the lengths of a rank's samples


def samples_of_pack(pack: Pack, *, pad_to_multiple: int = 1) -> list[Sample]:
    """Return the sequences of a stored pack as samples, which an iterator for `wrap_data_iterator` may yield.

    `pad_to_multiple` is that of the layout (`harness.thd.padding_multiple`).
    """
    row = build_thd_batch(pack.sequences(), pad_to_multiple=pad_to_multiple)
    return list(_checked({name: getattr(row, name) for name in (*FIELDS, *_BOUNDS)}, "the pack"))


def get_batch_and_global_seqlens(
    data_iterator: Iterator[Any], num_microbatches: int, dp_group: ProcessGroup
) -> tuple[list[Sample], list[tuple[int, int]], torch.Tensor, torch.Tensor, list[int]]:
    """Fetch this rank's part of a global batch, and gather the lengths of all of it over data-parallel ranks.

    Args:
        data_iterator: yields `num_microbatches` items a global batch: a sample, a list of samples, or the sequences of
            one pack with `cu_seqlens` (and `cu_seqlens_padded`, where they are padded).

    Returns:
        This rank's samples; (id, padded tokens) of every sample of the global batch; the ids of this rank's, int32;
        the first id of each rank and their number, int32 [ranks + 1]; the padded tokens of every sample.

    Raises:
        StopIteration: the iterators of all ranks are at their end.
        LoaderError: on every rank of the group, where an iterator ends within a global batch or before those of other
            ranks, or an item is not one of these.
    """
    error: Exception | None = None
    samples: list[Sample] = []
    try:
        samples = _read_samples(data_iterator, num_microbatches)
        own: list[int] | int = [int(sample["padded_seq_len"]) for sample in samples]
    except StopIteration:
        own = _ENDED
    except Exception as raised:
        error, own = raised, _FAILED
    gathered: list[Any] = [None] * dp_group.size()
    torch.distributed.all_gather_object(gathered, own, group=dp_group)
    if _FAILED in gathered:
        raise_together(error, (dp_group,))
    if all(each == _ENDED for each in gathered):
        raise StopIteration
    if _ENDED in gathered:
        ranks = torch.distributed.get_process_group_ranks(dp_group)
        what = f"the stream of rank {ranks[gathered.index(_ENDED)]} has ended before those of other ranks"
        fix = "provide the same number of microbatches on every data-parallel rank"
        raise LoaderError(what, where="the data iterator", fix=fix)
    lengths = [length for each in gathered for length in each]
    offsets = torch.tensor([0, *np.cumsum(list(map(len, gathered)))], dtype=torch.int32)
    ids = torch.arange(int(offsets[dp_group.rank()]), int(offsets[dp_group.rank() + 1]), dtype=torch.int32)
    return samples, list(enumerate(lengths)), ids, offsets, lengths


def _read_samples(data_iterator: Iterator[Any], num_microbatches: int) -> list[Sample]:
    items: list[Any] = []
    with suppress(StopIteration):  # Megatron's RerunDataIterator has __next__ alone: no `for` over it
        while len(items) < num_microbatches:
            items.append(next(data_iterator))
    if not items:
        raise StopIteration
    if len(items) < num_microbatches:
        what = f"the stream ended after {len(items)} of {num_microbatches} microbatches of a global batch"
        fix = "end the stream after a complete global batch, or pad it with samples without trained tokens"
        raise LoaderError(what, where="the data iterator", fix=fix)
    samples: list[Sample] = []
    for number, item in enumerate(items):
        for part in item if isinstance(item, (list, tuple)) else [item]:
            samples.extend(_checked(part, f"microbatch {number} of the global batch"))
    if not samples:
        what = "a global batch has no samples on this rank"
        raise LoaderError(what, where="the data iterator", fix="yield at least one sample per microbatch")
    return samples


def _checked(item: Any, where: str) -> Iterator[Sample]:
    """Yield the samples of an item of the stream, with the dtypes of FIELDS; the item is left as it is."""
    if not isinstance(item, Mapping):
        what = f"an item of the stream is a {type(item).__name__}"
        raise LoaderError(what, where=where, fix="yield a dict of tensors, a list of them, or `samples_of_pack(pack)`")
    values = {name: torch.as_tensor(value) for name, value in item.items() if name in (*FIELDS, *_LENGTHS, *_BOUNDS)}
    # A collate function adds a dimension for a batch of one.
    values = {
        name: value.squeeze(0) if value.dim() == 2 and value.shape[0] == 1 else value for name, value in values.items()
    }
    required = (*FIELDS, "padded_seq_len") if "padded_seq_len" in values else (*FIELDS, "cu_seqlens")
    if missing := [name for name in required if name not in values]:
        what = f"a sample is missing {', '.join(missing)}; it contains {', '.join(map(str, item)) or 'no entries'}"
        fix = "a sample requires tokens, labels, loss_mask, position_ids, original_seq_len and padded_seq_len, or "
        fix += "cu_seqlens for several concatenated sequences"
        raise LoaderError(what, where=where, fix=fix)
    data = {name: values[name].reshape(-1).to(dtype) for name, dtype in FIELDS.items()}
    sizes = {name: value.shape[0] for name, value in data.items()}
    if len(set(sizes.values())) > 1:
        what = f"a sample has {', '.join(f'{size:,} {name}' for name, size in sizes.items())}"
        raise LoaderError(what, where=where, fix="use the same length for all four")
    for start, stop, real in _bounds(values, data, where):
        lengths = (torch.tensor([length], dtype=torch.int32) for length in (real, stop - start))
        yield {name: value[start:stop] for name, value in data.items()} | dict(zip(_LENGTHS, lengths, strict=True))


def _bounds(values: Sample, data: Sample, where: str) -> list[tuple[int, int, int]]:
    """Return the start, the end and the real tokens of each sequence of an item."""
    total = data["tokens"].shape[0]
    if "padded_seq_len" in values:
        padded = [0, int(values["padded_seq_len"])]
        real = [0, int(values.get("original_seq_len", values["padded_seq_len"]))]
    else:
        real = values["cu_seqlens"].reshape(-1).tolist()
        padded = values.get("cu_seqlens_padded", values["cu_seqlens"]).reshape(-1).tolist()
    if len(real) != len(padded) or len(real) < 2 or real[0] != 0 or padded[0] != 0:
        what = (
            f"cu_seqlens begin {real[:3]} with {len(real)} entries, cu_seqlens_padded {padded[:3]} with {len(padded)}"
        )
        fix = "both are cumulative lengths that start at 0, with one entry more than the number of sequences"
        raise LoaderError(what, where=where, fix=fix)
    spans = zip(padded[:-1], padded[1:], np.diff(real).tolist(), strict=True)
    found = [span for span in spans if span[0] != span[1]]
    wrong = [span for span in found if not (0 <= span[0] < span[1] <= total and 0 < span[2] <= span[1] - span[0])]
    end = max((stop for _, stop, _ in found), default=0)
    if wrong or not found or bool(data["loss_mask"][end:].any()) or ("padded_seq_len" in values and end != total):
        what = f"from {wrong[0][0]} to {wrong[0][1]} with {wrong[0][2]} real tokens" if wrong else f"ending at {end}"
        fix = "bounds must increase from 0 to the number of tokens, and real lengths must not exceed padded ones; "
        fix += "trained tokens after the last sequence would be lost"
        raise LoaderError(f"a sample of {total:,} tokens has a sequence {what}", where=where, fix=fix)
    return found


def reroute_samples_to_dcp_ranks(
    batch: Sequence[Sample],
    global_ids_this_rank: torch.Tensor,
    global_id_seqlens: Sequence[tuple[int, int]],
    sample_id_groups: Sequence[Sequence[Sequence[int]]],
    offsets: torch.Tensor,
    dp_group: ProcessGroup,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    total_dcp_gpus: int | None = None,
) -> dict[int, Sample]:
    """Send every sample to the rank that trains it; return those of this rank by id.

    Ranks that share a row by context parallelism do the same, each in its own data-parallel group; only matching ranks
    have different samples.

    Args:
        batch: this rank's samples, with the ids `global_ids_this_rank`.
        global_id_seqlens: (id, padded tokens) of every sample of the global batch.
        sample_id_groups: by microbatch, then rank of `dp_cp_group`: ids.
        offsets: [ranks + 1], the first id of each data-parallel rank.
        tp_group, total_dcp_gpus: of earlier versions; not used.
    """
    lengths = dict(global_id_seqlens)
    bounds = [int(offset) for offset in offsets]
    of_both = torch.distributed.get_process_group_ranks(dp_cp_group)
    positions = [of_both.index(rank) for rank in torch.distributed.get_process_group_ranks(dp_group)]
    # Sender and receiver both order samples by id, so no ids have to be sent.
    wanted = [sorted(i for group in sample_id_groups for i in group[position]) for position in positions]
    rank = dp_group.rank()
    first, stop = bounds[rank], bounds[rank + 1]
    outgoing = [[i for i in ids if first <= i < stop] for ids in wanted]
    incoming = [[i for i in wanted[rank] if bounds[s] <= i < bounds[s + 1]] for s in range(dp_group.size())]
    received_ids = [i for ids in incoming for i in ids]
    received: dict[int, Sample] = {i: {} for i in received_ids}
    device = device_of(dp_group)
    for name in batch[0]:
        sizes = dict.fromkeys(lengths, 1) if name in _LENGTHS else lengths
        sent, counts = ([sum(sizes[i] for i in ids) for ids in side] for side in (outgoing, incoming))
        parts = [batch[i - first][name].reshape(-1) for ids in outgoing for i in ids]
        data = torch.cat([batch[0][name].new_empty(0), *parts]).to(device)
        target = data.new_empty(sum(counts))
        torch.distributed.all_to_all_single(target, data, counts, sent, group=dp_group)
        for i, values in zip(received_ids, torch.split(target, [sizes[i] for i in received_ids]), strict=True):
            received[i][name] = values
    return received


def build_packed_microbatches(
    grouped_samples: Sequence[Sequence[Sample]],
    dev: torch.device,
    *,
    fields: Sequence[str] = tuple(FIELDS),
    pad_to_multiple: int = 1,
) -> list[Row]:
    """Return one row with `fields` for each microbatch's samples; for none, one of zero loss of `pad_to_multiple`."""
    rows = []
    for samples in grouped_samples:
        if samples:
            row = {name: torch.cat([sample[name].reshape(-1) for sample in samples]).to(dev) for name in fields}
            real, padded = ([int(sample[name]) for sample in samples] for name in _LENGTHS)
        else:
            empty = zero_loss_row(pad_to_multiple)
            row = {name: torch.from_numpy(getattr(empty, name)).to(dev) for name in fields}
            real, padded = [empty.num_tokens], [len(empty)]
        bounds = visible_bounds([0, *np.cumsum(real)], [0, *np.cumsum(padded)])
        row["cu_seqlens"], row["cu_seqlens_padded"] = (torch.from_numpy(one).to(dev) for one in bounds)
        row["max_seqlen"] = torch.tensor(max(padded), dtype=torch.int32, device=dev)
        row["padding_mask"] = padding_mask(row["cu_seqlens"], row["cu_seqlens_padded"], is_empty=not samples)
        rows.append(row)
    return rows


def padding_mask(cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, *, is_empty: bool = False) -> torch.Tensor:
    """Return which tokens of a row are padding, bool [T]; all of them in a row without samples (`is_empty`)."""
    total, device = int(cu_seqlens_padded[-1]), cu_seqlens_padded.device
    if is_empty:
        return torch.ones(total, dtype=torch.bool, device=device)
    ends = cu_seqlens_padded[:-1] + torch.diff(cu_seqlens)
    return torch.arange(total, device=device) >= torch.repeat_interleave(ends, torch.diff(cu_seqlens_padded).long())


def broadcast_to_pp_group(
    new_samples: list[Row] | None,
    num_micro_batches: int | None,
    seqlen_sum_this_global_batch: float | None,
    seqlen_squared_sum_this_global_batch: float | None,
    pp_group: ProcessGroup,
    dev: torch.device,
) -> tuple[list[Row] | None, int | None, float | None, float | None]:
    """Send the bounds and the padding of rows, without their tokens, from the first stage to a pipeline's middle ones.

    The last stage has rows of its own. Returns the rows, their number, and the two sums.
    """
    ours = new_samples, num_micro_batches, seqlen_sum_this_global_batch, seqlen_squared_sum_this_global_batch
    if pp_group.size() <= 2:
        return ours
    source = torch.distributed.get_process_group_ranks(pp_group)[0]
    numbers = [{name: row[name].tolist() for name in _NUMBERS if name in row} for row in new_samples or []]
    is_empty = [bool(row["padding_mask"].all()) for row in new_samples or []]
    carried: list[Any] = [list(zip(numbers, is_empty, strict=True)), *ours[1:]]
    torch.distributed.broadcast_object_list(carried, src=source, group=pp_group, device=dev)
    rows, count, total, squared = carried
    if not rows or pp_group.rank() in (0, pp_group.size() - 1):  # no rows: the end of the streams
        return ours
    received = []
    for numbers, is_empty in rows:
        row = {name: torch.tensor(each, dtype=torch.int32, device=dev) for name, each in numbers.items()}
        row["padding_mask"] = padding_mask(row["cu_seqlens"], row["cu_seqlens_padded"], is_empty=is_empty)
        received.append(row)
    return received, count, total, squared


def broadcast_scalars(
    values: Sequence[Any], group: ProcessGroup, dev: torch.device, dtype: torch.dtype = torch.float64
) -> list[Any]:
    """Return the numbers of the group's first rank on every rank; the others may give None."""
    if group.size() <= 1:
        return list(values)
    carried = [0 if value is None else value for value in values] if group.rank() == 0 else [0] * len(values)
    tensor = torch.tensor(carried, dtype=dtype, device=dev)
    broadcast_tensor(tensor, torch.distributed.get_process_group_ranks(group)[0], group)
    return list(values) if group.rank() == 0 else tensor.cpu().tolist()


def broadcast_tensor(item: torch.Tensor | None, src_rank: int, group: ProcessGroup) -> None:
    """Overwrite `item` with that of the rank `src_rank` of the job; None does nothing."""
    if item is not None and group.size() > 1:
        torch.distributed.broadcast(item, src_rank, group=group)


def create_data_iterator(
    new_samples: list[Row] | None, pp_group: ProcessGroup, tp_group: ProcessGroup, config: Any
) -> Any:
    """Return an iterator over rows, or a list with one per virtual pipeline stage; None where rows come by broadcast.

    Only the first chunk of the first stage and the last chunk of the last stage (or all, with multi-token prediction)
    iterate over whole rows; the others have their bounds and padding alone.
    """
    virtual_stages = config.virtual_pipeline_model_parallel_size or 1
    if tp_group.rank() != 0 or new_samples is None:
        return [None] * virtual_stages if virtual_stages > 1 else None
    if virtual_stages == 1:
        return RerunDataIterator(iter(new_samples))
    whole = [bool(getattr(config, "mtp_num_layers", None))] * virtual_stages
    whole[0] |= pp_group.rank() == 0
    whole[-1] |= pp_group.rank() == pp_group.size() - 1
    kept = ([{name: row[name] for name in row if keep or name not in FIELDS} for row in new_samples] for keep in whole)
    return [RerunDataIterator(iter(rows)) for rows in kept]


def raise_together(error: Exception | None, groups: Sequence[ProcessGroup]) -> None:
    """Raise on every rank that the groups connect, one after the other, where any rank has an error.

    A failed rank raises its own; the others raise one that names the first failed rank. Otherwise they would wait in
    their next collective for a rank that has stopped.
    """
    news: tuple[str, HarnessError] | None = None
    if error is not None:
        what, fix = f"{type(error).__name__}: {error}", "see the traceback of this rank"
        foreign = LoaderError(what, where="the data iterator", fix=fix)
        known = error if isinstance(error, HarnessError) else foreign
        # A shared error names its rank already.
        news = ("" if known.is_shared else f"rank {torch.distributed.get_rank()}: ", known)
    for group in groups:
        if group.size() > 1:
            gathered: list[tuple[str, HarnessError] | None] = [None] * group.size()
            torch.distributed.all_gather_object(gathered, news, group=group)
            news = news or next(filter(None, gathered), None)
    if error is not None:
        raise error
    if news is not None:
        prefix, theirs = news
        shared = type(theirs)(f"{prefix}{theirs.what}", where=theirs.where, fix=theirs.fix)
        shared.is_shared = True
        raise shared


def device_of(group: ProcessGroup) -> torch.device:
    """Return the device whose tensors the group exchanges."""
    is_cuda = "nccl" in str(torch.distributed.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
