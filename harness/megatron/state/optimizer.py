"""Optimizer state in one format on disk, independent of which of Megatron's optimizers writes or reads it.

Megatron's plain and distributed optimizers store the same numbers under different names, and neither reads the other's
format. Here a checkpoint contains, for every weight `W`, `optimizer.state.exp_avg.W`, `optimizer.state.exp_avg_sq.W`
and, for a bfloat16 model, the float32 weight `optimizer.state.fp32_param.W` (in a float32 model that is `W` itself),
and the number of steps taken. Learning rates and weight decay come from the configuration and the schedule. Moments are
stored in their optimizer's dtype, and converted for an optimizer with another one (`optimizer.moments_dtype`).

A rank of the distributed optimizer owns a range of the elements of each weight in its buffers. Megatron either saves
ranges of its buffers, which fit only one tensor and pipeline parallelism, or gathers the whole state on the host of
every rank. Here a range is described as boxes of its weight, at most `2 * dimensions - 1` of them. The boxes are views
of the rank's range, nothing is gathered or copied, and any layout finds the parts that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from harness.errors import CheckpointError

# Name in the distributed optimizer of the float32 weights that it trains.
_MAIN = "param"


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that Megatron chains if a model needs several; usually only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def sharded_tensors(
    part: Any, weights: dict[str, Any], *, is_float32: bool, is_loading: bool
) -> tuple[dict[str, ShardedBase], list[torch.Tensor]]:
    """Return the state of one optimizer as sharded tensors with their names on disk, without copying.

    The sharded tensors are for `dist_checkpointing`, under arbitrary keys. Also returns the local tensors, in the same
    order; they are views of the optimizer's own state.
    """
    if is_loading:
        _make_empty_state(part)
    if isinstance(part, DistributedOptimizer):
        tensors = list(_shards_of(part, weights, is_float32=is_float32))
    else:
        own = nested_values(part.sharded_state_dict(weights, is_loading=is_loading))
        tensors = [one for one in own if isinstance(one, ShardedBase)]
    return {str(number): tensor for number, tensor in enumerate(tensors)}, [tensor.data for tensor in tensors]


@torch.no_grad()
def put_back(part: Any, values: list[torch.Tensor], loaded: dict[str, torch.Tensor], steps: int) -> None:
    """Copy the `loaded` tensors into those of an optimizer's `sharded_tensors`, and set the number of steps taken."""
    for number, value in enumerate(values):
        if (source := loaded[str(number)]).data_ptr() != value.data_ptr():  # most are loaded in place
            value.copy_(source)
    for adam in adams(part):
        if _counts_by_weight(adam):
            for state in adam.state.values():
                state["step"] = torch.tensor(float(steps))
        else:  # Transformer Engine's and Apex's Adam count by group
            for group in adam.param_groups:
                group["step"] = steps


def steps_taken(part: Any) -> int:
    """Return the number of updates; Adam implementations count them by weight or by group."""
    groups = (group for adam in adams(part) for group in adam.param_groups if group["params"])
    states = (state for adam in adams(part) for state in adam.state.values())
    return max((int(one["step"]) for one in chain(groups, states) if "step" in one), default=0)


def adams(part: Any) -> list[torch.optim.Optimizer]:
    """Return the Adam optimizers in an optimizer: one, or with `optimizer.offload`, those of the host and the GPU."""
    inner = part.optimizer
    return list(inner.sub_optimizers) if isinstance(inner, HybridDeviceOptimizer) else [inner]


def _counts_by_weight(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def _make_empty_state(part: Any) -> None:
    """Create the state that the first step creates; Megatron needs it before loading."""
    is_offloaded = isinstance(part.optimizer, HybridDeviceOptimizer)
    if not is_offloaded and not _counts_by_weight(part.optimizer):
        if isinstance(part, DistributedOptimizer):
            part.load_state_dict(part.state_dict())
        return
    for adam in adams(part):
        for weight in chain.from_iterable(group["params"] for group in adam.param_groups):
            if not adam.state[weight]:
                moments = {name: torch.zeros_like(weight.data) for name in ("exp_avg", "exp_avg_sq")}
                count = {"step": torch.tensor(0.0)} if _counts_by_weight(adam) else {}
                adam.state[weight] = {**count, **moments}
    if is_offloaded:
        part.optimizer._sync_sub_optimizers_state_to_hdo()


def _shards_of(part: Any, weights: dict[str, Any], *, is_float32: bool) -> Iterator[ShardedTensor]:
    """Yield the state that a rank of the distributed optimizer owns, as boxes of the tensors on disk."""
    by_weight = {id(sharded.data): sharded for sharded in nested_values(weights) if hasattr(sharded, "data")}
    buckets = chain.from_iterable(chain.from_iterable(buffer.values()) for buffer in part.gbuf_ranges)
    for weight, ranges in chain.from_iterable(bucket["param_map"].items() for bucket in buckets):
        owned = range(ranges["param"].start, ranges["param"].end)
        pieces = _pieces(by_weight[id(weight)])
        # Number of the replica of the state that this rank belongs to; replica 0 is saved.
        instance = int(getattr(part, "distributed_optimizer_instance_id", 0))
        group, place = part.model_param_group_index_map[weight]
        main = part.optimizer.param_groups[group]["params"][place]
        # Megatron's `_get_main_param_and_optimizer_states` returns copies of moments in bfloat16.
        states = {name: value for name, value in part.optimizer.state[main].items() if name != "step"}
        # If the inner optimizer owns the float32 weights, they are part of its state.
        for name, state in {_MAIN: states.pop("master_param", main), **states}.items():
            # A float32 main weight is a view of the model's own weight, which the model saves and loads.
            if is_float32 and name == _MAIN:
                continue
            prefix = f"optimizer.state.{'fp32_param' if name == _MAIN else name}"
            for at, piece in pieces:
                yield from _cut(piece, at, f"{prefix}.{piece.key}", state.detach(), owned, instance)


def _pieces(sharded: Any) -> list[tuple[int, ShardedTensor]]:
    """Return the tensors on disk that a weight consists of, each with the index of its first element in the weight."""
    if not isinstance(sharded, ShardedTensorFactory):
        return [(0, sharded)]
    # Build the parts without data: only their offsets matter.
    whole = torch.empty(sharded.data.shape, device="meta")
    pieces = [(piece.data.storage_offset(), piece) for piece in nested_values(replace(sharded, data=whole).build())]
    end = 0
    for at, piece in sorted(pieces, key=lambda one: one[0]):
        if at != end or not piece.data.is_contiguous():
            what = f"the optimizer's state of {sharded.key} cannot be split into the tensors of a checkpoint"
            fix = "set parallel.distributed_optimizer=false for this model"
            raise CheckpointError(what, where="parallel.distributed_optimizer", fix=fix)
        end += piece.data.numel()
    return pieces


def _cut(
    piece: ShardedTensor, at: int, key: str, state: torch.Tensor, owned: range, instance: int
) -> Iterator[ShardedTensor]:
    """Yield the boxes that a rank owns of one tensor on disk."""
    prefix = (1,) * piece.prepend_axis_num
    first, last = max(owned.start, at), min(owned.stop, at + math.prod(piece.local_shape))
    for offset, size in boxes(piece.local_shape, first - at, last - at):
        num_elements = math.prod(size)
        begin = first - owned.start
        first += num_elements
        origin = piece.global_offset[len(prefix) :]
        yield replace(
            piece,
            key=key,
            data=state[begin : begin + num_elements].view(*prefix, *size),
            dtype=state.dtype,
            local_shape=(*prefix, *size),
            global_offset=(*piece.global_offset[: len(prefix)], *(a + b for a, b in zip(origin, offset, strict=True))),
            axis_fragmentations=None,  # parts of a tensor differ in size
            prepend_axis_num=0,
            # Ranks of a data-parallel group own different elements.
            replica_id=(*piece.replica_id[:2], instance),
        )


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, size) of the fewest boxes that cover elements `start` to `stop` of a tensor, in order.

    >>> list(boxes((4, 10), 7, 33))
    [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 3))]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, skipped = divmod(start, row)
        if skipped == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(stop, (index + 1) * row)
            for offset, size in boxes(shape[1:], skipped, end - index * row):
                yield (index, *offset), (1, *size)
            start = end
