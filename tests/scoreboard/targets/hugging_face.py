"""Parts of a target for trainers that are subclasses of transformers' `Trainer`; each target makes its own."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from harness.conformance import Layout, NotSupported

# Of every target here, beside its own.
NOTES: dict[str, str] = {
    "resume-on-one-rank": (
        "The position is global_step, a number of steps. With fewer ranks, the Trainer skips as many batches "
        "(steps_trained_in_current_epoch, skip_first_batches), which contain fewer conversations."
    ),
    "damaged-checkpoint-is-refused": (
        "optimizer.pt is read by torch.load; PyTorch is built without checks of the file's CRCs, and "
        "no other checksum is written."
    ),
    "evaluation-mean": (
        "Trainer.evaluation_loop repeats the mean loss of each batch batch_size times and reports their "
        "mean, so a batch with few trained tokens weighs as much as one with many."
    ),
    "epoch-is-complete-on-ranks": (
        "Documented: `even_batches` of AcceleratorConfig (default True) repeats samples from the start of the "
        "data until all ranks have equally many."
    ),
    "resume-on-more-ranks": (
        "Documented: nothing is lost, and `even_batches` repeats samples in the last step; see "
        "epoch-is-complete-on-ranks."
    ),
}
_SUPPORTED = ("dp_size", "microbatches", "pack_size", "loss_average", "num_workers", "shuffle", "seed", "learning_rate")
# What every target sets: nothing is random, and everything is logged.
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 1,
    "logging_strategy": "steps",
    "disable_tqdm": True,
    "save_strategy": "no",
}


class _Loaded(Exception):  # noqa: N818 - ends a training that has loaded its checkpoint
    pass


class _Watcher(TrainerCallback):
    """Keeps the rows of each optimizer step, and stops after some steps or an epoch, with a checkpoint."""

    def __init__(self, steps: int | None) -> None:
        self.left, self.rows, self.steps = steps, [], []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.rows)
        self.rows = []
        if self.left is not None:
            self.left -= 1
            control.should_training_stop = control.should_save = self.left == 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.left is None:
            control.should_training_stop = control.should_save = True


class _OnlyLoad(TrainerCallback):
    def on_train_begin(self, *_: Any, **named: Any) -> None:
        raise _Loaded


class HuggingFaceTarget:
    """A target of `harness.conformance` on the public interface of transformers' `Trainer`.

    A step is an epoch of one optimizer step, `rows` the first steps of a training of two epochs. Rows are read where
    `training_step` gets them, and loss and norm where they are logged.

    Attributes:
        name: of the package.
    """

    name = ""
    # Conversations of a row where the trainer flattens batches in place of packing them; 0 where it packs.
    flattened = 0
    scans = ""  # why packed rows of linear attention are not judged; empty where they are

    def __init__(self) -> None:
        self.version = version(self.name)

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        layout.only(*_SUPPORTED)
        if self.scans and json.loads((model_folder / "config.json").read_text())["model_type"] == "qwen3_5_text":
            raise NotSupported(self.scans)
        self._calls = self._resumed = 0
        self._model_folder, self._layout, self._checkpoint = model_folder, layout, ""
        self._data = [json.loads(line) for line in data.read_text().splitlines()]
        # The same on all ranks, of which the first writes.
        self._out, self._made = model_folder.parent / f"out-{data.stem.split('-')[1]}", 0
        return self._step

    def make(self, data: list[Any], evaluation: list[Any] | None, **arguments: Any) -> Any:
        """Return the trainer of some conversations, with `arguments` besides ARGUMENTS and those of the layout."""
        raise NotImplementedError

    def _step(self, batch: Any) -> tuple[float, float]:
        layout = self._layout
        size = 1
        if not layout.pack_size or self.flattened:
            size = -(-len(batch) // (layout.dp_size * layout.microbatches))
        # Where weights move, a call trains all steps up to its own again: one step per copy of the batch.
        self._calls += 1
        count = self._resumed + self._calls if layout.learning_rate else 1
        trainer = self.make(list(batch) * count, None, per_device_train_batch_size=size, num_train_epochs=1)
        if layout.learning_rate:
            trainer.add_callback(_Watcher(None))
        try:
            trainer.train(resume_from_checkpoint=self._checkpoint or None)
        except ValueError as error:
            if "causal_conv1d" in str(error):
                reason = "it refuses packed rows of linear attention without causal_conv1d, which needs a GPU"
                raise NotSupported(reason) from error
            raise
        if trainer.state.global_step != count:
            raise RuntimeError(f"{count} batches were trained in {trainer.state.global_step} steps")
        self._saved = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        logged = next(line for line in reversed(trainer.state.log_history) if "loss" in line)
        return logged["loss"], logged["grad_norm"]

    def evaluate(self, batch: Any) -> float:
        trainer = self.make(list(batch), list(batch), per_device_train_batch_size=1, per_device_eval_batch_size=1)
        return float(trainer.evaluate()["eval_loss"])

    def rows(self, steps: int | None) -> list[list[Any]]:
        trainer, watcher = self._trainer(), _Watcher(steps)
        trainer.add_callback(watcher)
        train = trainer.training_step

        def training_step(model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
            names = [name for name in ("input_ids", "labels", "position_ids") if name in inputs]
            watcher.rows += [
                {name: inputs[name][place].tolist() for name in names} for place in range(len(inputs["input_ids"]))
            ]
            return train(model, inputs, *others, **named)

        trainer.training_step = training_step
        trainer.train(resume_from_checkpoint=self._checkpoint or None)
        self._saved = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        return watcher.steps

    def _trainer(self) -> Any:
        size = self.flattened if self._layout.pack_size and self.flattened else 1
        return self.make(self._data, None, per_device_train_batch_size=size, num_train_epochs=2)

    def save(self, folder: Path) -> None:
        if self._layout.dp_size > 1:
            torch.distributed.barrier()
        if os.environ.get("RANK", "0") == "0":
            shutil.copytree(self._saved, folder)

    def load(self, folder: Path) -> None:
        """Load once, up to the first step; `rows` does it again and goes on."""
        trainer = self._trainer()
        trainer.add_callback(_OnlyLoad())
        try:
            trainer.train(resume_from_checkpoint=str(folder))
        except RuntimeError as error:
            # `torch.load(map_location="cpu:0")`, where accelerate names the device of ranks so: of CPUs alone.
            if "Attempting to deserialize object" not in str(error) and "cpu:0" not in str(error):
                raise
            raise NotSupported(f"ranks on CPUs cannot resume: {str(error).splitlines()[0][:120]}") from error
        except _Loaded:
            self._checkpoint = str(folder)
            self._resumed = json.loads((folder / "trainer_state.json").read_text())["global_step"]

    def settings(self) -> dict[str, Any]:
        """Return the arguments of transformers' `TrainingArguments` for the layout, with a new folder."""
        layout = self._layout
        self._made += 1
        return {
            **ARGUMENTS,
            "output_dir": str(self._out / str(self._made)),
            "seed": layout.seed,
            "learning_rate": layout.learning_rate,
            "lr_scheduler_type": "constant",
            "gradient_accumulation_steps": layout.microbatches,
            "dataloader_num_workers": layout.num_workers,
        }
