"""Commands on the jobs of a run: its status, its logs, and its end."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from harness.checks import KEY
from harness.cli.settings import AsJson, argument, class_of, print_json
from harness.errors import ConfigError, HarnessError
from harness.printing import duration, print_line, print_text

jobs_app = typer.Typer()
cluster_app = typer.Typer(help="Propose the settings of a Slurm cluster.", no_args_is_help=True)
Run = Annotated[Path, argument("RUN", "the run's folder")]
_LOG_INTERVAL_S = 0.5


@jobs_app.command()
def status(run_dir: Run, as_json: AsJson = False) -> None:
    """Show a run's progress, how its attempts ended, and its jobs in Slurm's queue with the reason they are pending."""
    from harness.launch.queue import jobs_of_run, read_excluded
    from harness.train.attempts import read_status

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


@jobs_app.command()
def logs(
    run_dir: Run,
    rank: Annotated[int | None, typer.Option(min=0, help="print the log of this rank instead of the job's")] = None,
    lines: Annotated[int, typer.Option(min=0, help="number of lines from the end; 0 for all")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep printing new lines until Ctrl-C")] = False,
) -> None:
    """Print the log of the run's current or newest job: the batch script, or one rank."""
    path, keep = find_log(run_dir, rank)
    print_line(f"==> {path} <==", file=sys.stderr)
    with path.open(errors="replace") as file:
        shown, line, before = deque[str](maxlen=lines or None), "", ""
        while True:
            line += file.readline()
            is_whole = line.endswith("\n")
            # Without its end, a line is shown once it has not grown for an interval.
            if line and (is_whole or not follow or line == before) and keep.search(line):
                shown.append(line)
            if is_whole:
                line = ""
                continue
            print_text("".join(shown), end="", flush=True)
            if not follow:
                return
            shown = deque()
            line, before = ("", "") if line == before else (line, line)
            time.sleep(_LOG_INTERVAL_S)


@jobs_app.command()
def cancel(run_dir: Run) -> None:
    """Cancel every job of a run, including its successors; the ranks save a checkpoint if the grace period suffices."""
    from harness.launch.queue import cancel_jobs, jobs_of_run
    from harness.train.attempts import read_status

    read_status(run_dir)  # refuses a folder without a run
    jobs = jobs_of_run(run_dir)
    if not jobs:
        print_line(f"{run_dir}: no job of this run is in the queue")
        raise typer.Exit(1)
    cancel_jobs(jobs)
    for job in jobs:
        print_line(f"canceled: {job}")


@cluster_app.callback()
def _group() -> None:
    pass


@dataclass
class DetectedNodes:
    """The nodes that `harness cluster detect` looks at.

    Attributes:
        partition: partition of the nodes; empty for the largest one with GPUs.
    """

    partition: str = field(default="", metadata={KEY: "cluster.partition"})


@cluster_app.command(cls=class_of(DetectedNodes))
def detect(context: typer.Context) -> None:
    """Print a cluster file for the nodes of a partition: `harness cluster detect > configs/cluster/mine.yaml`."""
    from harness.launch.detect import detect_cluster

    print_text(detect_cluster(context.obj.partition), end="")


def find_log(run_dir: Path, rank: int | None) -> tuple[Path, re.Pattern[str]]:
    """Return the newest log of a run's script or rank, and the pattern of its own lines; ConfigError without one."""
    folder = run_dir / "logs"
    named = [(path, match) for path in folder.glob("*.out") if (match := _LOG_NAME.fullmatch(path.name))]
    jobs = {match["job"]: path for path, match in named if match["part"] is None}
    if not jobs:
        what = "there are no logs"
        raise ConfigError(what, where=str(folder), fix="check the path; only runs of `harness submit` have logs")
    job = max(jobs, key=int)
    with suppress(OSError):  # a later one may have been refused because this one has the run
        owner = (run_dir / "_job").read_text(errors="replace").strip()
        job = owner if owner in jobs else job
    if rank is None:
        return jobs[job], re.compile("")
    parts = {(name["part"], int(name["number"])): path for path, name in named if name["job"] == job and name["part"]}
    if ("rank", rank) in parts:
        return parts["rank", rank], re.compile("")
    # The log of a node has the lines of its ranks, each with its number on the node.
    script = run_dir / "job.sbatch"
    number = re.search(r"--nproc-per-node=(\d+)", script.read_text(errors="replace")) if script.exists() else None
    ranks_per_node = int(number[1]) if number else 1
    if ("node", rank // ranks_per_node) in parts:
        return parts["node", rank // ranks_per_node], re.compile(rf"^\[[a-z]*{rank % ranks_per_node}\]:")
    found = [number for part, number in parts if part == "rank"]
    found += [node * ranks_per_node + own for part, node in parts if part == "node" for own in range(ranks_per_node)]
    fix = f"--rank is 0 to {max(found)}" if found else "its ranks have not started; omit --rank for the job's own log"
    raise ConfigError(f"job {job} has no log of rank {rank}", where=str(folder), fix=fix)


_LOG_NAME = re.compile(r".+-(?P<job>\d+)(?:-(?P<part>rank|node)(?P<number>\d+))?\.out")
