"""torchtitan as a target: its `Trainer` with `ChatDataLoader`, its validator and its checkpoints, on CPUs.

Conversations enter through a tokenizer, so that shift, mask, packing and order are the dataset's own. It always packs;
where a layout does not, rows are short: the multiple of 48 that holds the longest conversation.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))
# First: it makes torchtitan accept a CPU.
import titan_train
import cuda_stand_ins
import torch
from datasets import Dataset
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import ChatDataLoader, ChatDataset
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.trainer import Trainer as TitanTrainer

from harness.conformance import Layout, NotSupported

NOTES: dict[str, str] = {
    "epoch-is-complete-unpacked": (
        "Documented in Trainer.batch_generator: if data runs out during gradient accumulation, the entire step is not "
        "executed. A warning says that the last step was canceled."
    ),
    "epoch-is-complete-on-ranks": (
        "Data repeats by default (`infinite` of ChatDataLoader.Config): a rank with fewer rows begins its next epoch "
        "in the last steps. Documented: without it ranks might hang, as they then train different numbers of steps."
    ),
    "long-conversation-is-kept": (
        "Documented in ChatDataset._tokenize_sample: what exceeds `seq_len` is dropped, to avoid training on truncated "
        "responses; it is logged at level debug."
    ),
    "shuffle-ignores-workers": (
        "ChatDataset does not divide the data among workers (get_worker_info), so each of `num_workers` workers reads "
        "all data, which is trained once per worker."
    ),
    "shuffle-follows-the-seed": (
        "ChatDataset shuffles with seed 42, and 42 + epoch later (hf_datasets/text_datasets.py). No setting changes "
        "this; debug.seed, the base seed used for training, does not affect it."
    ),
    "resume-with-workers": (
        "Both workers read all of the data, before and after the resume; see shuffle-ignores-workers."
    ),
    "padding-changes-nothing": "It always packs: the microbatch has two rows with padding, one of two conversations.",
    "damaged-checkpoint-is-refused": (
        "DCP reads tensors by torch.load; PyTorch is built without checks of the file's CRCs, and no "
        "other checksum is written."
    ),
}
_SUPPORTED = ("dp_size", "tp_size", "microbatches", "pack_size", "num_workers", "shuffle", "seed", "learning_rate")
_SHORTEST = 48
# Tokens as text: printable characters, none of which is stripped.
_FIRST_CHARACTER = 0x4E00
# Of `ChatDataset`, which has no setting for it.
_SHUFFLE_SEED = 42


class _End(int):
    """The token that ends conversations; those of the checks end without it."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class TokensAsText(BaseTokenizer):
    """Reads tokens where texts stand for them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = _End(257)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - _FIRST_CHARACTER for letter in text]

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 264


def _messages(sample: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": sample[role]} for role in ("user", "assistant")]


def _small(folder: Path) -> Any:
    """Return torchtitan's configuration of the model in a folder."""
    stored = json.loads((folder / "config.json").read_text())
    if stored["model_type"] != "llama":
        raise NotSupported(f"it has no {stored['model_type']}")
    dim, heads, size, eps = (
        stored[name] for name in ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    )
    layers = llama3._build_llama3_layers(
        n_layers=stored["num_hidden_layers"],
        dim=dim,
        n_heads=heads,
        n_kv_heads=stored["num_key_value_heads"],
        hidden_dim=stored["intermediate_size"],
        rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=1024, theta=stored["rope_theta"]),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = eps
    return llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=size,
        tok_embeddings=Embedding.Config(num_embeddings=size, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=size, param_init=llama3._output_linear_init(dim)),
        layers=layers,
    )


def _start() -> None:
    """Make this process a job of one rank, unless it is a rank already."""
    cuda_stand_ins.become_one_rank()
    titan_train.use_cpu()
    # torchtitan collects garbage with every checkpoint, which takes long for the modules that it has imported.
    gc.freeze()


class Trainer:
    """A target of `harness.conformance`."""

    name, version = "torchtitan", version("torchtitan")

    def __init__(self) -> None:
        _start()

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        self._model, self._layout, self._made = _small(model_folder), layout, 0
        if layout.lora_rank:
            raise NotSupported("it trains adapters, and has no code that merges them")
        if layout.loss_average != "token":
            raise NotSupported("no setting averages by conversation")
        layout.only(*_SUPPORTED)
        # The same on all ranks, which write a checkpoint together.
        self._model_folder, self._out = model_folder, model_folder.parent / f"out-{data.stem.split('-')[1]}"
        self._data = [json.loads(line) for line in data.read_text().splitlines()]
        self._trainer: Any = None
        self._resumed: Path | None = None
        return self._step

    def _loader(self, data: list[Any], **options: Any) -> ChatDataLoader.Config:
        """Write conversations where `ChatDataset` reads them; it shuffles them, and unless asked to it is undone."""
        places = list(range(len(data)))
        if not self._layout.shuffle:
            shuffled = Dataset.from_dict({"place": places}).shuffle(seed=_SHUFFLE_SEED)["place"]
            places = sorted(places, key=list(shuffled).__getitem__)
        self._made += 1
        folder = self._out / f"data-{self._made}-{os.environ['RANK']}"
        folder.mkdir(parents=True)
        path = folder / "data.jsonl"
        path.write_text("".join(json.dumps(_sample(data[place])) + "\n" for place in places))
        return ChatDataLoader.Config(
            dataset_path="json",
            load_dataset_kwargs={"data_files": str(path), "split": "train", "cache_dir": str(folder)},
            sample_processor=_messages,
            **options,
        )

    def _make(self, data: list[Any], *, one_step: bool = False, validated: bool = False) -> None:
        """Make a trainer; for one step all rows of the data are its microbatches, and the data repeats.

        Ranks need data that repeats: where it ends, the rank of the fewest rows would leave the others waiting.
        """
        layout, self._is_step = self._layout, one_step
        longest = max(len(one["input_ids"]) - 1 for one in data)
        size = layout.pack_size or _SHORTEST * -(-longest // _SHORTEST)
        loader = self._loader(data, num_workers=layout.num_workers, infinite=one_step or layout.dp_size > 1)
        counts = self._count_rows(loader, size)
        self._epoch_steps = -(-max(counts) // layout.microbatches)
        if one_step and (len(set(counts)) > 1 or counts[0] % layout.microbatches):
            raise NotSupported(f"microbatches of a step have equally many rows; here ranks have {counts}")
        batch = self._epoch_steps if one_step else 1
        folder = self._out / f"run-{self._made}"
        config = TitanTrainer.Config(
            model_spec=replace(llama3.model_registry("debugmodel"), model=self._model),
            hf_assets_path=str(self._model_folder),
            dump_folder=str(folder),
            tokenizer=TokensAsText.Config(),
            loss=CrossEntropyLoss.Config(global_vocab_size=self._model.vocab_size),
            optimizer=default_adamw(lr=layout.learning_rate),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
            training=TrainingConfig(
                seq_len=size,
                local_batch_size=batch,
                global_batch_size=batch * layout.microbatches * layout.dp_size,
                mixed_precision_param="float32",
                disable_cuda_graphs=True,
            ),
            parallelism=ParallelismConfig(
                spmd_backend="partial_dtensor",
                data_parallel_replicate_degree=layout.dp_size,
                tensor_parallel_degree=layout.tp_size,
            ),
            dataloader=loader,
            validator=Validator.Config(enable=validated, steps=-1, dataloader=loader),
            metrics=MetricsProcessor.Config(log_freq=1),
            checkpoint=CheckpointManager.Config(
                enable=True, interval=1, initial_load_in_hf=True, last_save_model_only=False
            ),
            activation_checkpoint=None,
            debug=DebugConfig(seed=layout.seed),
        )
        self._checkpoints = folder / config.checkpoint.folder
        if self._resumed and os.environ["RANK"] == "0":
            shutil.copytree(self._resumed, self._checkpoints)
        self._trainer = TitanTrainer(config)
        distributed.barrier()

    def _count_rows(self, loader: ChatDataLoader.Config, size: int) -> list[int]:
        """Return the rows of each rank in an epoch."""
        once, tokenizer = replace(loader, num_workers=0, infinite=False), TokensAsText.Config().build()
        ranks = self._layout.dp_size
        options = {"dp_world_size": ranks, "tokenizer": tokenizer, "seq_len": size, "local_batch_size": 1}
        return [sum(1 for _ in once.build(dp_rank=rank, **options)) for rank in range(ranks)]

    def _step(self, batch: Any) -> tuple[float, float]:
        if self._trainer is None or not self._is_step:
            self._make(list(batch), one_step=True)
            self._trainer.checkpointer.load()
            self._batches = self._trainer.batch_generator(self._trainer.dataloader)
        logged = self._watch("log")
        self._trainer.step += 1
        self._trainer.train_step(self._batches)
        self._trainer.checkpointer.save(self._trainer.step)
        _, loss, _, norm = logged[-1]
        return loss, norm

    def _watch(self, name: str) -> list[Any]:
        """Return a list that gets the arguments of each call of a method of the metrics processor."""
        processor, calls = self._trainer.metrics_processor, []
        method = getattr(type(processor), name).__get__(processor)

        def watched(*arguments: Any, **named: Any) -> None:
            calls.append(arguments or named)
            method(*arguments, **named)

        setattr(processor, name, watched)
        return calls

    def rows(self, steps: int | None) -> list[list[Any]]:
        if self._trainer is None:
            self._make(self._data)
        trainer, made, logged = self._trainer, [], self._watch("log")
        given = trainer.post_dataloading_process

        def keep(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
            if len(made) == len(logged):
                made.append([])
            made[-1] += [_as_labels(*row) for row in zip(inputs["input"], labels, inputs["positions"], strict=True)]
            return given(inputs, labels)

        trainer.post_dataloading_process = keep
        if steps is not None:
            trainer.config.training.steps = trainer.step + steps
        elif self._layout.dp_size > 1:
            trainer.config.training.steps = self._epoch_steps
        trainer.train()
        return made

    def evaluate(self, batch: Any) -> float:
        self._make(list(batch), validated=True)
        logged = self._watch("log_validation")
        self._trainer.checkpointer.load()
        self._trainer.validator.validate(self._trainer.model_parts, 1)
        return float(logged[-1]["loss"])

    def merge(self, folder: Path) -> None:
        raise NotSupported("it has no code that merges adapters")

    def render(self, records: Any) -> list[Any]:
        chats = [record["messages"] for record in records]
        try:
            for messages in chats:
                ChatDataset._validate_messages(messages)
        except ValueError as error:
            raise NotSupported(f"ChatDataset takes one question and one answer: {error}") from error
        tokenizer = HuggingFaceTokenizer(tokenizer_path=str(self._model_folder))
        rows = ChatDataset(Dataset.from_dict({"chat": chats}), tokenizer, lambda sample: sample["chat"], 1024)
        return [_as_labels(row["input"], labels, row["positions"]) for row, labels in rows]

    def save(self, folder: Path) -> None:
        distributed.barrier()
        if os.environ["RANK"] == "0":
            newest = max(self._checkpoints.iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
            shutil.copytree(newest, folder / newest.name)

    def load(self, folder: Path) -> None:
        self._resumed = folder
        self._make(self._data)
        try:
            self._trainer.checkpointer.load()
        except (AssertionError, CheckpointException) as error:
            if not re.search(r"not supported|Missing key .* dataloader\.dp_rank", str(error)):
                raise
            raise NotSupported(str(error).strip().splitlines()[-1]) from error


def _sample(conversation: Any) -> dict[str, str]:
    """Return the tokens before the first trained one, and the others, as text."""
    ids, labels = conversation["input_ids"], conversation["labels"]
    first = next((place for place, label in enumerate(labels) if label != IGNORE_INDEX), len(ids))
    letters = "".join(chr(_FIRST_CHARACTER + token) for token in ids)
    return {"user": letters[:first], "assistant": letters[first:]}


def _as_labels(inputs: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> dict[str, list[int]]:
    """Return a row with a label at the trained token; the last token of each conversation is only a label."""
    made: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    for first, last in pairwise(starts):
        targets = labels[first:last].tolist()
        if targets[-1] == IGNORE_INDEX:
            continue  # padding
        made["input_ids"] += [*inputs[first:last].tolist(), targets[-1]]
        made["labels"] += [IGNORE_INDEX, *targets]
        made["position_ids"] += [*positions[first:last].tolist(), last - first]
    return made
