"""LoRA: small matrices next to the frozen linear layers, divided over tensor-parallel ranks like the layers.

A layer W x becomes W x + (alpha / rank) B A x. If the rows of the layer are divided (queries, keys and values; the
gated layer), every rank holds A and its rows of B; if the columns are divided (the output projections), its columns of
A and all of B. Queries, keys and values share one A, and so do both halves of the gated layer.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; initial values as in PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from harness.errors import ConfigError
from harness.megatron.weights import ADAPTER, TensorShard, linear_names, to_hf
from harness.plan import ModelConfig
from harness.plan.families.base import SCANS
from harness.plan.layout import DIVIDED_BY_COLUMNS, LORA_TARGETS, ON_EVERY_RANK


@dataclass(frozen=True)
class AdapterPlace:
    """A linear layer with an adapter.

    Attributes:
        layer: number of its Megatron layer, 0 for the first of the model.
        parent: module that contains the linear layer, as attribute `linear`.
        seed: seed of its adapter, relative to its layer.
        is_expert: True for a layer of a routed expert, which tensor-parallel ranks do not divide.
    """

    layer: int
    parent: torch.nn.Module
    linear: str
    weight: str
    seed: int
    is_expert: bool = False


def places(chunk: GPTModel, model: ModelConfig) -> Iterator[AdapterPlace]:
    """Yield the linear layers of a chunk that `model.lora_targets` names; experts are numbered in their layer."""
    fc = [name for name in ("linear_fc1", "linear_fc2") if name in model.adapted]

    def mlp(layer: Any, parent: Any, where: str, seed: int, *, is_expert: bool = False) -> Iterator[AdapterPlace]:
        for name in fc:
            end = seed + LORA_TARGETS.index(name)
            yield AdapterPlace(layer.layer_number - 1, parent, name, f"{where}.{name}.weight", end, is_expert)

    for layer in chunk.decoder.layers:
        parts = model.all_parts[layer.layer_number - 1]
        mixer = next((part for part in parts if part in "*" + SCANS), None)
        for number, name in enumerate(model.adapted_in(mixer) if mixer else ()):
            seed = LORA_TARGETS.index(name) if name in LORA_TARGETS else len(LORA_TARGETS) * (1 + number)
            weight = f"self_attention.{name}.weight"
            yield AdapterPlace(layer.layer_number - 1, layer.self_attention, name, weight, seed)
        if parts == mixer:
            continue
        if not hasattr(layer.mlp, "router"):
            yield from mlp(layer, layer.mlp, "mlp", 0)
            continue
        if layer.mlp.shared_experts is not None:
            yield from mlp(layer, layer.mlp.shared_experts, "mlp.shared_experts", 1_000)
        if not fc:
            continue
        for index, expert in zip(layer.mlp.local_expert_indices, layer.mlp.experts.local_experts, strict=True):
            yield from mlp(layer, expert, f"mlp.experts.{index}", 10_000 + 10 * index, is_expert=True)


class Adapter(torch.nn.Module):
    """The two small matrices of one linear layer's adapter.

    Attributes:
        by_columns: True if ranks divide the layer's inputs instead of its outputs.
        a: [rank, inputs], or this rank's columns of it.
        b: [outputs, rank] for each piece of the layer, or this rank's rows of it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        place: AdapterPlace,
        *,
        shard: TensorShard,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        target, rank, dtype = place.linear, model.lora_rank, config.params_dtype
        self.by_columns, self.scale = target in DIVIDED_BY_COLUMNS, model.lora_alpha / rank
        # The adapter of a layer that is whole on a rank, for that rank's tokens, needs no communication.
        self.is_expert = place.is_expert
        self.is_whole = self.is_expert or target in ON_EVERY_RANK
        if self.is_whole:
            shard = TensorShard()
        self._sequence_parallel = config.sequence_parallel
        layer: Any = getattr(place.parent, target)
        rows, columns = layer.weight.shape
        inputs = columns * (shard.size if self.by_columns else 1)
        # Ranks divide each piece of a scan's inputs, and each half of a gated layer.
        pieces = [piece // shard.size for piece in model.scan_pieces] if target == "in_proj" else [rows]
        if target == "linear_fc1":
            pieces = [rows // model.halves] * model.halves
        bound, generator = 1 / math.sqrt(inputs), torch.Generator().manual_seed(seed)
        drawn = torch.rand(rank, inputs, generator=generator, dtype=torch.float32) * 2 * bound - bound
        if self.by_columns:
            drawn = drawn[:, slice(*shard.of(inputs))].contiguous()
        self.a = torch.nn.Parameter(drawn.to(device, dtype))
        self.b = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(piece, rank, device=device, dtype=dtype)) for piece in pieces
        )
        if place.is_expert:
            # Reduce gradients over the ranks that hold copies of this expert, like its own weights.
            for parameter in self.parameters():
                is_dense = getattr(layer.weight, "allreduce", True)
                setattr(parameter, "allreduce", is_dense)  # noqa: B010 - not an attribute of torch
                # Each rank holds different experts, so all of them count in the gradient norm.
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
            return
        # The gradient norm counts shared parameters once and divided ones on every rank.
        divided = [] if self.is_whole else [self.a] if self.by_columns else list(self.b)
        for parameter in divided:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=int(self.by_columns), stride=1)
        # Their gradients cover only a part of the tokens; Megatron sums them over the ranks that hold the others.
        partial = list(self.parameters()) if self.is_whole else list(self.b) if self.by_columns else [self.a]
        for parameter in partial:
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not an attribute of torch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the term to add to the layer's output; shapes, [s, b, ...], are those of the layer on this rank."""
        rows = self.b[0] if len(self.b) == 1 else torch.cat(list(self.b))
        if self.is_whole:
            return functional.linear(functional.linear(inputs, self.a), rows) * self.scale
        whole, split = (
            (mappings.reduce_from_tensor_model_parallel_region, mappings.reduce_scatter_to_sequence_parallel_region)
            if self.by_columns
            else (mappings.copy_to_tensor_model_parallel_region, mappings.gather_from_sequence_parallel_region)
        )
        low = (split if self._sequence_parallel else whole)(functional.linear(inputs, self.a))
        return functional.linear(low, rows) * self.scale

    def weight(self) -> torch.Tensor:
        """Return the term to add to the layer's weight, [outputs, inputs], on a rank that holds all of it."""
        return torch.cat(list(self.b)).float() @ self.a.float() * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the adapter's tensors for `dist_checkpointing`, which any layout can load."""
        axes = {"a": 1} if self.by_columns else {f"b.{half}": 0 for half in range(len(self.b))}
        if self.is_whole:
            axes = {}
        own = self.state_dict(prefix="", keep_vars=True)
        made = dict(make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets))
        if self.is_expert:
            # Tensor-parallel ranks hold other experts, not copies of this one, so the copy number is 0.
            for tensor in made.values():
                tensor.replica_id = (tensor.replica_id[0], 0, *tensor.replica_id[2:])
        return made


def add_adapters(chunk: GPTModel, model: ModelConfig, shard: TensorShard, device: torch.device) -> None:
    """Freeze a chunk's weights, routers included, and add adapters to its linear layers."""
    config = chunk.config
    for parameter in chunk.parameters():
        parameter.requires_grad = False
    for place in list(places(chunk, model)):
        # Use the layer's number in the whole model, so that every layout initializes the same values.
        seed = (model.seed * 1_000_003 + place.layer + 1) * len(LORA_TARGETS) + place.seed
        if place.seed >= len(LORA_TARGETS):
            seed = (seed * 1_000_003 + place.seed) % (1 << 63)  # the largest seed of a generator
        adapter = Adapter(config, model, place, shard=shard, seed=seed, device=device)
        setattr(place.parent, place.linear + ADAPTER[:-1], adapter)
        getattr(place.parent, place.linear).register_forward_hook(partial(_add, adapter, config))
    if chunk.pre_process:
        # Recomputed layers compute gradients only if their input requires one, and the embedding is frozen.
        chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def _add(adapter: Adapter, config: TransformerConfig, layer: torch.nn.Module, inputs: Any, output: Any) -> Any:
    values = inputs[0]
    norm = getattr(layer, "layer_norm_weight", None)
    if norm is not None:  # the layer of Transformer Engine includes the norm
        weight = norm.float() + config.layernorm_zero_centered_gamma
        wide = functional.rms_norm(values.float(), norm.shape, weight, config.layernorm_epsilon)
        values = wide.type_as(values)
    return output[0] + adapter(values), *output[1:]


def adapters(chunk: GPTModel, model: ModelConfig) -> Iterator[tuple[str, torch.nn.Module, Adapter]]:
    """Yield the name of each adapted weight (layers numbered over the whole model), its layer, and its adapter."""
    for place in places(chunk, model) if model.lora_rank else ():
        adapter = getattr(place.parent, place.linear + ADAPTER[:-1])
        yield f"decoder.layers.{place.layer}.{place.weight}", getattr(place.parent, place.linear), adapter


@torch.no_grad()
def merge(chunk: GPTModel, model: ModelConfig) -> None:
    """Add every adapter to its weight, on a rank that holds the whole model; adapters do not change."""
    for _, layer, adapter in adapters(chunk, model):
        weight: Any = layer.weight
        weight += adapter.weight().to(weight.dtype)


def peft_tensors(chunk: GPTModel, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the adapters' tensors by their names in PEFT, on a rank that holds the whole model."""
    tensors = {}
    for name, _, adapter in adapters(chunk, model):
        rows = torch.cat(list(adapter.b)).detach()
        for other, part in to_hf(name, rows, model, vocab_size=0).items():
            # Module names in transformers start with `model`, even if names of stored weights do not.
            prefix = f"base_model.model.{other.removesuffix('.weight').replace('backbone.', 'model.', 1)}"
            tensors[f"{prefix}.lora_A.weight"] = adapter.a.detach().clone()
            tensors[f"{prefix}.lora_B.weight"] = part.contiguous().clone()
    return tensors


def peft_config(model: ModelConfig) -> dict[str, Any]:
    """Return the `adapter_config.json` that PEFT reads."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.init_from,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [name for target in model.adapted for name in linear_names(target, model)],
    }


def check_same_adapters(model: ModelConfig, before: dict[str, Any], where: str) -> None:
    """Raise ConfigError if a run resumes with other adapters; their names may match, so loading would not fail."""
    names = ("lora_rank", "lora_alpha", "lora_targets")
    then, now = {"lora_rank": 0, **before}, vars(model)
    if then["lora_rank"] == now["lora_rank"] == 0:
        return
    changed = [f"model.{n} was {then.get(n)} and is {now[n]}" for n in names if then.get(n) != now[n]]
    if changed:
        fix = "resume with the original settings, or start a new run"
        raise ConfigError(f"the checkpoint contains different adapters: {'; '.join(changed)}", where=where, fix=fix)
