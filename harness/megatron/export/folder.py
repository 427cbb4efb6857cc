"""Write the folder of an exported checkpoint: config, safetensors, generation settings, tokenizer, and model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from harness.errors import CheckpointError, ConfigError, os_errors_as
from harness.megatron.export.card import CARD_FILE, model_card
from harness.megatron.export.data import SpecialTokens, TrainedData, find_data, write_tokenizer
from harness.megatron.hf_files import INDEX_FILE, HfWeights
from harness.megatron.job import runtime
from harness.megatron.model import lora
from harness.megatron.model.gpt import build_chunks
from harness.megatron.state.checkpoint import find_damage, find_newest
from harness.megatron.state.loading import load_tree, put_weights, sharded_weights
from harness.megatron.weights import hf_tensors
from harness.paths import explain_path
from harness.plan import ModelConfig, ParallelConfig, read_hf_config
from harness.plan.encoders import of_whole
from harness.plan.hf_config import MTP_SETTINGS, check_exported, find_weights, text_config, to_hf_config
from harness.storage import Marker, make_folder, sync_path
from harness.storage.checksums import digest_files, write_checksums
from harness.storage.files import PlacingClaim, sync_tree
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, read_progress
from harness.train.folder import SETTINGS_FILE, check_settings, read_settings

# Largest size of one safetensors file; a larger tensor gets its own file.
_SHARD_BYTES = 5 * 10**9
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


@dataclass(frozen=True)
class Exported:
    """Summary of an export."""

    step: int
    num_weights: int
    num_bytes: int
    has_tokenizer: bool
    end_tokens: tuple[str, ...]
    pad_token: str | None
    missing: tuple[str, ...]


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    adapters_only: bool = False,
    keep_mtp: bool = False,
    data_paths: Sequence[str] = (),
    unchecked: bool = False,
) -> Exported:
    """Write a checkpoint as a folder that can be served. Needs CPU memory for one copy of the weights.

    Besides the weights, it contains config.json and generation_config.json with every token that ends an answer, the
    tokenizer and chat template of the data, and a model card. LoRA adapters are merged into the weights of their
    layers. Missing data does not prevent an export; `Exported.missing` lists the parts that could not be written.

    Args:
        source: the folder of a run (exports its newest whole checkpoint), or one of its checkpoints.
        out: a folder that does not exist yet, or is empty.
        keep_mtp: also write the layers that predict further tokens (MTP), copied from the initial weights: they were
            not trained, so a server that drafts with them accepts fewer of their tokens.
        data_paths: current location of the run's data, in the order of its settings; empty if it has not moved.
        unchecked: export even a checkpoint without `checksums.json`.

    Raises:
        ConfigError: `source` is not a run, `out` is not empty, the run has no adapters to export separately, its
            initial weights have no MTP layers to keep, or `data_paths` contain other data or none.
        CheckpointError: there is no whole checkpoint, or it is damaged.
    """
    if not _marker_of(out).path.exists():
        _refuse_used(out)
    path, settings = _find_checkpoint(source, unchecked=unchecked)
    progress = read_progress(path)
    data = find_data(settings, progress.loader, data_paths)
    # Layers of PyTorch can hold the weights of any other kind, and run on a CPU.
    model = ModelConfig(**{**settings["model"], "attention": "torch", "fp8": "off"})
    vocab_size = _check_choices(model, path, adapters_only=adapters_only, keep_mtp=keep_mtp)
    copied = _copied_tensors(model, path, keep_mtp=keep_mtp)
    with _claim(out) as writing, runtime.start("cpu"):
        chunk = _load(model, path, vocab_size)
        if adapters_only:
            size = _write_adapters(chunk, model, writing)
        else:
            lora.merge(chunk, model)
            size = _write_weights(chain(hf_tensors(chunk, model, vocab_size), copied), writing)
        tokens = write_tokenizer(data, writing, vocab_size=vocab_size)
        config, generation = _settings_of(model, data, tokens, vocab_size, has_mtp=keep_mtp or bool(model.mtp_layers))
        _write_json(writing / GENERATION_FILE, generation)
        if not adapters_only:
            _write_json(writing / CONFIG_FILE, config)
        (writing / CARD_FILE).write_text(model_card(path, settings, data, tokens, is_adapter=adapters_only))
        files = sorted(str(file.relative_to(writing)) for file in writing.rglob("*") if file.is_file())
        for file in files:  # safetensors writes files that other users cannot read
            shutil.copymode(writing / CARD_FILE, writing / file)
        write_checksums(writing, digest_files(writing, files))
    ends = () if tokens is None else tuple(tokens.texts[token] for token in tokens.ends)
    pad = None if tokens is None or tokens.pad is None else tokens.texts[tokens.pad]
    return Exported(progress.step, *size, tokens is not None, ends, pad, tuple(data.missing))


# Families for which PEFT 0.21 loads expert adapters; for others it silently skips them.
_EXPERTS_IN_PEFT = ("qwen3_moe", "olmoe")


def _check_choices(model: ModelConfig, path: Path, *, adapters_only: bool, keep_mtp: bool) -> int:
    """Raise ConfigError if the model cannot be exported as requested; return its vocabulary size."""
    if model.vocab_size is None:
        raise ConfigError("the run's config.yaml has no model.vocab_size", where=str(path), fix="resume it once")
    if adapters_only and not (model.lora_rank and model.init_from):
        what = "the run trained all weights" if not model.lora_rank else "the adapters belong to random base weights"
        raise ConfigError(what, where=str(path), fix="export the full model: omit --adapter")
    check_exported(model)
    # PEFT skips adapters of experts that it does not know, and refuses those of Mamba's output projections.
    odd = ["linear_fc1", "linear_fc2"] * (model.num_experts > 0 and model.family not in _EXPERTS_IN_PEFT)
    has_mamba = "M" in (model.layer_pattern or "")
    odd = [name for name in (*odd, *["linear_proj"] * has_mamba) if name in model.lora_targets]
    if adapters_only and odd:
        what = f"PEFT does not load all adapters of {', '.join(odd)} into models of the family {model.family}"
        raise ConfigError(what, where=str(path), fix="export the full model with merged adapters: omit --adapter")
    if adapters_only and model.encoder is not None:
        what = "PEFT uses different layer names for models with an encoder"
        raise ConfigError(what, where="--adapter", fix="export the full model with merged adapters: omit --adapter")
    if adapters_only and keep_mtp:
        raise ConfigError("adapters do not include MTP layers", where="--adapter and --mtp", fix="omit one of them")
    if model.mtp_layers and keep_mtp:
        what = "the run trained its MTP layers, which every export contains"
        raise ConfigError(what, where="--mtp", fix="omit --mtp")
    return model.vocab_size


def _load(model: ModelConfig, path: Path, vocab_size: int) -> GPTModel:
    runtime.join(ParallelConfig(), 1)
    (chunk,) = build_chunks(model, ParallelConfig(), vocab_size=vocab_size, device=torch.device("cpu"))
    state = load_tree({"model": sharded_weights(chunk)}, path, fix="export the folder of an older checkpoint")
    put_weights(chunk, state["model"])
    return chunk


def _settings_of(
    model: ModelConfig, data: TrainedData, tokens: SpecialTokens | None, vocab_size: int, *, has_mtp: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json; add to `data.missing` if the data does not define end tokens."""
    base: dict[str, dict[str, Any]] = {}  # of the initial weights; empty if they are missing
    if model.init_from is not None:
        with suppress(ConfigError):
            folder = find_weights(model.init_from)
            read_hf_config(folder)
            for name in (CONFIG_FILE, GENERATION_FILE):
                with suppress(OSError, ValueError, TypeError, RecursionError):
                    base[name] = dict(json.loads((folder / name).read_text()))
    of_base = base.get(CONFIG_FILE) or to_hf_config(model, vocab_size=vocab_size)
    config = text_config(of_base) if model.media is None else dict(of_whole(of_base))
    if config is not of_base:  # extracted from the config of a multimodal model
        config["architectures"] = [model.traits.architecture if model.media is None else model.media.architecture]
    ends = sorted({*(tokens.ends if tokens is not None else ()), *([] if data.eod is None else [data.eod])})
    begin, pad = (tokens.begin, tokens.pad) if tokens is not None else (None, None)
    every = {"bos_token_id": begin, "eos_token_id": ends or None, "pad_token_id": pad}
    ids = {name: value for name, value in every.items() if value is not None}
    if "eos_token_id" not in ids:
        end = (base.get(GENERATION_FILE) or base.get(CONFIG_FILE) or {}).get("eos_token_id")
        instead = f"{end} of {model.init_from} instead" if end else "generation ends only at its length limit"
        data.missing.append(f"end tokens of the data: {instead}")
    generation = {**base.get(GENERATION_FILE, {}), **ids, "max_length": text_config(config)["max_position_embeddings"]}
    generation.pop("_from_model_config", None)
    if not has_mtp:
        config |= {name: 0 for name in (*MTP_SETTINGS, "mtp_num_hidden_layers") if config.get(name)}
    # The weights are written unquantized, for the model's own class in transformers.
    config = {name: value for name, value in config.items() if name not in ("quantization_config", "auto_map")}
    # Many programs do not accept a list of one id in config.json.
    config |= {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in ids.items()}
    # transformers 5 reads the first name; versions before 4.56 read only the second.
    return {**config, "dtype": model.number, "torch_dtype": model.number}, generation


@contextmanager
def _claim(out: Path) -> Iterator[Path]:
    """Keep other exports out of `out`, and yield a folder to write to, which becomes `out` at the end."""
    place, claim = out.absolute(), PlacingClaim(_marker_of(out), lambda: _refuse_used(out))
    fix = "fix the cause (space, permissions, quota) and run the same command again"
    with os_errors_as(CheckpointError, "the export cannot be written", where=out, fix=fix):
        make_folder(place.parent)
        claim.enter()
        writing = place.with_name(f"{place.name}.unfinished")
        try:
            # Left by a killed export; `out` was empty or missing when it began.
            for left in [writing, *([out] if claim.is_placing else [])]:
                if left.is_dir():
                    shutil.rmtree(left)
            writing.mkdir()
            yield writing
            sync_tree(writing)
            claim.place()
            if out.exists():
                out.rmdir()
            writing.rename(out)
            sync_path(place.parent)
        finally:
            shutil.rmtree(writing, ignore_errors=True)
            claim.release()


def _marker_of(out: Path) -> Marker:
    place = out.absolute()
    return Marker(place.with_name(f".{place.name}_exporting"))


def _refuse_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("the folder already exists", where=str(out), fix="choose a new folder")


def _find_checkpoint(source: Path, *, unchecked: bool) -> tuple[Path, dict[str, Any]]:
    is_checkpoint = (source / RUN_FILE).is_file()
    run = source.resolve().parent.parent if is_checkpoint else source
    config = run / SETTINGS_FILE
    if not (is_checkpoint or config.is_file() or (run / CHECKPOINTS).is_dir()):
        usual = "use the folder of a run (runs/sft-001), or one of its checkpoints"
        what, fix = explain_path(source, expected="a run") or ("not a run: there is no config.yaml", usual)
        raise ConfigError(what, where=str(source), fix=fix)
    path: Path | None = source
    if is_checkpoint:
        if (damage := find_damage(source, unchecked=unchecked)) is not None:
            raise damage
    else:
        path, _ = find_newest(run / CHECKPOINTS, unchecked=unchecked)
    if path is None:
        what = "the run has no complete checkpoint"
        raise CheckpointError(what, where=str(run / CHECKPOINTS), fix="train it for a few steps first")
    own = json.loads((path / RUN_FILE).read_text()).get("settings")
    # Older checkpoints do not contain the settings.
    return path, read_settings(config) if own is None else check_settings(own, where=path / RUN_FILE)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> tuple[int, int]:
    from safetensors.torch import save_file

    files: list[list[str]] = []
    total = weights = waiting = 0
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if pending:
            save_file(pending, str(folder / f"part-{len(files)}"), metadata={"format": "pt"})
            files.append(list(pending))
            pending.clear()

    for name, tensor in tensors:
        size = tensor.nbytes
        if waiting + size > _SHARD_BYTES:
            flush()
            waiting = 0
        pending[name] = tensor
        total, weights, waiting = total + size, weights + tensor.numel(), waiting + size
    flush()
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / f"part-{number}").rename(folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return weights, total


def _copied_tensors(model: ModelConfig, where: Path, *, keep_mtp: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over the names and tensors that an export copies unchanged from the initial weights."""
    parts = () if model.media is None else model.media.copied
    layers: tuple[str, ...] = ()
    names: list[str] = []
    if model.init_from is not None and (keep_mtp or parts):
        folder = find_weights(model.init_from)  # they may have been removed since
        if keep_mtp:
            after = range(model.num_layers, model.num_layers + read_hf_config(folder).mtp_layers)
            layers = ("mtp.", *(f"model.layers.{number}." for number in after))
        with HfWeights(folder) as weights:
            names = sorted(name for name in weights.names if name.startswith((*parts, *layers)))

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        if names:
            with HfWeights(folder) as weights:
                for name in names:
                    yield name, weights.rows(name)

    if keep_mtp and not any(name.startswith(layers) for name in names):
        what = f"the initial weights ({model.init_from or 'random ones'}) have no MTP layers that can be exported"
        raise ConfigError(what, where=str(where), fix="omit --mtp")
    return read()


def _write_adapters(chunk: GPTModel, model: ModelConfig, folder: Path) -> tuple[int, int]:
    from safetensors.torch import save_file

    tensors = lora.peft_tensors(chunk, model)
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "adapter_config.json", lora.peft_config(model))
    return sum(one.numel() for one in tensors.values()), sum(one.nbytes for one in tensors.values())
