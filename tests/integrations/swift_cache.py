"""Read and write cached datasets with ms-swift's own pipelines; run by the Python of its environment.

    swift_cache.py SETTINGS.json

With `arguments`, those of `swift sft`, the batches of one epoch of its trainer are written as JSON. With `chats`, that
file becomes a cached dataset, and what its template makes of each row is written.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from datasets import load_from_disk
from swift.arguments import SftArguments
from swift.pipelines.export.cached_dataset import ExportCachedDataset
from swift.pipelines.train.sft import SwiftSft
from transformers import LlamaConfig, LlamaForCausalLM

# A CPU has no flash attention, without which packing is refused. Batches are the same; none is trained here.
SftArguments._check_padding_free = lambda self: None


class Pipeline(SwiftSft):
    """The pipeline up to the trainer, which it returns in place of training."""

    def train(self, trainer: Any) -> Any:
        return trainer


def common(settings: dict[str, Any]) -> list[str]:
    model = Path(settings["model"])
    config = LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(model)
    return ["--model", str(model), "--model_type", "llama", "--torch_dtype", "float32"]


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    words = common(settings)
    out: list[Any]
    if "chats" in settings:
        words += ["--template", "chatml", "--dataset", settings["chats"], "--output_dir", settings["cache"]]
        pipeline = ExportCachedDataset([*words, "--to_cached_dataset", "true", "--max_length", "256"])
        pipeline.main()
        encoded = [pipeline.template.encode(row) for row in load_from_disk(f"{settings['cache']}/train")]
        out = [{name: list(row[name]) for name in ("input_ids", "labels")} for row in encoded]
    else:
        words += [
            *("--add_version", "false", "--tuner_type", "full", "--per_device_train_batch_size", "1"),
            *("--gradient_accumulation_steps", "1"),
        ]
        words += ["--output_dir", str(Path(settings["out"]).parent / "output"), "--report_to", "none"]
        trainer = Pipeline([*words, *shlex.split(settings["arguments"])]).run()
        out = [
            {name: batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids")}
            for batch in trainer.get_train_dataloader()
        ]
    Path(settings["out"]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
