"""Commands that batch scripts run at the start of a job: the preflight checks of its nodes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.checks import KEY, LONGEST_S, CheckedSettings, bounded
from harness.cli.settings import argument, class_of
from harness.errors import ConfigError
from harness.launch.cluster import ClusterConfig
from harness.printing import print_line

preflight_app = typer.Typer(
    help="Check that every node of a job can start training; the batch scripts of `harness submit` run these.",
    no_args_is_help=True,
)


@dataclass
class ProbeSettings:
    """Settings of `harness preflight probe`: those of the run that name what every node has to reach.

    Attributes:
        data: datasets of the run.
        live: folders of chunks of the run.
        weights: folder of the weights that the run starts from; null for none.
        cluster: cluster settings; its `preflight.timeout_s` limits each check and the time for ranks to connect.
    """

    data: list[str] = field(default_factory=list, metadata={KEY: "data.path"})
    live: list[str] = field(default_factory=list, metadata={KEY: "data.live.path"})
    weights: str | None = field(default=None, metadata={KEY: "model.init_from"})
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass
class JudgeSettings(CheckedSettings):
    """Settings of `harness preflight judge`.

    Attributes:
        srun: file with the standard error of the step's `srun --label`; null for none.
        failed: file for the names of nodes that the job can exclude; null for none.
        tasks_per_node: number of tasks of the step per node.
        code: required digest of the harness's code and configs on every node; empty accepts any.
        cluster: its `gpus_per_node`, and the `min_*` and `max_*` of its `preflight`, are the requirements on a node.
    """

    srun: str | None = None
    failed: str | None = None
    tasks_per_node: int = bounded(1, lowest=1)
    code: str = ""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@preflight_app.command(cls=class_of(ProbeSettings))
def probe(context: typer.Context, run_dir: Annotated[Path, argument("RUN_DIR", "the run's folder")]) -> None:
    """Check this node, as one task of a Slurm step with one task per node; prints JSON lines."""
    from harness.launch.preflight.probe import node_checks, run_checks
    from harness.launch.ranks import place_in_slurm

    settings: ProbeSettings = context.obj
    place, timeout_s = place_in_slurm(), settings.cluster.preflight.timeout_s
    named: dict[str, Any] = {"data": settings.data, "weights": settings.weights, "live": settings.live}
    checks = node_checks(place, run_dir=run_dir, **named, timeout_s=timeout_s)
    run_checks(checks, node=place.node, timeout_s=timeout_s)
    # A thread that hangs in the kernel would keep the interpreter from ending.
    os._exit(0)


@preflight_app.command(cls=class_of(ProbeSettings))
def copy(
    context: typer.Context, local_dir: Annotated[Path, argument("LOCAL_DIR", "folder on the disk of this node")]
) -> None:
    """Copy datasets and weights to the disk of this node unless they exist there; prints JSON lines."""
    from harness.launch.preflight.probe import copy_checks, run_checks
    from harness.launch.ranks import place_in_slurm
    from harness.storage.local_copies import read_originals

    settings: ProbeSettings = context.obj
    read_originals()
    paths = [path for path in (*settings.data, settings.weights) if path and "://" not in path]
    checks = copy_checks(paths, local_dir, timeout_s=settings.cluster.preflight.timeout_s)
    # Each ends by itself where nothing moves; the whole takes as long as it takes.
    run_checks(checks, node=place_in_slurm().node, timeout_s=LONGEST_S)
    os._exit(0)  # a thread that hangs in the kernel would keep the interpreter from ending


@preflight_app.command(cls=class_of(JudgeSettings))
def judge(
    context: typer.Context, nodes: Annotated[str, typer.Argument(help="names of the job's nodes, separated by commas")]
) -> None:
    """Read the nodes' JSON lines from standard input and print the nodes with problems.

    Exit code 1 if there are any, 3 if the job can run without these nodes.
    """
    from harness.launch.preflight.judge import culprits, judge_nodes

    settings: JudgeSettings = context.obj
    cluster, srun = settings.cluster, settings.srun
    errors = Path(srun).read_text(errors="replace").splitlines() if srun and Path(srun).exists() else []
    names = nodes.split(",")
    job = {"gpus": cluster.gpus_per_node, "tasks_per_node": settings.tasks_per_node}
    faults, summary = judge_nodes(sys.stdin, names, cluster.preflight, code=settings.code, srun=errors, **job)
    for fault in faults:
        print_line(f"preflight: {fault}")
    if not faults:
        print_line(f"preflight: {summary}")
    without = culprits(faults, names)
    if settings.failed and without:
        lines = [f"{node} {' '.join(what.split())}\n" for node, what in without.items()]
        Path(settings.failed).write_text("".join(lines))
        raise typer.Exit(3)
    raise typer.Exit(1 if faults else 0)


@preflight_app.command(cls=class_of(ProbeSettings))
def reduce(context: typer.Context) -> None:
    """All-reduce a tensor over all tasks of a Slurm step, with NCCL on GPUs, otherwise gloo; prints JSON lines."""
    from harness.launch.preflight.probe import run_checks
    from harness.launch.ranks import place_in_slurm

    if "SLURM_PROCID" not in os.environ:
        fix = "start it with srun, like the batch scripts of `harness submit`"
        raise ConfigError("this is not a task of a Slurm step", where="SLURM_PROCID", fix=fix)
    timeout_s = context.obj.cluster.preflight.timeout_s
    place, rank = place_in_slurm(), os.environ["SLURM_PROCID"]
    os.environ.update(RANK=rank, WORLD_SIZE=os.environ["SLURM_NTASKS"], LOCAL_RANK=os.environ["SLURM_LOCALID"])

    def check() -> dict[str, Any]:
        from harness.megatron.job.all_reduce import check_all_reduce

        return check_all_reduce(timeout_s=timeout_s)

    run_checks({"all-reduce": check}, node=place.node, rank=int(rank), timeout_s=timeout_s)
    os._exit(0)  # a thread that waits for another rank would keep the interpreter from ending
