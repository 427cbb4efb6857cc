"""Layers after the model's own that predict further tokens (multi-token prediction, MTP), trained on packed rows.

The layers are Megatron's, but the pass through them is not. Megatron shifts tokens, labels and masks by one within
bounds that do not count padding, so that padding changes training. Its router counts padding there (0.16), or treats
the last token of a sequence as padding (0.19). 0.19 weights a row's loss by how many of its own tokens are predicted,
which depends on the layout. Here the row includes the tokens ahead of each token, and versions and layouts agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from harness.megatron import compat
from harness.megatron.model.attention import RMSNorm


class PredictingModel(GPTModel):  # type: ignore[misc] # no types are known of Megatron
    """Megatron's GPTModel with MTP layers after the last one, each of which predicts one token further.

    Layer k combines the state of a token, from the previous layer, with the embedding of the k-th token ahead, and
    predicts the token after that. Its losses are summed with the loss weights of the predicted tokens, like the losses
    of the model, and Megatron divides both by the divisor of the step.

    Attributes:
        predicted: float64 [MTP layers, 3], summed losses, summed weights and trained tokens of this step on this rank.
    """

    predicted: Any = 0

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        *,
        labels: torch.Tensor | None,
        rotary_pos_emb: Any,
        packed_seq_params: Any,
        **_unused: Any,
    ) -> torch.Tensor:
        """Return the last stage's losses [1, T / cp], or logits without labels; on other stages, the hidden states.

        Further tokens are predicted only in training, and only for rows that include the tokens ahead.
        """
        if not self.post_process:
            return hidden_states
        ahead = packed_seq_params.ahead if isinstance(packed_seq_params, compat.PackedRow) else ()
        if ahead and labels is not None and self.training and torch.is_grad_enabled():
            hidden_states = self._predict(hidden_states, ahead, rotary_pos_emb, packed_seq_params)
        logits, _ = self.output_layer(hidden_states)
        if labels is None:
            made: torch.Tensor = logits.transpose(0, 1).contiguous()
        else:
            made = self.compute_language_model_loss(labels, logits)
        return made

    def _predict(self, hidden_states: torch.Tensor, ahead: Sequence[Any], angles: Any, row: Any) -> torch.Tensor:
        """Attach the losses of further tokens to the hidden states, so that their backward pass includes them."""
        states, sums, config = hidden_states, [], self.config
        for layer, fields in zip(self.mtp.layers, ahead, strict=True):
            embedded = self.embedding(input_ids=fields.tokens, position_ids=None)  # the angles contain positions
            padding = own_tokens(fields.padding_mask, config)

            def run(
                states: torch.Tensor, embedded: torch.Tensor, layer: Any = layer, padding: torch.Tensor = padding
            ) -> torch.Tensor:
                joined = layer._concat_embeddings(states, embedded)
                after, _ = compat.predicting_layer(layer)(
                    hidden_states=joined,
                    attention_mask=None,
                    rotary_pos_emb=angles,
                    packed_seq_params=row,
                    padding_mask=padding,
                )
                normed: torch.Tensor = layer._postprocess(after)
                return normed

            if config.recompute_granularity == "full":
                states = tensor_parallel.checkpoint(run, False, states, embedded)
            else:
                states = run(states, embedded)
            losses = self.compute_language_model_loss(fields.labels, self.output_layer(states)[0])
            losses = losses.float() * fields.loss_mask
            scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
            hidden_states = MTPLossAutoScaler.apply(hidden_states, losses * scale)
            mask = fields.loss_mask.double()
            sums.append(torch.stack((losses.detach().double().sum(), mask.sum(), torch.count_nonzero(mask))))
        self.predicted = self.predicted + torch.stack(sums)
        return hidden_states


def own_tokens(values: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return this rank's part of per-token values, [..., T / cp], if sequence parallelism divides them."""
    if not config.sequence_parallel:
        return values
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return values.chunk(config.tensor_model_parallel_size, dim=-1)[rank]


def predicting_layers(
    config: TransformerConfig, block: Any, *, transformer_engine: bool, vp_stage: int | None
) -> Any | None:
    """Return the specification of MTP layers, built like the last layer of `block`; None on stages without them."""
    made = get_gpt_mtp_block_spec(config, block, use_transformer_engine=transformer_engine, vp_stage=vp_stage)
    if made is None:
        return None
    norms = {"enorm": RMSNorm, "hnorm": RMSNorm, "layer_norm": RMSNorm}
    layers = [replace(layer, submodules=replace(layer.submodules, **norms)) for layer in made.layer_specs]
    return replace(made, layer_specs=layers)


def decoder_layers(chunk: GPTModel) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 0 over the whole model, and each decoder layer of a chunk; MTP layers come last."""
    yield from ((layer.layer_number - 1, layer) for layer in chunk.decoder.layers)
    if getattr(chunk, "mtp_process", False):
        for place, layer in enumerate(chunk.mtp.layers):
            yield chunk.config.num_layers + place, compat.predicting_layer(layer)


def predicted_losses(
    chunks: Sequence[DistributedDataParallel], num_layers: int, device: torch.device
) -> tuple[list[float], int]:
    """Return the mean loss of each MTP layer in the step over all ranks, and the number of tokens that they trained."""
    if not num_layers:
        return [], 0
    sums = torch.zeros(num_layers, 3, dtype=torch.float64, device=device)
    for chunk in chunks:
        sums += chunk.module.predicted
    torch.distributed.all_reduce(sums)
    # All tensor-parallel ranks have the same losses.
    sums /= parallel_state.get_tensor_model_parallel_world_size()
    rows = sums.tolist()
    return [total / (weights or 1.0) for total, weights, _ in rows], round(sum(tokens for *_, tokens in rows))
