"""Convert Hugging Face weights to Megatron's parameters and back, one tensor at a time.

Each rank reads only its own rows and columns of the safetensors files, which are mapped into memory. Megatron stores
the queries, keys and values of a group together, and on each rank the two halves of the gated layer in sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import xxhash
from megatron.core.models.gpt import GPTModel

from harness.errors import FormatError
from harness.megatron import compat
from harness.megatron.hf_files import HfWeights
from harness.megatron.job.runtime import gather
from harness.plan import ModelConfig
from harness.plan.families.base import ExpertNames

# Part of the names of the parameters that `harness.megatron.model.lora` adds to the model.
ADAPTER = "_adapter."
# Prefix of the names of the parameters that `harness.megatron.model.media` adds.
ENCODER = "encoder."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Layers as this rank numbers them: decoder layers, and MTP layers, each of which contains a decoder layer.
_OWN_LAYER = re.compile(rf"(decoder|mtp)\.layers\.(\d+)\.(?:{compat.PREDICTING_LAYER})?(.+)")
_EMBEDDING, _OUTPUT, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# The tensor of each layer parameter, by suffix, and the dimension that tensor-parallel ranks divide, or None.
# Transformer Engine fuses the norms into the linear layers that follow.
_TENSORS: dict[str, tuple[str, int | None]] = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.in_proj.layer_norm_weight": ("input_layernorm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.out_norm.weight": ("linear_attn.norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias", None),
    "self_attention.core_attention.softmax_offset": ("self_attn.sinks", 0),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.router.bias": ("mlp.router.bias", None),
    **{f"mlp.{name}_latent_proj.weight": (f"mlp.{name}_latent_proj.weight", None) for name in ("fc1", "fc2")},
}
_HEAD_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
# The same for latent attention.
_LATENT: dict[str, tuple[str, int | None]] = {
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight", None),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight", None),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight", None),
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight", 0),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight", 0),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight", 0),
}
# The same for an MTP layer, in addition to the parameters of its decoder layer.
_PREDICTING: dict[str, tuple[str, int | None]] = {
    "enorm.weight": ("enorm.weight", None),
    "hnorm.weight": ("hnorm.weight", None),
    "eh_proj.weight": ("eh_proj.weight", 0),
    "final_layernorm.weight": ("shared_head.norm.weight", None),
}
# Copies of the model's own tensors that MTP layers have in published weights, by the name of the original.
_COPIES = {_EMBEDDING: "embed_tokens.weight", _OUTPUT: "shared_head.head.weight"}
# Parameters of a Mamba-2 layer, and the pieces of `ModelConfig.scan_pieces` in their rows; ranks divide each piece.
_MAMBA = {
    "in_proj.weight": slice(0, 5),
    "conv1d.weight": slice(1, 4),
    "conv1d.bias": slice(1, 4),
    **dict.fromkeys(("A_log", "D", "dt_bias"), slice(4, 5)),
    "norm.weight": slice(0, 1),
}
# The same for the gated delta rule. Its first matrix is several tensors; the key is whether key heads group rows.
_DELTA = {"conv1d.weight": slice(0, 3), "A_log": slice(5, 6), "dt_bias": slice(5, 6)}
_DELTA_INPUTS = {
    True: {"in_proj_qkvz.weight": slice(0, 4), "in_proj_ba.weight": slice(4, 6)},
    False: {
        "in_proj_qkv.weight": slice(0, 3),
        **{f"in_proj_{name}.weight": slice(place, place + 1) for place, name in ((3, "z"), (4, "b"), (5, "a"))},
    },
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Parameters of an expert: in Megatron, numbered on this rank; in `global_parameters`, numbered in the layer.
_LOCAL_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)|linear_fc([12])\.(weight|bias)(\d+))"
)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
_GATED = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


@dataclass(frozen=True)
class TensorShard:
    """A rank's place among the tensor-parallel ranks that divide a matrix, and among those that divide an expert."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1

    def of(self, count: int) -> tuple[int, int]:
        """Return the bounds of this rank's share of `count` rows or columns."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size


def _scan_module(model: ModelConfig) -> str:
    return "linear_attn" if model.has_delta_rule else "self_attn"


def linear_names(target: str, model: ModelConfig) -> list[str]:
    """Return the linear layers of transformers that one of Megatron's, such as `linear_qkv`, combines."""
    end = f"{'mlp' if '_fc' in target else 'self_attention'}.{target}.weight"
    tensors = [tensor for tensor, *_ in _row_pieces(end, model, TensorShard())] or _tensors_of(end, model)[0]
    return list(dict.fromkeys(name.split(".")[-2] for name in tensors))


def copied_names(model: ModelConfig) -> dict[str, str]:
    """Return the names of tensors that are copies of other tensors of the model, mapped to the originals."""
    layers = range(model.num_layers, model.num_layers + model.mtp_layers)
    tied = {_OUTPUT: _EMBEDDING} if model.tie_embeddings else {}
    return tied | {f"model.layers.{number}.{copy}": own for number in layers for own, copy in _COPIES.items()}


def expert_names(model: ModelConfig) -> ExpertNames:
    """Return the names of the expert tensors; `check_exported` makes sure that the family defines them."""
    names = model.traits.experts
    assert names is not None
    return names


def check_weights(
    chunks: Sequence[GPTModel],
    weights: HfWeights,
    model: ModelConfig,
    shard: TensorShard,
    vocab_size: int,
    mtp_layers: int = 0,
) -> None:
    """Raise FormatError on every rank if a tensor of the model is missing, has another shape, or is unknown.

    Tensors of the `mtp_layers` layers after the model's own, which predict further tokens, are ignored.
    """
    stored, there = model.traits.stored_name, weights.names
    expected = {
        stored(tensor): shape
        for chunk in chunks
        for name, parameter in global_parameters(chunk)
        for tensor, shape in _whole_shapes(name, parameter, model, shard, vocab_size)
    }
    copied = {copy: stored(own) for copy, own in copied_names(model).items() if copy in there}
    expected |= {copy: expected[own] for copy, own in copied.items() if own in expected}
    left_out = tuple(f"model.layers.{model.num_layers + number}." for number in range(mtp_layers))
    names = sorted(name for name in there if not name.startswith((*left_out, *model.left_out)))
    lacking = set(expected).difference(names)
    wrong = [name for name in expected if name not in lacking and weights.shape(name) != expected[name]]
    other = [(name, weights.shape(name), expected[name]) for name in wrong[:1]]
    found = gather((lacking, other, xxhash.xxh3_64_hexdigest("\n".join(names).encode())))
    _refuse_odd(weights, "lack", sorted(set().union(*(some for some, *_ in found))))
    if len({digest for *_, digest in found}) > 1:
        what, fix = "the weights have other tensors on another rank", "download the same revision on every node"
        raise FormatError(what, where=str(weights.folder), fix=fix)
    is_known = torch.tensor([name in expected for name in names], dtype=torch.uint8, device=torch.cuda.current_device())
    if len(found) > 1:
        torch.distributed.all_reduce(is_known, op=torch.distributed.ReduceOp.MAX)
    unknown = [name for name, known in zip(names, is_known.tolist(), strict=True) if not known]
    _refuse_odd(weights, "have unknown", unknown)
    for name, shape, needed in (one for _, some, _ in found for one in some):
        what = f"{name} is {list(shape)}, and config.json requires {list(needed)}"
        fix = "download the model again: its files belong to different models"
        raise FormatError(what, where=str(weights.folder), fix=fix)


def _refuse_odd(weights: HfWeights, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        fix = "they are damaged or do not match config.json: download them again"
        raise FormatError(f"the weights {verb} {names[0]}{more}", where=str(weights.folder), fix=fix)


def _whole_shapes(
    name: str, part: torch.Tensor, model: ModelConfig, shard: TensorShard, vocab_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and whole shape of each Hugging Face tensor that a rank's parameter is part of."""
    if (match := _LAYER.fullmatch(name)) is None:
        tensor = _outer_tensor(name, model)
        yield tensor, (vocab_size if tensor in (_EMBEDDING, _OUTPUT) else part.shape[0], *part.shape[1:])
        return
    layer, end = f"model.layers.{match[1]}.", match[2]
    expert = _EXPERT.fullmatch(end)
    if pieces := _row_pieces(end, model, TensorShard()):
        for tensor in dict.fromkeys(tensor for tensor, *_ in pieces):
            yield layer + tensor, (sum(count for one, _, count in pieces if one == tensor), *part.shape[1:])
    elif expert is not None and expert_names(model).are_stacked:
        yield layer + _stack_of(expert, model), (model.num_experts, *part.shape[::-1])
    else:
        tensors, dim = _tensors_of(end, model)
        size = shard.expert_size if expert else shard.size
        for tensor, own in zip(tensors, part.chunk(len(tensors)), strict=True):
            yield layer + tensor, tuple(own.shape[axis] * (size if axis == dim else 1) for axis in range(own.dim()))


def fill_model(chunks: list[GPTModel], weights: HfWeights, model: ModelConfig, shard: TensorShard) -> None:
    """Copy this rank's part of the weights into its chunks. Rows that pad the vocabulary become zero.

    Raise FormatError if, in this rank's rows, a copy differs from the matrix that Megatron uses instead.
    """
    weights.stored_name = model.traits.stored_name
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in global_parameters(chunk):
                read_parameter(name, parameter, weights, model, shard)
    if not any(chunk.pre_process or getattr(chunk, "mtp_process", False) for chunk in chunks):
        return
    for copy, own in copied_names(model).items():
        if copy not in weights.names:
            continue
        rows, copied = (weights.rows(name, *shard.of(weights.shape(own)[0])) for name in (own, copy))
        if not torch.equal(copied.to(rows.dtype), rows):
            what = f"{copy} differs from {own}, which Megatron-Core uses instead"
            fix = f"{'tie_word_embeddings=false in config.json' if copy == _OUTPUT else 'model.mtp_layers=0'} omits it"
            raise FormatError(what, where=str(weights.folder), fix=fix)


def global_parameters(chunk: GPTModel, *, adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of parameters and expert biases, including adapters if `adapters` is set.

    Layers are numbered from 0 over the whole model, MTP layers after its own, and experts over their layer, as
    `mlp.experts.N.linear_fc1.weight`.
    """
    biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")]
    for name, parameter in [*chunk.named_parameters(), *biases]:
        if ADAPTER in name and not adapters:
            continue
        if (match := _OWN_LAYER.fullmatch(name)) is None:
            yield name, parameter
            continue
        place, end = int(match[2]), match[3]
        if match[1] == "mtp":
            number, layer = chunk.config.num_layers + place, compat.predicting_layer(chunk.mtp.layers[place])
        else:
            layer = chunk.decoder.layers[place]
            number = layer.layer_number - 1
        if (expert := _LOCAL_EXPERT.fullmatch(end)) is not None:
            index = layer.mlp.local_expert_indices[int(expert[1] or expert[6])]
            end = f"mlp.experts.{index}.linear_fc{expert[2] or expert[4]}.{expert[3] or expert[5]}"
        yield f"decoder.layers.{number}.{end.replace('.conv1d_', '.conv1d.')}", parameter  # Megatron 0.16's name


def read_parameter(name: str, target: torch.Tensor, weights: HfWeights, model: ModelConfig, shard: TensorShard) -> None:
    """Fill one parameter of this rank piece by piece, which needs memory for only one piece at a time."""
    match = _LAYER.fullmatch(name)
    if match is None:
        tensor = _outer_tensor(name, model)
        if tensor not in (_EMBEDDING, _OUTPUT):
            target.copy_(weights.rows(tensor))
            return
        start = min(shard.rank * target.shape[0], weights.shape(tensor)[0])
        stop = min(start + target.shape[0], weights.shape(tensor)[0])
        target[: stop - start] = weights.rows(tensor, start, stop).to(target.dtype)
        target[stop - start :] = 0
        return
    layer, end = f"model.layers.{match[1]}.", match[2]
    expert = _EXPERT.fullmatch(end)
    if pieces := _row_pieces(end, model, shard):
        place = 0
        for tensor, first, count in pieces:
            target[place : place + count].copy_(weights.rows(layer + tensor, first, first + count))
            place += count
    elif expert is not None and expert_names(model).are_stacked:
        # Gate before up, [outputs, inputs] or [outputs]. These experts have biases, so ranks never divide one.
        number = int(expert[1])
        own = weights.rows(layer + _stack_of(expert, model), number, number + 1)[0].t()
        target.copy_(torch.cat((own[0::2], own[1::2])) if expert[2] == "1" else own)
    else:
        tensors, dim = _tensors_of(end, model)
        part = TensorShard(shard.expert_rank, shard.expert_size) if expert else shard
        for own, tensor in zip(target.chunk(len(tensors)), tensors, strict=True):
            bounds = () if dim is None else part.of(weights.shape(layer + tensor)[dim])
            own.copy_((weights.columns if dim == 1 else weights.rows)(layer + tensor, *bounds))


def _outer_tensor(name: str, model: ModelConfig) -> str:
    """Return the tensor of a parameter outside the layers."""
    if name.startswith(ENCODER):
        assert model.media is not None
        return model.media.encoder_name(name.removeprefix(ENCODER))
    if name == "decoder.final_layernorm.weight":
        return _FINAL_NORM
    return _EMBEDDING if name.startswith("embedding.") or model.tie_embeddings else _OUTPUT


def _stack_of(expert: re.Match[str], model: ModelConfig) -> str:
    """Return the tensor in a layer that stacks this matrix, or bias, of all its experts."""
    names = expert_names(model)
    return (names.gate if expert[2] == "1" else names.down) + ("_bias" if expert[3] == "bias" else "")


def _tensors_of(end: str, model: ModelConfig) -> tuple[tuple[str, ...], int | None]:
    """Return the tensors in a layer that make up a parameter, and the dimension that ranks divide, or None."""
    known = _TENSORS | _PREDICTING | (_LATENT if model.kv_lora_rank else {})
    if end in known:
        tensor, dim = known[end]
        return (tensor,), 0 if model.traits.norms_span_heads and end in _HEAD_NORMS else dim
    if end == "self_attention.out_proj.weight":
        return (f"{_scan_module(model)}.out_proj.weight",), 1
    if end == "mlp.linear_fc1.weight":
        return _GATED[-model.halves :], 0
    names = expert_names(model)
    if (expert := _EXPERT.fullmatch(end)) is not None:
        gate, up, down = (name.format(int(expert[1])) for name in (names.gate, names.up, names.down))
        return ((gate, up)[-model.halves :], 0) if expert[2] == "1" else ((down,), 1)
    if end == "mlp.shared_experts.gate_weight":
        return (names.shared_gate,), None
    if end.startswith("mlp.shared_experts."):
        assert names.shared is not None
        return (names.shared[2 - model.halves : 2], 0) if end.endswith("linear_fc1.weight") else (names.shared[2:], 1)
    return (names.bias if end == "mlp.router.expert_bias" else names.router,), None


def _row_pieces(end: str, model: ModelConfig, shard: TensorShard) -> list[tuple[str, int, int]]:
    """Return (tensor in the layer, first row, count) for each piece of a parameter with rows from several places."""
    kind = end.rpartition(".")[2]
    if end == f"self_attention.linear_qkv.{kind}":
        return [(f"{tensor}.{kind}", first, count) for tensor, first, count in _qkv_rows(model, shard)]
    found = []
    end = end.removeprefix("self_attention.")
    of_scan = _DELTA if model.has_delta_rule else _MAMBA
    if end == "in_proj.weight" and model.has_delta_rule:
        tensors = _DELTA_INPUTS[model.traits.groups_scan_rows]
    else:
        tensors = {end: of_scan[end]} if end in of_scan else {}
    for name, own in tensors.items():
        tensor = f"{_scan_module(model)}.{name}"
        pieces, groups = model.scan_pieces[own], 1
        if "in_proj" in tensor and model.traits.groups_scan_rows:
            groups = model.scan_num_groups
        # Each group holds its part of all pieces; ranks divide the groups, or the pieces of the only group.
        whole = sum(pieces) // groups
        for place, piece in enumerate(pieces):
            before, size = sum(pieces[:place]) // groups, piece // groups
            if groups > 1:
                found += [(tensor, group * whole + before, size) for group in range(*shard.of(groups))]
            else:
                start, stop = shard.of(size)
                found.append((tensor, before + start, stop - start))
    return found


def _qkv_rows(model: ModelConfig, shard: TensorShard) -> Iterator[tuple[str, int, int]]:
    """Yield (query, key or value tensor, first row, count) for all rows; the rows of a group are consecutive."""
    head, each = model.head_size, model.num_attention_heads // model.num_query_groups
    for group in range(*shard.of(model.num_query_groups)):
        if model.traits.has_output_gate:  # the rows of a head's gate follow those of its query
            for part in range(2):
                yield from ((_QKV[0], (2 * (group * each + number) + part) * head, head) for number in range(each))
        else:
            yield _QKV[0], group * each * head, each * head
        yield _QKV[1], group * head, head
        yield _QKV[2], group * head, head


def hf_tensors(chunk: GPTModel, model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and Hugging Face tensors of a whole model; stacked experts once all of them are converted."""
    stacks: dict[str, list[torch.Tensor]] = {}
    stacks_media = model.media is not None and model.media.stacks_experts
    for ours, parameter in global_parameters(chunk):
        made = to_hf(ours, parameter.detach(), model, vocab_size)
        if stacks_media and ".mlp.experts." in ours:  # gate and up side by side, inputs first
            layer, end = next(iter(made)).partition(".experts.")[0], "gate_up_proj" if len(made) == 2 else "down_proj"
            made = {f"{layer}.experts.{end}": torch.cat([part.t() for part in made.values()], dim=1)}
        for name, tensor in made.items():
            for copy in (copy for copy, own in copied_names(model).items() if own == name and copy != _OUTPUT):
                yield copy, tensor.clone()
            if ".mlp.experts." not in name or not (expert_names(model).are_stacked or stacks_media):
                yield name, tensor.contiguous()
                continue
            stack = stacks.setdefault(name, [])
            stack.append(tensor)
            if len(stack) == model.num_experts:
                yield name, torch.stack(stacks.pop(name))


def to_hf(name: str, tensor: torch.Tensor, model: ModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return a whole parameter (tensor parallelism of 1) as Hugging Face tensors by name, or as a part of a stack."""
    stored, media = model.traits.stored_name, model.media
    if media is not None and name.startswith(ENCODER):
        return {_outer_tensor(name, model): tensor}
    made = {stored(own): part for own, part in _to_hf(name, tensor, model, vocab_size).items()}
    return made if media is None else {media.text_name(own): part for own, part in made.items()}


def _to_hf(name: str, tensor: torch.Tensor, model: ModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    match = _LAYER.fullmatch(name)
    if match is None:
        outer = _outer_tensor(name, model)
        is_copy = name.startswith("output_layer.") and outer == _EMBEDDING
        return {} if is_copy else {outer: tensor if outer == _FINAL_NORM else tensor[:vocab_size]}
    layer, end = f"model.layers.{match[1]}.", match[2]
    if pieces := _row_pieces(end, model, TensorShard()):
        found: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for (other, first, _), rows in zip(pieces, torch.split(tensor, [count for *_, count in pieces]), strict=True):
            found.setdefault(layer + other, []).append((first, rows))
        in_order = {other: sorted(parts, key=itemgetter(0)) for other, parts in found.items()}
        return {other: torch.cat([rows for _, rows in parts]) for other, parts in in_order.items()}
    if (expert := _EXPERT.fullmatch(end)) is not None and expert_names(model).are_stacked:
        if expert[2] == "1":
            tensor = torch.stack(tensor.chunk(2), dim=1).flatten(0, 1)
        return {layer + _stack_of(expert, model): tensor.t()}
    tensors, _ = _tensors_of(end, model)
    return {layer + other: part for other, part in zip(tensors, tensor.chunk(len(tensors)), strict=True)}
