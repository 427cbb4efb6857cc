"""Optimizer state in one form on disk, whichever of Megatron's optimizers wrote it or will read it.

Megatron's plain and distributed optimizers store the same numbers under different names, and neither reads the
other's. Here a checkpoint has, for every weight `W`, `optimizer.state.exp_avg.W`, `optimizer.state.exp_avg_sq.W` and,
for a bfloat16 model, the float32 weight `optimizer.state.fp32_param.W` (in a float32 model that is `W` itself), and
the number of steps taken. Learning rates and weight decay come from the configuration and the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# Name that the distributed optimizer has for the float32 weights that it trains.
_MAIN = "param"


@dataclass(frozen=True)
class OptimizerTensors:
    """The sharded tensors of one of Megatron's optimizers, under the names of the disk.

    Attributes:
        by_number: sharded tensors for `dist_checkpointing`, under keys that mean nothing.
        values: their local tensors, in the same order.
        places: number of the weight and name of the state under which the distributed optimizer expects each.
    """

    by_number: dict[str, ShardedBase]
    values: list[torch.Tensor]
    places: list[tuple[int, str]]


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that Megatron chains if a model needs several; usually there is one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def sharded_tensors(part: Any, weights: dict[str, Any], *, is_float32: bool, is_loading: bool) -> OptimizerTensors:
    """Return the state of one optimizer as sharded tensors; every rank takes part.

    Args:
        part: one of `parts_of`.
        weights: the model's own sharded state.
        is_float32: True if the model's weights are.
    """
    if is_loading:
        _make_empty_state(part.optimizer)
    state = part.sharded_state_dict(
        weights, is_loading=is_loading, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
    )
    placed: list[tuple[tuple[int, str], ShardedBase]] = []
    if isinstance(part, DistributedOptimizer):
        for number, tensors in state["param_state"].items():
            for name, tensor in tensors.items():
                if is_float32 and name == _MAIN:
                    continue  # the model's own weights, which the model saves and loads
                key = tensor.key.replace(f"optimizer.state.{_MAIN}.", "optimizer.state.fp32_param.", 1)
                placed.append(((number, name), replace(tensor, key=key)))
    else:
        placed = [((0, ""), tensor) for tensor in _sharded_in(state)]
    return OptimizerTensors(
        by_number={str(number): tensor for number, (_, tensor) in enumerate(placed)},
        values=[tensor.data for _, tensor in placed],
        places=[place for place, _ in placed],
    )


@torch.no_grad()
def put_back(part: Any, tensors: OptimizerTensors, loaded: dict[str, torch.Tensor], steps: int) -> None:
    """Copy into an optimizer the `loaded` tensors of its `sharded_tensors`, and the number of steps taken.

    The model's weights must be loaded already.
    """
    inner = part.optimizer
    if isinstance(part, DistributedOptimizer):
        for state in inner.state.values():
            state.pop("step", None)  # Megatron expects every entry to have the weight's shape
        by_weight: dict[int, dict[str, torch.Tensor]] = {}
        for number, (weight, name) in enumerate(tensors.places):
            by_weight.setdefault(weight, {})[name] = loaded[str(number)]
        # In the order in which the optimizer numbers them.
        for weight, parameter in enumerate(chain.from_iterable(buffer.param_index_map for buffer in part.buffers)):
            by_weight[weight].setdefault(_MAIN, parameter)
        part.load_parameter_state_from_fully_reshardable(by_weight)
    else:
        for number, value in enumerate(tensors.values):
            value.copy_(loaded[str(number)])
    if _counts_by_weight(inner):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(steps))
    else:  # Transformer Engine's and Apex's Adam count by group
        for group in inner.param_groups:
            group["step"] = steps


def steps_taken(part: Any) -> int:
    """Return the number of updates, wherever the implementation counts them."""
    inner = part.optimizer
    counts = {int(state["step"]) for state in inner.state.values() if "step" in state}
    counts |= {int(group["step"]) for group in inner.param_groups if "step" in group and group["params"]}
    return max(counts, default=0)


def _counts_by_weight(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def _make_empty_state(inner: torch.optim.Optimizer) -> None:
    """Create the state that PyTorch's Adam creates in its first step; Megatron needs it before loading."""
    if not _counts_by_weight(inner):
        return
    for weight in chain.from_iterable(group["params"] for group in inner.param_groups):
        if not inner.state[weight]:
            moments = {name: torch.zeros_like(weight.data) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[weight] = {"step": torch.tensor(0.0), **moments}


def _sharded_in(state: Any) -> Iterator[ShardedBase]:
    """Yield every sharded tensor of a plain optimizer's state, in its order."""
    if isinstance(state, ShardedBase):
        if hasattr(state, "replica_id"):
            yield state
    elif isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _sharded_in(value)
