"""Rehearsal of a job on one CPU: builds and trains single ranks of it for a step, without the others.

The layout, the numbers of layers, heads and experts, and the sizes of all groups are the same as in the job; only the
width of matrices, the vocabulary and the length of rows are small. A rehearsal checks that Megatron-Core accepts the
layout and that each rank's part of the model, the schedule and a checkpoint can be built, and compares the bytes of
weights, gradients, optimizer state and activations with the plan. It does not check numerical results: no other rank
takes part in collectives, and tokens are sent to experts evenly.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from harness.megatron.job import runtime
from harness.megatron.model.router import routers
from harness.megatron.state.checkpoint import count_sharded_tensors
from harness.megatron.state.optimizer import adams, parts_of
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.plan.memory import plan_stage_memory
from harness.plan.model_checks import check_division
from harness.records import SequenceView
from harness.schedule.batch import largest_share
from harness.thd import ThdBatch, build_thd_batch, shared_multiple

_VOCABULARY = 256
# Use many short sequences: with context parallelism, PyTorch's attention also saves masks, which grow quadratically.
_SEQUENCES = 16
_PARTS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class RankRehearsal:
    """Sizes of one rank's parts after a step.

    Attributes:
        found, planned: measured and planned bytes of weights, gradients, optimizer state and activations of its stage.
            Activations are the tensors saved by autograd at the step's peak; optimizer state includes the part on the
            host.
    """

    rank: int
    place: dict[str, int]
    layers: int
    microbatches: int
    sharded_tensors: int
    found: dict[str, int]
    planned: dict[str, int]

    def describe(self) -> str:
        place = " ".join(f"{name} {number}" for name, number in self.place.items())
        shares = ", ".join(f"{name} {self.found[name] / max(1, planned):.1%}" for name, planned in self.planned.items())
        parts = f"{self.layers} layers, {self.microbatches} microbatches, {self.sharded_tensors:,} sharded tensors"
        return f"rank {self.rank} ({place}): {parts}; of the plan: {shares}"


def rehearse(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    world_size: int,
    ranks: Sequence[int] | None = None,
    optimizer: OptimizerConfig | None = None,
    shares_rows: bool = False,
) -> list[RankRehearsal]:
    """Build ranks of a job one after another, train each for a step, and describe its part of a checkpoint.

    Raise ConfigError if the layout does not divide the model or the ranks.

    Args:
        ranks: ranks to rehearse; None for the first, the middle and the last.
        optimizer: None for the default settings. Moments are always in float32, as in PyTorch's AdamW.
        shares_rows: also create the groups of ranks that share rows, and share one row among as many as possible.
    """
    small = narrow(model, parallel)
    # Pipeline stages would exchange the sizes of rows, which no other rank sends here.
    static = parallel.static_rows or parallel.pipeline_parallel_size > 1
    parallel = replace(parallel, static_rows=static, cuda_graphs=False, overlap_tensor_parallel=False, ranks=None)
    check_division(small, parallel)
    parallel.dp_size(world_size)
    optimizer = replace(optimizer or OptimizerConfig(), moments_dtype="float32")
    return [
        _rehearse_rank(small, parallel, optimizer, rank, world_size, shares_rows)
        for rank in (sorted({0, world_size // 2, world_size - 1}) if ranks is None else ranks)
    ]


def narrow(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Return the model with narrow matrices; its layers, heads, groups, experts and choices do not change."""
    tp, etp = parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size
    width = 2 * math.lcm(tp, etp)
    sizes: dict[str, Any] = {"hidden_size": 32, "ffn_hidden_size": width, "vocab_size": _VOCABULARY, "init_from": None}
    # The encoder has its own width, and no row here has media.
    sizes |= {"encoder": None, "train_encoder": False}
    if model.kv_lora_rank:
        sizes |= {"kv_lora_rank": 4 * tp, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2 * tp, "v_head_dim": 4}
        sizes |= {"q_lora_rank": None if model.q_lora_rank is None else 4 * tp}
    else:
        sizes["head_dim"] = 8
    if model.num_experts:
        sizes["expert_ffn_hidden_size"] = width
        sizes["expert_latent_size"] = 16 if model.expert_latent_size else 0
        sizes["shared_ffn_hidden_size"] = width if model.shared_ffn_hidden_size else 0
    return replace(model.on("cuda"), attention="torch", fp8="off", max_sequence_length=4096, **sizes)


class KeptBytes:
    """Count bytes that autograd saves for the backward pass, except in storages `without`; `peak` is the maximum."""

    def __init__(self, without: set[int]) -> None:
        self.peak = self._now = 0
        self._without = without
        self._uses: Counter[int] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept()):
            yield

    def _keep(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Count a tensor until autograd releases the result, unless a tensor with the same storage is counted."""
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()

        def kept() -> torch.Tensor:
            return tensor

        def let_go() -> None:
            self._uses[place] -= 1
            self._now -= 0 if self._uses[place] else size

        if place not in self._without:
            self._now += 0 if self._uses[place] else size
            self._uses[place] += 1
            self.peak = max(self.peak, self._now)
            weakref.finalize(kept, let_go)
        return kept


def _tokens(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return a sequence length with which every rank can send equal numbers of tokens to all experts."""
    tokens = math.lcm(8 if parallel.context_parallel_size > 1 else 16, parallel.pad_to_multiple)
    if not model.num_experts:
        return tokens
    groups, each = _blocks(model)
    own = groups * (model.num_experts // groups // math.gcd(model.num_experts // groups, each))
    every = own * parallel.tensor_parallel_size * parallel.context_parallel_size
    return math.lcm(tokens, every // math.gcd(every, _SEQUENCES))


def _blocks(model: ModelConfig) -> tuple[int, int]:
    """Return the number of blocks of expert groups, one of which a token uses, and its experts in each group."""
    groups, top = model.router_groups or 1, model.router_top_groups or 1
    return groups // top, model.experts_per_token // top


def _route(model: ModelConfig, routing: Any, logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Replace a router's choice: send equal numbers of tokens to all experts."""
    top, (blocks, each) = model.router_top_groups or 1, _blocks(model)
    size = model.num_experts // (blocks * top)
    tokens = torch.arange(logits.numel() // model.num_experts).view(-1, 1, 1)
    groups = tokens % blocks * top + torch.arange(top).view(1, -1, 1)
    experts = groups * size + (tokens // blocks * each + torch.arange(each)) % size
    # Replace the values without autograd noticing.
    logits.data.copy_(torch.zeros(len(tokens), model.num_experts).scatter_(1, experts.flatten(1), 1.0).view_as(logits))
    return routing(logits, *arguments, **options)


def _row(tokens: int, parallel: ParallelConfig, ranks: int = 1) -> ThdBatch:
    """Return a row shared by `ranks` data-parallel ranks, with `tokens` tokens of each sequence on every rank."""
    ids = np.arange(tokens * ranks + 1, dtype=np.int32) % _VOCABULARY
    mask = np.r_[np.ones(tokens * ranks, np.uint8), np.zeros(1, np.uint8)]
    multiple = shared_multiple(parallel.pad_to_multiple, ranks)
    row = build_thd_batch([SequenceView(ids, mask)] * _SEQUENCES, pad_to_multiple=multiple)
    return replace(row, shared_by=ranks)


def _rehearse_rank(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, rank: int, ranks: int, shares_rows: bool
) -> RankRehearsal:
    with runtime.alone(rank, ranks) as job:
        layout = runtime.join(parallel, ranks, shares_rows=shares_rows)
        tokens = _tokens(model, parallel)
        padded = _SEQUENCES * tokens if parallel.static_rows else None
        step = MegatronStep(
            model, parallel, layout, device=job.device, vocab_size=_VOCABULARY, pad_rows_to=padded, optimizer=optimizer
        )
        microbatches = 2 * parallel.pipeline_parallel_size
        rows = [_row(tokens, parallel)] * microbatches
        if shares_rows:
            rows[0] = _row(tokens, parallel, largest_share(layout.dp_size))
        for router in routers(step.chunks):
            router.routing = partial(_route, model, router.routing)  # type: ignore[method-assign]
        weights = [weight for chunk in step.chunks for weight in chunk.parameters()]
        kept = KeptBytes({weight.untyped_storage().data_ptr() for weight in weights})
        with kept.counted():
            step.train(rows)
        trained = [weight for weight in weights if weight.requires_grad]
        sizes: dict[str, Any] = {"vocab_size": _VOCABULARY, "dp_size": layout.dp_size, "optimizer": optimizer}
        sizes["max_tokens_per_rank"] = _SEQUENCES * tokens // parallel.context_parallel_size
        memory = plan_stage_memory(model, parallel, stage=layout.pp_rank, microbatches=microbatches, **sizes)
        memory = replace(memory, optimizer=memory.optimizer + memory.host)
        # The plan counts activations of the scan's kernel, but a CPU runs its reference; attention over shared rows
        # saves masks here.
        parts = _PARTS[:-1] if model.layer_pattern or shares_rows else _PARTS
        found = {
            "weights": sum(weight.numel() * weight.element_size() for weight in weights),
            "gradients": sum(one.main_grad.numel() * one.main_grad.element_size() for one in trained),
            "optimizer": _optimizer_bytes(step, offloads=optimizer.offload > 0),
            "activations": kept.peak,
        }
        return RankRehearsal(
            rank=rank,
            place={"tp": layout.tp_rank, "cp": layout.cp_rank, "dp": layout.dp_rank, "pp": layout.pp_rank},
            layers=sum(len(chunk.module.decoder.layers) for chunk in step.chunks),
            microbatches=microbatches,
            sharded_tensors=count_sharded_tensors(step),
            found={name: found[name] for name in parts},
            planned={name: getattr(memory, name) for name in parts},
        )


def _optimizer_bytes(step: MegatronStep, *, offloads: bool) -> int:
    """Return the bytes of main weights, moments and, if offloaded, gradients that are not in the model's tensors."""
    weights = [weight for chunk in step.chunks for weight in chunk.parameters() if weight.requires_grad]
    model = {one.untyped_storage().data_ptr() for weight in weights for one in (weight, weight.main_grad)}
    total = 0
    for adam in chain.from_iterable(map(adams, parts_of(step.optimizer))):
        for main, state in adam.state.items():
            values = (main, main.grad, *state.values()) if offloads else (main, *state.values())
            tensors = {value.data_ptr(): value for value in values if value.dim()}
            own = [one for one in tensors.values() if one.untyped_storage().data_ptr() not in model]
            total += sum(one.nbytes for one in own)
    return total
