"""Differences of a published model family from the Llama architecture: settings, config.json and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import ConfigError

# Letters of `model.layer_pattern` for layers with a scan: Mamba-2, and the gated delta rule.
SCANS = "MD"
# Returns the error for an unsupported feature of a config.json.
Refuse = Callable[[str], ConfigError]


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's tensors in Hugging Face weights; `{}` is the number of an expert.

    Attributes:
        gate, up, down: matrices of one routed expert; gate is empty if the family has none.
        bias: bias of the experts' scores; empty if there is none.
        shared: gate, up and down of the shared experts; None if there are none.
        shared_gate: gate of the shared experts' output; empty if there is none.
        are_stacked: the experts of a layer are in one tensor [experts, inputs, outputs], with gate and up in alternate
            columns of one tensor, and their biases (the name with `_bias` appended) in another [experts, outputs].
    """

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    bias: str = ""
    shared: tuple[str, str, str] | None = None
    shared_gate: str = ""
    are_stacked: bool = False


def require_known(values: Mapping[str, Any], known: Mapping[str, Any], refuse: Refuse) -> None:
    """Raise the error of `refuse` if a value of a config.json is present and differs from the known one."""
    for name, value in known.items():
        if (found := values.get(name, value)) != value:
            raise refuse(f"{name} {found!r} is not supported ({value!r} is)")


def read_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the rotary embedding; like transformers, read `rope_scaling` before `rope_parameters`."""
    names = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")
    outer = {name: values[name] for name in names if values.get(name) is not None}
    rope = {"rope_theta": 10000.0, **outer, **(values.get("rope_scaling") or values.get("rope_parameters") or {})}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    # Older files use `mrope`; the sections of a head are in `model.encoder`.
    return {**rope, "rope_type": "default" if kind == "mrope" else kind}


def require_rotated(values: Mapping[str, Any], part: float, refuse: Refuse) -> None:
    """Raise the error of `refuse` if a config.json rotates another fraction of each head than `part`."""
    name = "partial_rotary_factor"
    require_known({name: read_rope(values).get(name, values.get(name, part))}, {name: part}, refuse)


def has_scan(parts: str) -> bool:
    """Return True if a layer with these parts, letters of `model.layer_pattern`, has a scan."""
    return any(part in SCANS for part in parts)


def count_experts(values: Mapping[str, Any]) -> int:
    """Return the number of experts under any of its names in config.json; raise KeyError if there is none."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(values[name]) for name in names if values.get(name)), 0) or int(values["num_experts"])


def read_softmax(
    values: Mapping[str, Any], *, normalize: bool, inner: int | None = None, dense_layers: int = 0
) -> dict[str, Any]:
    """Return the settings of experts with a softmax router; `inner` is their size, None for `intermediate_size`."""
    return {
        "num_experts": count_experts(values),
        "experts_per_token": int(values["num_experts_per_tok"]),
        "expert_ffn_hidden_size": inner,
        "dense_layers": dense_layers,
        "router_score": "softmax",
        "router_normalize": normalize,
    }


def write_softmax(model: Any, *, number: str = "num_experts", inner: str = "intermediate_size") -> dict[str, Any]:
    """Return the values that `read_softmax` reads, with the number and size of experts under these names."""
    return {
        number: model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        inner: model.expert_size,
        "router_aux_loss_coef": model.aux_loss,
    }


@dataclass(frozen=True)
class Family:
    """A family of published models.

    Attributes:
        name: `model_type` of its config.json, and value of `model.family`.
        has_qkv_bias: queries, keys and values have biases.
        has_biases: the attention output, routers and experts have biases.
        has_sinks: each head attends to an additional key with a trained score and no value.
        has_windows: every second layer, starting with the first, attends to only `sliding_window` tokens.
        swiglu_limit: limit that clamps the gate from above and the up-projection from both sides; the gate is
            x * sigmoid(1.702 x), and 1 is added to the up-projection. 0 for plain SwiGLU.
        yarn_truncates: yarn rounds its range of dimensions to whole numbers.
        has_head_norms: queries and keys are normalized, separately for each head.
        chooses_head_norms: only some of its models have such norms, as set by `model.qk_norm`.
        rotated_part: fraction of the dimensions of a head, the first ones, that the rotary embedding rotates.
        norms_span_heads: the queries of all heads are normalized together, and so are the keys.
        has_latents: keys and values of all heads are computed from one latent vector (multi-latent attention).
        ranks_groups_by: number of best experts whose sum of scores ranks a group of experts; 0 for no groups.
        window_setting: setting that enables its sliding window; empty if `sliding_window` alone does.
        predicts_further: its models can have multi-token prediction (MTP) layers.
        has_experts_everywhere: no layer of its models is dense.
        pattern_letters: letters of `model.layer_pattern`; empty if its models have none. If `-` is one of them, a layer
            consists of only that part; otherwise an MLP or experts follow it.
        has_output_gate: the output of each head is multiplied by a gate, whose rows follow the rows of its query.
        norms_add_one: the weights of norms, except the norm of a scan, are relative to 1.
        groups_scan_rows: the rows of a scan's input projection are stored by key head.
        is_gated: the MLP and the experts have a gate (SwiGLU); otherwise they use squared ReLU.
        read: returns further settings of `ModelConfig` from the values of a config.json; raises if one is missing.
        write: returns further values of a config.json from the settings of `ModelConfig`.
        standard: returns a config.json under the names that all other families use.
        stored_name: returns the name of a tensor in published weights, given its name in Llama.
        left_out: name prefixes of tensors in published weights that are neither trained nor exported.
        unwritten: values that other families write into a config.json, but this one does not.
    """

    name: str
    architecture: str
    has_qkv_bias: bool = False
    has_biases: bool = False
    has_sinks: bool = False
    has_windows: bool = False
    swiglu_limit: float = 0.0
    yarn_truncates: bool = True
    has_head_norms: bool = False
    chooses_head_norms: bool = False
    rotated_part: float = 1.0
    norms_span_heads: bool = False
    has_latents: bool = False
    ranks_groups_by: int = 0
    window_setting: str = "use_sliding_window"
    predicts_further: bool = False
    has_experts_everywhere: bool = False
    pattern_letters: str = ""
    has_output_gate: bool = False
    norms_add_one: bool = False
    groups_scan_rows: bool = False
    is_gated: bool = True
    experts: ExpertNames | None = None
    read: Callable[[Mapping[str, Any], Refuse], dict[str, Any]] = lambda values, refuse: {}
    write: Callable[[Any], dict[str, Any]] = lambda model: {"attention_bias": False}
    standard: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    stored_name: Callable[[str], str] = lambda name: name
    left_out: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
