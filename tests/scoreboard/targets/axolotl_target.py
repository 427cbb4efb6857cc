"""axolotl as a target, from a configuration over its own datasets and trainer builder; `sdpa` packs on a CPU."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
# `accelerate launch --cpu`, with which it starts ranks, sets this.
os.environ["ACCELERATE_USE_CPU"] = "true"

from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.train import setup_model_and_trainer
from axolotl.utils.data import sft
from axolotl.utils.dict import DictDefault
from hugging_face import HuggingFaceTarget

from harness.conformance.model import TEMPLATE
from harness.conformance import NotSupported

# The cache of prepared datasets, which starts a process for each.
sft.save_preprocessed_dataset = lambda *_: None
# It collects garbage several times per training, which takes seconds for the modules that it has imported.
gc.freeze()

NOTES: dict[str, str] = {
    "long-conversation-is-kept": (
        "Documented: `excess_length_strategy`, by default `drop`, leaves out what is longer than `sequence_len` "
        "(utils.data.utils.handle_long_seq_in_dataset); `truncate` cuts it and `raise` refuses it."
    ),
    "labels-at-boundaries": (
        "V2BatchSamplerDataCollatorForSeq2Seq joins labels unchanged, so that the first token of a conversation is "
        "predicted from the previous one if it has a label, as in pre-tokenized data and completions."
    ),
    "token-mean-over-microbatches": (
        "AxolotlTrainer.__init__ sets model_accepts_loss_kwargs to False unless the forward of the inner model "
        "(model.base_model, LlamaModel here) has a parameter num_items_in_batch, which no model has; each microbatch "
        "is then divided by its own tokens. axolotl-ai-cloud/axolotl#3982 reports it."
    ),
    "token-mean-over-packed-rows": "The same as token-mean-over-microbatches.",
    "token-mean-over-ranks": "The same as token-mean-over-microbatches: each rank divides by its own tokens.",
    "epoch-is-complete-on-ranks": (
        "Documented: accelerate's `even_batches` (default True, and disabled only with `sample_packing`) "
        "repeats samples from the start of the data until all ranks have equally many."
    ),
}


class Trainer(HuggingFaceTarget):
    """A target of `harness.conformance`, with `sample_packing`; conversations are a pre-tokenized dataset."""

    name = "axolotl"
    scans = "on GPUs alone it gives linear attention the boundaries (loaders/patch_manager.py); not run there"

    def make(self, data: list[Any], evaluation: list[Any] | None, **arguments: Any) -> Any:
        if self._layout.loss_average != "token":
            raise NotSupported("no setting averages by conversation")
        rows = [{**one, "attention_mask": [1] * len(one["input_ids"])} for one in data]
        packing = {}
        if size := self._layout.pack_size:
            packing = {"sample_packing": True, "sequence_len": size}
        cfg = self._configured(rows, {}, evaluated=bool(evaluation), **packing, **arguments)
        return setup_model_and_trainer(cfg, load_datasets(cfg=cfg))[0]

    def render(self, records: Any) -> list[Any]:
        if (self._model_folder / "chat_template.jinja").read_text() != TEMPLATE:
            raise NotSupported("the tokens that end turns of other templates are a setting, eot_tokens, not given here")
        cfg = self._configured(list(records), {"type": "chat_template", "field_messages": "messages"})
        rows = load_datasets(cfg=cfg).train_dataset
        return [{name: row[name] for name in ("input_ids", "labels")} for row in rows]

    def _configured(self, rows: list[Any], kind: Any, *, evaluated: bool = False, **arguments: Any) -> DictDefault:
        layout, out = self._layout, Path(self.settings()["output_dir"])
        out.mkdir(parents=True, exist_ok=True)
        path = out / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"path": str(path), "ds_type": "json", "split": "train", **kind}
        settings = {
            "base_model": str(self._model_folder),
            "datasets": [source],
            "dataset_prepared_path": str(out / "prepared"),
            "output_dir": str(out),
            "sequence_len": 1024,
            "chat_template": "tokenizer_default",
            "attn_implementation": "sdpa",
            "micro_batch_size": arguments.pop("per_device_train_batch_size", 1),
            "eval_batch_size": arguments.pop("per_device_eval_batch_size", 1),
            "num_epochs": arguments.pop("num_train_epochs", 1),
            "gradient_accumulation_steps": layout.microbatches,
            "learning_rate": layout.learning_rate,
            "optimizer": "adamw_torch",
            "lr_scheduler": "constant",
            "bf16": False,
            "fp16": False,
            "tf32": False,
            "seed": layout.seed,
            "dataloader_num_workers": layout.num_workers,
            "curriculum_sampling": not layout.shuffle,
            "logging_steps": 1,
            "save_strategy": "no",
            "val_set_size": 0,
            "dataset_num_proc": 1,
            **arguments,
        }
        if evaluated:
            settings["test_datasets"] = [source]
        cfg = load_cfg(DictDefault(settings))
        if layout.dp_size > 1:
            cfg.device_map = None  # names a GPU by the rank
        return cfg
