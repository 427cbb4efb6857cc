"""Audio or image encoder in front of a text model; its features replace the embeddings of placeholder tokens.

The modules come from transformers. Every rank of a tensor-parallel group holds the whole encoder and runs it on the
media of its row; context-parallel ranks run it on the media of their slice. Its gradients are therefore equal on
tensor-parallel ranks, and summed over all other ranks like those of any weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import nn

from harness.errors import ConfigError, LoaderError
from harness.plan import ModelConfig
from harness.plan.encoders import read_encoder


@dataclass(frozen=True)
class MediaTensors:
    """The media of a rank's slice of a row, on the device.

    Attributes:
        arrays: inputs of the encoder, by name, as returned by `harness.prep.media.MediaRules.features`.
        places: int64 [features of the slice], index of the token in the slice that each feature replaces.
        features: int64 [features of the slice], index of each feature among the concatenated features of these media.
        tokens: number of placeholder tokens of all these media, which is the number of features from the encoder.
        deeper: [T / cp, 1, hidden_size], features to add after each of the first layers; with sequence parallelism,
            tokens are divided over ranks. Set when the row is embedded.
    """

    arrays: dict[str, torch.Tensor]
    places: torch.Tensor
    features: torch.Tensor
    tokens: int
    deeper: list[torch.Tensor] = field(default_factory=list)


class MediaEncoder(nn.Module):
    """Encoder that turns the media of a row into one feature for each placeholder token; never in training mode.

    Raises ConfigError if transformers is missing, or cannot build it from `model.encoder`.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.encoder is not None
        self.media, self.values = read_encoder(model.encoder)
        self.is_trained = model.train_encoder
        self.row: MediaTensors | None = None
        self.is_divided = False
        try:
            parts = _build(self.media.name, self.values, model.hidden_size)
        except ImportError as error:
            fix = "pip install 'harness[tokenize]'"
            raise ConfigError(f"encoders require transformers: {error}", where="model.encoder", fix=fix) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"transformers cannot build the encoder: {type(error).__name__}: {error}"
            raise ConfigError(what, where="model.encoder", fix="use the config.json of the published model") from None
        for name, module in parts.items():
            self.add_module(name, module)
        if not self.is_trained:
            self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> MediaEncoder:
        """Do nothing: in training mode, dropout would depend on the layout."""
        return self

    def forward(self, **arrays: torch.Tensor) -> torch.Tensor:
        """Return the concatenated features of media, [features, hidden_size]; deep features follow in the last axis."""
        with torch.set_grad_enabled(self.is_trained and torch.is_grad_enabled()):
            features: torch.Tensor = _ENCODE[self.media.name](self, **arrays)
            return features

    def merge(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the embedding, [T / cp, 1, hidden_size], with the features of the row's media inserted."""
        if self.row is None:
            return embedded
        features = self(**self.row.arrays).to(embedded.dtype)
        if features.shape[0] != self.row.tokens:
            what = f"the encoder returns {features.shape[0]:,} features for {self.row.tokens:,} placeholder tokens"
            fix = "prepare the data again with tokenizer.name set to this model"
            raise LoaderError(what, where="the media of a row", fix=fix)
        is_whole = len(self.row.features) == features.shape[0]
        chosen = features if is_whole else features.index_select(0, self.row.features)
        places = self.row.places.view(-1, 1, 1).expand(-1, 1, embedded.shape[-1])
        first, *deeper = chosen.unsqueeze(1).split(embedded.shape[-1], dim=-1)
        embedded = embedded.scatter(0, places, first)
        if not deeper:
            return embedded
        made = [torch.zeros_like(embedded).scatter(0, places, one) for one in deeper]
        if self.is_divided:
            made = [tensor_parallel.scatter_to_sequence_parallel_region(one) for one in made]
        self.row.deeper[:] = [one.detach().requires_grad_(one.requires_grad) for one in made]
        return _Deepened.apply(embedded, self.row.deeper, *made)  # type: ignore[no-untyped-call,no-any-return]


class _Deepened(torch.autograd.Function):
    """Return the embedding of a row unchanged; its backward pass adds the gradients of the deep features.

    By then all layers have accumulated them in `added`, including recomputed layers, which have separate graphs.
    """

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, added: list[torch.Tensor], *made: torch.Tensor) -> torch.Tensor:
        ctx.added = added
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None, *(one.grad for one in ctx.added)


# Encoders with a projector: a text model that they work with, the kind of media, and the projector class.
_PROJECTED = {
    "llava": ("llama", "vision", "LlavaMultiModalProjector"),
    "qwen2_audio": ("qwen2", "audio", "Qwen2AudioMultiModalProjector"),
}
# Encoders for images of any size.
_WITH_GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def _build(name: str, values: dict[str, Any], hidden_size: int) -> dict[str, nn.Module]:
    from transformers import AutoConfig, AutoModel

    if name in _PROJECTED:
        text, kind, projector = _PROJECTED[name]
        of_text = {"model_type": text, "hidden_size": hidden_size}
        config = AutoConfig.for_model(**{**values, "model_type": name, "text_config": of_text})
        project = getattr(import_module(f"transformers.models.{name}.modeling_{name}"), projector)
        tower = AutoModel.from_config(getattr(config, f"{kind}_config"))
        return {f"{kind}_tower": tower, "multi_modal_projector": project(config)}
    if name in _WITH_GRIDS:
        whole = AutoConfig.for_model(name, vision_config=dict(values["vision_config"]))
        vision = whole.vision_config
        if vision.out_hidden_size != hidden_size:
            what = f"out_hidden_size is {vision.out_hidden_size}"
            raise ValueError(f"{what}, but hidden_size of the text model is {hidden_size}")
        return {"visual": AutoModel.from_config(vision)}
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    audio = Qwen3OmniMoeAudioEncoderConfig(**values["audio_config"])
    if audio.output_dim != hidden_size:
        raise ValueError(f"output_dim is {audio.output_dim}, but hidden_size of the text model is {hidden_size}")
    return {"audio_tower": Qwen3OmniMoeAudioEncoder(audio)}


def _encode_whisper(encoder: Any, input_features: torch.Tensor, feature_attention_mask: torch.Tensor) -> torch.Tensor:
    tower = encoder.audio_tower
    frames, lengths = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    size = (input_features.shape[-1] - 2) // 2 + 1
    heard = torch.arange(size, device=frames.device) < frames.unsqueeze(1)
    mask = torch.zeros(heard.shape, dtype=tower.conv1.weight.dtype, device=frames.device)
    mask = mask.masked_fill(~heard, -torch.inf)[:, None, None, :].expand(-1, 1, size, size)
    hidden = tower(input_features, attention_mask=mask).last_hidden_state
    features: torch.Tensor = encoder.multi_modal_projector(hidden)
    kept = torch.arange(features.shape[1], device=lengths.device) < lengths.unsqueeze(1)
    return features[kept]


def _encode_omni(encoder: Any, input_features: torch.Tensor, feature_attention_mask: torch.Tensor) -> torch.Tensor:
    """Encode each sound independently of the others.

    The tower pads all windows to the longest one, and its convolutions turn the padding into biases: the features of a
    sound shorter than a window would depend on the other sounds.
    """
    tower = encoder.audio_tower
    lengths, window = feature_attention_mask.sum(-1).tolist(), 2 * tower.n_window
    longer = [number for number, frames in enumerate(lengths) if frames >= window]
    shorter = [[number] for number, frames in enumerate(lengths) if frames < window]
    features: dict[int, torch.Tensor] = {}
    for group in [longer, *shorter] if longer else shorter:
        heard = torch.cat([input_features[number, :, : lengths[number]] for number in group], dim=1)
        own = torch.tensor([lengths[number] for number in group], device=heard.device)
        made = tower(heard, feature_lens=own).last_hidden_state
        counts = [_omni_tokens(lengths[number], window) for number in group]
        features |= zip(group, made.split(counts), strict=True)
    return torch.cat([features[number] for number in range(len(lengths))])


def _omni_tokens(frames: int, window: int) -> int:
    """Return the number of features of a sound (whole windows and the rest), after three convolutions of stride 2."""
    halved = frames % window
    for _ in range(3):
        halved = (halved + 1) // 2
    return halved + (0 if frames < window else frames // window * _omni_tokens(window - 1, window))


def _encode_image(encoder: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    values = encoder.values
    layers = values.get("vision_feature_layer", -2)
    weight = encoder.multi_modal_projector.linear_1.weight
    seen = encoder.vision_tower(pixel_values.to(weight.dtype), output_hidden_states=True).hidden_states
    chosen = [seen[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
    if values.get("vision_feature_select_strategy", "default") == "default":
        chosen = [one[:, 1:] for one in chosen]  # without the class token
    features: torch.Tensor = encoder.multi_modal_projector(torch.cat(chosen, dim=-1))
    return features.flatten(0, 1)


def _encode_patches(encoder: Any, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
    made = encoder.visual(pixel_values, grid_thw=image_grid_thw)
    return torch.cat((made.pooler_output, *getattr(made, "deepstack_features", ())), dim=-1)


_ENCODE: dict[str, Any] = {
    **dict.fromkeys(_WITH_GRIDS, _encode_patches),
    "qwen2_audio": _encode_whisper,
    "qwen3_omni_moe_thinker": _encode_omni,
    "llava": _encode_image,
}


def add_encoder(chunk: GPTModel, model: ModelConfig) -> None:
    """Add the encoder to the first stage of a model, whose embedding then includes the features of each row's media."""
    encoder = chunk.encoder = MediaEncoder(model)

    def take(module: nn.Module, args: Any, options: dict[str, Any]) -> None:
        encoder.row = options["packed_seq_params"].media
        chunk.embedding.scatter_to_sequence_parallel = False

    def merge(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        embedded = encoder.merge(embedded)
        if not encoder.is_divided:
            return embedded
        # Scatter here, so that each tensor-parallel rank gets the gradient of all tokens, and the encoder the same
        # gradient on all. Megatron 0.19 would scatter again.
        module.scatter_to_sequence_parallel = True
        return tensor_parallel.scatter_to_sequence_parallel_region(embedded)  # type: ignore[no-any-return]

    def deepen(number: int, module: nn.Module, args: Any, options: dict[str, Any], output: Any) -> Any:
        media = options["packed_seq_params"].media
        return None if media is None or not media.deeper else (output[0] + media.deeper[number], *output[1:])

    for number in range(model.deep_layers):
        chunk.decoder.layers[number].register_forward_hook(partial(deepen, number), with_kwargs=True)
    encoder.is_divided = chunk.config.sequence_parallel
    chunk.register_forward_pre_hook(take, with_kwargs=True)
    chunk.embedding.register_forward_hook(merge)
