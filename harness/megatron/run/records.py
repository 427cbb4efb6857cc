"""Records of each step: metrics, digests of data, answers to sample prompts, and progress on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch.distributed

from harness.errors import FormatError
from harness.launch.ranks import place_in_slurm
from harness.loader import RankLayout
from harness.megatron.compat import MEGATRON_VERSION
from harness.megatron.job import runtime
from harness.megatron.job.waits import thread_times
from harness.megatron.run.sampling import Sampler
from harness.plan import RunConfig, TrainerConfig
from harness.train import METRICS_FILE, DigestWriter, MetricsWriter, StepRecord, is_due, merge_ranks, read_metrics
from harness.train.attempts import read_attempts
from harness.train.digests import rank_rows
from harness.train.metrics import plot_experts, plot_loss, step_metrics, write_report
from harness.train.progress import RunProgress
from harness.train.stragglers import RankTimes, Straggler, StragglerWatch, write_slow_nodes


class RunRecords:
    """Writer of a run's records. Every rank creates one, but only rank 0 writes; removes records from `first_step` on.

    Attributes:
        progress: context manager that shows progress in the terminal; it prints nothing on other ranks.
        leaving: reason to end the run after this step and exclude a slow node, the same on every rank, or None.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        folder: Path,
        ranks: runtime.Runtime,
        layout: RankLayout,
        *,
        first_step: int,
        sampler: Sampler | None = None,
    ) -> None:
        self._trainer, self._folder, self._ranks, self._layout = trainer, folder, ranks, layout
        self._sampler = sampler
        self._keeps_data = trainer.record_digests or trainer.record_batches
        writes = ranks.rank == 0
        self.progress = RunProgress(trainer.steps, done=first_step - 1, quiet=not writes)
        begins: dict[str, Any] = {"first_step": first_step, "log": self.progress.log}
        self._digests = DigestWriter(folder, **begins) if writes and self._keeps_data else None
        self._metrics = MetricsWriter(folder, trackers=trainer.trackers, **begins) if writes else None
        if writes and sampler is not None and sampler.hole:
            self.progress.log(sampler.hole)
        self.leaving: str | None = None
        self._named: set[tuple[int | None, str]] = set()
        self._thread = thread_times()
        nodes, stages = zip(*runtime.gather((place_in_slurm().node, layout.pp_rank)), strict=True)
        self._is_on_many_nodes = len(set(nodes)) > 1
        self._watch: StragglerWatch | None = None
        if trainer.straggler_ratio is not None:
            limits: dict[str, Any] = {"ratio": trainer.straggler_ratio, "steps": trainer.straggler_steps}
            self._watch = StragglerWatch(nodes, stages, **limits, on_gpu=ranks.device.type == "cuda")

    def step(self, record: StepRecord) -> None:
        """Record one step; every rank takes part."""
        # Write digests before metrics, so that every step with metrics has digests.
        if self._keeps_data:
            own = rank_rows(
                record.batch,
                process=self._ranks.rank,
                dp_rank=self._layout.dp_rank,
                is_first_stage=self._layout.is_first_stage,
                is_last_stage=self._layout.is_last_stage,
                keep=self._trainer.record_batches,
            )
            parts = runtime.gather_on_rank_0(own)
            if self._digests is not None:
                self._digests.write(merge_ranks(record.step, record.batch, parts))
        before, self._thread = self._thread, thread_times()
        wait_s = max(0.0, record.step_s - record.compute_s - record.data_s)
        running_s, queued_s = (now - was for now, was in zip(self._thread, before, strict=True))
        times = [RankTimes(record.compute_s, record.data_s, wait_s, running_s, queued_s, record.batch.media_bytes)]
        if self._ranks.world_size > 1:
            mine = torch.tensor(astuple(times[0]), dtype=torch.float64, device=self._ranks.device)
            everyones = [torch.empty_like(mine) for _ in range(self._ranks.world_size)]
            torch.distributed.all_gather(everyones, mine)
            times = [RankTimes(*values) for values in torch.stack(everyones).tolist()]
        stragglers = self._watch.step(times) if self._watch is not None else []
        metrics = step_metrics(record, times, stragglers)
        if self._metrics is not None:
            self._metrics.write(metrics)
        self.progress.step(metrics)
        self._report_stragglers(stragglers)
        if self._sampler is not None and is_due(record.step, self._trainer.eval_interval, self._trainer.last_step):
            with self.progress.doing("answering prompts"):
                for prompt, answer in self._sampler.answer(record.step):
                    self.progress.log(f"  {prompt!r}: {answer!r}")

    def sync(self) -> None:
        """Make the records durable on rank 0: a checkpoint must not outlive the records of its steps."""
        for records in (self._metrics, self._digests, self._sampler):
            if records is not None:
                records.sync()

    def _report_stragglers(self, stragglers: Sequence[Straggler]) -> None:
        steps = self._trainer.straggler_steps
        named = {(straggler.rank, straggler.cause) for straggler in stragglers}
        for straggler in stragglers:
            if (straggler.rank, straggler.cause) not in self._named:
                self.progress.log(f"warning: {straggler.describe(steps)}")
        is_new, self._named = not named <= self._named, named
        if not is_new or self._trainer.on_straggler != "exclude" or not self._is_on_many_nodes:
            return
        if nodes := runtime.on_rank_0(lambda: write_slow_nodes(self._folder, stragglers, steps)):
            self.leaving = f"{', '.join(nodes)} excluded as too slow"

    def close(self, status: str) -> None:
        """Close the records of a run; `status` is finished or stopped."""
        self.progress.log_last_step()
        if self._metrics is not None:
            self._metrics.close(status)
        if self._digests is not None:
            self._digests.close()

    def report(self, config: RunConfig, facts: Mapping[str, str], data_names: Sequence[str]) -> None:
        """Plot the losses of a closed run and write its report."""
        if self._metrics is None:
            return
        steps = read_metrics(self._folder / METRICS_FILE)
        if not steps:
            self.progress.log(f"warning: {self._folder / METRICS_FILE} no longer contains steps: no report is written")
            return
        model, data = config.model, ", ".join(data_names[:3])
        data += f" and {len(data_names) - 3} more" if len(data_names) > 3 else ""
        name = Path(model.init_from).name if model.init_from else f"{model.num_layers} layers of {model.hidden_size}"
        adapters = f", LoRA of rank {model.lora_rank}" if model.lora_rank else ""
        title = f"{self._folder.name}: {name}{adapters}, on {data}"
        plot_loss(steps, self._folder / "loss.png", title=title)
        if steps[-1].experts:
            plot_experts(steps, self._folder / "experts.png", title=title)
        ended: dict[str, str] = {}
        with suppress(FormatError):  # ignore a damaged record: the run is finished
            ended = {f"attempt {n}": line.describe() for n, line in enumerate(read_attempts(self._folder), 1)}
        ranks, parallel = self._ranks, config.parallel
        shape = f"{model.num_layers} layers of {model.hidden_size}, {model.num_attention_heads} heads, "
        shape += f"vocabulary {model.vocab_size:,}, {model.dtype}"
        layout = f"{ranks.world_size} on {ranks.device}: tensor {parallel.tensor_parallel_size}, "
        layout += f"pipeline {parallel.pipeline_parallel_size}, context {parallel.context_parallel_size}"
        own = {
            "model": shape + (f"; {model.mtp_layers} MTP layers" if model.mtp_layers else ""),
            "ranks": layout,
            "versions": f"megatron-core {MEGATRON_VERSION}, torch {torch.__version__}",
        }
        write_report(self._folder, steps, {**facts, **own, **ended})
        plot, report = self._folder / "loss.png", self._folder / "report.md"
        self.progress.log(f"run {self._folder}, loss plot {plot}, report {report}")
