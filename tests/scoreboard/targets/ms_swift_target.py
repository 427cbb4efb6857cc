"""ms-swift's supervised fine-tuning as a target, driven by its own pipeline `SwiftSft`.

Conversations enter where its template returns prompt and answer, as lists of tokens that it takes besides texts;
truncation, labels, collation and sampling are its own.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from hugging_face import HuggingFaceTarget
from swift.arguments import SftArguments
from swift.pipelines.train.sft import SwiftSft

from harness.conformance import NotSupported

# It collects garbage after each training, which takes seconds for the modules that it has imported.
gc.freeze()

NOTES: dict[str, str] = {
    "epoch-is-complete-on-ranks": (
        "BatchSamplerShard gives each rank len(dataset) // ranks samples, and permutes only these: the rest, "
        "here the last conversation, is not trained in any epoch."
    ),
    "assistant-alone-is-trained": (
        "The line break after each answer is trained too; it belongs to the template's answer."
    ),
    "packed-equals-unpacked": (
        "SftArguments._check_padding_free refuses `packing` without a flash attention implementation."
    ),
}


class _Pipeline(SwiftSft):
    """The pipeline up to the trainer, which it returns in place of training."""

    pairs: list[Any] | None = None

    def _prepare_dataset(self) -> Any:
        if (pairs := self.pairs) is not None:

            def encode(inputs: Any) -> tuple[list[list[int]], list[float], int]:
                return pairs[int(inputs.messages[0]["content"])], [0.0, 1.0], 1

            self.template._swift_encode = encode
            self.template._add_dynamic_eos = lambda *_: None
        self.prepared = super()._prepare_dataset()
        return self.prepared

    def train(self, trainer: Any) -> Any:
        return trainer


class Trainer(HuggingFaceTarget):
    """A target of `harness.conformance`, with the template `qwen` (ChatML with tools)."""

    name = "ms-swift"

    def make(self, data: list[Any], evaluation: list[Any] | None, **arguments: Any) -> Any:
        if self._layout.loss_average != "token":
            raise NotSupported("no `loss_scale` averages by conversation")
        if self._layout.pack_size:
            raise NotSupported("`packing` requires a flash attention implementation (SftArguments), so a GPU")
        records = [
            {"messages": [{"role": "user", "content": str(place)}, {"role": "assistant", "content": "-"}]}
            for place in range(len(data))
        ]
        pipeline = self._assemble(records, bool(evaluation), **arguments)
        pipeline.pairs = [_split(one) for one in data]
        return pipeline.run()

    def evaluate(self, batch: Any) -> float:
        """Evaluate at the end of an epoch; the progress bar of ms-swift needs a training."""
        sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
        trainer = self.make(list(batch), list(batch), eval_strategy="epoch", num_train_epochs=1, **sizes)
        trainer.train()
        return float(next(line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line))

    def render(self, records: Any) -> list[Any]:
        pipeline = self._assemble(list(records), False)
        rows, _ = pipeline._prepare_dataset()
        return [{name: list(row[name]) for name in ("input_ids", "labels")} for row in rows]

    def _assemble(self, records: list[Any], evaluated: bool, **arguments: Any) -> _Pipeline:
        layout, settings = self._layout, self.settings()
        folder = Path(settings["output_dir"]) / "data"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "train.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        for name in ("disable_tqdm", "logging_strategy"):
            settings.pop(name)
        settings |= {"model": str(self._model_folder), "model_type": "llama", "template": "qwen"}
        settings |= {"tuner_type": "full", "torch_dtype": "float32", "data_seed": layout.seed, "fp16": False}
        settings |= {"train_dataloader_shuffle": layout.shuffle, "dataset_shuffle": layout.shuffle}
        settings |= {"add_version": False, "check_model": False, "report_to": ["none"], **arguments}
        if evaluated:
            settings["val_dataset"] = [str(path)]
        return _Pipeline(SftArguments(dataset=[str(path)], **settings))


def _split(conversation: Any) -> list[list[int]]:
    ids, labels = conversation["input_ids"], conversation["labels"]
    first = next((place for place, label in enumerate(labels) if label != -100), len(ids))
    return [ids[:first], ids[first:]]
