"""Commands on a cluster: the status of a run and its jobs, and the settings of a cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.settings import AsJson, class_of, print_json
from harness.errors import HarnessError
from harness.printing import duration, print_line, print_text

jobs_app = typer.Typer()
cluster_app = typer.Typer(help="Propose the settings of a Slurm cluster.", no_args_is_help=True)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder")]


@jobs_app.command()
def status(run_dir: Run, as_json: AsJson = False) -> None:
    """Show a run's progress, how its attempts ended, and its jobs in Slurm's queue with the reason they are pending."""
    from harness.launch.queue import jobs_of_run, read_excluded
    from harness.train.status import read_status

    run = read_status(run_dir)
    problem = ""
    try:
        jobs = jobs_of_run(run_dir)
    except HarnessError as error:
        jobs, problem = [], error.what
    excluded = read_excluded(run_dir)
    if as_json:
        print_json(
            {**asdict(run), "is_finished": run.is_finished, "left_s": run.left_s, "excluded": excluded}
            | {"jobs": [asdict(job) for job in jobs], "queue_problem": problem}
        )
        return
    state = "in the queue" if jobs else "not in the queue"
    if any(not job.is_pending for job in jobs):
        state = "running"
    if problem:
        state = f"not finished; its jobs are unknown ({problem})"
    print_line(f"{run_dir}: {'finished' if run.is_finished else state}")
    for job in jobs:
        print_line(f"  {job}")
    if run.step:
        assert run.step_s is not None
        assert run.age_s is not None
        of = f" of {run.steps:,}" if run.steps is not None else ""
        loss = f", loss {run.loss:.4f}" if run.loss is not None else ""
        left = f", {duration(run.left_s)} left" if run.left_s else ""
        print_line(f"  step {run.step:,}{of}{loss}, {run.step_s:.2f} s per step{left}, {duration(run.age_s)} ago")
    print_line(f"  newest checkpoint: {'none' if run.checkpoint is None else f'step {run.checkpoint:,}'}")
    for attempt in run.attempts[-5:]:
        print_line(f"  {attempt.describe()}")
    if run.stopped is not None:
        print_line(f"  ended: {run.stopped}")
    for node, reason in excluded.items():
        print_line(f"  excluded: {node}: {reason}")


@cluster_app.callback()
def _group() -> None:
    pass


@dataclass
class DetectedNodes:
    """The nodes that `harness cluster detect` looks at.

    Attributes:
        partition: partition of the nodes; empty for the largest one with GPUs.
    """

    partition: str = ""


@cluster_app.command(cls=class_of(DetectedNodes, section="cluster"))
def detect(context: typer.Context) -> None:
    """Print a cluster file for the nodes of a partition: `harness cluster detect > configs/cluster/mine.yaml`."""
    from harness.launch.detect import detect_cluster

    print_text(detect_cluster(context.obj.cluster.partition), end="")
