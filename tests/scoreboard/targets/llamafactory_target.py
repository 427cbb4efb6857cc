"""LLaMA-Factory's supervised fine-tuning as a target, put together as its `run_sft` does it.

Conversations enter where its template returns the tokens of prompts and answers, so that truncation, labels and packing
are its own.
"""

from __future__ import annotations

import copy
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hugging_face import HuggingFaceTarget

# Imported for sound; the package index has builds for CUDA alone.
sys.modules["torchaudio"] = ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_model, load_tokenizer
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

from harness.conformance import NotSupported

NOTES: dict[str, str] = {
    "long-conversation-is-kept": (
        "Documented: `cutoff_len`. Prompt and answer are cut to it in proportion (processor_utils.infer_seqlen), "
        "so that the answer follows a truncated prompt, without a warning."
    ),
    "labels-at-boundaries": (
        "With `train_on_prompt` the label of the first token of each conversation is kept in a packed row "
        "(PackedSupervisedDatasetProcessor joins labels unchanged) and is predicted from the previous "
        "conversation. transformers 5.6, the newest that it accepts, also counts the first label of the row, for "
        "which there is no loss."
    ),
    "assistant-alone-is-trained": (
        "The line break after each answer is trained too; it belongs to the template's answer."
    ),
}
_CHATS = {
    "formatting": "openai",
    "columns": {"messages": "messages", "tools": "tools"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "function",
        "system_tag": "system",
    },
}


class Trainer(HuggingFaceTarget):
    """A target of `harness.conformance`, with `neat_packing` and the template `qwen` (ChatML with tools)."""

    name = "llamafactory"
    scans = "it gives linear attention the boundaries by flash-linear-attention's kernels (model/patcher.py); not run"

    def make(self, data: list[Any], evaluation: list[Any] | None, **arguments: Any) -> CustomSeq2SeqTrainer:
        layout = self._layout
        if layout.loss_average != "token":
            raise NotSupported("no setting averages by conversation")
        if layout.pack_size:
            arguments |= {"neat_packing": True, "cutoff_len": layout.pack_size}
        records = [{"instruction": str(place), "input": "", "output": "-"} for place in range(len(data))]
        pairs = [_split(one) for one in data]
        arguments["train_on_prompt"] = bool(data) and data[0]["labels"][0] != -100
        if evaluation:
            arguments["eval_dataset"] = "train"
        return self._assemble(records, {}, pairs, disable_shuffling=not layout.shuffle, **arguments)

    def render(self, records: Any) -> list[Any]:
        rows = self._assemble(list(records), _CHATS, None).train_dataset
        return [{name: row[name] for name in ("input_ids", "labels")} for row in rows]

    def _assemble(self, records: list[Any], kind: Any, pairs: list[Any] | None, **arguments: Any) -> Any:
        settings = self.settings()
        folder = Path(settings["output_dir"]) / "data"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.json").write_text(json.dumps(records))
        info = {"train": {"file_name": "train.json", **kind}}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        settings |= {"model_name_or_path": str(self._model_folder), "template": "qwen", "stage": "sft"}
        settings |= {"finetuning_type": "full", "dataset": "train", "dataset_dir": str(folder), "do_train": True}
        settings |= {"overwrite_output_dir": True, "overwrite_cache": True, **arguments}
        model_args, data_args, training_args, finetuning_args, generating_args = get_train_args(settings)
        tokenizer_module = load_tokenizer(model_args)
        tokenizer = tokenizer_module["tokenizer"]
        template = copy.copy(get_template_and_fix_tokenizer(tokenizer, data_args))
        if pairs is not None:
            template.encode_multiturn = lambda _, messages, *others: [pairs[int(messages[0]["content"])]]
        dataset_module = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokenizer_module)
        model = load_model(tokenizer, model_args, finetuning_args, training_args.do_train)
        return CustomSeq2SeqTrainer(
            model=model,
            args=training_args,
            finetuning_args=finetuning_args,
            data_collator=SFTDataCollatorWith4DAttentionMask(
                template=template,
                model=model,
                pad_to_multiple_of=8,
                label_pad_token_id=-100,
                block_diag_attn=model_args.block_diag_attn,
                neat_packing=data_args.neat_packing,
                attn_implementation=getattr(model.config, "_attn_implementation", None),
                compute_dtype=model_args.compute_dtype,
                **tokenizer_module,
            ),
            gen_kwargs=generating_args.to_dict(obey_generation_config=True),
            **dataset_module,
            **tokenizer_module,
        )


def _split(conversation: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the answer; with `train_on_prompt` the place does not matter."""
    ids, labels = conversation["input_ids"], conversation["labels"]
    first = next((place for place, label in enumerate(labels) if label != -100), len(ids)) or len(ids) // 2
    return ids[:first], ids[first:]
