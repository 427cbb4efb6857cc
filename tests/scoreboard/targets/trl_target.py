"""TRL's `SFTTrainer` as a target, with its default packing strategy and `assistant_only_loss` for chats."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from hugging_face import HuggingFaceTarget
from trl import SFTConfig, SFTTrainer

from harness.conformance import NotSupported

NOTES: dict[str, str] = {
    "long-conversation-is-kept": (
        "Documented: `packing_strategy` `bfd`, the default, truncates what is longer than `max_length` "
        "(data_utils.pack_dataset); `bfd_split` splits it. Here, the part that is cut contains all trained tokens."
    ),
    "packed-equals-unpacked": (
        "The documentation of `padding_free` asks for flash attention 2 or 3; sdpa of transformers also derives "
        "the boundaries from position_ids."
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
