"""Pretraining on `.bin` and `.idx` pairs: check the settings, open the corpus, and batch its samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.checks import memory_bytes
from harness.errors import ConfigError
from harness.formats import PackReader
from harness.loader import LoaderConfig, LoaderState, RankLayout
from harness.megatron.data.corpus import find_packs, open_corpus
from harness.megatron.data.feed import Feed
from harness.megatron.data.samples import SampleLoader, SampleReader
from harness.megatron.job.runtime import Runtime, on_rank_0
from harness.megatron.pretrained import find_pretrained
from harness.megatron.run.training import Task
from harness.plan import PretrainConfig, sequence_cost
from harness.thd import padded_lengths
from harness.train import Progress
from harness.train.loop import OWN_VALIDATION

# Bytes per sample in Megatron-Core's sample index (two numbers), shuffle index and blend index.
_SAMPLE_BYTES = 24


def open_pretraining(config: PretrainConfig, ranks: Runtime, progress: Progress | None = None) -> Task:
    """Return the task of a pretraining run; check the settings as far as possible without reading the corpus."""
    _check_samples(config)
    packs = find_packs(config.data)
    pretrained = find_pretrained(config.model)
    config.model.vocab_size = vocab_size = pretrained.vocab_size if pretrained else config.model.vocab_size or 0
    data = config.data
    if data.eod is not None and not 0 <= data.eod < vocab_size:
        fix = "set it to the id of the end-of-document token"
        raise ConfigError(f"data.eod is {data.eod}, but the model has {vocab_size:,} tokens", where="data.eod", fix=fix)
    sources = [source.path for some in data.sources().values() for source in some]
    row = int(padded_lengths(np.asarray([data.sequence_length + 1]), config.parallel.pad_to_multiple)[0])
    return Task(
        feeds=partial(make_feeds, config, packs),
        vocab_size=vocab_size,
        pad_rows_to=data.micro_batch_size * row if config.parallel.static_rows else None,
        max_sequences=data.micro_batch_size if config.parallel.cuda_graphs else None,
        pretrained=pretrained,
        data_names=sources,
        facts={
            "corpus": ", ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else ""),
            "samples": f"{data.sequence_length:,} tokens, {data.micro_batch_size} per row",
        },
    )


def _check_samples(config: PretrainConfig) -> None:
    """Raise ConfigError for more samples than Megatron-Core can index in the memory of this machine."""
    trainer, size = config.trainer, config.loader.global_batch_size
    asked = {
        "data.num_samples": config.data.num_samples or 0,
        "trainer.steps * loader.global_batch_size": config.with_steps().trainer.last_step * size,
        "trainer.eval_batches * loader.global_batch_size": (trainer.eval_batches or 0) * size,
    }
    for name, samples in asked.items():
        if samples * _SAMPLE_BYTES > memory_bytes():
            what = f"{name} is {samples:,} samples, whose index requires {samples * _SAMPLE_BYTES / 1e9:,.0f} GB of "
            what += f"memory, but this machine has {memory_bytes() / 1e9:,.0f} GB"
            raise ConfigError(what, where=name, fix="lower it, or use a machine with more memory")


def make_feeds(
    config: PretrainConfig, packs: dict[str, PackReader], layout: RankLayout, progress: Progress | None, ranks: Runtime
) -> tuple[Feed, dict[str, Feed]]:
    """Return the training batches after `progress`, and the batches of the validation and test splits by name."""
    data, size, cost = config.data, config.loader.global_batch_size, sequence_cost(config.model)
    batches = config.trainer.eval_batches
    evaluated = None if batches is None else batches * size
    done, state = (progress.step, progress.loader) if progress is not None else (0, None)
    consumed = state.packs_consumed if state is not None else 0
    # Earlier steps may have had another batch size.
    wanted = consumed + max(0, config.trainer.last_step - done) * size
    sizes, vocabulary = (max(wanted, data.num_samples or 0), evaluated, evaluated), config.model.vocab_size or 0
    corpus = open_corpus(data, config.loader.seed, sizes, vocabulary, packs, reads=layout.tp_rank == 0, ranks=ranks)

    def feed(dataset: Any, settings: LoaderConfig, count: int | None, start: LoaderState | None) -> Feed:
        def loader() -> SampleLoader:
            assert corpus is not None
            fresh = LoaderState(config.loader.seed, fingerprint=corpus.fingerprint, order=corpus.order)
            if start is not None:
                allow = config.loader.allow_other_data
                fresh = start.resumed(fresh, num_packs=None, allow_other_data=allow)
            boundary, last = data.eod if data.reset_attention_mask else None, min(len(dataset), count or len(dataset))
            reader = SampleReader(dataset, layout, data.sequence_length, data.micro_batch_size, boundary, cost)
            return SampleLoader(reader, settings, layout=layout, num_samples=last, start=fresh)

        return Feed(loader, device=ranks.device)

    # Every rank creates the same feeds; ranks that do not read learn from rank 0 which splits exist.
    splits = corpus and {OWN_VALIDATION: corpus.validation, "test": corpus.test}
    names = on_rank_0(lambda: [name for name, split in (splits or {}).items() if split])
    once = replace(config.loader, num_workers=0)
    validation = {name: feed(splits and splits[name], once, evaluated, None) for name in names}
    return feed(corpus and corpus.train, config.loader, wanted, state), validation
