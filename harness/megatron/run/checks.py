"""Errors and warnings about a run whose data is open, and the recorded reasons of failed runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from harness.checks import memory_bytes
from harness.errors import ConfigError, HarnessError, reason_of_memory
from harness.formats import PackReader
from harness.loader import JoinedReader, RunData
from harness.loader.datasets import LiveData
from harness.megatron.job.runtime import place_in_job
from harness.megatron.pretrained import Pretrained
from harness.plan import RunConfig, SftConfig, plan_memory
from harness.plan.encoders import read_encoder
from harness.printing import count_of
from harness.train.folder import leave_refusal
from harness.train.loop import OWN_VALIDATION

# PyTorch's message on a CPU.
_NO_MEMORY = "can't allocate memory"


def check_media(config: SftConfig, data: RunData | LiveData) -> None:
    """Raise ConfigError for data whose media were prepared for another model."""
    rules = data.media_rules
    if rules is None or config.model.encoder is None:
        return
    media, values = read_encoder(config.model.encoder)
    if (rules.family, rules.tokens) != (media.rules, {media.kind: int(values[media.token])}):
        what = f"the media of the data were prepared for {rules.family}, with placeholder tokens {dict(rules.tokens)}, "
        what += f"but the model is {media.name}, with {media.kind} {values[media.token]}"
        raise ConfigError(what, where="data and model", fix="prepare the data with tokenizer.name set to the model")
    part = values["audio_config" if media.kind == "audio" else "vision_config"]
    patches = (part["image_size"] // part["patch_size"]) ** 2 if "image_size" in part else None
    sizes = {"feature_size": "num_mel_bins", "merge_size": "spatial_merge_size", "patch_size": "patch_size"}
    for name, size in (*((name, part.get(own)) for name, own in sizes.items()), ("tokens", patches)):
        found = rules.numbers.get(name, size)
        if size is not None and found not in (size, size + (name == "tokens")):  # may include the class token
            what = f"the media of the data were prepared with {name}={found}, but the encoder has {size}"
            raise ConfigError(what, where="data and model", fix="prepare the data with tokenizer.name set to the model")


def check_weights(config: SftConfig, data: PackReader | JoinedReader) -> None:
    """Raise ConfigError if weights of a global batch may not fit the int32 by which Megatron divides gradients."""
    most = (2**31 - 1) // (data.max_weight * data.pack_size)
    if data.max_weight > 1 and config.loader.global_batch_size > most:
        what = f"a global batch of {config.loader.global_batch_size:,} packs of {data.pack_size:,} tokens with weights"
        fix = f"set it to at most {most:,}, or prepare the data without tokenizer.train_on=weighted"
        raise ConfigError(f"{what} is too large", where="loader.global_batch_size", fix=fix)


def list_warnings(config: SftConfig, data: RunData | LiveData) -> list[str]:
    """Return warnings about settings that have less effect than expected with this data."""
    size, batches, warnings = config.loader.global_batch_size, config.trainer.eval_batches, []
    if isinstance(data, LiveData):
        return []
    if data.blend is None and size > len(data.train):
        what = f"loader.global_batch_size is {size:,}, but the dataset has {count_of(len(data.train), 'pack')}"
        warnings.append(f"{what}: every step trains the whole dataset, one epoch")
    if config.shares_rows and (longest := int(data.train.sequence_lengths.max()) - 1) <= config.max_tokens_per_rank:
        what = f"schedule.name is {config.schedule.name}, and the longest sequence has {longest:,} tokens, which fit"
        warnings.append(f"{what} on one rank: schedule=cost_balanced trains at about the same speed")
    if batches is not None and data.validation is not None and (batches - 1) * size >= len(data.validation):
        there = count_of(len(data.validation), "pack")
        what = f"trainer.eval_batches is {batches:,}, but the validation set has {there}"
        warnings.append(f"{what}: every validation reads the whole set")
    return warnings


def check(config: SftConfig, data: RunData | LiveData, pretrained: Pretrained | None = None) -> int:
    """Return the vocabulary size; raise ConfigError for data that cannot train, before any rank waits for another."""
    if isinstance(data, RunData) and data.blend is not None and (steps := config.with_steps().trainer.steps):
        data.blend.check_lasts(steps * config.loader.global_batch_size)
    for reader in (data.train, data.validation, *data.evaluation.values()):
        if reader is not None and reader.pack_size > config.model.max_sequence_length:
            what = f"the dataset's pack_size {reader.pack_size:,} exceeds the model's max_sequence_length "
            what += f"{config.model.max_sequence_length:,}"
            fix = "increase model.max_sequence_length, or prepare the data with a smaller data.pack_size"
            raise ConfigError(what, where=str(reader.path), fix=fix)
    where = ", ".join(data.train.folders) if isinstance(data, LiveData) else data.train.path
    wanted, stored = config.model.vocab_size, data.vocab_size
    if pretrained is not None:
        hash = data.tokenizer_hash if isinstance(data, RunData) else data.tokenizer and data.tokenizer.tokenizer_hash
        pretrained.check_data(vocab_size=stored, dataset_tokenizer=hash or "", where=where)
        return pretrained.vocab_size
    if wanted is None and isinstance(data, LiveData) and data.tokenizer is None:
        what = "no tokenizer is set, so conversations cannot be read and the vocabulary size is unknown"
        fix = "set it to the tokenizer of the data: a folder, such as DIR/tokenizer of a prepared dataset, or a hub "
        fix += "id. For chunks of packs, set model.vocab_size to their tokenizer's vocabulary size instead"
        raise ConfigError(what, where="data.live.tokenizer.name", fix=fix)
    if wanted is None and stored is None:
        what = "the vocabulary size is unknown: the dataset does not specify it"
        fix = "set it to the vocabulary size of the dataset's tokenizer"
        raise ConfigError(what, where="model.vocab_size", fix=fix)
    if wanted is not None and stored is not None and wanted < stored:
        what = f"model.vocab_size is {wanted:,}, but the dataset's tokenizer has {stored:,} tokens"
        raise ConfigError(what, where=where, fix=f"set model.vocab_size to {stored} or more, or omit it")
    return wanted or stored or 0


@contextmanager
def explained(config: RunConfig) -> Iterator[None]:
    """Record the reason of a HarnessError for Slurm's script, and raise ConfigError if memory ran out."""
    try:
        yield
    except HarnessError as error:
        if (folder := slurm_folder(config)) is not None:
            leave_refusal(folder, error)
        raise
    except Exception as error:
        if (found := reason_of_memory(error)) is None:
            raise
        what = str(found).partition("\n")[0]
        what = f"out of memory: {what[max(0, what.find(_NO_MEMORY)) :] or 'this process'}"
        fix = "a smaller model or rows, model.recompute=full, or more ranks; see `harness plan`"
        raise ConfigError(what, where="model or row size", fix=fix) from error


def check_memory(config: RunConfig, device: torch.device, *, vocab_size: int, dp_size: int) -> None:
    """Raise ConfigError if weights, gradients and optimizer alone need more memory than a machine without GPU has."""
    if device.type != "cpu":
        return
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "dp_size": dp_size, "max_tokens_per_rank": 1}
    planned = plan_memory(config.model, config.parallel, **sizes, optimizer=config.optimizer)
    needed = (planned.total + planned.host) * place_in_job("LOCAL_WORLD_SIZE")
    there = memory_bytes()
    if needed > there:
        what = f"weights, gradients and optimizer need {needed / 1e9:,.1f} GB of memory, but this machine has "
        what += f"{there / 1e9:,.1f} GB"
        fix = "use a smaller model or more machines; `harness plan` estimates the memory per rank"
        raise ConfigError(what, where="model, model.vocab_size", fix=fix)


def slurm_folder(config: RunConfig) -> Path | None:
    """Return the run's folder if Slurm's script created it; the script reads there why an attempt ended early."""
    return Path(config.run_dir) if config.run_dir is not None and "SLURM_JOB_ID" in os.environ else None


def check_validations(config: RunConfig, validation: Collection[str]) -> None:
    """Raise ConfigError if early stopping is on without validations; `validation` contains the names of the sets."""
    if config.trainer.early_stop and not (config.trainer.eval_interval and OWN_VALIDATION in validation):
        fix = "set trainer.eval_interval, and a validation set: data.validation_path, or a weight in data.split"
        raise ConfigError("early_stop requires validations before the last step", where="trainer.early_stop", fix=fix)
