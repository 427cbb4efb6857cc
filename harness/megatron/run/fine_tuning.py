"""Fine-tuning: open the data, check it against the model, and create the batches of `recipes.sft`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from harness.loader import Loader, LoaderConfig, RankLayout, RunData, open_datasets
from harness.loader.datasets import LiveData, open_live
from harness.loader.live.rank import BatchPlan
from harness.loader.order import epochs_after, steps_until
from harness.loader.plan import PackSource
from harness.megatron.data.feed import Feed, readable
from harness.megatron.data.live_feed import LiveFeed
from harness.megatron.job import runtime
from harness.megatron.pretrained import find_pretrained
from harness.megatron.run.checks import check, check_media, check_weights, list_warnings
from harness.megatron.run.sampling import find_tokenizer
from harness.megatron.run.training import Task
from harness.plan import SftConfig, sequence_cost
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
    check_media(config, data)
    if isinstance(data, RunData):
        check_weights(config, data.train)
    most = None
    if config.parallel.cuda_graphs:
        assert isinstance(data, RunData), "settings with live data are refused"
        lengths = padded_lengths(data.train.sequence_lengths, config.parallel.pad_to_multiple)
        sizes = {"max_tokens_per_row": config.max_tokens_per_row, "global_batch_size": config.loader.global_batch_size}
        name, repeats = config.schedule.name, data.blend is not None
        most = most_sequences(name, lengths, data.train.pack_offsets, repeats=repeats, **sizes)
    return Task(
        feeds=partial(make_feeds, config, data),
        vocab_size=config.model.vocab_size,
        pad_rows_to=config.max_tokens_per_row if config.parallel.static_rows else None,
        max_sequences=most,
        pretrained=pretrained,
        data_names=config.data.live.folders or [source.path for source in config.data.blend] or [config.data.path],
        facts={
            "dataset": data.describe(),
            "schedule": f"{config.schedule.name}, up to {config.schedule.max_tokens_per_rank:,} tokens per rank",
        },
        answering=find_tokenizer(config, data) if config.trainer.sample_prompts else None,
        sources=data.named_sources if isinstance(data, RunData) else None,
        warnings=list_warnings(config, data),
        length=settle_length(config, data, progress) if isinstance(data, RunData) else "",
    )


def settle_length(config: SftConfig, data: RunData, progress: Progress | None) -> str:
    """Set `trainer.steps` if the length of the run is in epochs; return a log message with the steps in epochs.

    A run that resumes with another global batch size has another number of steps left, up to the same pack.
    """
    trainer, packs = config.trainer, data.epoch_packs
    done, at = 0, {"epoch": 0, "packs_consumed": 0}
    if progress is not None:
        done, at = progress.step, {"epoch": progress.loader.epoch, "packs_consumed": progress.loader.packs_consumed}
    if trainer.epochs is not None:
        packs = data.check_epochs(trainer.epochs)
        # Only one of the two may be set in the recorded settings.
        trainer.steps = max(1, done + steps_until(config.loader, packs, trainer.epochs, **at))
        trainer.epochs = None
    if packs is None or trainer.steps is None:
        return ""
    epochs = epochs_after(config.loader, packs, max(0, trainer.steps - done), **at)
    steps = f"{count_of(trainer.steps, 'step')} {'is' if trainer.steps == 1 else 'are'}"
    return f"{steps} {epochs:.3g} epoch{'s' * (epochs != 1)} of {count_of(packs, 'pack')}"


def make_feeds(
    config: SftConfig, data: RunData | LiveData, layout: RankLayout, progress: Progress | None, ranks: runtime.Runtime
) -> tuple[Feed, dict[str, Feed]]:
    """Return the training batches after `progress`, and for each validation set the batches of one pass over it."""
    state = progress.loader if progress is not None else None
    rules = None if config.model.encoder is None else data.media_rules
    features = None if rules is None else rules.features
    cost = sequence_cost(config.model, config.parallel, on_gpu=ranks.device.type == "cuda")
    hash = data.tokenizer_hash if isinstance(data, RunData) else ""
    stored = None if rules is None else rules.features_at(is_first_stage=layout.is_first_stage)
    # Digests and recorded batches need whole rows.
    keeps_rows = config.trainer.record_digests or config.trainer.record_batches
    reads = layout if keeps_rows else replace(layout, reads_ahead=1 + config.model.mtp_layers)
    make = partial(Loader, schedule=config.schedule, layout=reads, cost=cost, tokenizer=hash, features=stored)

    def feed(reader: PackSource, settings: LoaderConfig, **options: Any) -> Feed:
        return Feed(lambda: make(readable(reader, layout), settings, **options), device=ranks.device)

    training: Feed
    if isinstance(data, LiveData):
        sizes, live = (config.loader.global_batch_size, config.max_tokens_per_row), data.train
        name, window = config.schedule.name, live.window_sequences
        training = LiveFeed(
            live,
            BatchPlan(layout, *sizes, cost, name, window_sequences=window, weights=live.weights),
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
    # Validation is short and rare: separate workers would cost more time than they save.
    once = replace(config.loader, shuffle=False, drop_last=False, num_workers=0)
    return training, {name: feed(reader, once, num_epochs=1) for name, reader in sets.items()}
