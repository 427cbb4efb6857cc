"""A training run on any data: the ranks meet, the run's folder opens, and steps are trained, recorded and saved.

`sft` and `pretrain` open their data as a `Task`; everything else of a run is here, once for all recipes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
import yaml

from harness.checks import memory_bytes
from harness.errors import CheckpointError, ConfigError, FormatError, HarnessError
from harness.loader import LoaderState, RankBatch, RankLayout
from harness.loader.datasets import Sources
from harness.megatron.compat import MEGATRON_VERSION
from harness.megatron.data.feed import Feed, together
from harness.megatron.data.live_feed import LiveFeed
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.job.stopping import StopSignals
from harness.megatron.job.waits import Waits
from harness.megatron.job.watchdog import Watchdog
from harness.megatron.model.fusions import slow_parts
from harness.megatron.model.gpt import engine_layers
from harness.megatron.model.lora import check_same_adapters
from harness.megatron.pretrained import Pretrained
from harness.megatron.run.records import RunRecords
from harness.megatron.run.sampling import Answering, Sampler
from harness.megatron.state.checkpoint import CheckpointWriter, find_newest, load_checkpoint, stored_moments
from harness.megatron.state.local import LocalCopies, LocalStore
from harness.megatron.step import MegatronStep
from harness.plan import OptimizerConfig, RunConfig, TrainerConfig, plan_memory
from harness.printing import print_line, print_text, redact_all
from harness.settings import to_plain, to_yaml
from harness.train import METRICS_FILE, Progress, StepRecord, alone_in, is_due, read_metrics
from harness.train.attempts import EXIT_STOPPED, Stop, note_lost, read_attempts, record_resume, write_stop
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, read_progress, whole_checkpoints
from harness.train.folder import choose_run_folder, leave_early_stop, leave_refusal, open_run_folder
from harness.train.local import Identity, own_local_record, read_local_record
from harness.train.loop import OWN_VALIDATION, train

# PyTorch's words on a CPU.
_NO_MEMORY = "can't allocate memory"


@dataclass(frozen=True)
class Task:
    """The part of a run that depends on the kind of data.

    Attributes:
        feeds: returns the training batches after a progress, None for the start, and the validation sets by name, each
            read once per validation; every rank takes part.
        vocab_size: of the model.
        pad_rows_to: pad every row to this many tokens; None to leave rows as long as they are.
        max_sequences: the most that a row has, for `parallel.cuda_graphs`; None without.
        pretrained: initial weights.
        data_names: of the training data, for the title of the loss plot.
        facts: about data and schedule, for the run's report.
        answering: for sample prompts; None where there are none.
        sources: the datasets of a blend; None without one.
        warnings: about settings and data that do not go together, each by the name of the setting.
    """

    feeds: Callable[[RankLayout, Progress | None, runtime.Runtime], tuple[Feed | LiveFeed, dict[str, Feed]]]
    vocab_size: int
    pad_rows_to: int | None
    max_sequences: int | None
    pretrained: Pretrained | None
    data_names: Sequence[str]
    facts: Mapping[str, str]
    answering: Answering | None = None
    sources: Sources | None = None
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class _OpenRun:
    """A run before its next step.

    Attributes:
        folder: of the run; no other run writes there.
        identity: of this attempt.
        newest: the checkpoint that it resumes from, None for a new run.
        passed_over: the damage of newer ones.
        first_step: the next step.
        training, validation: of `Task.feeds`.
        step: has the weights that `first_step` begins with.
        validated: losses of the validations before it.
        settings: as they are in its config.yaml.
    """

    task: Task
    layout: RankLayout
    folder: Path
    identity: Identity
    newest: Path | None
    passed_over: list[CheckpointError]
    first_step: int
    training: Feed | LiveFeed
    validation: dict[str, Feed]
    step: MegatronStep
    validated: list[float]
    settings: RunConfig


C = TypeVar("C", bound=RunConfig)


def run_training(config: C, open_task: Callable[[C, runtime.Runtime], Task]) -> int:
    """Train; return the exit code, 75 if a signal ended the run before its last step.

    Args:
        open_task: checks the settings and opens the data; called on every rank once the ranks have met.

    Raises:
        HarnessError: settings, data, a checkpoint or the run's folder are refused, or training failed; on every rank.
    """
    config = runtime.settle(config.with_steps())
    trainer = config.trainer
    with _explained(config), ExitStack() as stack:
        if config.parallel.cuda_graphs:
            # With expandable segments, registered memory would move.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        limits = {"timeout_s": trainer.patience_s, "meet_timeout_s": trainer.startup_timeout_s}
        ranks = stack.enter_context(runtime.start(trainer.device, deterministic=trainer.deterministic, **limits))
        signals = stack.enter_context(StopSignals())
        folder = _slurm_folder(config)
        leave = partial(leave_early_stop, folder) if folder is not None else lambda stop: True
        with Watchdog(limit_s=trainer.startup_timeout_s, requested=signals.noticed, leave=leave) as watchdog:
            run = _open_run(config, open_task, ranks, watchdog, stack)
            records = _open_records(config, run, ranks, stack)
            with _Hooks.open(config, run, records, signals, watchdog) as hooks, Waits(run.step.device) as waits:
                reason = train(
                    iter(run.training),
                    run.step,
                    trainer,
                    waits_s=waits.total_s,
                    validation={name: partial(hooks.validate, batches) for name, batches in run.validation.items()},
                    save=hooks.save,
                    save_locally=hooks.save_locally,
                    record=hooks.record,
                    stop=hooks.stop,
                    at=watchdog.at,
                    log=records.progress.log,
                    first_step=run.first_step,
                    validated=run.validated,
                )
                hooks.finish(reason)
        records.close("finished" if reason is None else "stopped")
        if reason is not None:
            return _stop_run(run, records, reason, done=watchdog.step)
        ended: dict[str, str] = {}
        with suppress(FormatError):  # of a record that is damaged by now; the run is finished
            ended = {f"attempt {n}": line.describe() for n, line in enumerate(read_attempts(run.folder), 1)}
        records.report({**run.task.facts, **_facts(config, run.task, ranks), **ended}, title=_title(config, run))
    return 0


@contextmanager
def _explained(config: RunConfig) -> Iterator[None]:
    """Leave the reason of a refusal where Slurm's script reads it, and raise ConfigError where memory ran out."""
    try:
        yield
    except HarnessError as error:
        if (folder := _slurm_folder(config)) is not None:
            leave_refusal(folder, error)
        raise
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and _NO_MEMORY not in str(error):
            raise
        what = str(error).partition("\n")[0]
        raise ConfigError(
            f"memory ran out: {what[what.find(_NO_MEMORY) :] if _NO_MEMORY in what else what or 'of this process'}",
            where="model, or the size of a row",
            fix="a smaller model or rows, model.recompute=full, or more ranks; `harness plan` has the memory of one",
        ) from error


def _check_memory(config: RunConfig, task: Task, layout: RankLayout, ranks: runtime.Runtime) -> None:
    """Raise ConfigError if weights, gradients and optimizer alone are more than a CPU machine has."""
    if ranks.device.type != "cpu":
        return
    planned = plan_memory(
        config.model,
        config.parallel,
        vocab_size=task.vocab_size,
        dp_size=layout.dp_size,
        max_tokens_per_rank=1,
        optimizer=config.optimizer,
    )
    needed = (planned.total + planned.host) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    there = memory_bytes()
    if needed > there:
        raise ConfigError(
            f"weights, gradients and optimizer need {needed / 1e9:,.1f} GB of memory, and this machine has "
            f"{there / 1e9:,.1f} GB",
            where="model, model.vocab_size",
            fix="a smaller model, or more machines; `harness plan` computes what a rank needs",
        )


def _open_records(config: RunConfig, run: _OpenRun, ranks: runtime.Runtime, stack: ExitStack) -> RunRecords:
    """Begin the records of a run, with its warnings and where it resumes."""
    trainer, sampler = config.trainer, None
    if run.task.answering is not None:
        writes_to = run.folder if ranks.rank == 0 else None
        sampler = Sampler(run.step, run.task.answering, writes_to, trainer, run.first_step)
    records = RunRecords(trainer, run.folder, ranks, run.layout, first_step=run.first_step, sampler=sampler)
    log = stack.enter_context(records.progress).log
    has_engine = engine_layers(config.model, config.parallel, ranks.device)
    slow = slow_parts(config.model, config.parallel, ranks.device, has_engine=has_engine)
    pretrained = run.task.pretrained.warnings if run.task.pretrained is not None else []
    for warning in [*config.warnings(), *run.task.warnings, *pretrained, *slow]:
        log(f"warning: {warning}")
    if run.newest is not None:
        runtime.on_rank_0(lambda: _report_resume(config, run, log))
    return records


def _stop_run(run: _OpenRun, records: RunRecords, reason: str, *, done: int) -> int:
    """Record why a run ends before its last step; return the exit code."""
    is_slow = reason == records.leaving
    message = reason if is_slow else f"{reason} received"
    # Written by every rank, and the first one counts: srun ends the others as soon as one has left.
    write_stop(run.folder, Stop(done, "straggler" if is_slow else "signal", message))
    again = "true" if done else "auto"  # before the first step there is nothing to resume from
    records.progress.log(f"{message}: stopped after step {done}; continue with run_dir={run.folder} resume={again}")
    return EXIT_STOPPED


def _report_resume(config: RunConfig, run: _OpenRun, log: Callable[[str], None]) -> None:
    """Log and record from where a run resumes."""
    assert run.newest is not None
    done, last = run.first_step - 1, config.trainer.last_step
    log(f"resuming after step {done}, from {run.newest}")
    written_by = json.loads((run.newest / RUN_FILE).read_text()).get("run", run.identity.run)
    if written_by != run.identity.run:
        log(
            f"this folder was copied, moved or restored: its checkpoint is of run {written_by}, and it is run "
            f"{run.identity.run} from here on"
        )
    for note in notes_of_moments(run.newest, config.optimizer):
        log(note)
    if done >= last:
        log(
            f"nothing is left to train: all {last:,} steps of trainer.steps are done; to train more, resume with "
            f"a higher number, such as trainer.steps={2 * last}"
        )
    record_resume(run.folder, run.identity, done, run.newest, run.passed_over)


def notes_of_moments(checkpoint: Path, optimizer: OptimizerConfig) -> list[str]:
    """Return what the log of a run says of a checkpoint's moments that have another dtype than its own."""
    stored = stored_moments(checkpoint)
    if stored in (None, optimizer.moments_dtype):
        return []
    return [f"its optimizer's moments are {stored}, and were converted to {optimizer.moments_dtype}"]


def _open_run(
    config: C,
    open_task: Callable[[C, runtime.Runtime], Task],
    ranks: runtime.Runtime,
    watchdog: Watchdog,
    stack: ExitStack,
) -> _OpenRun:
    """Do everything before the first step; push onto `stack` what has to be closed."""
    trainer = config.trainer
    watchdog.at(0, "looking for a checkpoint")
    folder = runtime.on_rank_0(lambda: _choose_folder(config))
    newest, passed_over = _find_newest(config, folder) if config.resume != "false" else (None, [])
    progress = runtime.on_rank_0(lambda: _check_resumed(config, folder, newest)) if newest is not None else None
    if newest is None:
        _check_base_weights(config)
    first_step = progress.step + 1 if progress else 1
    watchdog.at(first_step, "opening the data")
    task = together(lambda: open_task(config, ranks), device=ranks.device)
    layout = join(config.parallel, ranks.world_size, timeout_s=trainer.patience_s)
    training, validation = task.feeds(layout, progress, ranks)
    stack.enter_context(training)
    runtime.on_rank_0(lambda: _check_validations(config, validation))
    watchdog.at(first_step, "building the model")
    together(lambda: _check_memory(config, task, layout, ranks), device=ranks.device)
    # A checkpoint has the weights that the pretrained ones became.
    fill = task.pretrained.filler(layout) if task.pretrained is not None and newest is None else None
    step = MegatronStep.build(
        config.model,
        config.parallel,
        layout,
        device=ranks.device,
        vocab_size=task.vocab_size,
        optimizer=config.optimizer,
        decay_steps=trainer.steps,
        pad_rows_to=task.pad_rows_to,
        max_sequences=task.max_sequences,
        fill=fill,
    )
    step.sources = task.sources
    if newest is not None:
        watchdog.at(first_step, "loading the checkpoint")
        load_checkpoint(newest, step)
    watchdog.at(first_step, "opening the run's folder")
    # The device that `auto` chose is a fact of the run, which a baseline recorded from it needs.
    settings = replace(config, trainer=replace(trainer, device=ranks.device.type))
    opened = open_run_folder(folder, settings=to_yaml(settings), resumes=config.resume != "false")
    identity = runtime.on_rank_0(lambda: stack.enter_context(opened))
    watchdog.training_begins(folder, limit_s=trainer.timeout_s)
    validated = runtime.on_rank_0(lambda: _read_validations(folder, first_step))
    return _OpenRun(
        task, layout, folder, identity, newest, passed_over, first_step, training, validation, step, validated, settings
    )


def _find_newest(config: RunConfig, folder: Path) -> tuple[Path | None, list[CheckpointError]]:
    """Return the checkpoint to resume from, on any disk, and print which newer ones are passed over."""
    record = runtime.on_rank_0(lambda: own_local_record(folder))
    local = LocalCopies(config.trainer.local_checkpoints, record) if record is not None else None
    newest, passed_over = find_newest(folder / CHECKPOINTS, local)

    def report() -> None:
        for error in passed_over:
            print_text(f"passed over: {error.what}\n  where: {error.where}", file=sys.stderr)
        for note in local.notes if local is not None else ():
            print_line(f"passed over: {note}", file=sys.stderr)
        if record is None and (other := read_local_record(folder)) is not None and other.step:
            what = f"the local checkpoints of run {other.run} up to step {other.step}, of which this folder is a copy"
            print_line(f"passed over: {what}", file=sys.stderr)
        if newest is None and config.resume == "true":
            fix = "resume=auto starts from the first step"
            raise ConfigError("there is no whole checkpoint left to resume from", where=str(folder), fix=fix)

    runtime.on_rank_0(report)
    return newest, passed_over


@dataclass(frozen=True)
class _Hooks:
    """The work of a run around its steps: checkpoints, records, validations, and the decision to stop.

    Attributes:
        checkpoints: writes them; the chunks of live data that they hold are then marked as trained.
        local: checkpoints on the nodes' own disks, None without.
    """

    run: _OpenRun
    trainer: TrainerConfig
    records: RunRecords
    signals: StopSignals
    watchdog: Watchdog
    checkpoints: CheckpointWriter
    local: LocalStore | None

    @classmethod
    @contextmanager
    def open(
        cls, config: RunConfig, run: _OpenRun, records: RunRecords, signals: StopSignals, watchdog: Watchdog
    ) -> Iterator[_Hooks]:
        trainer, folder, log = config.trainer, run.folder / CHECKPOINTS, records.progress.log
        root = trainer.local_checkpoints
        local = LocalStore.open(root, run.folder, run.identity, log=log, timeout_s=trainer.timeout_s)
        checkpoints = CheckpointWriter(
            folder,
            run.step,
            keep=trainer.keep_checkpoints,
            in_background=trainer.background_checkpoints,
            before_whole=records.sync,
            # The newest may turn out to be damaged: chunks stay until no checkpoint needs them.
            on_whole=lambda _: _mark_trained(run.training, whole_checkpoints(folder)[:1]),
            local=local,
            # The settings are what an export needs, whatever becomes of config.yaml.
            facts={
                "run": run.identity.run,
                "attempt": run.identity.attempt,
                "settings": redact_all(to_plain(run.settings)),
            },
        )
        hooks = cls(run, trainer, records, signals, watchdog, checkpoints, local)
        if isinstance(run.training, LiveFeed):
            run.training.call_while_waiting(hooks.wait)
        with closing(local) if local is not None else nullcontext():
            yield hooks

    def save(self, number: int, state: LoaderState) -> None:
        with self.records.progress.doing("writing a checkpoint"):
            self.checkpoints.start(Progress(number, state))

    def save_locally(self, number: int, state: LoaderState) -> None:
        self.checkpoints.start_local(Progress(number, state))

    def stop(self) -> str | None:
        self.checkpoints.finish(wait=False)
        return self.signals.agreed() or self.records.leaving

    def wait(self) -> str | None:
        self.watchdog.at(self.watchdog.step, "waiting for live chunks")
        return self.stop()

    def validate(self, batches: Feed) -> Iterator[RankBatch]:
        with self.records.progress.doing("validating"):
            yield from islice(batches, self.trainer.eval_batches)

    def record(self, made: StepRecord) -> None:
        self.records.step(made)
        if self.trainer.drift_interval and is_due(made.step, self.trainer.drift_interval, self.trainer.last_step):
            self.run.step.check_drift(made.step)

    def finish(self, reason: str | None) -> None:
        """Wait until the last checkpoint is whole; local ones are then needless."""
        self.checkpoints.finish()
        if reason is None:
            _mark_trained(self.run.training, whole_checkpoints(self.run.folder / CHECKPOINTS)[-1:])
        if self.local is not None:
            self.local.remove()


def _slurm_folder(config: RunConfig) -> Path | None:
    """Return the run's folder if Slurm's script made it; the script reads there why an attempt ended early."""
    return Path(config.run_dir) if config.run_dir is not None and "SLURM_JOB_ID" in os.environ else None


def _choose_folder(config: RunConfig) -> Path:
    """Return the run's folder."""
    folder = choose_run_folder(config.run_dir, runs=config.runs, name=config.name, resume=config.resume)
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    # The jobs of a sweep have a folder only once they train.
    if job is not None and config.run_dir is not None and restarts.isdecimal() and folder.is_dir():
        # Not while another run is active there: its records are its own.
        with alone_in(folder):
            note_lost(folder, job=job, restarts=int(restarts), predecessor=os.environ.get("HARNESS_PREDECESSOR"))
    return folder


def _check_resumed(config: RunConfig, folder: Path, newest: Path) -> Progress:
    """Return the progress of the checkpoint to resume from; refuse settings that cannot continue it."""
    progress = read_progress(newest)
    # Settings that cannot be read are no reason to refuse; they are kept as config.before-N.yaml.
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        before = yaml.safe_load((folder / "config.yaml").read_text())["model"]
        check_same_adapters(config.model, before, str(folder))
    if progress.step > config.trainer.last_step:
        what = f"{progress.step} steps are done, and trainer.steps is {config.trainer.steps}"
        raise ConfigError(what, where=str(newest), fix=f"trainer.steps={progress.step} or more, or start a new run")
    return progress


def _check_base_weights(config: RunConfig) -> None:
    if config.model.lora_rank and config.model.init_from is None:
        raise ConfigError(
            f"model.lora_rank is {config.model.lora_rank}, and model.init_from names no base weights: the adapters "
            "would be trained on frozen random weights",
            where="model.init_from",
            fix="name the folder or hub id of the base model, or train all weights with model.lora_rank=0",
        )


def _check_validations(config: RunConfig, validation: Mapping[str, Feed]) -> None:
    if config.trainer.early_stop and not (config.trainer.eval_interval and OWN_VALIDATION in validation):
        raise ConfigError(
            "early_stop needs validations, and there are none before the last step",
            where="trainer.early_stop",
            fix="set trainer.eval_interval, and name a validation set: data.validation_path, or a share in data.split",
        )


def _read_validations(folder: Path, first_step: int) -> list[float]:
    """Return the losses of the validations before `first_step`."""
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.exists() else []
    return [step.validation_loss for step in steps if step.step < first_step and step.validation_loss is not None]


def _facts(config: RunConfig, task: Task, ranks: runtime.Runtime) -> dict[str, str]:
    """Return the facts of a run's report about model, ranks and versions."""
    model, parallel = config.model, config.parallel
    return {
        "model": f"{model.num_layers} layers of {model.hidden_size}, {model.num_attention_heads} heads, "
        f"vocabulary {task.vocab_size:,}, {model.dtype}"
        + (f"; {model.mtp_layers} more that predict further tokens" if model.mtp_layers else ""),
        "ranks": f"{ranks.world_size} on {ranks.device}: tensor {parallel.tensor_parallel_size}, "
        f"pipeline {parallel.pipeline_parallel_size}, context {parallel.context_parallel_size}",
        "versions": f"megatron-core {MEGATRON_VERSION}, torch {torch.__version__}",
    }


def _title(config: RunConfig, run: _OpenRun) -> str:
    """Return the title of the loss plot: run, model and data."""
    model, names = config.model, run.task.data_names
    name = Path(model.init_from).name if model.init_from else f"{model.num_layers} layers of {model.hidden_size}"
    adapters = f", LoRA of rank {model.lora_rank}" if model.lora_rank else ""
    data = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{run.folder.name}: {name}{adapters}, on {data}"


def _mark_trained(training: Feed | LiveFeed, checkpoints: list[Path]) -> None:
    """Mark the live chunks all rows of which are in these checkpoints."""
    if isinstance(training, LiveFeed):
        for path in checkpoints:
            training.trained(read_progress(path).loader)
