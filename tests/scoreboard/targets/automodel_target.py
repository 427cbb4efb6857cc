"""NeMo AutoModel as a target: its fine-tuning recipe from a configuration, with NEAT packing, on CPUs.

Conversations enter where its chat dataset packages tokens and a mask of the assistant.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

# It compiles its loss, which takes a minute on a CPU.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from nemo_automodel._transformers import auto_model
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel._transformers.auto_tokenizer import NeMoAutoTokenizer
from nemo_automodel.components.datasets.llm.chat_dataset import ChatDatasetConfig
from nemo_automodel.components.datasets.llm.formatting_utils import _package_tokenized_example
from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from transformers import AutoTokenizer

from harness.conformance import Layout, NotSupported

NOTES: dict[str, str] = {
    "epoch-is-complete-on-ranks": (
        "ParallelAwareDataloader (datasets/loader.py) creates its sampler with drop_last=True, which omits what "
        "ranks cannot divide evenly; the setting `drop_last` of the loader affects only batches."
    ),
    "long-conversation-is-kept": (
        "Documented: `drop_long_samples` of NeatPackingConfig, True by default in this recipe, drops what is longer "
        "than a pack; False refuses it."
    ),
    "resume-on-one-rank": (
        "Each rank keeps the position of its own loader and loads the file of its rank "
        "(Checkpointer.load_on_dp_ranks) with any number of ranks. NVIDIA-NeMo/Automodel#533 reports it."
    ),
    "resume-on-more-ranks": (
        "Each rank loads the file of its own rank (Checkpointer.load_on_dp_ranks), which a rank more does not have; "
        "see resume-on-one-rank."
    ),
    "damaged-checkpoint-is-refused": (
        "DCP reads tensors by torch.load; PyTorch is built without checks of the file's CRCs, and no "
        "other checksum is written."
    ),
}
_SUPPORTED = ("dp_size", "tp_size", "microbatches", "pack_size", "num_workers", "shuffle", "seed", "learning_rate")
_EPOCHS = 100


def _use_cpu() -> None:
    """Replace what the recipe asks of a GPU; it has no setting for a CPU."""
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.cuda.current_device = lambda: 0
    place = auto_model.apply_model_infrastructure
    auto_model.apply_model_infrastructure = lambda *some, **named: place(
        *some, **named | {"device": torch.device("cpu")}
    )
    gc.freeze()


class _Recipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Keeps the rows and the metrics of each step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(ConfigNode(settings, raise_on_missing_attr=False))
        self.__dict__["seen"] = ([], [])

    def _run_train_optim_step(self, batches: Any, *some: Any, **named: Any) -> Any:
        rows, metrics = self.__dict__["seen"]
        rows.append([row for batch in batches for row in _rows_of(batch)])
        done = super()._run_train_optim_step(batches, *some, **named)
        metrics.append(done.metrics)
        return done


def _examples(path: str) -> list[dict[str, Any]]:
    """Return the conversations of a file as the recipe's chat dataset packages them."""
    made = []
    for line in Path(path).read_text().splitlines():
        one = json.loads(line)
        mask = [label != -100 for label in one["labels"]]
        made.append(_package_tokenized_example(AutoTokenizer, one["input_ids"], mask, 257, 258, None))
    return made


def _distributed(tp_size: int) -> dict[str, Any]:
    if tp_size == 1:
        return {"strategy": "ddp"}
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "float32")
    return {"strategy": "fsdp2", "tp_size": tp_size, "mp_policy": dtypes}


class Trainer:
    """A target of `harness.conformance`."""

    name, version = "nemo-automodel", version("nemo-automodel")

    def __init__(self) -> None:
        _use_cpu()

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        if layout.loss_average != "token":
            raise NotSupported("no setting averages by conversation")
        layout.only(*_SUPPORTED)
        if layout.pack_size and json.loads((model_folder / "config.json").read_text())["model_type"] == "mixtral":
            raise NotSupported("it packs for a Mixtral with flash attention alone, which needs a GPU")
        if json.loads((model_folder / "config.json").read_text())["model_type"] == "qwen3_5_text":
            raise NotSupported("its own layers of linear attention (components/models/qwen3_5) need a GPU; not run")
        self._model_folder, self._data, self._layout = model_folder, data, layout
        self._out, self._made = model_folder.parent / f"out-{data.stem.split('-')[1]}", 0
        self._calls = self._files = 0
        self._resumed: Path | None = None
        return self._step

    def _make(self, data: Path, *, steps: int | None, epochs: int, batch: int, validated: bool = False) -> Any:
        layout = self._layout
        self._made += 1
        self._checkpoints = self._out / str(self._made)
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        source = {"_target_": _examples, "path": str(data)}
        settings = {
            "seed": layout.seed,
            "dist_env": {"backend": "gloo", "timeout_minutes": 2},
            "distributed": _distributed(layout.tp_size),
            "model": {
                "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
                "pretrained_model_name_or_path": str(self._model_folder),
                "torch_dtype": "float32",
                "attn_implementation": "sdpa",
                "use_liger_kernel": False,
            },
            "checkpoint": {"enabled": True, "checkpoint_dir": str(self._checkpoints), "save_consolidated": False},
            "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
            "dataset": source,
            "dataloader": {"num_workers": layout.num_workers, "shuffle": layout.shuffle},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": layout.learning_rate, "weight_decay": 0.0},
            "step_scheduler": {
                "global_batch_size": batch * layout.microbatches * layout.dp_size,
                "local_batch_size": batch,
                "num_epochs": epochs,
                "max_steps": steps,
                "ckpt_every_steps": 1,
                "validate_on_checkpoint": False,
                "preemption_signal": None,
            },
        }
        if layout.pack_size:
            settings["packed_sequence"] = {"packed_sequence_size": layout.pack_size, "packing_strategy": "neat"}
        if validated:
            settings |= {"validation_dataset": source, "validation_dataloader": {"batch_size": 1}}
        if self._resumed:
            settings["checkpoint"]["restore_from"] = str(self._resumed)
        recipe = _Recipe(settings)
        recipe.setup()
        return recipe

    def _step(self, batch: Any) -> tuple[float, float]:
        layout = self._layout
        self._calls += 1
        path = self._write(batch)
        rows = len(neat_pack_dataset(_examples(str(path)), "train", layout.pack_size) if layout.pack_size else batch)
        size = -(-rows // (layout.dp_size * layout.microbatches))
        done = int(self._resumed.name.rpartition("_")[2]) + 1 if self._resumed else 0
        recipe = self._make(path, steps=done + self._calls, epochs=_EPOCHS, batch=size)
        if recipe.step_scheduler.epoch_len != 1:
            raise RuntimeError(f"the batch is trained in {recipe.step_scheduler.epoch_len} steps")
        recipe.run_train_validation_loop()
        metrics = recipe.__dict__["seen"][1][-1]
        return float(metrics["loss"]), float(metrics["grad_norm"])

    def _write(self, records: Any) -> Path:
        """Write records to a new file of this rank."""
        self._files += 1
        path = self._out / f"data-{self._files}-{os.environ.get('RANK', '0')}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def rows(self, steps: int | None) -> list[list[Any]]:
        recipe = self._make(self._data, steps=None, epochs=1 if steps is None else 2, batch=1)
        scheduler = recipe.step_scheduler
        if steps is not None:
            scheduler.max_steps = scheduler.step + steps
        recipe.run_train_validation_loop()
        return recipe.__dict__["seen"][0]

    def evaluate(self, batch: Any) -> float:
        recipe = self._make(self._write(batch), steps=1, epochs=1, batch=1, validated=True)
        return float(recipe._run_validation_epoch(recipe.val_dataloaders["default"]).metrics["val_loss"])

    def render(self, records: Any) -> list[Any]:
        tokenizer = NeMoAutoTokenizer.from_pretrained(str(self._model_folder))
        chats = ChatDatasetConfig(path_or_dataset_id=str(self._write(records))).build(tokenizer=tokenizer)
        rendered = []
        for place in range(len(records)):
            ids, labels = (list(chats[place][name]) for name in ("input_ids", "labels"))
            # Its shift leaves the last token, which is no input, to the labels.
            last = [label for label in labels[-1:] if label != -100]
            rendered.append({"input_ids": [*ids, *last], "labels": [-100, *labels][: len(ids) + len(last)]})
        return rendered

    def save(self, folder: Path) -> None:
        torch.distributed.barrier()
        if os.environ.get("RANK", "0") == "0":
            newest = max(self._checkpoints.glob("epoch_*_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
            shutil.copytree(newest, folder / newest.name)

    def load(self, folder: Path) -> None:
        (self._resumed,) = folder.iterdir()
        self._make(self._data, steps=None, epochs=2, batch=1)


def _rows_of(batch: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return rows with a label at the trained token; the last token of each conversation is only a label."""
    rows = []
    for place, (inputs, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        if "position_ids" in batch:
            positions = batch["position_ids"][place]
        else:
            positions = torch.arange(len(inputs)) * batch["attention_mask"][place]
        made: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for first, last in pairwise([*(positions == 0).nonzero().flatten().tolist(), len(positions)]):
            targets = labels[first:last].tolist()
            if targets[-1] == -100:
                continue  # padding
            made["input_ids"] += [*inputs[first:last].tolist(), targets[-1]]
            made["labels"] += [-100, *targets]
            made["position_ids"] += [*positions[first:last].tolist(), last - first]
        if "position_ids" not in batch:
            del made["position_ids"]
        rows.append(made)
    return rows
