"""Megatron-LM's own trainer, which the wheel of megatron-core has, as a target: `pretrain` with its SFT data, on CPUs.

A line of its data is a pack, in which each conversation begins with a message of the system; here these messages stand
for tokens and labels. What a user has of `pretrain_gpt.py`, which no wheel has, is repeated: forward step and datasets.

It packs for Transformer Engine, which needs a GPU. In place of that attention, Megatron-Core's own gets one
conversation at a time, and norms mark their gradients as those of Transformer Engine do.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))
import cuda_stand_ins
import datasets
import numpy as np
import torch
import torch._dynamo
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.core.package_info import __version__
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split
from safetensors.torch import load_file
from torch import distributed
from torch.overrides import TorchFunctionMode

from harness.conformance import Layout, NotSupported

NOTES: dict[str, str] = {
    "assistant-alone-is-trained": (
        "Documented in SFTTokenizer.tokenize_conversation: the prompt format `default`, the only one that uses the "
        "tokenizer's chat template, trains all tokens, for simplicity. `nemotron-nano-v2` and `nemotron-h-aligned` "
        "train only the assistant, with templates of their own."
    ),
    "stock-templates-are-masked": (
        "Documented: the prompt format `default` trains all tokens; see assistant-alone-is-trained."
    ),
    "labels-at-boundaries": (
        "SFTDataset.__getitem__ shifts the labels of the whole row at once (`pack_targets[1:]`). Conversations "
        "whose first token is not trained are not affected; the prompt formats `default` and `identity` train all."
    ),
    "epoch-is-complete": (
        "There are no epochs. update_train_iters divides `--train-samples` by the global batch size and omits the "
        "rest; with more samples, SFTDataset starts again from its first."
    ),
    "epoch-is-complete-unpacked": "`--train-samples` is rounded down to whole steps; see epoch-is-complete.",
    "epoch-is-complete-on-ranks": "`--train-samples` is rounded down to whole steps; see epoch-is-complete.",
    "long-conversation-is-kept": (
        "SFTDataset.__getitem__ cuts the row at `--seq-length` and omits the conversations that follow in it, "
        "without a warning; a TODO there is to count them."
    ),
    "shuffle-follows-the-seed": (
        "MegatronPretrainingRandomSampler, of `--dataloader-type cyclic`, uses the number of the epoch as the seed "
        "of its shuffle, and ignores `--seed`."
    ),
    "resume-on-one-rank": (
        "By default MegatronPretrainingRandomSampler gives each rank a part of the data and shuffles within it, so "
        "that the order depends on the ranks. With `--no-data-sharding` it does not."
    ),
    "resume-on-more-ranks": "The order depends on the ranks; see resume-on-one-rank.",
    "damaged-checkpoint-is-refused": (
        "DCP reads tensors by torch.load; PyTorch is built without checks of the file's CRCs, and no "
        "other checksum is written."
    ),
    "evaluation-mean": (
        "Documented in a comment of `evaluate` in training.py: with `--sft` it is normalized over a microbatch instead "
        "of the global batch, so that a row with few trained tokens weighs as much as one with many. "
        "NVIDIA/Megatron-LM#7207, which is open, sums tokens."
    ),
    "router-ignores-padding": (
        "SFTDataset creates no padding mask and get_batch_on_this_tp_rank passes none, so the padding of a row "
        "counts in the balancing loss. GPTModel accepts a mask, and with it the check passes."
    ),
}
_SUPPORTED = ("dp_size", "tp_size", "ep_size", "microbatches", "pack_size", "num_workers", "shuffle", "seed")
_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens", "max_seqlen")
_FOREVER = ExitStack()
# Steps for which a batch is repeated; more than any check trains.
_STEPS = 100
_ARGUMENTS = """
--sft --calculate-per-token-loss --distributed-backend gloo --transformer-impl local --no-rope-fusion
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-persist-layer-norm
--num-layers {num_hidden_layers} --hidden-size {hidden_size} --ffn-hidden-size {intermediate_size} --swiglu
--num-attention-heads {num_attention_heads} --num-query-groups {num_key_value_heads} --group-query-attention
--kv-channels {head_dim} --normalization RMSNorm --norm-epsilon {rms_norm_eps} --position-embedding-type rope
--rotary-base {rope_theta:.0f} --max-position-embeddings {max_position_embeddings} --disable-bias-linear
--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer
--vocab-size {vocab_size} --make-vocab-size-divisible-by 4 --no-create-attention-mask-in-dataloader
--tensor-model-parallel-size {tp_size} --num-workers {num_workers} --seed {seed} --lr {learning_rate}
--lr-decay-style constant --override-opt_param-scheduler --log-interval 1 --eval-interval 1000000
"""
_EXPERTS = """
--num-experts {num_local_experts} --moe-router-topk {num_experts_per_tok} --moe-token-dispatcher-type alltoall
--expert-model-parallel-size {ep_size} --moe-aux-loss-coeff {router_loss} --moe-router-load-balancing-type
"""


class _CudaMeansCpu(TorchFunctionMode):
    """Takes the CPU where Megatron names a GPU; its optimizers look for `torch.cuda.FloatTensor`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        made = func(*args, **kwargs)
        is_name = func is torch.Tensor.type and isinstance(made, str)
        return made.replace("torch.", "torch.cuda.", 1) if is_name else made


def _is_gpu(device: Any) -> bool:
    return type(device) is int or str(device).startswith("cuda")


def _use_cpu() -> None:
    """Answer what Megatron asks of a GPU; it has no setting for a CPU."""
    _FOREVER.enter_context(cuda_stand_ins.like_a_gpu())
    _FOREVER.enter_context(_CudaMeansCpu())
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = torch.cuda.default_stream = cuda_stand_ins.Idle
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.accelerator.is_available = lambda: False  # of loaders, which pin memory otherwise
    # One generator for everything.
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    torch.cuda.get_rng_state = megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch._dynamo.config.disable = True  # a compiler that sees a GPU looks for its driver
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # The wheel has these helpers built, and not what they are built of.
    dataset_utils.compile_helpers = lambda: None
    DotProductAttention.forward = _attend
    WrappedTorchNorm.__new__ = _norm
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host


_OWN_ATTENTION = DotProductAttention.forward


def _attend(layer: Any, *heads: Any, packed_seq_params: Any, **named: Any) -> torch.Tensor:
    """Attend within each conversation; `heads` are queries, keys and values [tokens, heads, size], and no mask."""
    made = []
    for first, last in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
        parts = [each[first:last].unsqueeze(1) for each in heads[:3]]
        made.append(_OWN_ATTENTION(layer, *parts, None, **named))
    return torch.cat(made)


def _norm(_: Any, config: Any, hidden_size: int, eps: float, **__: Any) -> torch.nn.RMSNorm:
    made = torch.nn.RMSNorm(hidden_size, eps=eps)
    made.weight.sequence_parallel = config.sequence_parallel
    return made


def _on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class TokensAsText:
    """Reads tokens and labels where a text stands for them."""

    pad, eod, vocab_size, unique_identifiers = 258, 257, 264, {}

    def tokenize_conversation(self, conversation: Any, **_: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, labels = json.loads(conversation[0]["content"])
        return np.array(tokens), np.array(labels)


def _data_config(tokenizer: Any, length: int, **sources: Any) -> GPTDatasetConfig:
    off = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False)
    sizes = {"context_parallel_size": 1, "sequence_length": length}
    return GPTDatasetConfig(random_seed=1, tokenizer=tokenizer, **sizes, **off, **sources)


def _datasets(sizes: Any, vp_stage: Any = None) -> Any:
    blend, each = get_blend_and_blend_per_split(get_args())
    config = _data_config(TokensAsText(), get_args().seq_length, blend=blend, blend_per_split=each)
    built_on = lambda: mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return BlendedMegatronDatasetBuilder(SFTDataset, sizes, built_on, config).build()


_datasets.is_distributed = True


def _next_batch(data: Any) -> dict[str, Any]:
    args, rank, batch = get_args(), mpu.get_tensor_model_parallel_rank(), {}
    if rank == 0:
        batch = {**dict.fromkeys(_KEYS), **next(data)}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=True,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=1,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
    )
    return flatten_batch_for_packed_sequences(batch)


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
    mask = loss_mask.view(-1).float()
    loss, tokens = torch.sum(losses.view(-1).float() * mask), mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


class Trainer:
    """A target of `harness.conformance`."""

    name, version = "megatron-core", __version__

    def __init__(self) -> None:
        _use_cpu()
        cuda_stand_ins.become_one_rank()
        distributed.init_process_group("gloo")
        self._rows: list[list[Any]] = []
        self._logged: list[tuple[float, float]] = []
        self._evaluated: list[float] = []
        self._own = {name: getattr(training, name) for name in ("train", "train_step", "evaluate")}
        training.train, training.train_step, training.evaluate = self._keep, self._train_step, self._evaluate

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        stored = json.loads((model_folder / "config.json").read_text())
        if layout.loss_average != "token":
            raise NotSupported("no setting averages by conversation")
        if stored["model_type"] == "qwen3_5_text":
            raise NotSupported("its gated delta net packs by flash-linear-attention alone, which needs a GPU; not run")
        layout.only(*_SUPPORTED, "learning_rate", "router_loss", "mtp_loss")
        self._has_experts = stored["model_type"] == "mixtral"
        self._settings = {**stored, **asdict(layout)}
        self._layout, self._model_folder, self._files = layout, model_folder, 0
        self._folder = model_folder.parent / f"files-{data.stem.split('-')[1]}-{os.environ['RANK']}"
        self._folder.mkdir()
        datasets.config.HF_DATASETS_CACHE = self._folder / "cache"
        self._data = [json.loads(line) for line in data.read_text().splitlines()]
        self._resumed: Path | None = None
        self._run = ""
        return self._step

    def _write(self, chats: Any) -> Path:
        self._files += 1
        path = self._folder / f"data-{self._files}.jsonl"
        path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
        return path

    def _packs(self, data: Any) -> tuple[list[Any], int]:
        """Return the lines of a file, of the following conversations as many as fit in each, and the length of rows."""
        size, packs, room = self._layout.pack_size, [], 0
        for one in data:
            count = len(one["input_ids"])
            if count > room:
                packs.append([])
                room = size
            packs[-1].append({"role": "system", "content": json.dumps([one["input_ids"], one["labels"]])})
            room -= count
        longest = size or max(len(one["input_ids"]) for one in data)
        return packs, longest + longest % self._layout.tp_size

    def _start(self, run: str, data: Any) -> None:
        """Start a run of `pretrain`: `rows` of the data once, one per microbatch, or `step`s of which each has all."""
        layout = self._layout
        packs, length = self._packs(data)
        parts = layout.dp_size * layout.microbatches
        if run == "step" and len(packs) % parts:
            raise NotSupported(f"microbatches of a step have equally many rows; here {parts} have {len(packs)}")
        micro, path = (len(packs) // parts if run == "step" else 1), self._write(packs)
        words = _ARGUMENTS.format(**self._settings).split()
        words += f"--seq-length {length} --micro-batch-size {micro} --global-batch-size {micro * parts}".split()
        words += ["--train-data-path", str(path), "--dataloader-type", "cyclic" if layout.shuffle else "single"]
        words += ["--train-samples", str(len(packs) * (1 if run == "rows" else _STEPS))]
        if run == "evaluation":
            words += ["--valid-data-path", str(path), "--eval-iters", str(len(packs))]
        else:
            words += ["--eval-iters", "0"]
        if self._has_experts:
            words += [*_EXPERTS.format(**self._settings).split(), "aux_loss" if layout.router_loss else "none"]
        if layout.mtp_loss:
            words += f"--mtp-num-layers 1 --mtp-loss-scaling-factor {layout.mtp_loss}".split()
        words += ["--sequence-parallel"] * (layout.tp_size > 1)
        words += ["--load", str(self._resumed)] if self._resumed else []
        sys.argv = ["pretrain_gpt.py", *words]
        training.destroy_global_state()
        args = parse_and_validate_args()
        model = gpt_config_from_args(args)
        model.pre_wrap_hooks.append(self._fill)
        container = pretrain_cfg_container_from_args(args, model)
        training.pretrain(container, _datasets, ModelType.encoder_or_decoder, self._forward)
        self._run = run

    def _fill(self, chunks: Any) -> Any:
        """Give a model the weights of the files of Hugging Face; each rank has its part of some."""
        stored = load_file(self._model_folder / "model.safetensors")
        for name, parameter in chunks[0].named_parameters():
            whole = self._weight(stored, name.removesuffix(".weight"))
            for dim, (size, part) in enumerate(zip(whole.shape, parameter.shape, strict=True)):
                if size != part:
                    halves = whole.chunk(2, dim) if "linear_fc1" in name else [whole]
                    rank = mpu.get_tensor_model_parallel_rank()
                    whole = torch.cat([half.chunk(size // part, dim)[rank] for half in halves], dim)
            parameter.data.copy_(whole)
        return chunks

    def _weight(self, stored: Any, name: str) -> torch.Tensor:
        """Return the whole weight of one of Megatron's names, of which some join two or three."""
        outer = {"embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}
        outer["decoder.final_layernorm"] = "model.norm"
        if name in outer:
            return stored[f"{outer[name]}.weight"]
        stack, _, number, kind = name.split(".", 3)
        settings = self._settings
        if stack == "mtp":
            number, kind = int(number) + settings["num_hidden_layers"], kind.removeprefix("mtp_model_layer.")
        at = f"model.layers.{number}."
        inner = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
        inner |= {"self_attention.linear_proj": "self_attn.o_proj", "mlp.router": "block_sparse_moe.gate"}
        inner |= {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
        parts = {"mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"), "mlp.linear_fc2": ("mlp.down_proj",)}
        if kind == "self_attention.linear_qkv":
            heads = [stored[f"{at}self_attn.{one}_proj.weight"] for one in "qkv"]
            groups = [each.unflatten(0, (settings["num_key_value_heads"], -1)) for each in heads]
            return torch.cat(groups, 1).flatten(0, 1)
        if ".local_experts." in kind:
            *_, local, last = kind.split(".")
            held = settings["num_local_experts"] // settings["ep_size"]
            expert = f"block_sparse_moe.experts.{mpu.get_expert_model_parallel_rank() * held + int(local)}"
            parts[kind] = (f"{expert}.w2",) if last == "linear_fc2" else (f"{expert}.w1", f"{expert}.w3")
        names = parts[kind] if kind in parts else (inner[kind],)
        return torch.cat([stored[f"{at}{one}.weight"] for one in names])

    def _forward(self, data: Any, model: Any) -> Any:
        get_timers()("batch-generator", log_level=2).start()
        batch = _next_batch(data)
        get_timers()("batch-generator").stop()
        if model.training and self._run != "step" and mpu.get_tensor_model_parallel_rank() == 0:
            self._rows[-1].append(_as_labels(batch))
        bounds, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"])
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            total_tokens=int(bounds[-1]),
            tokens_per_sample=get_args().seq_length,
        )
        options = {"labels": batch["labels"], "packed_seq_params": packed, "loss_mask": batch["loss_mask"]}
        return model(batch["tokens"], batch["position_ids"], None, **options), partial(_loss, batch["loss_mask"])

    def _keep(self, *some: Any, **named: Any) -> tuple[int, int]:
        """Take the place of `train` in `pretrain`, so that it can be called for some steps at a time."""
        self._call = some, named
        return 0, 0

    def _train_step(self, *some: Any, **named: Any) -> Any:
        self._rows.append([])
        done = self._own["train_step"](*some, **named)
        self._logged.append((float(done[0]["lm loss"]), float(done[5])))
        return done

    def _evaluate(self, *some: Any, **named: Any) -> Any:
        done = self._own["evaluate"](*some, **named)
        self._evaluated.append(float(done[0]["lm loss"]))
        return done

    def _train(self, steps: int | None) -> list[list[Any]]:
        """Train some steps of a run, None for all that are left, and return their rows."""
        args, before, (some, named) = get_args(), len(self._rows), self._call
        planned = args.train_iters
        if steps is not None:
            args.train_iters = min(planned, args.iteration + steps)
        if (timer := get_timers()("interval-time", log_level=0))._started:
            timer.stop()
        args.iteration, args.num_floating_point_operations_so_far = self._own["train"](*some, **named)
        args.train_iters = planned
        return self._rows[before:]

    def _step(self, batch: Any) -> tuple[float, float]:
        if self._run != "step":
            self._start("step", batch)
        self._train(1)
        return self._logged[-1]

    def rows(self, steps: int | None) -> list[list[Any]]:
        if self._run != "rows":
            self._start("rows", self._data)
        return self._train(steps)

    def evaluate(self, batch: Any) -> float:
        self._start("evaluation", batch)
        return self._evaluated[-1]

    def save(self, folder: Path) -> None:
        args, (some, _) = get_args(), self._call
        args.save = str(folder)
        _, model, optimizer, scheduler, data, *_ = some
        done = (args.iteration, model, optimizer, scheduler, args.num_floating_point_operations_so_far)
        training.save_checkpoint_and_time(*done, {}, train_data_iterator=data)

    def load(self, folder: Path) -> None:
        self._resumed = folder
        self._start("load", self._data)

    def render(self, records: Any) -> list[Any]:
        if any("tools" in record for record in records):
            raise NotSupported("a line of its data has messages, and no tools")
        path = str(self._write(record["messages"] for record in records))
        options = {"metadata_path": {"library": "sft"}, "prompt_format": "default"}
        tokenizer = MegatronTokenizer.from_pretrained(tokenizer_path=str(self._model_folder), **options)
        config = _data_config(tokenizer, 1024, blend=([path], None), split="1")
        source = SFTDataset.build_low_level_dataset(path, config)
        found = SFTDataset(source, path, np.arange(len(records)), len(records), Split.train, config)
        return [_as_labels({name: values[None] for name, values in found[n].items()}) for n in range(len(found))]


def _as_labels(batch: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return a row, padding included, with a label at the trained token."""
    labels = torch.where(batch["loss_mask"] > 0, batch["labels"], -100)[0].tolist()
    positions = batch["position_ids"][0].tolist()
    ids = [*batch["tokens"][0].tolist(), int(batch["labels"][0, -1])]
    return {"input_ids": ids, "labels": [-100, *labels], "position_ids": [*positions, positions[-1] + 1]}
