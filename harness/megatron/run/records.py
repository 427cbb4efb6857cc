"""What a run leaves of its steps: metrics, digests of data, answers to prompts, and a line for whoever watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.loader import RankBatch, RankLayout
from harness.megatron.job import runtime
from harness.megatron.sampling import Sampler
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
    """Context manager; every rank has one, and that of rank 0 writes.

    Args:
        folder: of the run.
        first_step: what an earlier part of the run left of it and of later steps is removed.
        sampler: answers prompts at every evaluation.
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
        speaks = ranks.rank == 0
        self._shown = RunProgress(trainer.steps, done=first_step - 1, quiet=not speaks)
        self._digests = DigestWriter(folder, first_step=first_step) if speaks and self._keeps_data else None
        self._metrics = (
            MetricsWriter(folder, first_step=first_step, trackers=trainer.trackers, say=self._shown.say)
            if speaks
            else None
        )

    def __enter__(self) -> RunRecords:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        self._shown.say(line)

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self._shown.doing(what)

    def doing_each(self, what: str, batches: Iterator[RankBatch]) -> Iterable[RankBatch]:
        return self._shown.doing_each(what, batches)

    def step(self, taken: StepRecord) -> None:
        """Every rank takes part."""
        # Before the metrics: a step that these have is one whose data is known.
        if self._keeps_data:
            self._data(taken)
        metrics = step_metrics(taken)
        if self._metrics is not None:
            self._metrics.write(metrics)
        self._shown.step(metrics)
        if self._sampler is not None and is_due(taken.step, self._trainer.eval_interval, self._trainer.steps):
            with self.doing("answering prompts"):
                for prompt, answer in self._sampler.answer(taken.step):
                    self.say(f"  {prompt!r}: {answer!r}")

    def _data(self, taken: StepRecord) -> None:
        own = rank_rows(
            taken.batch,
            process=self._ranks.rank,
            dp_rank=self._layout.dp_rank,
            is_first_stage=self._layout.is_first_stage,
            is_last_stage=self._layout.is_last_stage,
            keep=self._trainer.record_batches,
        )
        parts = runtime.gather_on_rank_0(own)
        if self._digests is not None:
            self._digests.write(merge_ranks(taken.step, taken.batch, parts))

    def close(self, status: str) -> None:
        """The run has ended; `status` as trackers tell it: finished or stopped."""
        if self._metrics is not None:
            self._metrics.close(status)
        if self._digests is not None:
            self._digests.close()

    def report(self, facts: Mapping[str, Any]) -> None:
        """Draw the losses of all steps and write what was done, once the run is closed."""
        if self._metrics is None:
            return
        steps = read_metrics(self._folder / METRICS_FILE)
        plot_loss(steps, self._folder / "loss.png")
        write_report(self._folder, steps, facts)
        self.say(f"run {self._folder}, loss plot {self._folder / 'loss.png'}, report {self._folder / 'report.md'}")
