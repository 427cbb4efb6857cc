"""Fine-tune a Megatron-Core GPT on a packed dataset.

    torchrun --nproc-per-node 2 -m recipes.sft trainer.steps=60 resume=auto

Every rank plans the same global batches from sequence lengths, reads its own sequences, and trains. The run's folder
gets config.yaml, metrics.jsonl, TensorBoard events, checkpoints, loss.png and report.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from harness.config import hydra_entry, to_yaml
from harness.errors import ConfigError, HarnessError
from harness.loader.blend import Blend
from harness.loader.datasets import LiveData, RunData, open_datasets, open_live
from harness.loader.live.consumer import Rows
from harness.loader.loader import Loader, LoaderConfig
from harness.loader.state import LoaderState
from harness.loader.step import Layout, PackSource, StepBatch
from harness.megatron import checkpoint, runtime
from harness.megatron.checkpoint_writer import CheckpointWriter
from harness.megatron.compat import MEGATRON_VERSION
from harness.megatron.feed import Feed
from harness.megatron.live_feed import LiveFeed
from harness.megatron.model import build_model
from harness.megatron.model_config import sequence_cost
from harness.megatron.pretrained import find_pretrained
from harness.megatron.step import MegatronStep
from harness.megatron.stopping import StopSignals
from harness.megatron.topology import Topology, join
from harness.megatron.watchdog import Watchdog
from harness.report.attempts import EXIT_STOPPED, Stop, write_stop
from harness.report.metrics import METRICS_FILE, MetricsWriter, plot_loss, read_metrics, step_metrics, write_report
from harness.report.parity.digests import DigestWriter, merge_ranks, rank_rows
from harness.report.progress import RunProgress
from harness.report.run_folder import (
    CHECKPOINTS,
    choose_run_folder,
    leave_refusal,
    open_run_folder,
    whole_checkpoints,
)
from harness.train import OWN_VALIDATION, StepRecord, train
from recipes.sft_config import SftConfig, check


def make_feeds(
    config: SftConfig,
    data: RunData | LiveData,
    topology: Topology,
    state: LoaderState | None,
    device: torch.device,
) -> tuple[Feed | LiveFeed, dict[str, Feed]]:
    """The training batches from `state` on, and those that go through each validation set once each time, by name."""

    def feed(
        reader: PackSource,
        settings: LoaderConfig,
        *,
        start: LoaderState | None = None,
        epochs: int | None = None,
        blend: Blend | None = None,
    ) -> Feed:
        def loader(source: PackSource) -> Loader:
            return Loader(
                source,
                settings,
                schedule=config.schedule,
                dp_rank=topology.dp_rank,
                dp_size=topology.dp_size,
                cp_size=topology.cp_size,
                multiple=config.parallel.row_multiple,
                group_size=config.parallel.microbatch_group,
                cost=sequence_cost(config.model),
                tokenizer=data.tokenizer_hash if isinstance(data, RunData) else "",
                blend=blend,
                state=start,
                num_epochs=epochs,
            )

        return Feed(loader, reader, topology, device=device)

    training = (
        live_feed(config, data, topology, state)
        if isinstance(data, LiveData)
        else feed(data.train, config.loader, start=state, blend=data.blend)
    )
    sets = {**({OWN_VALIDATION: data.validation} if data.validation is not None else {}), **data.evaluation}
    # Validation is short and rare: workers of its own would cost more than they save.
    once = replace(config.loader, shuffle=False, drop_last=False, num_workers=0)
    return training, {name: feed(reader, once, epochs=1) for name, reader in sets.items()}


def live_feed(config: SftConfig, data: LiveData, topology: Topology, state: LoaderState | None) -> LiveFeed:
    """The training batches of live chunks from `state` on."""
    layout = Layout(
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        cp_size=topology.cp_size,
        multiple=config.parallel.row_multiple,
        group_size=config.parallel.microbatch_group,
    )
    capacity = config.parallel.row_capacity(config.schedule.max_tokens_per_rank)
    return LiveFeed(
        data.train,
        Rows(layout, config.loader.global_batch_size, capacity, sequence_cost(config.model)),
        tokenizer=data.tokenizer,
        state=state,
        seed=config.loader.seed,
        allow_other_data=config.loader.allow_other_data,
        timeout_s=config.trainer.timeout_s + 60,
    )


def mark_trained(training: Feed | LiveFeed, held_by: list[Path]) -> None:
    """Mark the live chunks of which these checkpoints hold every row."""
    if isinstance(training, LiveFeed):
        for path in held_by:
            training.trained(checkpoint.read_progress(path).loader)


def describe(config: SftConfig, data: RunData | LiveData, device: str, world_size: int) -> dict[str, str]:
    """The facts of a run for its report."""
    model = config.model
    return {
        "dataset": data.describe(),
        "model": f"{model.num_layers} layers of {model.hidden_size}, {model.num_attention_heads} heads, "
        f"vocabulary {model.vocab_size:,}, {model.dtype}",
        "schedule": f"{config.schedule.name}, up to {config.schedule.max_tokens_per_rank:,} tokens a rank",
        "ranks": f"{world_size} on {device}: tensor {config.parallel.tensor_parallel_size}, "
        f"pipeline {config.parallel.pipeline_parallel_size}, context {config.parallel.context_parallel_size}",
        "versions": f"megatron-core {MEGATRON_VERSION}, torch {torch.__version__}",
    }


def main(config: SftConfig) -> int:
    """Train; gives the exit code, 75 where a signal ended the run before its last step."""
    try:
        return run(config)
    except HarnessError as error:
        if config.run_dir is not None and "SLURM_JOB_ID" in os.environ:
            leave_refusal(Path(config.run_dir), error)
        raise


def run(config: SftConfig) -> int:
    world_size = runtime.place_in_job("WORLD_SIZE")
    data = open_live(config.data) if config.data.live.path else open_datasets(config.data)
    pretrained = find_pretrained(config.model)
    config.model.vocab_size = check(config, data, world_size, pretrained)
    with ExitStack() as stack:
        # The watchdog speaks first: it knows which rank the others wait for.
        patience_s = config.trainer.timeout_s + 60
        ranks = stack.enter_context(runtime.start(config.trainer.device, timeout_s=patience_s))
        signals = stack.enter_context(StopSignals())
        folder, newest = runtime.on_rank_0(lambda: _choose_folder(config))
        progress = checkpoint.read_progress(newest) if newest is not None else None
        topology = join(config.parallel, world_size)
        training, validation = make_feeds(config, data, topology, progress.loader if progress else None, ranks.device)
        stack.enter_context(training)
        step = MegatronStep(
            build_model(
                config.model,
                config.parallel,
                vocab_size=config.model.vocab_size,
                device=ranks.device,
                # A checkpoint has the weights that these became.
                fill=pretrained.filler(topology) if pretrained is not None and newest is None else None,
            ),
            optimizer=config.optimizer,
            parallel=config.parallel,
            topology=topology,
            device=ranks.device,
            vocab_size=config.model.vocab_size,
            decay_steps=config.trainer.steps,
            row_tokens=config.parallel.row_capacity(config.schedule.max_tokens_per_rank)
            if config.parallel.static_rows
            else None,
        )
        if newest is not None:
            checkpoint.load(newest, step)
        first_step = progress.step + 1 if progress else 1
        if first_step > config.trainer.steps + 1:
            raise ConfigError(
                f"{first_step - 1} steps are done, and trainer.steps is {config.trainer.steps}",
                where=str(newest),
                fix=f"trainer.steps={first_step - 1} or more, or start a new run",
            )
        # The device that `auto` took is a fact of the run, which a baseline made of it has to tell.
        told = to_yaml(replace(config, trainer=replace(config.trainer, device=ranks.device.type)))
        opened = open_run_folder(folder, settings=told, goes_on=config.resume != "false")
        runtime.on_rank_0(lambda: stack.enter_context(opened))
        validated = runtime.on_rank_0(lambda: _validated(folder, first_step))
        speaks = ranks.rank == 0
        records = config.trainer.record_digests or config.trainer.record_batches
        digests = DigestWriter(folder, first_step=first_step) if speaks and records else None
        shown = stack.enter_context(RunProgress(config.trainer.steps, done=first_step - 1, quiet=not speaks))
        trackers = config.trainer.trackers
        writer = MetricsWriter(folder, first_step=first_step, trackers=trackers, say=shown.say) if speaks else None
        if newest is not None:
            shown.say(f"goes on behind step {first_step - 1}, from {newest}")

        def record_data(taken: StepRecord) -> None:
            own = rank_rows(
                taken.batch,
                process=ranks.rank,
                dp_rank=topology.dp_rank,
                is_first_stage=topology.is_first_stage,
                is_last_stage=topology.is_last_stage,
                keep=config.trainer.record_batches,
            )
            parts = runtime.gather_on_rank_0(own)
            if digests is not None:
                digests.write(merge_ranks(taken.step, taken.batch, parts))

        def record(taken: StepRecord) -> None:
            # Before the metrics: a step that these have is one whose data is known.
            if records:
                record_data(taken)
            metrics = step_metrics(taken)
            if writer is not None:
                writer.write(metrics)
            shown.step(metrics)

        checkpoints = CheckpointWriter(
            folder / CHECKPOINTS,
            step,
            keep=config.trainer.keep_checkpoints,
            in_background=config.trainer.background_checkpoints,
            # The newest may turn out to be damaged: chunks stay until no checkpoint needs them.
            on_whole=lambda _: mark_trained(training, whole_checkpoints(folder / CHECKPOINTS)[:1]),
        )

        def save(number: int, state: LoaderState) -> None:
            with shown.doing("writing a checkpoint"):
                checkpoints.start(checkpoint.Progress(number, state))

        def stop() -> str | None:
            checkpoints.poll()
            return signals.agreed()

        def validate(batches: Feed) -> Iterable[StepBatch]:
            return shown.doing_each("validating", _first(iter(batches), config.trainer.eval_batches))

        with Watchdog(folder, limit_s=config.trainer.timeout_s) as watchdog:

            def wait() -> str | None:
                watchdog.at(watchdog.step, "waiting for live chunks")
                return stop()

            if isinstance(training, LiveFeed):
                training.call_while_waiting(wait)
            reason = train(
                iter(training),
                step,
                config.trainer,
                validation={name: partial(validate, batches) for name, batches in validation.items()},
                save=save,
                record=record,
                stop=stop,
                at=watchdog.at,
                say=shown.say,
                first_step=first_step,
                validated=validated,
            )
            checkpoints.finish()
            if reason is None:
                mark_trained(training, whole_checkpoints(folder / CHECKPOINTS)[-1:])
        if writer is not None:
            writer.close("finished" if reason is None else "stopped")
        if digests is not None:
            digests.close()
        if reason is not None:
            done = watchdog.step
            # Every rank, the first of them counts: srun ends the others as soon as one has left.
            write_stop(folder, Stop(done, "signal", f"{reason} came"))
            shown.say(f"{reason} came: stopped after step {done}, run_dir={folder} resume=true goes on")
            return EXIT_STOPPED
        if writer is not None:
            steps = read_metrics(folder / METRICS_FILE)
            plot_loss(steps, folder / "loss.png")
            write_report(folder, steps, describe(config, data, str(ranks.device), world_size))
            shown.say(f"run {folder}, loss plot {folder / 'loss.png'}, report {folder / 'report.md'}")
    return 0


def _choose_folder(config: SftConfig) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to go on from, if there is one."""
    folder = choose_run_folder(config.run_dir, runs=config.runs, name=config.name, resume=config.resume)
    if config.resume == "false":
        return folder, None
    newest, passed_over = checkpoint.find_newest(folder / CHECKPOINTS)
    for error in passed_over:
        print(f"passed over: {error.what}\n  where: {error.where}", file=sys.stderr)
    return folder, newest


def _validated(folder: Path, first_step: int) -> list[float]:
    """Losses of the validations before `first_step`."""
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.exists() else []
    return [one.validation_loss for one in steps if one.step < first_step and one.validation_loss is not None]


def _first(batches: Iterator[StepBatch], count: int | None) -> Iterator[StepBatch]:
    for number, batch in enumerate(batches, start=1):
        yield batch
        if number == count:
            return


if __name__ == "__main__":
    hydra_entry("sft", SftConfig)(main)()
