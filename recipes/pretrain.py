"""Go on pretraining on Megatron's own data: `.bin` and `.idx` pairs, blended and split as Megatron-Core does it.

    torchrun --nproc-per-node 2 -m recipes.pretrain data.path=data/corpus model.vocab_size=32000

Samples, their order and their built indices are those of Megatron-Core's GPTDataset and BlendedDataset. Packed SFT
datasets may be sources too. Loop, checkpoints, metrics and launch are those of `recipes.sft`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.config import hydra_entry
from harness.errors import ConfigError
from harness.formats import PackReader
from harness.loader.config import LoaderConfig
from harness.loader.layout import RankLayout
from harness.loader.state import LoaderState
from harness.megatron.data import Feed, SampleLoader, SampleReader, find_packs, open_corpus
from harness.megatron.job import runtime
from harness.megatron.model import use_transformer_engine
from harness.megatron.run import Task, run_training
from harness.megatron.state import Progress
from harness.megatron.weights import find_pretrained
from harness.plan import PretrainConfig, sequence_cost
from harness.thd import padded_lengths
from harness.train import OWN_VALIDATION, check_trackers


def check(config: PretrainConfig, world_size: int) -> None:
    """Refuse what cannot train, before any rank waits for another."""
    data, trainer, size = config.data, config.trainer, config.loader.global_batch_size
    config.check_layout(world_size)
    dp_size, group = config.parallel.dp_size(world_size), config.parallel.group_size
    if size % (data.micro_batch_size * dp_size * group):
        raise ConfigError(
            f"a global batch of {size} samples is no multiple of {data.micro_batch_size * dp_size * group} "
            f"({data.micro_batch_size} in a row * {dp_size} data-parallel ranks"
            + (f" * {group} stages)" if group > 1 else ")"),
            where="loader.global_batch_size",
            fix="change it, data.micro_batch_size or the layout",
        )
    if data.sequence_length > config.model.max_sequence_length:
        raise ConfigError(
            f"samples of {data.sequence_length:,} tokens are longer than the model's max_sequence_length "
            f"{config.model.max_sequence_length:,}",
            where="data.sequence_length",
            fix="lower it, or raise model.max_sequence_length",
        )
    if data.reset_position_ids and not data.reset_attention_mask:
        raise ConfigError(
            "rotary positions follow the bounds of attention: reset_position_ids alone would change nothing",
            where="data.reset_position_ids",
            fix="set data.reset_attention_mask=true too, or leave both out",
        )
    if data.reset_attention_mask and config.parallel.static_rows:
        raise ConfigError(
            "rows whose documents are padded one by one have no largest size",
            where="parallel.static_rows",
            fix="parallel.static_rows=false, or data.reset_attention_mask=false",
        )
    weighted = any(source.weight is not None for some in data.sources().values() for source in some)
    if weighted and trainer.eval_batches is None:
        raise ConfigError(
            "a blend with weights has no end, so its validation needs one",
            where="trainer.eval_batches",
            fix="a number of global batches, such as 10",
        )
    if config.model.vocab_size is None and config.model.init_from is None:
        raise ConfigError(
            "the vocabulary size is not known: a corpus does not say",
            where="model.vocab_size",
            fix="set it to the size of the tokenizer that made the corpus",
        )
    if trainer.sample_prompts:
        raise ConfigError(
            "prompts are answered with the tokenizer of the data, and a corpus names none",
            where="trainer.sample_prompts",
            fix="leave them out; `harness export` the run, and generate with transformers",
        )
    check_trackers(trainer.trackers)
    use_transformer_engine(config.model.attention, runtime.choose_device(trainer.device))


def make_feeds(
    config: PretrainConfig,
    packs: dict[str, PackReader],
    layout: RankLayout,
    progress: Progress | None,
    ranks: runtime.Runtime,
) -> tuple[Feed, dict[str, Feed]]:
    """The training batches from `progress` on, and those of the validation and test splits, by name."""
    data, size, cost = config.data, config.loader.global_batch_size, sequence_cost(config.model)
    batches = config.trainer.eval_batches
    evaluated = None if batches is None else batches * size
    done, state = (progress.step, progress.loader) if progress is not None else (0, None)
    consumed = state.packs_consumed if state is not None else 0
    # Steps of before may have had another size.
    wanted = consumed + max(0, config.trainer.steps - done) * size
    corpus = open_corpus(
        data,
        seed=config.loader.seed,
        sizes=(max(wanted, data.num_samples or 0), evaluated, evaluated),
        vocab_size=config.model.vocab_size or 0,
        packs=packs,
        reads=layout.tp_rank == 0,
        ranks=ranks,
    )

    def feed(dataset: Any, settings: LoaderConfig, count: int | None, start: LoaderState | None) -> Feed:
        def loader() -> SampleLoader:
            assert corpus is not None
            fresh = LoaderState(config.loader.seed, fingerprint=corpus.fingerprint, order=corpus.order)
            allow = config.loader.allow_other_data
            reader = SampleReader(
                dataset,
                layout=layout,
                sequence_length=data.sequence_length,
                micro_batch_size=data.micro_batch_size,
                boundary=data.eod if data.reset_attention_mask else None,
                cost=cost,
            )
            return SampleLoader(
                reader,
                settings,
                layout=layout,
                num_samples=min(len(dataset), count or len(dataset)),
                start=fresh if start is None else start.resumed(fresh, num_packs=None, allow_other_data=allow),
            )

        return Feed(loader, layout, device=ranks.device)

    # Every rank makes the same feeds, and those that do not read learn from the first which there are.
    held = corpus and {OWN_VALIDATION: corpus.validation, "test": corpus.test}
    there = runtime.on_rank_0(lambda: [name for name, one in (held or {}).items() if one is not None and len(one)])
    once = replace(config.loader, num_workers=0)
    validation = {name: feed(held and held[name], once, evaluated, None) for name in there}
    return feed(corpus and corpus.train, config.loader, wanted, state), validation


def main(config: PretrainConfig) -> int:
    """Train; gives the exit code, 75 where a signal ended the run before its last step."""
    return run_training(config, partial(open_task, config))


def open_task(config: PretrainConfig, ranks: runtime.Runtime) -> Task:
    """Check the settings, as far as they can be without reading the corpus."""
    check(config, ranks.world_size)
    packs = find_packs(config.data)
    pretrained = find_pretrained(config.model)
    config.model.vocab_size = vocab_size = pretrained.vocab_size if pretrained else config.model.vocab_size or 0
    data = config.data
    if data.eod is not None and not 0 <= data.eod < vocab_size:
        raise ConfigError(
            f"the token {data.eod} ends documents, and the model knows {vocab_size:,} tokens",
            where="data.eod",
            fix="set it to the id of the token that ends a document",
        )
    sources = [source.path for some in data.sources().values() for source in some]

    def feeds(layout: RankLayout, progress: Progress | None, ranks: runtime.Runtime) -> tuple[Feed, dict[str, Feed]]:
        return make_feeds(config, packs, layout, progress, ranks)

    row = int(padded_lengths(np.asarray([data.sequence_length + 1]), config.parallel.pad_to_multiple)[0])
    return Task(
        feeds=feeds,
        vocab_size=vocab_size,
        row_tokens=data.micro_batch_size * row if config.parallel.static_rows else None,
        pretrained=pretrained,
        facts={
            "corpus": ", ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else ""),
            "samples": f"{data.sequence_length:,} tokens, {data.micro_batch_size} in a row",
        },
    )


if __name__ == "__main__":
    hydra_entry("pretrain", PretrainConfig)(main)()
