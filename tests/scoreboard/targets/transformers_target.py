"""transformers' `Trainer` as a target: `DataCollatorForSeq2Seq` pads, `DataCollatorWithFlattening` packs."""

from __future__ import annotations

from typing import Any

from hugging_face import HuggingFaceTarget
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    TrainingArguments,
)
from transformers import Trainer as TransformersTrainer

from harness.conformance import NotSupported

NOTES: dict[str, str] = {
    "scan-boundaries": (
        "Linear attention takes boundaries from cu_seq_lens_q (modeling_qwen3_5.py), which DataCollatorWithFlattening "
        "provides only with return_flash_attn_kwargs=True, and not from position_ids, as attention does. "
        "With that argument, a CPU is refused (integrations/hub_kernels.py)."
    ),
    "packed-equals-unpacked": (
        "Rows are batches joined by DataCollatorWithFlattening. Its documentation says to make sure that "
        "attention can handle it; sdpa derives the boundaries from position_ids "
        "(masking_utils.find_packed_sequence_indices)."
    ),
}


class Trainer(HuggingFaceTarget):
    """A target of `harness.conformance`."""

    name = "transformers"
    flattened = 2

    def make(self, data: list[Any], evaluation: list[Any] | None, **arguments: Any) -> TransformersTrainer:
        layout = self._layout
        if layout.loss_average != "token":
            raise NotSupported("no setting averages by conversation")
        if layout.pack_size and max(len(one["input_ids"]) for one in data) > layout.pack_size:
            raise NotSupported("DataCollatorWithFlattening joins a batch of conversations; a row has no longest length")
        tokenizer = AutoTokenizer.from_pretrained(self._model_folder)
        return TransformersTrainer(
            model=AutoModelForCausalLM.from_pretrained(self._model_folder),
            args=TrainingArguments(
                **self.settings(), **arguments, train_sampling_strategy="random" if layout.shuffle else "sequential"
            ),
            train_dataset=data,
            eval_dataset=evaluation,
            processing_class=tokenizer,
            data_collator=DataCollatorWithFlattening() if layout.pack_size else DataCollatorForSeq2Seq(tokenizer),
        )

    def render(self, records: Any) -> list[Any]:
        tokenizer, rendered = AutoTokenizer.from_pretrained(self._model_folder), []
        for record in records:
            made = tokenizer.apply_chat_template(
                record["messages"],
                tools=record.get("tools"),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            labels = [
                token if kept else -100 for token, kept in zip(made["input_ids"], made["assistant_masks"], strict=True)
            ]
            rendered.append({"input_ids": made["input_ids"], "labels": labels})
        return rendered
