"""Router of a mixture of experts, with losses, biases and counts over real tokens only, the same on every layout.

Megatron's own router counts padding unless it gets a padding mask. Versions differ in the weight of its losses when
several ranks share a row (0.16 divides them by the number of ranks), and 0.16 refuses a mask together with an expert
bias. Here losses and counts are computed the same way for all versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter

from harness.megatron import compat
from harness.megatron.model.mtp import decoder_layers, own_tokens
from harness.plan import ModelConfig

# Sums for one layer and step, in addition to the tokens of each expert.
_SUMS = ("tokens", "shared_tokens", "bias_tokens", "entropy", "aux_loss")


class Router(TopKRouter):  # type: ignore[misc] # no types are known of Megatron
    """Megatron's router with losses, expert bias and statistics over real tokens.

    Attributes:
        layer: number of its layer, 0 for the model's first.
        token_weight: float64, weight of a real token in the losses, which Megatron divides by the divisor of the loss.
        counts: float64 [experts], real tokens sent to each expert in this step, on this rank.
        row_sources: int64 [T], dataset of each token of this rank in the current row, or None.
        source_counts: float64 [datasets, experts], `counts` for each dataset.
        shared_experts_ran: True if this layer's shared experts processed the tokens that are routed next.
        is_recomputed: True if the layer or its experts are recomputed in the backward pass.
        row: PackedSeqParams of the row that the layer processes, also when the whole layer is recomputed.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.layer = 0
        self.token_weight = torch.ones((), dtype=torch.float64)
        self.shared_experts_ran = False
        self.balances_sequences = self.is_recomputed = False
        self.row: Any = None
        self.reset()

    def reset(self) -> None:
        """Reset the statistics for a new step or validation."""
        self.counts: Any = 0
        self.sums: dict[str, Any] = dict.fromkeys(_SUMS, 0)
        self.row_sources: torch.Tensor | None = None
        self.source_counts: Any = 0

    def note_row(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        self.row = named.get("packed_seq_params")

    def note_shared(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.shared_experts_ran = True

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None, **_unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [T, 1, experts] of this rank's tokens.
            padding_mask: bool [T, 1], True at padding; None if there is none.

        Returns:
            weights of the chosen experts, float [T, experts], and a mask of the chosen experts, bool [T, experts].
        """
        config = self.config
        logits = logits.view(-1, config.num_moe_experts)
        if padding_mask is None and (whole := getattr(self.row, "padding_mask", None)) is not None:
            # If only the first layers are recomputed, Megatron passes the mask only to them.
            padding_mask = own_tokens(whole, config)
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        counted = self.training and torch.is_grad_enabled()  # once, also where activations are computed again
        if counted and (z_loss := config.moe_z_loss_coeff):
            squares = torch.logsumexp(logits, dim=-1).square()
            squares = squares if padding is None else squares.masked_fill(padding, 0.0)
            logits = MoEAuxLossAutoScaler.apply(logits, squares.sum() * (z_loss * self.token_weight).float())
        weights, chosen = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=config.moe_router_fusion,
        )
        if counted or not self.training:
            scores, best = self._score(logits)
            if counted:
                weights = self._balance(scores, best, weights, padding)
            self._count(scores, chosen, padding)
        # Count datasets in the first forward pass: by the time of a recomputation, `row_sources` may be another row's.
        is_forward = torch.is_grad_enabled() != self.is_recomputed
        if self.row_sources is not None and self.training and is_forward:
            with torch.no_grad():
                real = chosen if padding is None else chosen & ~padding.unsqueeze(1)
                self.source_counts.index_add_(0, self.row_sources, real.to(self.source_counts.dtype))
        return weights, chosen

    def _score(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each expert's share of a token's scores, float32 [T, experts], and 1 for the `topk` best, 0 otherwise.

        Transformer Engine's kernel does not normalize sigmoid scores if `topk` is 1. Its loss kernel does not support
        separate sequences in a row or, up to 2.17, a token count on the GPU.
        """
        if self.config.moe_router_fusion and (self.score_function == "softmax" or self.topk > 1):
            best, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function, fused=True)
            return scores, best.to(scores.dtype)
        scores = _scores(logits, self.score_function)
        return scores, torch.zeros_like(scores).scatter(1, scores.topk(self.topk, dim=1).indices, 1.0)

    def _balance(
        self, scores: torch.Tensor, best: torch.Tensor, weights: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """Attach the load-balancing loss of the row, or of its sequences, to `weights`, and record it.

        For T tokens, of which n_i are sent to expert i of E, and p_i the sum of that expert's scores, the loss is
        E * sum(n_i * p_i) / (topk * T * T), which is 1 if all is even. It is multiplied by T, so that every token
        counts, and each rank adds the part of its own scores.
        """
        if padding is not None:
            scores, best = scores * ~padding.unsqueeze(1), best * ~padding.unsqueeze(1)
        config = self.config
        if self.balances_sequences:
            bounds = self.row.cu_seqlens_q if self.row.cu_seqlens_q_padded is None else self.row.cu_seqlens_q_padded
            number, whole = len(bounds) - 1, config.tensor_model_parallel_size if config.sequence_parallel else 1
            # A context-parallel rank holds an equal share of every sequence.
            sizes = bounds.diff() // (self.row.local_cp_size or config.context_parallel_size)
            places = torch.arange(number, device=bounds.device)
            of_row = torch.repeat_interleave(places, sizes, output_size=len(scores) * whole)
            owners = own_tokens(of_row, config)
            zeros = scores.new_zeros(number, scores.shape[1])
            summed, sent = zeros.index_add(0, owners, scores), zeros.index_add(0, owners, best.detach())
        else:
            summed, sent = scores.sum(dim=0, keepdim=True), best.detach().sum(dim=0, keepdim=True)
        for group in (self.tp_cp_group, getattr(self.row, "cp_group", None)):
            if group is not None and group.size() > 1:
                torch.distributed.all_reduce(sent, group=group)
        tokens = (sent.sum(dim=1) / self.topk).clamp(min=1)
        loss = ((summed * sent).sum(dim=1) * (scores.shape[1] / (self.topk * tokens))).sum()
        self.sums["aux_loss"] += loss.detach().double()
        if coefficient := self.get_aux_loss_coeff("aux_loss"):
            weights = MoEAuxLossAutoScaler.apply(weights, loss * (coefficient * self.token_weight).float())
        return weights

    @torch.no_grad()
    def _count(self, scores: torch.Tensor, chosen: torch.Tensor, padding: torch.Tensor | None) -> None:
        real = chosen if padding is None else chosen & ~padding.unsqueeze(1)
        counts = real.sum(dim=0)
        if self.enable_expert_bias and self.training:
            self.local_tokens_per_expert += counts
        self.counts = self.counts + counts.double()
        entropy = -(scores * scores.clamp(min=1e-30).log()).sum(dim=1)
        if padding is not None:
            entropy = entropy.masked_fill(padding, 0.0)
        tokens = torch.as_tensor(scores.shape[0], device=scores.device) if padding is None else (~padding).sum()
        self.sums["tokens"] += tokens.double()
        self.sums["entropy"] += entropy.double().sum()
        if self.shared_experts_ran:
            self.sums["shared_tokens"] += tokens.double()
        self.shared_experts_ran = False


def _scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    """Return the share of each expert in a token's scores, float32 [T, experts]."""
    if function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def prepare_experts(chunk: GPTModel, model: ModelConfig, device: torch.device) -> None:
    """Initialize expert weights independently of the layout, and connect routers to their layers and shared experts.

    Also marks expert parameters for gradient reduction over the ranks that hold copies, before adapters copy the mark.
    On GPUs the weights stay as Megatron drew them, from one generator per expert-parallel rank.
    """
    for place, (number, layer) in enumerate(decoder_layers(chunk)):
        if not hasattr(layer.mlp, "router"):
            continue
        experts = layer.mlp
        experts.router.layer = number
        experts.router.is_recomputed = model.is_recomputed(place) or "moe" in model.recomputed
        experts.router.balances_sequences = model.aux_loss_scope == "sequence"
        layer.register_forward_pre_hook(experts.router.note_row, with_kwargs=True)
        if experts.shared_experts is not None:
            experts.shared_experts.register_forward_hook(experts.router.note_shared)
        for parameter in experts.router.parameters():
            parameter.requires_grad = not model.freeze_router
        if chunk.config.expert_tensor_parallel_size != chunk.config.tensor_model_parallel_size:
            compat.reduce_over_copies(experts.experts)
        if model.traits.has_biases:
            # Megatron marks the biases of the second matrices as if tensor-parallel ranks held the same experts: it
            # would add gradients of different experts, and count only one rank's in the norm.
            for name, parameter in experts.experts.named_parameters():
                if "linear_fc2" in name and "bias" in name:
                    parameter.sequence_parallel = False
                    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
            # Megatron adds the bias to an expert's output in place, which autograd refuses for PyTorch's layers.
            for expert in getattr(experts.experts, "local_experts", ()):
                expert.linear_fc2.register_forward_hook(lambda _, inputs, output: (output[0].clone(), *output[1:]))
        if device.type == "cpu" and hasattr(experts.experts, "local_experts"):  # without grouped GEMM
            for index, expert in zip(experts.local_expert_indices, experts.experts.local_experts, strict=True):
                _draw(expert, chunk.config, (model.seed * 10_007 + number + 1) * 100_003 + index)


@torch.no_grad()
def _draw(expert: Any, config: Any, seed: int) -> None:
    """Initialize this rank's part of an expert: rows of both halves of the first matrix, columns of the second."""
    rank = parallel_state.get_expert_tensor_parallel_rank()
    first, second = expert.linear_fc1.weight, expert.linear_fc2.weight
    size = config.expert_tensor_parallel_size
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # without other devices, each of which keeps a stack trace
        whole = torch.empty(first.shape[0] * size, first.shape[1])
        config.init_method(whole)
        first.copy_(torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)]))
        whole = torch.empty(second.shape[0], second.shape[1] * size)
        config.output_layer_init_method(whole)
        second.copy_(whole.chunk(size, dim=1)[rank])


def finalize_with_experts(model: list[torch.nn.Module], *arguments: Any, **options: Any) -> None:
    """Finalize the gradients of a step as Megatron does, which also updates the expert biases."""
    for router in routers(model):
        if router.enable_expert_bias:
            # Megatron resets these counts.
            router.sums["bias_tokens"] += router.local_tokens_per_expert.double().sum() / router.topk
    finalize_model_grads(model, *arguments, **options)


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[Router]:
    """Yield the routers of this rank's layers."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))


def show_sources(chunk: torch.nn.Module, sources: torch.Tensor, number: int) -> None:
    """Make the routers of a chunk count the tokens of its next row by dataset; `sources` are int64 [1, T / cp]."""
    for router in routers([chunk]):
        router.row_sources = own_tokens(sources, router.config).reshape(-1)
        if isinstance(router.source_counts, int):
            shape = number, router.config.num_moe_experts
            router.source_counts = torch.zeros(shape, dtype=torch.float64, device=sources.device)


def expert_metrics(
    chunks: Sequence[DistributedDataParallel], num_layers: int, device: torch.device, names: Sequence[str] = ()
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the statistics of `StepMetrics.experts`, and the load of the busiest expert for each dataset's tokens.

    They cover all ranks, which all take part, and are then reset for the next step. They cover all layers of the model,
    including MTP layers; loads are means over layers. Datasets without a token are omitted.
    """
    experts = chunks[0].module.config.num_moe_experts
    table = torch.zeros(num_layers, 1 + len(names), experts, dtype=torch.float64, device=device)
    summed = torch.zeros(num_layers, len(_SUMS), dtype=torch.float64, device=device)
    biases = torch.zeros(num_layers, dtype=torch.float64, device=device)
    for router in routers(chunks):
        table[router.layer, 0] += router.counts
        table[router.layer, 1:] += router.source_counts
        for place, name in enumerate(_SUMS):
            summed[router.layer, place] += router.sums[name]
        if router.expert_bias is not None:
            biases[router.layer] = router.expert_bias.double().abs().mean()
        router.reset()
    both = torch.cat([table.flatten(1), summed], dim=1)
    torch.distributed.all_reduce(both)
    torch.distributed.all_reduce(biases, op=torch.distributed.ReduceOp.MAX)
    found, width = torch.cat([both, biases.unsqueeze(1)], dim=1).cpu().numpy(), table[0].numel()  # the only wait
    bias, found = float(found[:, -1].sum()), found[found[:, width] > 0]
    if not len(found):
        return {}, {}
    by_layer = found[:, :width].reshape(-1, *table.shape[1:])
    busiest, mean = by_layer.max(axis=2), by_layer.mean(axis=2)
    loads = [busiest[had, of] / mean[had, of] for of, had in enumerate(mean.T > 0)]
    sums = dict(zip(_SUMS, found[:, width:-1].sum(axis=0).tolist(), strict=True))
    return {
        "routed_tokens": round(sums["tokens"]),
        "shared_tokens": round(sums["shared_tokens"]),
        "bias_tokens": round(sums["bias_tokens"]),
        "load": float(loads[0].mean()),
        "worst_load": float(loads[0].max()),
        "entropy": sums["entropy"] / sums["tokens"],
        "aux_loss": sums["aux_loss"] / sums["tokens"],
        "bias": bias / len(found),
    }, {name: float(of.mean()) for name, of in zip(names, loads[1:], strict=True) if len(of)}
