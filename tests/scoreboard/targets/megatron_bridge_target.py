"""Megatron-Bridge as a target: `finetune` with its `gpt_step`, chat dataset and offline packing, on CPUs.

Conversations enter as chats of a tokenizer with one character per token, so that shift, mask, packs and order are
Bridge's. Every token counts the same by `calculate_per_token_loss`, its setting for that; a packed row is a microbatch,
as it requires. Packed attention, for which it needs Transformer Engine, is a stand-in, as are norms; the harness alone
maps devices to the CPU.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from contextlib import ExitStack
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))
import cuda_stand_ins

cuda_stand_ins.install(after=cuda_stand_ins.MEGATRON_CORE)

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.data.builders import GPTSFTDatasetConfig
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.data.sft_processing import ChatSFTPreprocessingConfig
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.bridge.models.llama.llama_bridge import LlamaBridge
from megatron.bridge.peft import utils as peft_utils
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training import config
from megatron.bridge.training.callbacks import CallbackManager
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.bridge.training.utils import checkpoint_utils
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import distributed
from torch.nn.functional import scaled_dot_product_attention

from harness.conformance import Layout, NotSupported
from harness.megatron import compat

NOTES: dict[str, str] = {
    "token-mean-over-packed-rows": (
        "With `calculate_per_token_loss`; without it, as in its recipes for Llama, the gradients of microbatches are "
        "averaged."
    ),
    "router-ignores-padding": (
        "gpt_step.py passes no `padding_mask` to the model, and GPTSFTPackedDataset.collate_fn creates none, so the "
        "routers count the padding of a row; NVIDIA-NeMo/Megatron-Bridge#5470, merged but not in 0.6.2, adds both."
    ),
    "mtp-ignores-padding": (
        "gpt_step.py passes no `loss_mask` to the model, so that the layer also trains prompts and padding, "
        "NVIDIA-NeMo/Megatron-Bridge#6103; with the mask of the batch, the check passes."
    ),
    "mtp-with-tensor-parallel-equals-one-rank": "gpt_step.py passes no `loss_mask`; see mtp-ignores-padding.",
    "long-conversation-is-kept": (
        "Documented in GPTSFTDataset (`max_seq_length`): examples that cannot be truncated are dropped; create_hist "
        "(packing/algorithms.py) warns with their number."
    ),
    "resume-on-one-rank": (
        "The check sets the number of remaining steps: `num_epochs` would count the steps of an epoch by the new "
        "global batch and the finished ones by the old one, and begin another epoch."
    ),
    "damaged-checkpoint-is-refused": (
        "CheckpointConfig has `verify_integrity`, set here, but checkpointing.py does not pass it to Megatron-Core's "
        "save and load; DCP reads tensors by torch.load, and PyTorch is built without checks of the file's CRCs."
    ),
}
_SUPPORTED = (
    *("dp_size", "tp_size", "ep_size", "microbatches", "pack_size", "num_workers", "shuffle", "seed"),
    *("learning_rate", "router_loss", "mtp_loss", "lora_rank"),
)
_LONGEST = 1024
# Tokens as text: printable characters, none of which is stripped.
_FIRST_CHARACTER = 0x4E00
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


@MegatronModelBridge.register_bridge(source="MixtralForCausalLM", target=GPTModel, model_type="mixtral")
class _MixtralBridge(LlamaBridge):
    """Read a Mixtral, in the way that Bridge documents for models that it does not have."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        provider = super().provider_bridge(hf_pretrained)
        provider.moe_ffn_hidden_size = provider.ffn_hidden_size
        provider.moe_token_dispatcher_type = "alltoall"
        provider.moe_router_load_balancing_type = "aux_loss"
        provider.moe_grouped_gemm = False
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        ours, theirs = "decoder.layers.*.mlp.", "model.layers.*.block_sparse_moe."
        experts = f"{theirs}experts.*."
        return MegatronMappingRegistry(
            *super().mapping_registry().mappings,
            AutoMapping(f"{ours}router.weight", f"{theirs}gate.weight"),
            AutoMapping(f"{ours}experts.local_experts.*.linear_fc2.weight", f"{experts}w2.weight"),
            GatedMLPMapping(
                f"{ours}experts.local_experts.*.linear_fc1.weight", gate=f"{experts}w1.weight", up=f"{experts}w3.weight"
            ),
        )


def _further_mappings(layer: int) -> list[Any]:
    """Return where the layer of multi-token prediction is in the files, as Bridge does for DeepSeek-V3."""
    ours, theirs = "mtp.layers.0.", f"model.layers.{layer}."
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    inner = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    inner |= {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
    names |= {f"mtp_model_layer.{name}": other for name, other in inner.items()}
    heads = {name: f"{theirs}self_attn.{name}_proj.weight" for name in "qkv"}
    halves = {name: f"{theirs}mlp.{name}_proj.weight" for name in ("gate", "up")}
    return [
        *(AutoMapping(f"{ours}{name}.weight", f"{theirs}{other}.weight") for name, other in names.items()),
        QKVMapping(f"{ours}mtp_model_layer.self_attention.linear_qkv.weight", **heads),
        GatedMLPMapping(f"{ours}mtp_model_layer.mlp.linear_fc1.weight", **halves),
    ]


_OWN_MAPPINGS = LlamaBridge.mapping_registry


def _mappings(bridge: Any) -> MegatronMappingRegistry:
    return MegatronMappingRegistry(*_OWN_MAPPINGS(bridge).mappings, *_further_mappings(2))


class _Attention(torch.nn.Module):
    """Attend as Transformer Engine does: causally, and in packed rows inside each sequence of `cu_seqlens_q`."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> torch.Tensor:
        if packed_seq_params is None:
            return _attend(*(each.permute(1, 2, 0, 3) for each in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        out = torch.zeros_like(query)
        for start, end in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            if end > start:
                parts = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
                out[start:end] = _attend(*parts)[0].transpose(0, 1)
        return out.flatten(1)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _norm(kind: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """Return a norm that may have parts of a sequence, which Megatron's of PyTorch refuses."""
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def _layers(model: Any) -> Any:
    spec = local_layer_spec(model)
    spec.submodules.self_attention.submodules.core_attention = _Attention
    return spec


def _start() -> ExitStack:
    """Make this process a job of one rank, unless it is a rank already, and let a CPU stand for its GPU."""
    cuda_stand_ins.become_one_rank()
    patches = ExitStack()
    patches.enter_context(compat.without_kernels(on_cpu=True))
    patches.enter_context(cuda_stand_ins.bridge_like_a_gpu())
    patches.enter_context(mock.patch.object(peft_utils, "HAVE_TE", False))
    patches.enter_context(mock.patch.object(WrappedTorchNorm, "__new__", _norm))
    patches.enter_context(mock.patch.object(LlamaBridge, "mapping_registry", _mappings))
    distributed.init_process_group("gloo")
    gc.freeze()
    return patches


class Trainer:
    """A target of `harness.conformance`."""

    name, version = "megatron-bridge", version("megatron-bridge")

    def __init__(self) -> None:
        self._patches = _start()

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        if layout.loss_average != "token":
            raise NotSupported("no setting averages by conversation")
        layout.only(*_SUPPORTED)
        kind = json.loads((model_folder / "config.json").read_text())["model_type"]
        if kind == "qwen3_5_text":
            raise NotSupported("its layers of linear attention need kernels of a GPU")
        self._layout, self._model_folder, self._made, self._calls = layout, model_folder, 0, 0
        # The same on all ranks, of which the first writes.
        self._out = model_folder.parent / f"out-{data.stem.split('-')[1]}"
        self._data = [json.loads(line) for line in data.read_text().splitlines()]
        self._resumed: Path | None = None
        self._saved: Path | None = None
        self._done, self._consumed, self._rows, self._keeps = 0, 0, [[]], False
        return self._step

    def _run(self, data: list[Any], *, batch: int, size: int = 1, do: str = "train", **options: Any) -> None:
        """Fine-tune on some conversations.

        Args:
            batch: rows of a step on all ranks.
            size: rows of a microbatch.
            do: "train", "evaluate" or "read", which loads the last checkpoint alone.
            options: `steps` to train in all, and `event=function` for a callback of Bridge.
        """
        layout, mode = self._layout, _loss_mode(data)
        if not layout.shuffle:  # Bridge does, without a setting
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(layout.seed)).tolist()
            data = [data[order.index(place)] for place in range(len(data))]
        folder = self._write([_chat(one) for one in data])
        train, validation, callbacks = do == "train", do == "evaluate", CallbackManager()
        steps = options.pop("steps", 1)
        for event, function in options.items():
            callbacks.register(event, function)
        load = self._resumed if train else self._saved
        new = self._out / f"run-{self._made}"
        made = config.ConfigContainer(
            model=self._provider(),
            train=config.TrainingConfig(micro_batch_size=size, global_batch_size=batch, train_iters=steps),
            validation=config.ValidationConfig(
                eval_iters=len(data) // batch if validation else 0, skip_train=not train, eval_micro_batch_size=1
            ),
            optimizer=config.OptimizerConfig(lr=layout.learning_rate, min_lr=0.0, weight_decay=0.0, clip_grad=1e9),
            scheduler=config.SchedulerConfig(
                lr_decay_style="constant",
                start_weight_decay=0.0,
                end_weight_decay=0.0,
                override_opt_param_scheduler=True,
            ),
            ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            dataset=_dataset(folder, layout, loss_mode=mode, do_validation=validation),
            logger=config.LoggerConfig(log_interval=1),
            tokenizer=_hugging_face(folder),
            checkpoint=config.CheckpointConfig(
                pretrained_checkpoint=str(self._model_folder),
                load=load and str(load),
                save=str(new) if layout.learning_rate or self._keeps else None,
                verify_integrity=True,
            ),
            dist=config.DistributedInitConfig(distributed_backend="gloo"),
            rng=config.RNGConfig(seed=layout.seed),
            peft=LoRA(target_modules=["linear_qkv", "linear_proj"], dim=layout.lora_rank) if layout.lora_rank else None,
        )
        # They are kept for the process, in which usually one training runs.
        checkpoint_utils.read_train_state.cache_clear()
        checkpoint_utils.read_run_config.cache_clear()
        finetune(made, self._forward, callbacks=callbacks)
        if train:
            self._saved = new

    def _provider(self) -> Any:
        """Return Bridge's provider of the model, without the fused kernels of a GPU."""
        layout = self._layout
        provider = AutoBridge.from_hf_pretrained(self._model_folder).to_megatron_provider(load_weights=False)
        provider.transformer_layer_spec = _layers
        provider.seq_length = layout.pack_size or _LONGEST
        provider.calculate_per_token_loss = True
        provider.tensor_model_parallel_size = layout.tp_size
        provider.sequence_parallel = layout.tp_size > 1
        provider.expert_model_parallel_size = layout.ep_size
        provider.apply_rope_fusion = provider.gradient_accumulation_fusion = provider.cross_entropy_loss_fusion = False
        if layout.mtp_loss:
            provider.mtp_num_layers, provider.mtp_loss_scaling_factor = 1, layout.mtp_loss
        if provider.num_moe_experts:
            provider.moe_aux_loss_coeff = layout.router_loss
        return provider

    def _forward(self, state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        """Keep the rows of a microbatch, and train them by Bridge's own step."""

        def kept() -> Any:
            for batch in data_iterator:
                self._rows[-1] += _rows_of(batch)
                yield batch

        return forward_step(state, kept(), model, return_schedule_plan)

    def _step(self, batch: Any) -> tuple[float, float]:
        layout, seen = self._layout, []
        self._calls += 1
        rows = self._count_rows(batch)
        size = 1 if layout.pack_size else -(-rows // (layout.dp_size * layout.microbatches))
        whole = layout.dp_size * size * -(-rows // (layout.dp_size * size))
        # Where weights move, a call trains all steps up to its own again.
        self._run(list(batch), batch=whole, size=size, steps=self._done + self._calls, on_train_step_end=seen.append)
        return float(seen[-1].loss_dict["lm loss"]), float(seen[-1].grad_norm)

    def _count_rows(self, data: Any) -> int:
        if not self._layout.pack_size:
            return len(data)
        folder = self._write([_chat(one) for one in data])
        builder = GPTSFTDatasetBuilder(_dataset(folder, self._layout), build_tokenizer(_hugging_face(folder)))
        return len(builder.build()[0])

    def evaluate(self, batch: Any) -> float:
        seen: list[float] = []
        self._run(
            list(batch),
            batch=self._layout.dp_size,
            do="evaluate",
            on_eval_end=lambda context: seen.append(float(context.total_loss_dict["lm loss"])),
        )
        return seen[-1]

    def rows(self, steps: int | None) -> list[Any]:
        batch = self._layout.dp_size * self._layout.microbatches
        if steps is None:
            steps = -(-(self._count_rows(self._data) - self._consumed) // batch)
        self._rows, self._keeps = [], True
        self._run(
            self._data,
            batch=batch,
            steps=self._done + steps,
            on_train_step_start=lambda _: self._rows.append([]),
            on_train_step_end=self._remember,
        )
        return self._rows

    def _remember(self, context: Any) -> None:
        self._done, self._consumed = context.state.train_state.step, context.state.train_state.consumed_train_samples

    def save(self, folder: Path) -> None:
        distributed.barrier()
        if os.environ["RANK"] == "0":
            shutil.copytree(self._saved, folder)

    def load(self, folder: Path) -> None:
        self._resumed = self._saved = folder
        self._read(self._remember)

    def merge(self, folder: Path) -> None:
        bridge = AutoBridge.from_hf_pretrained(self._model_folder)
        self._read(lambda context: bridge.save_hf_weights(context.model, folder, merge_adapter_weights=True))

    def _read(self, use: Any) -> None:
        """Load the last checkpoint, and call a function with Bridge's context."""
        batch = self._layout.dp_size * self._layout.microbatches
        self._run(self._data, batch=batch, do="read", on_data_init_start=use)

    def render(self, records: Any) -> list[Any]:
        tokenizer = build_tokenizer(_hugging_face(self._model_folder))
        folder = self._write([dict(record) for record in records])
        dataset, rendered = GPTSFTDatasetBuilder(_dataset(folder, Layout()), tokenizer).build()[0], []
        for place in range(len(records)):
            ids, mask = (dataset[place][name].tolist() for name in ("input_ids", "loss_mask"))
            labels = [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]
            rendered.append({"input_ids": ids, "labels": labels})
        return rendered

    def _write(self, records: list[Any]) -> Path:
        """Write records to the files of a dataset, and a tokenizer of a character per token, in a new folder."""
        self._made += 1
        folder = self._out / f"data-{self._made}"
        if os.environ["RANK"] == "0":
            folder.mkdir(parents=True)
            for split in ("training", "validation"):
                (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            _write_tokenizer(folder)
        distributed.barrier()
        return folder


def _write_tokenizer(folder: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 256 + place, "content": text, "special": True, **flags} for place, text in enumerate(_SPECIAL)]
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    vocabulary = {chr(_FIRST_CHARACTER + token): token for token in range(256)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": split, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _SPECIAL[1], "pad_token": _SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": _TEMPLATE}))


def _hugging_face(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


def _dataset(
    folder: Path, layout: Layout, *, loss_mode: str = "assistant", do_validation: bool = False
) -> GPTSFTDatasetConfig:
    specs = PackedSequenceSpecs(packed_sequence_size=layout.pack_size) if layout.pack_size else None
    return GPTSFTDatasetConfig(
        dataset_root=folder,
        seq_length=layout.pack_size or _LONGEST,
        preprocessing=ChatSFTPreprocessingConfig(loss_mode=loss_mode),
        seed=layout.seed,
        enable_offline_packing=specs is not None,
        offline_packing_specs=specs,
        # As in its recipes.
        dataset_kwargs={"pad_to_max_length": True} if specs else None,
        do_validation=do_validation,
        do_test=False,
        # As `num_epochs` has it, which counts steps and no rows.
        drop_last=False,
        num_workers=layout.num_workers,
        pin_memory=False,
    )


def _loss_mode(data: list[Any]) -> str:
    return "full" if all(one["labels"][0] != -100 for one in data) else "assistant"


def _chat(conversation: Any) -> dict[str, Any]:
    """Return the tokens before the first trained one as a question, and the others as its answer."""
    ids, labels = conversation["input_ids"], conversation["labels"]
    # A question of one token where all are trained, which is then another loss mode.
    first = max(1, next(place for place, label in enumerate(labels) if label != -100))
    letters = "".join(chr(_FIRST_CHARACTER + token) for token in ids)
    turns = {"user": letters[:first], "assistant": letters[first:]}
    return {"messages": [{"role": role, "content": content} for role, content in turns.items()]}


def _rows_of(batch: Any) -> list[dict[str, list[int]]]:
    """Return rows with a label at the trained token; the last token of each conversation is only a label."""
    rows = []
    for inputs, targets, mask, positions in zip(
        *(batch[name].tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")), strict=True
    ):
        made: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        starts = [place for place, position in enumerate(positions) if position == 0]
        for first, last in pairwise([*starts, len(positions)]):
            while last > first and not mask[last - 1]:
                last -= 1  # padding
            if last > first:
                pairs = zip(targets[first:last], mask[first:last], strict=True)
                trained = [label if kept else -100 for label, kept in pairs]
                made["input_ids"] += [*inputs[first:last], targets[last - 1]]
                made["labels"] += [-100, *trained]
                made["position_ids"] += [*positions[first:last], last - first]
        rows.append(made)
    return rows
