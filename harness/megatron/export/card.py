"""Model card of an exported folder: its training data and settings, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harness.errors import installed_versions
from harness.megatron.export.data import SpecialTokens, TrainedData
from harness.plan.encoders import read_encoder
from harness.printing import escape_markdown
from harness.tables import Table
from harness.train import METRICS_FILE, StepMetrics, read_metrics
from harness.train.checkpoints import RUN_FILE

CARD_FILE = "README.md"

_LOAD_MODEL = """from transformers import {kind}, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {kind}.from_pretrained(folder)
"""
_LOAD_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, folder)
model.generation_config = GenerationConfig.from_pretrained(folder)  # ends where the trained turns end
"""
_GENERATE = """
messages = [{"role": "user", "content": "Hello"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**prompt)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""


def model_card(
    checkpoint: Path, settings: Mapping[str, Any], data: TrainedData, tokens: SpecialTokens | None, *, is_adapter: bool
) -> str:
    """Return the model card of the exported `checkpoint`; the metrics of its run are two folders above it."""
    document = json.loads((checkpoint / RUN_FILE).read_text())
    run = checkpoint.resolve().parent.parent
    path, step = run / METRICS_FILE, int(document["step"])
    steps = [metrics for metrics in read_metrics(path) if metrics.step <= step] if path.exists() else []
    base = settings["model"].get("init_from")
    head: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megatron-core", *(["lora"] if settings["model"].get("lora_rank") else [])],
    }
    if base and not Path(base).exists():  # a hub id
        head["base_model"] = base
    encoder = settings["model"].get("encoder")
    kind = read_encoder(encoder)[0].architecture if encoder else "AutoModelForCausalLM"
    load = _LOAD_ADAPTER.format(base=json.dumps(base)) if is_adapter else _LOAD_MODEL.format(kind=kind)
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {escape_markdown(run.name)}, step {step:,}\n",
        "Trained with Megatron-Core, and exported by `harness export`.\n",
        *([f"## Use\n\n```python\n{load}{_GENERATE}```\n"] if tokens is not None else []),
        _table("Data", data_facts(data, tokens)),
        _table("Run", run_facts(document, settings, steps)),
    ]
    if data.missing:
        parts.append("## Not in this folder\n\n" + "".join(f"- {escape_markdown(line)}\n" for line in data.missing))
    return "\n".join(parts)


def data_facts(data: TrainedData, tokens: SpecialTokens | None) -> dict[str, str]:
    """Return the facts of the data, by name."""
    facts = {"datasets" if len(data.names) > 1 else "dataset": ", ".join(data.names)}
    several = len(data.manifests) > 1
    for path, manifest in data.manifests.items():
        origin, of = manifest.provenance, f" of {path}" if several else ""
        facts |= {
            f"fingerprint{of}": manifest.fingerprint or "not recorded",
            f"sequences{of}": f"{manifest.num_sequences:,} in {manifest.num_packs:,} packs of up to "
            f"{manifest.pack_size:,} tokens",
            f"tokens{of}": f"{manifest.num_tokens:,}, of which {manifest.num_trained_tokens:,} trained",
            f"schema{of}": origin.mask.get("schema") or "not recorded",
            f"mask{of}": _mask(origin.mask),
            f"tokenizer hash{of}": origin.tokenizer_hash or "not recorded",
            f"chat template hash{of}": origin.chat_template_hash or "not recorded",
        }
    if data.live_mask:
        facts["mask"] = _mask(data.live_mask)
    if data.eod is not None:
        facts["end of a document"] = f"token {data.eod}"
    if tokens is not None:
        is_recorded = all("end_tokens" in mask for mask in data.masks)
        source = "recorded by the data" if is_recorded else "of the tokenizer and its chat template"
        texts = ", ".join(f"{tokens.texts[token]} ({token})" for token in tokens.ends)
        facts["end of an answer"] = f"{texts}; {source}" if texts else "unknown"
        if tokens.pad is not None:
            also = ", which also ends an answer: the tokenizer has no other" if tokens.pad in tokens.ends else ""
            facts["padding"] = f"{tokens.texts[tokens.pad]} ({tokens.pad}){also}"
    return facts


def _mask(facts: Mapping[str, str]) -> str:
    if not facts:
        return "not recorded"
    # Omit facts that are elsewhere on the card, or empty.
    shown = {name: text for name, text in facts.items() if name not in ("schema", "end_tokens") and text != "[]"}
    rule, why = shown.pop("rule", "unknown"), shown.pop("why", "")
    return ", ".join([rule + (f" ({why})" if why else ""), *(f"{name} {text}" for name, text in shown.items())])


def run_facts(document: Mapping[str, Any], settings: Mapping[str, Any], steps: list[StepMetrics]) -> dict[str, str]:
    """Return the facts of the run, by name."""
    model, parallel, optimizer = settings["model"], settings["parallel"], settings["optimizer"]
    shape = f"{model['family']}, {model['num_layers']} layers of {model['hidden_size']}"
    shape += f", vocabulary {model['vocab_size']:,}, {model['dtype']}"
    facts = {"base model": model.get("init_from") or "none: trained from random weights", "model": shape}
    if model.get("lora_rank"):
        facts["LoRA"] = f"rank {model['lora_rank']}, alpha {model['lora_alpha']:g}, {', '.join(model['lora_targets'])}"
    each = "samples" if "sequence_length" in settings["data"] else "packs"
    facts["steps"] = f"{document['step']:,}, of {settings['loader']['global_batch_size']:,} {each} each"
    if steps:
        validated = [metrics for metrics in steps if metrics.validation_loss is not None]
        tokens, trained = sum(m.tokens for m in steps), sum(m.trained_tokens for m in steps)
        facts["tokens"] = f"{tokens:,}, of which {trained:,} trained"
        facts["training loss"] = f"{steps[-1].loss:.4f} at step {steps[-1].step:,}"
        if validated:
            facts["validation loss"] = f"{validated[-1].validation_loss:.4f} at step {validated[-1].step:,}"
        for name, loss in next((m.evaluation_losses for m in reversed(steps) if m.evaluation_losses), {}).items():
            facts[f"{name} loss"] = f"{loss:.4f}"
    rate = optimizer["lr"]
    facts["learning rate"] = f"{rate:g} to {rate * optimizer.get('min_lr_ratio', 0.1):g}, {optimizer['decay']}"
    sizes = ", ".join(f"{name} {parallel[f'{name}_parallel_size']}" for name in ("tensor", "pipeline", "context"))
    facts["layout"] = f"ranks {document.get('world_size', 'unknown')}, {sizes}"
    names = {"megatron-core": document.get("megatron_core", "unknown"), "torch": document.get("torch", "unknown")}
    packages = ("transformers", "megatron-sft-harness")
    names |= dict.fromkeys(packages, "not installed") | installed_versions(packages)
    facts["versions"] = ", ".join(f"{name} {number}" for name, number in names.items())
    return facts


def _table(title: str, facts: Mapping[str, str]) -> str:
    return f"## {title}\n\n{Table((), list(facts.items())).to_markdown()}\n"
