"""Fine-tuning: open the data, check it against the model, and make the batches of `recipes.sft`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from harness.errors import ConfigError
from harness.formats import PackReader
from harness.loader import JoinedReader, Loader, LoaderConfig, RankLayout, RunData, open_datasets
from harness.loader.datasets import LiveData, media_rules, open_live
from harness.loader.live.rank import BatchPlan
from harness.loader.order import epochs_after, steps_until
from harness.loader.plan import PackSource
from harness.megatron.data.feed import Feed, readable
from harness.megatron.data.live_feed import LiveFeed
from harness.megatron.job import runtime
from harness.megatron.pretrained import Pretrained, find_pretrained
from harness.megatron.run.sampling import find_tokenizer
from harness.megatron.run.training import Task
from harness.plan import SftConfig, sequence_cost
from harness.plan.encoders import read_encoder
from harness.prep.media import MediaRules
from harness.printing import count_of
from harness.schedule import most_sequences
from harness.thd import padded_lengths
from harness.train import Progress
from harness.train.loop import OWN_VALIDATION


def open_fine_tuning(config: SftConfig, ranks: runtime.Runtime, progress: Progress | None = None) -> Task:
    """Open packed or live data and check the settings against it."""
    data = open_live(config.data) if config.data.live.folders else open_datasets(config.data)
    pretrained = find_pretrained(config.model)
    config.model.vocab_size = check(config, data, pretrained)
    _check_media(config, data)
    if isinstance(data, RunData):
        _check_weights(config, data.train)
    return Task(
        feeds=partial(make_feeds, config, data),
        vocab_size=config.model.vocab_size,
        pad_rows_to=config.max_tokens_per_row if config.parallel.static_rows else None,
        max_sequences=_max_sequences(config, data) if config.parallel.cuda_graphs else None,
        pretrained=pretrained,
        data_names=config.data.live.folders or [source.path for source in config.data.blend] or [config.data.path],
        facts={
            "dataset": data.describe(),
            "schedule": f"{config.schedule.name}, up to {config.schedule.max_tokens_per_rank:,} tokens per rank",
        },
        answering=find_tokenizer(config, data) if config.trainer.sample_prompts else None,
        sources=data.named_sources if isinstance(data, RunData) else None,
        warnings=_warnings(config, data),
        length=settle_length(config, data, progress) if isinstance(data, RunData) else "",
    )


def _rules_of(data: RunData | LiveData) -> MediaRules | None:
    if isinstance(data, LiveData):
        return None if data.tokenizer is None else data.tokenizer.media_rules
    return media_rules(data.train)


def _check_media(config: SftConfig, data: RunData | LiveData) -> None:
    """Refuse data whose media were prepared for another model."""
    rules = _rules_of(data)
    if rules is None or config.model.encoder is None:
        return
    media, values = read_encoder(config.model.encoder)
    if (rules.family, rules.tokens) != (media.rules, {media.kind: int(values[media.token])}):
        what = f"the media of the data were prepared for {rules.family}, with placeholder tokens {dict(rules.tokens)}, "
        what += f"and the model is {media.name}, with {media.kind} {values[media.token]}"
        raise ConfigError(what, where="data and model", fix="prepare the data with tokenizer.name set to the model")


def _check_weights(config: SftConfig, data: PackReader | JoinedReader) -> None:
    """Refuse a global batch whose weights may not fit the int32 number by which Megatron divides the gradients."""
    most = (2**31 - 1) // (data.max_weight * data.pack_size)
    if data.max_weight > 1 and config.loader.global_batch_size > most:
        what = f"a global batch of {config.loader.global_batch_size:,} packs of {data.pack_size:,} tokens with weights"
        fix = f"set it to at most {most:,}, or prepare the data without tokenizer.train_on=weighted"
        raise ConfigError(f"{what} is too large", where="loader.global_batch_size", fix=fix)


def settle_length(config: SftConfig, data: RunData, progress: Progress | None) -> str:
    """Set `trainer.steps` where epochs are the length of the run; return the steps in epochs, for its log.

    A run that resumes with another global batch size has other steps left, up to the same pack.
    """
    trainer, packs = config.trainer, data.epoch_packs
    done, at = 0, {"epoch": 0, "packs_consumed": 0}
    if progress is not None:
        done, at = progress.step, {"epoch": progress.loader.epoch, "packs_consumed": progress.loader.packs_consumed}
    if trainer.epochs is not None:
        packs = data.check_epochs(trainer.epochs)
        # The record of the run has one of them.
        trainer.steps = max(1, done + steps_until(config.loader, packs, trainer.epochs, **at))
        trainer.epochs = None
    if packs is None or trainer.steps is None:
        return ""
    epochs = epochs_after(config.loader, packs, max(0, trainer.steps - done), **at)
    are = "is" if trainer.steps == 1 else "are"
    return (
        f"{count_of(trainer.steps, 'step')} {are} {epochs:.3g} epoch{'s' * (epochs != 1)} of {count_of(packs, 'pack')}"
    )


def _max_sequences(config: SftConfig, data: RunData | LiveData) -> int:
    assert isinstance(data, RunData), "settings with live data are refused"
    return most_sequences(
        config.schedule.name,
        padded_lengths(data.train.sequence_lengths, config.parallel.pad_to_multiple),
        data.train.pack_offsets,
        max_tokens_per_row=config.max_tokens_per_row,
        global_batch_size=config.loader.global_batch_size,
        repeats=data.blend is not None,
    )


def _warnings(config: SftConfig, data: RunData | LiveData) -> list[str]:
    size, batches, warnings = config.loader.global_batch_size, config.trainer.eval_batches, []
    if isinstance(data, LiveData):
        return []
    if data.blend is None and size > len(data.train):
        warnings.append(
            f"loader.global_batch_size is {size:,}, but the dataset has {count_of(len(data.train), 'pack')}: every "
            "step trains the whole dataset, one epoch"
        )
    longest = int(data.train.sequence_lengths.max()) - 1
    if config.shares_rows and longest <= config.schedule.max_tokens_per_rank:
        warnings.append(
            f"schedule.name is {config.schedule.name}, and the longest sequence has {longest:,} tokens, which fit on "
            "one rank: schedule=cost_balanced trains at about the same speed"
        )
    if batches is not None and data.validation is not None and (batches - 1) * size >= len(data.validation):
        warnings.append(
            f"trainer.eval_batches is {batches:,}, but the validation set has "
            f"{count_of(len(data.validation), 'pack')}: every validation reads the whole set"
        )
    return warnings


def check(config: SftConfig, data: RunData | LiveData, pretrained: Pretrained | None = None) -> int:
    """Return the vocabulary size; refuse what cannot train, before any rank waits for another.

    Raises:
        ConfigError: pack sizes, vocabulary or tokenizer do not fit.
    """
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


def make_feeds(
    config: SftConfig, data: RunData | LiveData, layout: RankLayout, progress: Progress | None, ranks: runtime.Runtime
) -> tuple[Feed, dict[str, Feed]]:
    """Return the training batches after `progress`, and per validation set the batches of one pass over it."""
    state = progress.loader if progress is not None else None
    rules = None if config.model.encoder is None else _rules_of(data)
    features = None if rules is None else rules.features
    cost = sequence_cost(config.model, config.parallel, on_gpu=ranks.device.type == "cuda")
    hash = data.tokenizer_hash if isinstance(data, RunData) else ""
    stored = None if rules is None else rules.features_at(is_first_stage=layout.is_first_stage)
    make = partial(Loader, schedule=config.schedule, layout=layout, cost=cost, tokenizer=hash, features=stored)

    def feed(reader: PackSource, settings: LoaderConfig, **options: Any) -> Feed:
        return Feed(lambda: make(readable(reader, layout), settings, **options), device=ranks.device)

    training: Feed
    if isinstance(data, LiveData):
        training = LiveFeed(
            data.train,
            BatchPlan(
                layout,
                config.loader.global_batch_size,
                config.max_tokens_per_row,
                cost,
                config.schedule.name,
                window_sequences=data.train.window_sequences,
                weights=data.train.weights,
            ),
            tokenizer=data.tokenizer,
            features=features,
            state=state,
            seed=config.loader.seed,
            allow_other_data=config.loader.allow_other_data,
            timeout_s=config.trainer.timeout_s + 60,
            device=ranks.device,
        )
    else:
        training = feed(data.train, config.loader, state=state, blend=data.blend)
    sets = {**({OWN_VALIDATION: data.validation} if data.validation is not None else {}), **data.evaluation}
    # Validation is short and rare: workers of its own would cost more than they save.
    once = replace(config.loader, shuffle=False, drop_last=False, num_workers=0)
    return training, {name: feed(reader, once, num_epochs=1) for name, reader in sets.items()}
