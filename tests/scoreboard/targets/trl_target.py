"""TRL's `SFTTrainer` as a target, with its default packing strategy and `assistant_only_loss` for chats."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from hugging_face import HuggingFaceTarget
from trl import SFTConfig, SFTTrainer

from harness.conformance import NotSupported

NOTES: dict[str, str] = {
    "resume-on-one-rank": (
        "The position is global_step, a number of steps; the Trainer skips as many batches of the new number of ranks "
        "(steps_trained_in_current_epoch, skip_first_batches), which are fewer conversations."
    ),
    "long-conversation-is-kept": (
        "Documented: `packing_strategy` `bfd`, the default, truncates what is longer than `max_length` "
        "(data_utils.pack_dataset); `bfd_split` splits it. Here the cut part has all trained tokens."
    ),
    "damaged-checkpoint-is-refused": (
        "optimizer.pt is read by torch.load, which PyTorch builds without the check of the CRCs that the file "
        "has; no other checksum is written."
    ),
    "evaluation-mean": (
        "Trainer.evaluation_loop repeats the mean loss of each batch batch_size times and reports the mean of "
        "these, so that a batch of few trained tokens weighs as much as one of many."
    ),
    "epoch-is-complete-on-ranks": (
        "Documented: `even_batches` of AcceleratorConfig (default True) repeats samples from the start of the "
        "data until all ranks have equally many."
    ),
    "packed-equals-unpacked": (
        "The documentation of `padding_free` asks for flash attention 2 or 3; sdpa of transformers finds the "
        "boundaries by position_ids all the same."
    ),
}


class Trainer(HuggingFaceTarget):
    """A target of `harness.conformance`; conversations are a dataset that has `input_ids` and `labels`."""

    name = "trl"

    def make(self, data: list[Any], evaluation: list[Any] | None, **arguments: Any) -> SFTTrainer:
        layout = self._layout
        if layout.loss_average != "token":
            raise NotSupported("no `loss_type` averages by conversation")
        packing = {"packing": True, "max_length": layout.pack_size} if layout.pack_size else {}
        return SFTTrainer(
            str(self._model_folder),
            args=SFTConfig(
                **self.settings(),
                **arguments,
                **packing,
                train_sampling_strategy="random" if layout.shuffle else "sequential",
            ),
            train_dataset=Dataset.from_list(data),
            eval_dataset=Dataset.from_list(evaluation) if evaluation else None,
        )

    def render(self, records: Any) -> list[Any]:
        config = SFTConfig(**self.settings(), assistant_only_loss=True)
        trainer = SFTTrainer(str(self._model_folder), args=config, train_dataset=Dataset.from_list(list(records)))
        return [{name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset]
