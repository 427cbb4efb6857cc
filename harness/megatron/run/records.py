"""Records of each step: metrics, digests of data, answers to sample prompts, and progress on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.loader import RankLayout
from harness.megatron.job import runtime
from harness.megatron.run.sampling import Sampler
from harness.plan import TrainerConfig
from harness.train import (
    METRICS_FILE,
    DigestWriter,
    MetricsWriter,
    RunProgress,
    StepRecord,
    is_due,
    merge_ranks,
    plot_loss,
    rank_rows,
    read_metrics,
    step_metrics,
    write_report,
)


class RunRecords:
    """Writes the records of a run; every rank has one, and that of rank 0 writes.

    Args:
        folder: of the run.
        first_step: records of this step and later ones, left by an earlier part of the run, are removed.
        sampler: answers prompts at every evaluation.

    Attributes:
        progress: the terminal's view, a context manager; it prints nothing on other ranks.
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
        self._digests: DigestWriter | None = None
        self._metrics: MetricsWriter | None = None
        if writes:
            log = self.progress.log
            self._digests = DigestWriter(folder, first_step=first_step) if self._keeps_data else None
            self._metrics = MetricsWriter(folder, first_step=first_step, trackers=trainer.trackers, log=log)

    def step(self, record: StepRecord) -> None:
        """Record one step; every rank takes part."""
        # Before the metrics: the data of every step in these is known.
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
        metrics = step_metrics(record)
        if self._metrics is not None:
            self._metrics.write(metrics)
        self.progress.step(metrics)
        if self._sampler is not None and is_due(record.step, self._trainer.eval_interval, self._trainer.last_step):
            with self.progress.doing("answering prompts"):
                for prompt, answer in self._sampler.answer(record.step):
                    self.progress.log(f"  {prompt!r}: {answer!r}")

    def close(self, status: str) -> None:
        """End the records of a run; `status` is finished or stopped."""
        if self._metrics is not None:
            self._metrics.close(status)
        if self._digests is not None:
            self._digests.close()

    def report(self, facts: Mapping[str, Any], *, title: str) -> None:
        """Plot the losses under a title and write the report of a closed run."""
        if self._metrics is None:
            return
        steps = read_metrics(self._folder / METRICS_FILE)
        plot_loss(steps, self._folder / "loss.png", title=title)
        write_report(self._folder, steps, facts)
        plot, report = self._folder / "loss.png", self._folder / "report.md"
        self.progress.log(f"run {self._folder}, loss plot {plot}, report {report}")
