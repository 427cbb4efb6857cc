"""Export a checkpoint as a folder that transformers loads: config.json, safetensors, and the tokenizer of the data."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from harness.errors import CheckpointError, ConfigError, HarnessError
from harness.formats import find_datasets, find_tokenizer_folder, open_dataset
from harness.megatron.job import join, runtime
from harness.megatron.model import build_chunks, lora
from harness.megatron.state import find_newest, read_progress
from harness.megatron.weights import INDEX_FILE, global_parameters, to_hf
from harness.plan import ModelConfig, ParallelConfig, find_weights, read_hf_config, to_hf_config
from harness.train import CHECKPOINTS, RUN_FILE

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Exported:
    """Summary of an export: the checkpoint's step, the weights and bytes written, and if a tokenizer is included."""

    step: int
    num_weights: int
    num_bytes: int
    has_tokenizer: bool


def export_checkpoint(
    source: Path, out: Path, *, adapters_only: bool = False, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write a checkpoint as Hugging Face weights. Needs memory for one copy of the weights, on the CPU.

    LoRA adapters are merged into the weights of their layers.

    Args:
        source: a run's folder (its newest whole checkpoint), or one of its checkpoints.
        out: a folder that does not exist yet, or is empty.
        adapters_only: write the LoRA adapters alone, in PEFT's layout.
        shard_bytes: largest size of one safetensors file; a larger tensor has a file of its own.

    Raises:
        ConfigError: `source` is not a run, `out` is not empty, or the run has no adapters to write alone.
        CheckpointError: there is no whole checkpoint, or it is damaged.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("the folder exists already", where=str(out), fix="name a new folder")
    path, settings = _find_checkpoint(source)
    progress = read_progress(path)
    model = ModelConfig(**settings["model"])
    vocab_size = model.vocab_size
    if vocab_size is None:
        raise ConfigError("the run's config.yaml has no model.vocab_size", where=str(path), fix="resume it once")
    if adapters_only and not (model.lora_rank and model.init_from):
        raise ConfigError(
            "the run trained all weights" if not model.lora_rank else "the adapters belong to random base weights",
            where=str(path),
            fix="export the whole model: leave --adapter out",
        )
    writing = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    with runtime.start("cpu"):
        join(ParallelConfig(), 1)
        device = torch.device("cpu")
        (chunk,) = build_chunks(model, ParallelConfig(), vocab_size=vocab_size, device=device)
        try:
            state = dist_checkpointing.load({"model": chunk.sharded_state_dict()}, str(path))
        # Megatron and torch raise many kinds, one of which is not an Exception.
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"the checkpoint cannot be read: {type(error).__name__}: {error}".splitlines()[0],
                where=str(path),
                fix="export an older checkpoint: name its folder",
            ) from error
        chunk.load_state_dict(state["model"])
        writing.mkdir(parents=True)
        try:
            if adapters_only:
                num_weights, num_bytes = _write_adapters(chunk, model, writing)
            else:
                lora.merge(chunk)
                tensors = (
                    (name, tensor.contiguous())
                    for ours, parameter in global_parameters(chunk)
                    for name, tensor in to_hf(ours, parameter.detach(), model, vocab_size).items()
                )
                num_weights, num_bytes = _write_weights(tensors, writing, shard_bytes)
                (writing / "config.json").write_text(json.dumps(_config(model, vocab_size), indent=2) + "\n")
            has_tokenizer = _copy_tokenizer(settings, writing)
            if out.exists():
                out.rmdir()
            writing.rename(out)
        finally:
            shutil.rmtree(writing, ignore_errors=True)
    return Exported(progress.step, num_weights, num_bytes, has_tokenizer)


def _find_checkpoint(source: Path) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint and the settings of its run."""
    is_checkpoint = (source / RUN_FILE).is_file()
    run = source.resolve().parents[1] if is_checkpoint else source
    config = run / "config.yaml"
    if not config.is_file():
        fix = "name the folder of a run (runs/sft-001), or one of its checkpoints"
        raise ConfigError("not a run: there is no config.yaml", where=str(config), fix=fix)
    path = source if is_checkpoint else find_newest(run / CHECKPOINTS)[0]
    if path is None:
        raise CheckpointError(
            "the run has no whole checkpoint", where=str(run / CHECKPOINTS), fix="train it for a few steps first"
        )
    return path, yaml.safe_load(config.read_text())


def _config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the config of the initial weights if they still exist, as it has more than this project needs."""
    if model.init_from is not None:
        with suppress(ConfigError):
            folder = find_weights(model.init_from)
            read_hf_config(folder)
            return dict(json.loads((folder / "config.json").read_text()))
    return to_hf_config(model, vocab_size=vocab_size)


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int) -> tuple[int, int]:
    from safetensors.torch import save_file

    files: list[list[str]] = []
    total = weights = 0
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if pending:
            save_file(pending, str(folder / f"part-{len(files)}"), metadata={"format": "pt"})
            files.append(list(pending))
            pending.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and size + sum(t.numel() * t.element_size() for t in pending.values()) > shard_bytes:
            flush()
        pending[name] = tensor
        total, weights = total + size, weights + tensor.numel()
    flush()
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / f"part-{number}").rename(folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return weights, total


def _write_adapters(chunk: GPTModel, model: ModelConfig, folder: Path) -> tuple[int, int]:
    from safetensors.torch import save_file

    tensors = lora.peft_tensors(chunk, model)
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(lora.peft_config(model), indent=2) + "\n")
    return sum(t.numel() for t in tensors.values()), sum(t.numel() * t.element_size() for t in tensors.values())


def _copy_tokenizer(settings: dict[str, Any], folder: Path) -> bool:
    """Copy the tokenizer of the data beside the weights; return False if it is not on this machine."""
    data = settings["data"]
    live = data.get("live") or {}
    path = data["blend"][0]["path"] if data.get("blend") else data["path"]
    try:
        if live.get("path"):
            tokenizer = Path(live["tokenizer"]["name"] or data["tokenizer"])
        else:
            tokenizer = find_tokenizer_folder(open_dataset(find_datasets(path)[0]))
        for file in tokenizer.iterdir():
            if file.is_file():
                shutil.copy(file, folder / file.name)
    except (HarnessError, OSError):  # data that has moved does not prevent the export
        return False
    return (folder / "tokenizer.json").is_file()
