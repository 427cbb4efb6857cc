"""Fine-tune a Megatron-Core GPT on a packed dataset.

    torchrun --nproc-per-node 2 -m recipes.sft trainer.steps=60 resume=auto

Every rank plans the same global batches from sequence lengths, reads its own sequences, and trains. The run's folder
gets config.yaml, metrics.jsonl, TensorBoard events, checkpoints, loss.png and report.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from harness.config import hydra_entry
from harness.loader.blend import Blend
from harness.loader.datasets import LiveData, RunData, open_datasets, open_live
from harness.loader.layout import RankLayout
from harness.loader.live.consumer import BatchPlan
from harness.loader.loader import Loader, LoaderConfig
from harness.loader.plan import PackSource
from harness.loader.state import LoaderState
from harness.megatron.data import Feed, LiveFeed, readable
from harness.megatron.job import runtime
from harness.megatron.run import Task, run_training
from harness.megatron.state import Progress
from harness.megatron.weights import find_pretrained
from harness.plan import SftConfig, sequence_cost
from harness.train import OWN_VALIDATION
from recipes.sft_config import check, find_tokenizer


def make_feeds(
    config: SftConfig,
    data: RunData | LiveData,
    layout: RankLayout,
    progress: Progress | None,
    ranks: runtime.Runtime,
) -> tuple[Feed | LiveFeed, dict[str, Feed]]:
    """The training batches from `progress` on, and those that go through each validation set each time, by name."""
    state = progress.loader if progress is not None else None

    def feed(
        reader: PackSource,
        settings: LoaderConfig,
        *,
        start: LoaderState | None = None,
        epochs: int | None = None,
        blend: Blend | None = None,
    ) -> Feed:
        def loader() -> Loader:
            return Loader(
                readable(reader, layout),
                settings,
                schedule=config.schedule,
                layout=layout,
                cost=sequence_cost(config.model),
                tokenizer=data.tokenizer_hash if isinstance(data, RunData) else "",
                blend=blend,
                state=start,
                num_epochs=epochs,
            )

        return Feed(loader, layout, device=ranks.device)

    training = (
        live_feed(config, data, layout, state)
        if isinstance(data, LiveData)
        else feed(data.train, config.loader, start=state, blend=data.blend)
    )
    sets = {**({OWN_VALIDATION: data.validation} if data.validation is not None else {}), **data.evaluation}
    # Validation is short and rare: workers of its own would cost more than they save.
    once = replace(config.loader, shuffle=False, drop_last=False, num_workers=0)
    return training, {name: feed(reader, once, epochs=1) for name, reader in sets.items()}


def live_feed(config: SftConfig, data: LiveData, layout: RankLayout, state: LoaderState | None) -> LiveFeed:
    """The training batches of live chunks from `state` on."""
    row_tokens = config.parallel.row_tokens(config.schedule.max_tokens_per_rank)
    return LiveFeed(
        data.train,
        BatchPlan(layout, config.loader.global_batch_size, row_tokens, sequence_cost(config.model)),
        tokenizer=data.tokenizer,
        state=state,
        seed=config.loader.seed,
        allow_other_data=config.loader.allow_other_data,
        timeout_s=config.trainer.timeout_s + 60,
    )


def main(config: SftConfig) -> int:
    """Train; gives the exit code, 75 where a signal ended the run before its last step."""
    return run_training(config, partial(open_task, config))


def open_task(config: SftConfig, ranks: runtime.Runtime) -> Task:
    """Check the settings against the data, and open it."""
    data = open_live(config.data) if config.data.live.path else open_datasets(config.data)
    pretrained = find_pretrained(config.model)
    config.model.vocab_size = check(config, data, ranks.world_size, pretrained)
    row_tokens = config.parallel.row_tokens(config.schedule.max_tokens_per_rank)
    tokenizer = find_tokenizer(config, data) if config.trainer.sample_prompts else None
    return Task(
        feeds=partial(make_feeds, config, data),
        vocab_size=config.model.vocab_size,
        row_tokens=row_tokens if config.parallel.static_rows else None,
        pretrained=pretrained,
        facts={
            "dataset": data.describe(),
            "schedule": f"{config.schedule.name}, up to {config.schedule.max_tokens_per_rank:,} tokens a rank",
        },
        tokenizer=tokenizer,
    )


if __name__ == "__main__":
    hydra_entry("sft", SftConfig)(main)()
