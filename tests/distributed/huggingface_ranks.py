"""A program of a user of Trainer or SFTTrainer: trains a Llama on packed data, and prints its losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from harness import LoaderConfig
from harness.integrations import RankStream
from harness.integrations.huggingface import PackedTraining
from harness.schedule import ScheduleConfig

OPTIMIZER = {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}


class PackedTrainer(PackedTraining, Trainer):
    """The Trainer on packed data."""


def trainer(model: Any, data: str, folder: Path, *, kind: str = "trainer", size: int = 6, **options: Any) -> Any:
    """Return a Trainer for steps of `size` packs."""
    schedule = ScheduleConfig(options.pop("schedule", "as_packed"), max_tokens_per_rank=256)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **OPTIMIZER,
        **options,
    }
    if kind == "sft":
        import trl
        from tokenizers import Tokenizer, models

        args = trl.SFTConfig(**settings, bf16=False)  # its default, unlike that of TrainingArguments, is bf16
        tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
        more = {"processing_class": PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")}

        class PackedSFTTrainer(PackedTraining, trl.SFTTrainer):
            """TRL's trainer on packed data."""

        made: type[Any] = PackedSFTTrainer
    else:
        args, more, made = TrainingArguments(**settings), {}, PackedTrainer
    config = LoaderConfig(global_batch_size=size, num_workers=options.get("dataloader_num_workers", 0), block_packs=4)
    stream = RankStream(data, config, schedule=schedule, dp_rank=args.process_index, dp_size=args.world_size)
    return made(model, args=args, stream=stream, **more)


def main() -> None:
    """Train on the ranks of torchrun, and write the losses."""
    model, data, folder, options = sys.argv[1:]
    torch.set_num_threads(1)
    settings = json.loads(options)
    resume = settings.pop("resume", None)
    built = trainer(AutoModelForCausalLM.from_pretrained(model), data, Path(folder), **settings)
    built.train(resume_from_checkpoint=resume)
    if built.args.process_index == 0:
        losses = [line["loss"] for line in built.state.log_history if "loss" in line]
        (Path(folder) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
