"""A small random Llama in the files of Hugging Face, and its loss by plain PyTorch, one conversation at a time.

The reference shares no code with any trainer: it attends within one conversation because it is given no other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, silu

from harness.conformance.target import Tokens

Shape = tuple[int, ...]
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = ("<|im_start|>", END, PAD)
VOCAB_SIZE = 256 + len(SPECIAL) + 5  # a multiple of 8
_LAYERS, _HEADS, _KEY_HEADS, _HEAD_SIZE, _HIDDEN, _MIDDLE, _BASE, _EPS = 2, 4, 2, 8, 32, 64, 10_000.0, 1e-6
_EXPERTS, _CHOSEN = 4, 2
_DECAYS = ("A_log", "dt_bias")
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _MIDDLE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KEY_HEADS,
    "head_dim": _HEAD_SIZE,
    "max_position_embeddings": 1024,
    "rope_theta": _BASE,
    "rms_norm_eps": _EPS,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 256 + SPECIAL.index(END),
    "pad_token_id": 256 + SPECIAL.index(PAD),
}
# Kinds of models, where they differ from a Llama.
_KINDS: dict[str, dict[str, Any]] = {
    "model": {},
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _CHOSEN,
        "sliding_window": None,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    },
    # With a layer of the gated delta rule and one of attention.
    "scans": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": _KEY_HEADS,
        "linear_num_value_heads": _HEADS,
        "linear_key_head_dim": _HEAD_SIZE,
        "linear_value_head_dim": _HEAD_SIZE,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": _BASE, "partial_rotary_factor": 0.25},
    },
    # A layer of multi-token prediction in the names of DeepSeek-V3; others read the Llama alone.
    "further": {"num_nextn_predict_layers": 1},
}
# ChatML with tools as JSON, tool results in a turn of their own, and marks around what an assistant says.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, *, kind: str) -> None:
    """Write `config.json`, `model.safetensors` and a tokenizer of bytes with a chat template to a new folder.

    The kind is `model`, a Llama, `experts`, a Mixtral of which each token visits two of four, `scans`, a Qwen3.5, or
    `further`, a Llama with a layer that predicts the token after the next. The deviation of the weights is larger than
    in training, so that what should change nothing shows where it does.
    """
    folder.mkdir(parents=True)
    rng, arrays = np.random.default_rng(5), {}
    inner, of_keys = _HEADS * _HEAD_SIZE, _KEY_HEADS * _HEAD_SIZE
    whole = (VOCAB_SIZE, _HIDDEN)
    shapes: dict[str, Shape] = {"model.embed_tokens": whole, "model.norm": (_HIDDEN,), "lm_head": whole}
    for layer in range(_LAYERS + (kind == "further")):
        at = f"model.layers.{layer}."
        if kind == "scans" and layer == 0:
            mixed = inner + 2 * of_keys
            rows = {"in_proj_qkv": mixed, "in_proj_z": inner, "in_proj_b": _HEADS, "in_proj_a": _HEADS}
            mixer: dict[str, Shape] = {f"linear_attn.{name}": (size, _HIDDEN) for name, size in rows.items()}
            mixer |= {"linear_attn.out_proj": (_HIDDEN, inner), "linear_attn.conv1d": (mixed, 1, 4)}
            mixer |= {"linear_attn.norm": (_HEAD_SIZE,), **{f"linear_attn.{name}": (_HEADS,) for name in _DECAYS}}
        else:
            rows = {"q": inner * (1 + (kind == "scans")), "k": of_keys, "v": of_keys}  # those of scans are gated
            mixer = {f"self_attn.{name}_proj": (size, _HIDDEN) for name, size in rows.items()}
            mixer |= {"self_attn.o_proj": (_HIDDEN, inner)}
            mixer |= {f"self_attn.{name}_norm": (_HEAD_SIZE,) for name in "qk" if kind == "scans"}
        shapes |= {f"{at}{name}": shape for name, shape in mixer.items()}
        if kind == "experts":
            shapes[f"{at}block_sparse_moe.gate"] = (_EXPERTS, _HIDDEN)
        for gate, down, up in _mlp_names(at, kind == "experts"):
            shapes |= {gate: (_MIDDLE, _HIDDEN), down: (_HIDDEN, _MIDDLE), up: (_MIDDLE, _HIDDEN)}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if layer == _LAYERS:
            norms += ["enorm", "hnorm", "shared_head.norm"]
            shapes[f"{at}eh_proj"] = (_HIDDEN, 2 * _HIDDEN)
        shapes |= {f"{at}{name}": (_HIDDEN,) for name in norms}
    for name, shape in sorted(shapes.items()):
        values = rng.normal(0.0, 0.2, shape) + (len(shape) == 1)
        is_decay = name.endswith(_DECAYS)
        # A state lasts for many tokens.
        arrays[name if is_decay else f"{name}.weight"] = (values - 3 * is_decay).astype("<f4")
    header, start = {}, 0
    for name, values in arrays.items():
        place = [start, start + values.nbytes]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": place}
        start = place[1]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    stored = b"".join(values.tobytes() for values in arrays.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + stored)
    (folder / "config.json").write_text(json.dumps(_CONFIG | _KINDS[kind]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _CONFIG["eos_token_id"]}))
    write_tokenizer(folder)


def _mlp_names(at: str, experts: bool) -> list[tuple[str, ...]]:
    """Return the names of gate, down and up of each MLP of the layer whose names begin with `at`."""
    if not experts:
        return [tuple(f"{at}mlp.{name}_proj" for name in ("gate", "down", "up"))]
    places = [f"{at}block_sparse_moe.experts.{number}" for number in range(_EXPERTS)]
    return [tuple(f"{place}.w{number}" for number in (1, 2, 3)) for place in places]


def write_tokenizer(folder: Path, template: str = TEMPLATE, special: Sequence[str] = (), end: str = END) -> None:
    """Write a tokenizer of bytes with a chat template, and with further special tokens."""
    # The printable stand-ins of GPT-2 for bytes, in the order of the bytes.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    numbered = enumerate((*SPECIAL, *special), start=256)
    added = [{"id": number, "content": text, "special": True, **flags} for number, text in numbered]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": PAD}
    config |= {"bos_token": None, "model_max_length": 1024, "clean_up_tokenization_spaces": False}
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)


class Reference:
    """Loss and gradients, in float64, of a model in the files that `write_model` writes."""

    def __init__(self, folder: Path) -> None:
        self._weights = {}
        for path in folder.glob("*.safetensors"):
            data = path.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:start]).items():
                if name != "__metadata__":
                    kind = {"F32": "<f4", "F64": "<f8"}[entry["dtype"]]
                    first, last = (start + place for place in entry["data_offsets"])
                    values = np.frombuffer(data[first:last], kind).reshape(entry["shape"]).astype("f8")
                    self._weights[name.removesuffix(".weight")] = torch.from_numpy(values).requires_grad_()

    def differing(self, other: Reference) -> list[str]:
        """Return the names of the weights that another model does not have, or has with other values."""
        return [
            name
            for name, weight in self._weights.items()
            if (own := other._weights.get(name)) is None or own.shape != weight.shape or not torch.allclose(own, weight)
        ]

    def losses(self, sequence: Tokens) -> torch.Tensor:
        """Return float64 [trained tokens]: the loss of each trained token but the first of the conversation."""
        ids, labels = torch.tensor(sequence["input_ids"]), torch.tensor(sequence["labels"])[1:]
        logits = self._states(ids[:-1]) @ self._weights["lm_head"].T
        return cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")

    def further_losses(self, sequence: Tokens, *, masked: bool = True) -> torch.Tensor:
        """Return the losses of the token after the next of each token, where it is trained, or all with `masked` off.

        The layer reads the states after the model's last norm, and shares embedding and output with the model.
        """
        weights, at = self._weights, f"model.layers.{_LAYERS}."
        ids, labels = torch.tensor(sequence["input_ids"]), torch.tensor(sequence["labels"])[2:]
        embedded = _norm(weights["model.embed_tokens"][ids[1:-1]], weights[f"{at}enorm"])
        states = torch.cat((embedded, _norm(self._states(ids[:-2]), weights[f"{at}hnorm"])), dim=-1)
        states = _norm(self._layer(states @ weights[f"{at}eh_proj"].T, at), weights[f"{at}shared_head.norm"])
        kept = (labels != -100) | (not masked)
        return cross_entropy((states @ weights["lm_head"].T)[kept], ids[2:][kept], reduction="none")

    def step_further(self, batch: Sequence[Tokens], share: float, *, masked: bool = True) -> list[tuple[float, float]]:
        """Return what trainers may report where `share` of the further loss is added: loss and norm of the gradients.

        They divide it by its own trained tokens, or by those of the model, and report the model's loss or the sum.
        """
        figures = []
        for divides_own in (True, False):
            loss = torch.cat([self.losses(one) for one in batch])
            further = torch.cat([self.further_losses(one, masked=masked) for one in batch])
            total, norm = self._measured(loss.mean() + share * further.sum() / len(further if divides_own else loss))
            figures += [(float(loss.mean().detach()), norm), (total, norm)]
        return figures

    def step(self, batch: Sequence[Tokens], average: str = "token") -> tuple[float, float]:
        """Return the loss of a global batch by `Layout.loss_average`, and the norm of its gradients."""
        losses = [each for each in map(self.losses, batch) if len(each)]
        loss = torch.cat(losses).mean() if average == "token" else torch.stack([each.mean() for each in losses]).mean()
        return self._measured(loss)

    def mean_of_means(self, groups: Sequence[Sequence[Tokens]]) -> tuple[float, float]:
        """Return loss and norm of a trainer that takes the mean of the means of ranks, microbatches or rows."""
        means = [torch.cat([self.losses(one) for one in group]).mean() for group in groups]
        return self._measured(torch.stack(means).mean())

    def _measured(self, loss: torch.Tensor) -> tuple[float, float]:
        # A layer of further losses has no gradients without them.
        gradients = torch.autograd.grad(loss, list(self._weights.values()), allow_unused=True)
        return float(loss.detach()), math.sqrt(sum(float((each**2).sum()) for each in gradients if each is not None))

    def _states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float64 [tokens, hidden], after the last norm."""
        hidden = self._weights["model.embed_tokens"][ids]
        for layer in range(_LAYERS):
            hidden = self._layer(hidden, f"model.layers.{layer}.")
        return _norm(hidden, self._weights["model.norm"])

    def _layer(self, hidden: torch.Tensor, at: str) -> torch.Tensor:
        """Return the output of the layer whose names begin with `at`."""
        weights, count = self._weights, len(hidden)
        angles = torch.outer(torch.arange(count), _BASE ** -(torch.arange(0, _HEAD_SIZE, 2) / _HEAD_SIZE)).double()
        turn = torch.polar(torch.ones_like(angles), angles)
        causal = torch.full((count, count), -math.inf, dtype=torch.float64).triu(1)
        states = _norm(hidden, weights[f"{at}input_layernorm"])
        parts = {name: states @ weights[f"{at}self_attn.{name}_proj"].T for name in "qkv"}
        heads = {name: values.view(count, -1, _HEAD_SIZE).transpose(0, 1) for name, values in parts.items()}
        query, key = _rotate(heads["q"], turn), _rotate(heads["k"], turn)
        # Head h reads key head h // 2.
        key, value = (each.repeat_interleave(_HEADS // _KEY_HEADS, dim=0) for each in (key, heads["v"]))
        scores = (query @ key.transpose(1, 2) / math.sqrt(_HEAD_SIZE) + causal).softmax(dim=-1)
        mixed = (scores @ value).transpose(0, 1).reshape(count, -1)
        hidden = hidden + mixed @ weights[f"{at}self_attn.o_proj"].T
        states = _norm(hidden, weights[f"{at}post_attention_layernorm"])
        router = weights.get(f"{at}block_sparse_moe.gate")
        shares = torch.ones(count, 1).double() if router is None else _shares(states @ router.T)
        for number, (gate, down, up) in enumerate(_mlp_names(at, router is not None)):
            middle = silu(states @ weights[gate].T) * (states @ weights[up].T)
            hidden = hidden + shares[:, number : number + 1] * (middle @ weights[down].T)
        return hidden


def _norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt((values**2).mean(dim=-1, keepdim=True) + _EPS) * weight


def _shares(logits: torch.Tensor) -> torch.Tensor:
    """Return [tokens, experts]: a softmax over the chosen experts of each token, and 0 for the others."""
    chosen = logits.topk(_CHOSEN, dim=-1).indices
    return logits.masked_fill(torch.ones_like(logits).scatter(1, chosen, 0.0).bool(), -math.inf).softmax(dim=-1)


def _rotate(heads: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate [heads, tokens, size]; the pair of element i is i + size / 2."""
    turned = torch.complex(*heads.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)
