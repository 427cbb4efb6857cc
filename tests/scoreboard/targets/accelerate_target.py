"""A loop on accelerate as a target, as its guides to gradient accumulation of samples of variable size and to
checkpoints write it, with transformers' model and collator.
"""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from harness.conformance import Layout, NotSupported

NOTES: dict[str, str] = {
    "resume-on-one-rank": (
        "skip_first_batches skips a number of batches, whose size depends on the number of ranks, and the saved random "
        "state belongs to one rank; with another number of ranks, other batches are drawn and divided."
    ),
    "resume-within-an-epoch": (
        "As in the guide to checkpoints: load_state, then skip_first_batches. With the default sampler, the generator "
        "is restored to its state at the checkpoint, so that batches of another permutation are skipped "
        "(huggingface/accelerate#4233). DataLoaderConfiguration(use_seedable_sampler=True) passes."
    ),
    "resume-on-more-ranks": "The same as resume-within-an-epoch.",
    "resume-with-workers": "The same as resume-within-an-epoch.",
    "damaged-checkpoint-is-refused": (
        "optimizer.bin is read by torch.load; PyTorch is built without checks of the file's CRCs, and "
        "no other checksum is written."
    ),
    "epoch-is-complete-on-ranks": (
        "Documented: `even_batches` of DataLoaderConfiguration (default True) repeats samples from the start of "
        "the data until all ranks have equally many."
    ),
}
_EPOCHS = 2


class _Position:
    """The batches that have been trained, saved and loaded with everything else."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Trainer:
    """A target of `harness.conformance`."""

    name, version = "accelerate", version("accelerate")

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        if layout.pack_size:
            raise NotSupported("accelerate does not pack")
        layout.only("dp_size", "microbatches", "loss_average", "num_workers", "shuffle", "seed")
        if layout.loss_average != "token":
            raise NotSupported("the loop is the user's own")
        self._folder, self._layout = model_folder, layout
        self._data = [json.loads(line) for line in data.read_text().splitlines()]
        self._prepare(self._data, 1)
        return self._step

    def _prepare(self, data: list[Any], size: int) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        set_seed(self._layout.seed)
        steps = self._layout.microbatches
        self._accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model = AutoModelForCausalLM.from_pretrained(self._folder)
        loader = DataLoader(
            data,
            batch_size=size,
            shuffle=self._layout.shuffle,
            num_workers=self._layout.num_workers,
            collate_fn=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(self._folder)),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        self._model, self._optimizer, self._loader = self._accelerator.prepare(model, optimizer, loader)
        self._position = _Position()
        self._accelerator.register_for_checkpointing(self._position)

    def _step(self, batch: Any) -> tuple[float, float]:
        layout = self._layout
        self._prepare(list(batch), -(-len(batch) // (layout.dp_size * layout.microbatches)))
        (loss, norm, _), *others = self._updates()
        if others:
            raise RuntimeError(f"the batch was trained in {1 + len(others)} steps")
        return loss, norm

    def rows(self, steps: int | None) -> list[list[Any]]:
        made: list[list[Any]] = []
        if steps != 0:
            for _, _, rows in self._updates():
                made.append(rows)
                if len(made) == steps:
                    break
        return made

    def _updates(self) -> Any:
        """Train the rest of the current epoch, and yield loss, norm and rows of each step."""
        accelerator, steps = self._accelerator, self._layout.microbatches
        epoch, skipped = divmod(self._position.batches, len(self._loader))
        if epoch == _EPOCHS:
            return
        loader = accelerator.skip_first_batches(self._loader, skipped) if skipped else self._loader
        iterator, left = iter(loader), len(self._loader) - skipped
        while left:
            batches = [next(iterator) for _ in range(min(steps, left))]
            left -= len(batches)
            items = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
            items = accelerator.gather(items).sum().item()
            total = torch.zeros(())
            for place, batch in enumerate(batches):
                is_last = place == len(batches) - 1 or accelerator.num_processes == 1
                with contextlib.nullcontext() if is_last else self._model.no_sync():
                    loss = self._model(**batch, num_items_in_batch=items).loss
                    total += loss.detach()
                    accelerator.backward(loss * steps * accelerator.num_processes)
            norm = accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._position.batches += len(batches)
            rows = [
                {name: batch[name][place].tolist() for name in ("input_ids", "labels")}
                for batch in batches
                for place in range(len(batch["labels"]))
            ]
            yield float(accelerator.gather(total).sum()), float(norm), rows

    def evaluate(self, batch: Any) -> float:
        raise NotSupported("accelerate has no evaluation of its own")

    def render(self, records: Any) -> list[Any]:
        raise NotSupported("accelerate does not tokenize")

    def save(self, folder: Path) -> None:
        self._accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self._accelerator.load_state(str(folder))
