"""Convert Hugging Face weights to Megatron's parameters and back, one tensor at a time.

Each rank reads only its own rows and columns of the safetensors files, which are mapped into memory. Megatron keeps
queries, keys and values of a group together, and the two halves of the gated layer one after the other on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from harness.errors import ConfigError, FormatError
from harness.megatron import compat
from harness.megatron.hf_files import HfWeights
from harness.plan import FAMILIES, ModelConfig
from harness.plan.families.base import ExpertNames

# Part of the names of parameters that `harness.megatron.model.lora` adds to the model's own.
ADAPTER = "_adapter."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FURTHER_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
_EMBEDDING, _OUTPUT, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# Parameters that are one tensor in Hugging Face weights, by suffix; Transformer Engine has two norms elsewhere.
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_HEAD_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.out_proj.weight": "self_attn.out_proj.weight",
}
# The same with latent attention; tensor-parallel ranks divide the rows of the second.
_LATENT = {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
}
_LATENT_ROWS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
# Of families with biases and sinks, and whether tensor-parallel ranks divide the rows.
_BIASES = {
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias", False),
    "self_attention.core_attention.softmax_offset": ("self_attn.sinks", True),
}
# Of a layer that predicts a further token, beside those of its decoder layer, and whether ranks divide the rows.
_PREDICTING = {
    "enorm.weight": ("enorm.weight", False),
    "hnorm.weight": ("hnorm.weight", False),
    "eh_proj.weight": ("eh_proj.weight", True),
    "final_layernorm.weight": ("shared_head.norm.weight", False),
}
# Copies of the model's own that such a layer has in published weights, by the names of these.
_COPIES = {_EMBEDDING: "embed_tokens.weight", _OUTPUT: "shared_head.head.weight"}
# Of a Mamba-2 layer, and which of `ModelConfig.mamba_pieces` their rows are; ranks divide each piece.
_SCAN = {
    "in_proj.weight": slice(0, 5),
    "conv1d.weight": slice(1, 4),
    "conv1d.bias": slice(1, 4),
    **dict.fromkeys(("A_log", "D", "dt_bias"), slice(4, 5)),
    "norm.weight": slice(0, 1),
}
_ROUTER_BIAS = "mlp.router.bias"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Of an expert in Megatron, by its number on this rank, and in `global_parameters`, by its number in the layer.
_LOCAL_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)|linear_fc([12])\.(weight|bias)(\d+))"
)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
_GATED = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


@dataclass(frozen=True)
class TensorShard:
    """A rank's part of every matrix that tensor parallelism divides.

    Attributes:
        expert_rank, expert_size: the same of each expert, which other ranks may share.
    """

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1

    @property
    def of_experts(self) -> TensorShard:
        return TensorShard(self.expert_rank, self.expert_size)

    def of(self, count: int) -> tuple[int, int]:
        """Return the bounds of this rank's share of `count` rows or columns."""
        share = count // self.size
        return self.rank * share, (self.rank + 1) * share


def expected_shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model's weights by its Hugging Face name."""
    hidden, ffn, head = model.hidden_size, model.ffn_hidden_size, model.head_size
    heads, groups = model.query_size, model.key_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not model.tie_embeddings:
        shapes[_OUTPUT] = (vocab_size, hidden)
    norm, after = {"input_layernorm.weight": (hidden,)}, {"post_attention_layernorm.weight": (hidden,)}
    layer: dict[str, tuple[int, ...]] = {**norm, "self_attn.o_proj.weight": (hidden, model.value_size)}
    if model.kv_lora_rank:
        for name, (inputs, outputs) in model.attention_sizes.items():
            if tensor := (_LATENT | _LATENT_ROWS).get(f"self_attention.{name}.weight"):
                layer[tensor] = (outputs, inputs)
        layer["self_attn.kv_a_layernorm.weight"] = (model.kv_lora_rank,)
        if model.q_lora_rank is not None:
            layer["self_attn.q_a_layernorm.weight"] = (model.q_lora_rank,)
    else:
        layer |= {f"{name}.weight": (rows, hidden) for name, rows in zip(_QKV, (heads, groups, groups), strict=True)}
    if model.has_qkv_bias:
        layer |= {f"{name}.bias": (rows,) for name, rows in zip(_QKV, (heads, groups, groups), strict=True)}
    if model.has_biases:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if model.has_sinks:
        layer["self_attn.sinks"] = (model.num_attention_heads,)
    if model.has_head_norms:
        sizes = (heads, groups) if model.norms_span_heads else (head, head)
        layer |= {"self_attn.q_norm.weight": (sizes[0],), "self_attn.k_norm.weight": (sizes[1],)}
    dense = dict.fromkeys(_GATED[-model.halves :], (ffn, hidden))
    parts: dict[str, dict[str, tuple[int, ...]]] = {
        "*": layer,
        "M": {**norm, **_scan_shapes(model)} if model.layer_pattern else {},
        "-": {**after, **dense, "mlp.down_proj.weight": (hidden, ffn)},
        "E": {**after, **_expert_shapes(model)} if model.num_experts else {},
    }
    further: dict[str, tuple[int, ...]] = {name: (hidden,) for name, _ in _PREDICTING.values()}
    further["eh_proj.weight"] = (hidden, 2 * hidden)
    for number in range(model.num_layers + model.mtp_layers):
        of_layer = dict(further) if number >= model.num_layers else {}
        for part in model.parts(number):
            of_layer |= parts[part]
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in of_layer.items()}
    stored = FAMILIES[model.family].stored_name
    return {stored(name): shape for name, shape in shapes.items()}


def _scan_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    rows = {name: sum(model.mamba_pieces[pieces]) for name, pieces in _SCAN.items()}
    inner: dict[str, tuple[int, ...]] = {"in_proj.weight": (model.hidden_size,), "conv1d.weight": (1, 4)}
    shapes = {f"self_attn.{name}": (count, *inner.get(name, ())) for name, count in rows.items()}
    return shapes | {"self_attn.out_proj.weight": (model.hidden_size, model.mamba_pieces[0])}


def copied_names(model: ModelConfig) -> dict[str, str]:
    """Return the names of tensors that are copies of the model's own, with the names of these."""
    layers = range(model.num_layers, model.num_layers + model.mtp_layers)
    return {f"model.layers.{number}.{copy}": own for number in layers for own, copy in _COPIES.items()}


def expert_names(model: ModelConfig) -> ExpertNames:
    """Return the names of the tensors of experts.

    Raises:
        ConfigError: published models of this family have no experts, so that other programs could not read them.
    """
    names = FAMILIES[model.family].experts
    has_all = names is not None and bool(names.bias) >= model.expert_bias
    if names is None or not has_all or (names.shared is None and model.shared_ffn_hidden_size):
        raise ConfigError(
            f"models of the family {model.family} in Hugging Face's format have no such experts",
            where="model.family, model.num_experts, model.expert_bias, model.shared_ffn_hidden_size",
            fix="train a family that supports them, such as qwen3_moe",
        )
    return names


def _expert_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    names, hidden, inner, shared = (
        expert_names(model),
        model.hidden_size,
        model.expert_size,
        model.shared_ffn_hidden_size,
    )
    shapes: dict[str, tuple[int, ...]] = {names.router: (model.num_experts, hidden)}
    if names.are_stacked:
        shapes[_ROUTER_BIAS] = (model.num_experts,)
        for name, inputs, outputs in ((names.gate, hidden, 2 * inner), (names.down, inner, hidden)):
            shapes |= {name: (model.num_experts, inputs, outputs), f"{name}_bias": (model.num_experts, outputs)}
    for number in range(0 if names.are_stacked else model.num_experts):
        shapes |= {name.format(number): (inner, hidden) for name in (names.gate, names.up) if name}
        shapes[names.down.format(number)] = (hidden, inner)
    if model.expert_bias:
        shapes[names.bias] = (model.num_experts,)
    if names.shared is not None and shared:
        *first, down = names.shared
        shapes |= {**{name: (shared, hidden) for name in first if name}, down: (hidden, shared)}
    return shapes


def check_weights(weights: HfWeights, model: ModelConfig, vocab_size: int, mtp_layers: int = 0) -> None:
    """Raise FormatError if the weights lack a tensor, have an unknown one, or one of another shape.

    Args:
        mtp_layers: layers after the model's own that predict further tokens and are left out.
    """
    expected = expected_shapes(model, vocab_size)
    expected |= {copy: expected[own] for copy, own in copied_names(model).items() if copy in weights.names}
    left_out = tuple(f"model.layers.{model.num_layers + number}." for number in range(mtp_layers))
    names = {name for name in weights.names if not name.startswith(left_out)}
    names -= {_OUTPUT} if model.tie_embeddings else set()  # some store a tied matrix twice
    wrong = {name: weights.shape(name) for name in expected if name in names and weights.shape(name) != expected[name]}
    for verb, odd in (("lack", sorted(set(expected) - names)), ("have unknown", sorted(names - set(expected)))):
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            fix = "they are damaged or do not match config.json: download them again"
            raise FormatError(f"the weights {verb} {odd[0]}{more}", where=str(weights.folder), fix=fix)
    for name, shape in wrong.items():
        raise FormatError(
            f"{name} is {list(shape)}, and config.json requires {list(expected[name])}",
            where=str(weights.folder),
            fix="download the model again: its files belong to different models",
        )


def fill_model(chunks: list[GPTModel], weights: HfWeights, model: ModelConfig, shard: TensorShard) -> None:
    """Copy this rank's part of the weights into its chunks. Rows that pad the vocabulary become zero."""
    weights.stored_name = FAMILIES[model.family].stored_name
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in global_parameters(chunk):
                read_parameter(name, parameter, weights, model, shard)
            if getattr(chunk, "mtp_process", False):
                _check_copies(weights, model, shard)


def _check_copies(weights: HfWeights, model: ModelConfig, shard: TensorShard) -> None:
    """Raise FormatError if a layer that predicts further tokens has another embedding or output layer than the model.

    Megatron has one of each. A rank compares the rows that it has.
    """
    for copy, own in copied_names(model).items():
        if copy not in weights.names:
            continue
        rows = shard.of(weights.shape(own)[0])
        if not torch.equal(weights.rows(copy, *rows), weights.rows(own, *rows)):
            raise FormatError(
                f"{copy} differs from {own}, which Megatron-Core uses instead",
                where=str(weights.folder),
                fix="model.mtp_layers=0 omits the MTP layers",
            )


def global_parameters(chunk: GPTModel, *, adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, and biases of experts, by name; those of adapters too where `adapters` is set.

    Layers are numbered from 0 over the whole model, those that predict further tokens after its own, and experts over
    their layer, as `mlp.experts.N.linear_fc1.weight`.
    """
    biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")]
    for name, parameter in [*chunk.named_parameters(), *biases]:
        if ADAPTER in name and not adapters:
            continue
        if (further := _FURTHER_LAYER.fullmatch(name)) is not None:
            number, end = chunk.config.num_layers + int(further[1]), further[2]
            layer = compat.predicting_layer(chunk.mtp.layers[int(further[1])])
            end = end.removeprefix(compat.PREDICTING_LAYER[0]).removeprefix(compat.PREDICTING_LAYER[1])
        elif (match := _LAYER.fullmatch(name)) is not None:
            layer, end = chunk.decoder.layers[int(match[1])], match[2]
            number = layer.layer_number - 1
        else:
            yield name, parameter
            continue
        if (expert := _LOCAL_EXPERT.fullmatch(end)) is not None:
            index = layer.mlp.local_expert_indices[int(expert[1] or expert[6])]
            end = f"mlp.experts.{index}.linear_fc{expert[2] or expert[4]}.{expert[3] or expert[5]}"
        yield f"decoder.layers.{number}.{end.replace('.conv1d_', '.conv1d.')}", parameter  # as 0.16 names it


def read_parameter(name: str, target: torch.Tensor, weights: HfWeights, model: ModelConfig, shard: TensorShard) -> None:
    """Fill one parameter of this rank, piece by piece: no more memory is needed than for one piece."""
    match = _LAYER.fullmatch(name)
    if match is None:
        if name == "decoder.final_layernorm.weight":
            target.copy_(weights.rows(_FINAL_NORM))
            return
        tensor = _EMBEDDING if name.startswith("embedding.") or model.tie_embeddings else _OUTPUT
        start = min(shard.rank * target.shape[0], weights.shape(tensor)[0])
        stop = min(start + target.shape[0], weights.shape(tensor)[0])
        target[: stop - start] = weights.rows(tensor, start, stop).to(target.dtype)
        target[stop - start :] = 0
        return
    layer, end = f"model.layers.{match[1]}.", match[2]
    expert = _EXPERT.fullmatch(end)
    if (pieces := _SCAN.get(end.removeprefix("self_attention."))) is not None:
        _read_pieces(f"{layer}self_attn.{end.partition('.')[2]}", target, weights, model.mamba_pieces[pieces], shard)
    elif expert is not None and expert_names(model).are_stacked:
        whole_expert, part = _from_stack(expert, layer, weights, model), shard.of_experts
        if expert[2] == "1":
            for half, own in zip(target.chunk(2), whole_expert.chunk(2), strict=True):
                half.copy_(own[slice(*part.of(own.shape[0]))])
        else:
            is_bias = expert[3] == "bias"
            target.copy_(whole_expert if is_bias else whole_expert[:, slice(*part.of(whole_expert.shape[1]))])
    elif (whole := _one_tensor(end, model)) is not None:
        tensor, divided = layer + whole[0], whole[1]
        target.copy_(weights.rows(tensor, *(shard.of(weights.shape(tensor)[0]) if divided else ())))
    elif end.startswith("mlp."):
        tensors = _mlp_tensors(end, model)
        part = shard.of_experts if expert else shard
        if end.endswith("linear_fc1.weight"):
            for half, tensor in zip(target.chunk(len(tensors)), tensors, strict=True):
                half.copy_(weights.rows(layer + tensor, *part.of(weights.shape(layer + tensor)[0])))
        elif end.endswith("linear_fc2.weight"):
            target.copy_(weights.columns(layer + tensors[0], *part.of(weights.shape(layer + tensors[0])[1])))
        else:
            target.copy_(weights.rows(layer + tensors[0]))
    elif end in _COLUMNS:
        tensor = layer + _COLUMNS[end]
        target.copy_(weights.columns(tensor, *shard.of(weights.shape(tensor)[1])))
    else:
        kind = end.rpartition(".")[2]
        groups = target.view(-1, _group_rows(model), *target.shape[1:])
        for group, tensor, first, start, stop in _qkv_pieces(model, shard):
            read = weights.rows(f"{layer}{tensor}.{kind}", first, first + stop - start)
            groups[group, start:stop].copy_(read)


def _read_pieces(
    name: str, target: torch.Tensor, weights: HfWeights, pieces: tuple[int, ...], shard: TensorShard
) -> None:
    """Fill a parameter with this rank's rows of each piece of a tensor, one after the other."""
    first = 0
    for piece, own in zip(pieces, torch.split(target, [count // shard.size for count in pieces]), strict=True):
        start, stop = shard.of(piece)
        own.copy_(weights.rows(name, first + start, first + stop))
        first += piece


def _one_tensor(end: str, model: ModelConfig) -> tuple[str, bool] | None:
    """Return the tensor in a layer that a parameter is, and True if ranks divide its rows; None if it is not one."""
    if model.kv_lora_rank and end in _LATENT_ROWS:
        return _LATENT_ROWS[end], True
    if model.kv_lora_rank and end in _LATENT:
        return _LATENT[end], False
    if end in _PREDICTING:
        return _PREDICTING[end]
    if end in _NORMS:
        return _NORMS[end], model.norms_span_heads and end in _HEAD_NORMS
    return _BIASES.get(end)


def _from_stack(expert: re.Match[str], layer: str, weights: HfWeights, model: ModelConfig) -> torch.Tensor:
    """Return the whole matrix, or bias, of an expert: gate before up, [outputs, inputs] or [outputs]."""
    names, number = expert_names(model), int(expert[1])
    name = layer + (names.gate if expert[2] == "1" else names.down) + ("_bias" if expert[3] == "bias" else "")
    own = weights.rows(name, number, number + 1)[0].t()
    return torch.cat((own[0::2], own[1::2])) if expert[2] == "1" else own


def _mlp_tensors(end: str, model: ModelConfig) -> tuple[str, ...]:
    """Return the tensors in a layer that a parameter of its MLP consists of: gate and up, or one."""
    if end in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
        return _GATED[-model.halves :] if end == "mlp.linear_fc1.weight" else ("mlp.down_proj.weight",)
    names = expert_names(model)
    if (expert := _EXPERT.fullmatch(end)) is not None:
        number = int(expert[1])
        pair = names.gate.format(number), names.up.format(number)
        return pair[-model.halves :] if expert[2] == "1" else (names.down.format(number),)
    if end.startswith("mlp.shared_experts."):
        assert names.shared is not None
        return names.shared[2 - model.halves : 2] if end.endswith("linear_fc1.weight") else names.shared[2:]
    if end == "mlp.router.bias":
        return (_ROUTER_BIAS,)
    return (names.bias if end == "mlp.router.expert_bias" else names.router,)


def _group_rows(model: ModelConfig) -> int:
    return (model.num_attention_heads // model.num_query_groups + 2) * model.head_size


def _qkv_pieces(model: ModelConfig, shard: TensorShard) -> Iterator[tuple[int, str, int, int, int]]:
    """Yield for each group of this rank its place, the tensor and first row of q, k or v, and its own rows' bounds."""
    head = model.head_size
    query = _group_rows(model) - 2 * head
    for place, group in enumerate(range(*shard.of(model.num_query_groups))):
        yield place, _QKV[0], group * query, 0, query
        yield place, _QKV[1], group * head, query, query + head
        yield place, _QKV[2], group * head, query + head, query + 2 * head


def hf_tensors(chunk: GPTModel, model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the Hugging Face tensors of a whole model by name; those of stacked experts once all are there."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for ours, parameter in global_parameters(chunk):
        for name, tensor in to_hf(ours, parameter.detach(), model, vocab_size).items():
            for copy in (copy for copy, own in copied_names(model).items() if own == name):
                yield copy, tensor.clone()
            if ".mlp.experts." not in name or not expert_names(model).are_stacked:
                yield name, tensor.contiguous()
                continue
            stack = stacks.setdefault(name, [])
            stack.append(tensor)
            if len(stack) == model.num_experts:
                yield name, torch.stack(stacks.pop(name))


def to_hf(name: str, tensor: torch.Tensor, model: ModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return one whole parameter (tensor parallelism of 1) as Hugging Face tensors by name.

    Of stacked experts it returns the part of one.
    """
    stored = FAMILIES[model.family].stored_name
    return {stored(own): part for own, part in _to_hf(name, tensor, model, vocab_size).items()}


def _to_hf(name: str, tensor: torch.Tensor, model: ModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    match = _LAYER.fullmatch(name)
    if match is None:
        if name == "decoder.final_layernorm.weight":
            return {_FINAL_NORM: tensor}
        if name.startswith("embedding."):
            return {_EMBEDDING: tensor[:vocab_size]}
        return {} if model.tie_embeddings else {_OUTPUT: tensor[:vocab_size]}
    layer, end = f"model.layers.{match[1]}.", match[2]
    if end.removeprefix("self_attention.") in _SCAN:
        return {f"{layer}self_attn.{end.partition('.')[2]}": tensor}
    if (whole := _one_tensor(end, model)) is not None:
        return {layer + whole[0]: tensor}
    if end in _COLUMNS:
        return {layer + _COLUMNS[end]: tensor}
    if (expert := _EXPERT.fullmatch(end)) is not None and (names := expert_names(model)).are_stacked:
        stack = (names.gate if expert[2] == "1" else names.down) + ("_bias" if expert[3] == "bias" else "")
        if expert[2] == "1":
            tensor = torch.stack(tensor.chunk(2), dim=1).flatten(0, 1)
        return {layer + stack: tensor.t()}
    if end.startswith("mlp."):
        tensors = _mlp_tensors(end, model)
        return {layer + other: part for other, part in zip(tensors, tensor.chunk(len(tensors)), strict=True)}
    kind = end.rpartition(".")[2]
    groups = tensor.view(-1, _group_rows(model), *tensor.shape[1:])
    pieces: dict[str, list[torch.Tensor]] = {}
    for group, other, _, start, stop in _qkv_pieces(model, TensorShard()):
        pieces.setdefault(f"{layer}{other}.{kind}", []).append(groups[group][start:stop])
    return {other: torch.cat(parts) for other, parts in pieces.items()}
