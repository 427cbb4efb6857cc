"""Metrics of a run: one JSON line per step, curves of trackers, and a plot and a report at the end."""

from __future__ import annotations

import io
import json
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import FormatError, HarnessError, how_to_install, os_errors_as
from harness.printing import print_line
from harness.settings import from_plain
from harness.storage import write_atomically
from harness.tables import Table
from harness.train.lines import DAMAGED_FIX, MISREAD, ROOM_FIX, LineFile, describe_hole, keep_lines_before, whole_lines
from harness.train.loop import OWN_VALIDATION, StepRecord
from harness.train.stragglers import CAUSES, RankTimes, Straggler
from harness.train.trackers import PATIENCE_S, SERVICES, EventFile, Tracker, curves_of

T = TypeVar("T")
Log = Callable[[str], None]
METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.md"


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`.

    Attributes:
        step, epoch: 1 and 0 for the first.
        loss: mean over the trained tokens, in nats.
        validation_loss: the same over the validation set; None if no validation followed this step.
        learning_rate, grad_norm: of this step; the norm before clipping.
        tokens: model tokens of the global batch, without padding.
        tokens_per_s: tokens / step_s, of the whole job.
        fill: tokens, including padding of sequences, over the capacity of the rows.
        step_s: wall time of the step, with the wait for data, without validation and checkpoint.
        data_wait_s: wait for the loader on rank 0.
        imbalance_tokens, imbalance_cost: busiest data-parallel rank over the mean, in tokens and in training cost;
            1 is even.
        packs_consumed: of this epoch, after this step.
        evaluation_losses: as validation_loss, of further validation sets by name.
        initial_losses: of step 1, losses before it by validation set; `validation` is that of the training data.
        source_losses: mean loss of the trained tokens of each dataset of a blend, by its path; without those that the
            step trains no token of.
        experts: statistics of the routers of a mixture of experts; empty for a dense model. `routed_tokens`,
            `shared_tokens` and `bias_tokens` are real tokens that went to experts, passed shared experts, and were
            counted for expert biases, over all layers. Means over layers: `load`, tokens of the busiest expert over the
            mean (`worst_load` is that of the most uneven layer), `entropy` of a token's scores in nats, `aux_loss`
            without its coefficient, where 1 is even, and the absolute `bias` of an expert.
        source_expert_loads: load of the busiest expert over the mean for the tokens of each dataset of a blend alone,
            by its path; without those that the step has no token of. Empty for a dense model, and without a blend.
        mtp_losses, mtp_tokens: mean loss of each layer that predicts further tokens, the nearest first, and the tokens
            that these layers trained together; empty and 0 where there are none.
        evaluation_expert_loads: load of the busiest expert over the mean in each validation set, by name; `validation`
            is that of the training data. Empty for a dense model.
        rank_compute_s: time of each rank in computation, without its loader and without waiting for other ranks.
        rank_media_bytes: bytes of audio and images that were read for the rows of each rank; empty if there are none.
    """

    step: int
    epoch: int
    loss: float
    validation_loss: float | None
    learning_rate: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    tokens_per_s: float
    fill: float
    num_microbatches: int
    step_s: float
    data_wait_s: float
    imbalance_tokens: float
    imbalance_cost: float
    packs_consumed: int
    evaluation_losses: dict[str, float] = field(default_factory=dict)
    initial_losses: dict[str, float] = field(default_factory=dict)
    source_losses: dict[str, float] = field(default_factory=dict)
    experts: dict[str, float] = field(default_factory=dict)
    source_expert_loads: dict[str, float] = field(default_factory=dict)
    mtp_losses: list[float] = field(default_factory=list)
    mtp_tokens: int = 0
    evaluation_expert_loads: dict[str, float] = field(default_factory=dict)
    rank_compute_s: list[float] = field(default_factory=list)
    rank_media_bytes: list[int] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)


def step_metrics(
    record: StepRecord, times: Sequence[RankTimes] = (), stragglers: Sequence[Straggler] = ()
) -> StepMetrics:
    """Return the metrics of one step, including the times of all ranks and the slow ranks."""
    batch, evaluations = record.batch, record.evaluations
    own = evaluations.get(OWN_VALIDATION)
    return StepMetrics(
        **{name: value for name, value in vars(record.result).items() if name != "skipped"},
        step=record.step,
        epoch=batch.epoch,
        validation_loss=None if own is None else own.loss,
        tokens=batch.num_tokens,
        tokens_per_s=batch.num_tokens / record.step_s,
        fill=batch.imbalance.fill,
        num_microbatches=batch.num_microbatches,
        step_s=record.step_s,
        data_wait_s=record.data_wait_s,
        imbalance_tokens=batch.imbalance.token_ratio,
        imbalance_cost=batch.imbalance.cost_ratio,
        packs_consumed=batch.state.packs_consumed,
        evaluation_losses={name: found.loss for name, found in evaluations.items() if name != OWN_VALIDATION},
        initial_losses={name: evaluation.loss for name, evaluation in record.initial.items()},
        evaluation_expert_loads={
            name: found.expert_load for name, found in evaluations.items() if found.expert_load is not None
        },
        rank_compute_s=[round(each.compute_s, 6) for each in times],
        rank_media_bytes=[int(each.media_bytes) for each in times] if any(each.media_bytes for each in times) else [],
        stragglers=list(stragglers),
    )


class MetricsWriter(LineFile):
    """Appends to `metrics.jsonl` in `folder` and sends metrics to the run's trackers.

    A failing tracker is reported once, and the run continues without it. Lines of `first_step` and later steps, left by
    a stopped run, are removed, because these steps are trained again.
    """

    def __init__(
        self, folder: Path, *, first_step: int = 1, trackers: Sequence[str] = ("tensorboard",), log: Log = print_line
    ) -> None:
        path = folder / METRICS_FILE
        with os_errors_as(HarnessError, "the run's folder cannot be made", where=folder, fix=ROOM_FIX):
            folder.mkdir(parents=True, exist_ok=True)
        if hole := describe_hole(path, keep_lines_before(path, first_step), range(1, first_step)):
            log(hole)
        super().__init__(path, "the run's metrics")
        self._log = log
        self._events: EventFile | None = None
        with self._events_may_fail():
            if "tensorboard" in trackers:
                self._events = EventFile(folder / "tensorboard", first_step=first_step)
        self._trackers = [Tracker(name, folder) for name in trackers if name in SERVICES]

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; raises HarnessError if the disk fails."""
        values = asdict(metrics)
        # Write NaN as null: it is not valid JSON outside Python.
        line = json.loads(json.dumps(values), parse_constant=lambda constant: None)
        self.append(json.dumps(line) + "\n")
        steps = curves_of(values)
        with self._events_may_fail():
            if self._events is not None:
                for step, curves in steps:
                    self._events.add(curves, step)
        for tracker in self._trackers:
            tracker.send(steps)
        self._report(tracker.problem() for tracker in self._trackers)

    def close(self, status: str = "finished") -> None:
        """Close the files and send the run's status, `finished` or `stopped`, to the trackers; may take seconds."""
        super().close()
        with self._events_may_fail():
            if self._events is not None:
                self._events.close()
        for tracker in self._trackers:
            tracker.send(status)
        deadline = time.monotonic() + PATIENCE_S[status]
        self._report(tracker.wait(deadline) for tracker in self._trackers)

    @contextmanager
    def _events_may_fail(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # its package may raise anything
            self._events = None
            fix = how_to_install(error) if isinstance(error, ModuleNotFoundError) else ""
            why = f"({error}{fix and f'; {fix}'})"
            self._log(f"tensorboard receives no more metrics of this run {why}; training continues")

    def _report(self, problems: Iterable[str]) -> None:
        for problem in filter(None, problems):
            self._log(problem)


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return the steps of a `metrics.jsonl` in order; raise FormatError for an invalid line."""
    return read_lines(path, partial(from_plain, StepMetrics), "metrics", remedy=DAMAGED_FIX)


def read_lines(path: Path, parse: Callable[[dict[str, Any]], T], kind: str, *, remedy: str) -> list[T]:
    """Parse a JSON lines file with one line per step; raise FormatError for a line that is not of this `kind`."""
    steps = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            steps.append(parse(json.loads(line)))
        except MISREAD as error:
            fix = f"the file was changed by hand or written by another version; {remedy}"
            raise FormatError(f"line {number} is not a step's {kind}: {error}", where=str(path), fix=fix) from error
    return steps


def _by_name(steps: Sequence[StepMetrics], kind: str) -> dict[str, dict[int, float]]:
    """Return the values of a field that maps names to numbers, by name and step."""
    found: dict[str, dict[int, float]] = {}
    for step in steps:
        for name, value in getattr(step, kind).items():
            found.setdefault(name, {})[step.step] = value
    return found


def validation_losses(steps: Sequence[StepMetrics]) -> dict[str, dict[int, float]]:
    """Return validation losses by set name and step; `validation` belongs to the training data."""
    losses: dict[str, dict[int, float]] = {"validation": {}}
    for step in steps:
        own = {} if step.validation_loss is None else {"validation": step.validation_loss}
        for number, found in ((0, step.initial_losses), (step.step, {**own, **step.evaluation_losses})):
            for name, loss in found.items():
                losses.setdefault(name, {})[number] = loss
    return losses


def plot_loss(steps: list[StepMetrics], path: Path, *, title: str = "") -> None:
    """Write a PNG of training and validation losses over the steps; a long title is wrapped."""
    _write(path, draw_runs({"training": steps}, title=title))


def draw_runs(runs: Mapping[str, Sequence[StepMetrics]], *, title: str = "") -> bytes:
    """Plot the training and validation losses of several runs over the steps; return the PNG."""
    figure, axes = new_axes(title, "loss (nats per trained token)")
    for number, (run, steps) in enumerate(runs.items()):
        color = f"C{number}"
        axes.plot([s.step for s in steps], [s.loss for s in steps], label=run, color=color, linewidth=1.4)
        for name, losses in validation_losses(steps).items():
            if losses:
                style = "o--" if name == "validation" else "o:"
                label = f"{run}, {name}" if len(runs) > 1 else name
                axes.plot([*losses], [*losses.values()], style, label=label, color=color, markersize=4)
    return as_png(figure, axes)


def plot_experts(steps: list[StepMetrics], path: Path, *, title: str = "") -> None:
    """Write a PNG of the busiest expert's load over the steps, in total and for each source and validation set."""
    figure, axes = new_axes(title, "tokens of the busiest expert, relative to the mean")
    trained = [s for s in steps if s.experts]
    for name, label, color in (("load", "training", "#1f6feb"), ("worst_load", "training, worst layer", "#9ec5fe")):
        axes.plot([s.step for s in trained], [s.experts[name] for s in trained], label=label, color=color)
    for name, loads in _by_name(steps, "source_expert_loads").items():
        axes.plot([*loads], [*loads.values()], "--", label=f"training, {name}", linewidth=1.0)
    for name, loads in _by_name(steps, "evaluation_expert_loads").items():
        axes.plot([*loads], [*loads.values()], "o:", label=name, markersize=4)
    _write(path, as_png(figure, axes))


def new_axes(title: str, label: str) -> tuple[Any, Any]:
    """Return a figure with axes for steps and for values described by `label`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    # Disable math: a dollar sign in a name would start a formula.
    axes.set_title("\n".join(textwrap.wrap(title, 100)), fontsize=10, loc="left", parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def as_png(figure: Any, axes: Any) -> bytes:
    """Render a figure as PNG, with a legend if a curve has a label."""
    if axes.get_legend_handles_labels()[0]:
        for name in axes.legend(frameon=False).get_texts():
            name.set_parse_math(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def _summary(losses: Mapping[int, float]) -> str:
    if not losses:
        return "not measured"
    steps = list(losses)
    shown = sorted({steps[0], min(steps, key=losses.__getitem__), steps[-1]}) if len(steps) > 4 else steps
    last = losses[steps[-1]]
    perplexity = f"{math.exp(last):,.1f}" if last < 50 else "too large to display"
    return ", ".join(f"{losses[step]:.4f} at step {step}" for step in shown) + f"; perplexity {perplexity}"


def _expert_rows(steps: Sequence[StepMetrics]) -> dict[str, str]:
    """Return report rows for the busiest expert's load in training and last validation; none for a dense model."""
    first, last = steps[0], steps[-1]
    if not (first.experts and last.experts):
        return {}
    rows = {
        "busiest expert, relative to the mean": f"{first.experts['load']:.3f} at step {first.step}, "
        f"{last.experts['load']:.3f} at step {last.step}, {last.experts['worst_load']:.3f} in the worst layer"
    }
    for what, kind in (("by source", "source_expert_loads"), ("of validation sets", "evaluation_expert_loads")):
        among = steps if kind.startswith("evaluation") else steps[-1:]  # not every step is followed by a validation
        newest = next((step for step in reversed(among) if getattr(step, kind)), None)
        if newest is not None:
            loads = (f"{name} {load:.3f}" for name, load in getattr(newest, kind).items())
            rows[f"the same {what}, step {newest.step}"] = ", ".join(loads)
    return rows


def _slow_ranks(steps: Sequence[StepMetrics]) -> dict[str, str]:
    """Return report rows for ranks that delayed the others, with reason and steps."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for step in steps:
        for straggler in step.stragglers:
            found.setdefault((straggler.rank, straggler.node, straggler.cause), []).append(step.step)
    return {
        "slow network" if rank is None else f"slow rank {rank} on {node}": f"{CAUSES.get(cause, cause)}; "
        + (f"{len(at)} steps from step {at[0]} to {at[-1]}" if len(at) > 1 else f"1 step, step {at[0]}")
        for (rank, node, cause), at in found.items()
    }


def write_report(folder: Path, steps: list[StepMetrics], facts: Mapping[str, Any]) -> Path:
    """Write `report.md`: results first, then `facts` about the run in the given order."""
    first, last, count = steps[0], steps[-1], len(steps)
    seconds, tokens = sum(s.step_s for s in steps), sum(s.tokens for s in steps)
    rows = {
        "training loss": f"{first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}",
        **{f"{name} loss": _summary(losses) for name, losses in validation_losses(steps).items()},
        **{
            f"training loss of {name}": ", ".join(f"{of[at]:.4f} at step {at}" for at in sorted({min(of), max(of)}))
            for name, of in _by_name(steps, "source_losses").items()
        },
        **_expert_rows(steps),
        **{
            f"loss of MTP layer {number}": _summary({s.step: s.mtp_losses[number - 1] for s in steps if s.mtp_losses})
            for number in range(1, len(last.mtp_losses) + 1)
        },
        "tokens": f"{tokens:,}, of them {sum(s.trained_tokens for s in steps):,} trained",
        "tokens per second": f"{tokens / seconds:,.0f}",
        "row fill": f"{sum(s.fill for s in steps) / count:.1%}",
        "busiest rank, relative to the mean": f"{sum(s.imbalance_tokens for s in steps) / count:.3f} in tokens, "
        f"{sum(s.imbalance_cost for s in steps) / count:.3f} in training cost",
        "waiting for data": f"{sum(s.data_wait_s for s in steps) / seconds:.2%} of step time",
        **_slow_ranks(steps),
        **facts,
    }
    charts = ["![loss](loss.png)", *(["![expert load](experts.png)"] if last.experts else [])]
    table = Table((), [(name, str(value)) for name, value in rows.items()])
    path = folder / REPORT_FILE
    _write(path, "\n".join(["# Training run", "", *charts, "", table.to_markdown(), ""]).encode())
    return path


def _write(path: Path, data: bytes) -> None:
    fix = "free disk space or check the disk; the run is complete and saved, and resume=true writes its report again"
    with os_errors_as(HarnessError, "the report of the run cannot be written", where=path, fix=fix):
        write_atomically(path, data)
