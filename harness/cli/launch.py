"""Commands before and at the start of a job: plan, submit, and the preflight checks that batch scripts run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness.checks import bounded, check_numbers
from harness.cli.settings import class_of, complete_names, list_experiments
from harness.errors import ConfigError
from harness.launch import SubmitConfig
from harness.settings import explain_settings, render_settings, to_plain

launch_app = typer.Typer()
preflight_app = typer.Typer(
    help="Check that every node of a job can start training; the batch scripts of `harness submit` run these.",
    no_args_is_help=True,
)


@dataclass
class AssumedData:
    """Packs that do not exist yet.

    Attributes:
        pack_size: tokens of each pack.
    """

    pack_size: int = bounded(8192, lowest=2)

    def __post_init__(self) -> None:
        check_numbers(self, "data")


@dataclass
class PlanSettings:
    """Settings of `harness plan`; `parallel.ranks` of the recipe are the GPUs of all nodes together, 8 by default.

    Attributes:
        gpu_gib: memory of a GPU in GiB: exit code 1 if the run does not fit; null to skip the check.
        peak_tflops: dense peak of a GPU in TFLOP/s; 989 is an H100's in bfloat16.
        mfu: measured share of the peak that training reaches; null estimates it.
        packs: plan for this many packs of `data.pack_size`; null for the dataset of the settings.
        sequence_tokens: tokens of each conversation in them.
    """

    gpu_gib: float | None = bounded(80, above=0, highest=1_000_000)
    peak_tflops: float = bounded(989, above=0, highest=1_000_000_000)
    mfu: float | None = bounded(None, above=0, highest=1)
    packs: int | None = bounded(None, lowest=1, highest=10**12)
    sequence_tokens: int = bounded(1024, lowest=2)
    data: AssumedData = field(default_factory=AssumedData)

    def __post_init__(self) -> None:
        check_numbers(self, "")


_RENAMED = {"ranks": "parallel.ranks", "--ranks": "parallel.ranks", "pack_size": "data.pack_size"}


@launch_app.command(cls=class_of(PlanSettings, _RENAMED, takes_recipe=True))
def plan(
    context: typer.Context,
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="a file of configs/experiment, or sft",
            autocompletion=complete_names(list_experiments),
        ),
    ],
) -> None:
    """Compute what a run needs before anyone books a node: memory, microbatches, tokens, MFU, time."""
    from harness.config import Options, compose_run
    from harness.plan import ROOM, AssumedPacks, Machine, plan_run

    settings: PlanSettings = context.obj[0]
    options = Options.parse(context.obj[1], where="harness plan")
    names = [setting.key for setting in explain_settings(PlanSettings)]
    config = compose_run(experiment, options.overrides, config_dir=options.config_dir, also=names).config
    if options.show:
        print(render_settings(settings) + render_settings(config), end="")
        return
    planned = plan_run(
        to_plain(config),
        machine=Machine(peak_flops=settings.peak_tflops * 1e12),
        mfu=settings.mfu,
        packs=None
        if settings.packs is None
        else AssumedPacks(settings.packs, settings.data.pack_size, settings.sequence_tokens),
    )
    gpu_bytes = None if settings.gpu_gib is None else settings.gpu_gib * 2**30
    Console(soft_wrap=True).print(planned.render(gpu_bytes=gpu_bytes))
    fits = gpu_bytes is None or planned.memory.total <= (1 - ROOM) * gpu_bytes
    raise typer.Exit(0 if fits else 1)


@launch_app.command(cls=class_of(SubmitConfig, {"--cluster": "cluster"}, takes_recipe=True, is_composed=True))
def submit(
    context: typer.Context,
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="a file of configs/experiment, or a recipe: sft, pretrain",
            autocompletion=complete_names(list_experiments),
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the script and leave nothing behind")] = False,
) -> None:
    """Submit a run as a Slurm job that checkpoints, requeues and resumes by itself.

    Settings of the job are nodes=N, cluster=NAME (a file of configs/cluster), cluster.KEY=VALUE and run_dir=DIR, which
    resumes a run; all others are those of the recipe.
    """
    from harness.config import Options, compose_config, compose_run
    from harness.launch import check_arguments, plan_job, read_excluded, refuse_second_job, render, submit_job

    own, rest = context.obj
    check_arguments([*own, *rest])
    options = Options.parse(rest, where="harness submit")
    job_settings = compose_config("submit", SubmitConfig, own, config_dir=options.config_dir)
    cluster = job_settings.cluster
    names = [setting.key for setting in explain_settings(SubmitConfig)]
    run = compose_run(experiment, options.overrides, config_dir=options.config_dir, also=names)
    if options.show:
        print(render_settings(job_settings) + render_settings(run.config), end="")
        return
    job = plan_job(
        run.module,
        run.arguments,
        to_plain(run.config),
        nodes=job_settings.nodes,
        cluster=cluster,
        run_dir=job_settings.run_dir,
    )
    # A layout that so many ranks cannot hold is refused here, and not after hours in a queue.
    run.config.check_layout(job_settings.nodes * cluster.ranks_per_node)
    run.config.check_dtypes()
    failed = read_excluded(Path(job.run_dir))
    if failed:
        print(f"left out, because they failed (remove the line to change that): {', '.join(failed)}", file=sys.stderr)
        cluster.exclude = ",".join([*filter(None, [cluster.exclude]), *failed])
    text = render(job, cluster)
    if dry_run:
        print(text, end="")
        print(f"by hand: mkdir -p {job.logs} && sbatch FILE", file=sys.stderr)
        return
    if job_settings.run_dir is not None:
        refuse_second_job(Path(job.run_dir))
    job_id = submit_job(job, text)
    print(f"job {job_id}, script {job.script}")
    print(f"log {job.logs}/{job.name}-{job_id}.out")


@preflight_app.command()
def probe(
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="the run's folder")],
    data: Annotated[list[str] | None, typer.Option(metavar="PATH", help="a dataset of the run; repeatable")] = None,
    weights: Annotated[str | None, typer.Option(metavar="DIR", help="initial weights of the model")] = None,
    live: Annotated[list[str] | None, typer.Option(metavar="DIR", help="folder of live chunks; repeatable")] = None,
    timeout_s: Annotated[float, typer.Option(help="time limit of each check")] = 40.0,
) -> None:
    """Check this node, as one task of a Slurm step with one task a node; prints JSON lines."""
    from harness.launch import place_in_slurm
    from harness.launch.preflight import node_checks, run_checks

    place = place_in_slurm()
    checks = node_checks(place, run_dir=run_dir, data=data or [], weights=weights, live=live or [], timeout_s=timeout_s)
    run_checks(checks, node=place.node, timeout_s=timeout_s)
    # A thread that hangs in the kernel would keep the interpreter from ending.
    os._exit(0)


@preflight_app.command()
def judge(
    nodes: Annotated[str, typer.Option(help="names of the job's nodes, separated by commas")],
    gpus: Annotated[int, typer.Option(help="GPUs of a node")] = 0,
    min_shm_mib: Annotated[int, typer.Option(help="smallest /dev/shm")] = 0,
    min_disk_gib: Annotated[float, typer.Option(help="least free space for the run's folder")] = 0.0,
    max_clock_offset_s: Annotated[float, typer.Option(help="largest offset from the first node")] = float("inf"),
    code: Annotated[str, typer.Option(help="digest of the harness's code and configs")] = "",
    min_inodes: Annotated[int, typer.Option(help="least files that can be created")] = 0,
    min_read_mib_s: Annotated[float, typer.Option(help="lowest rate of reading data")] = 0.0,
    min_node_gb_s: Annotated[float, typer.Option(help="lowest rate of an all-reduce in a node")] = 0.0,
    min_pair_gb_s: Annotated[float, typer.Option(help="lowest rate of an all-reduce of two nodes")] = 0.0,
    min_all_gb_s: Annotated[float, typer.Option(help="lowest rate of an all-reduce of all nodes")] = 0.0,
    min_gemm_tflops: Annotated[float, typer.Option(help="lowest rate of a matrix product")] = 0.0,
    srun: Annotated[Path | None, typer.Option(metavar="FILE", help="errors of the step's `srun --label`")] = None,
    tasks_per_node: Annotated[int, typer.Option(help="tasks of the step on each node")] = 1,
    failed: Annotated[Path | None, typer.Option(metavar="FILE", help="write the nodes to leave out there")] = None,
) -> None:
    """Read the nodes' JSON lines from stdin and name the nodes with problems.

    Exit code 1 if there are any, 3 if the job can run without the nodes that have them.
    """
    from harness.launch.preflight import Limits, culprits, judge_nodes

    limits = Limits(
        gpus,
        min_shm_mib,
        min_disk_gib,
        max_clock_offset_s,
        code,
        min_inodes,
        min_read_mib_s,
        min_node_gb_s,
        min_pair_gb_s,
        min_all_gb_s,
        min_gemm_tflops,
    )
    errors = srun.read_text(errors="replace").splitlines() if srun is not None and srun.exists() else []
    names = nodes.split(",")
    faults, summary = judge_nodes(sys.stdin, names, limits, srun=errors, tasks_per_node=tasks_per_node)
    for fault in faults:
        print(f"preflight: {fault}")
    if not faults:
        print(f"preflight: {summary}")
    without = culprits(faults, names)
    if failed is not None and without:
        failed.write_text("".join(f"{node} {' '.join(what.split())}\n" for node, what in without.items()))
        raise typer.Exit(3)
    raise typer.Exit(1 if faults else 0)


@preflight_app.command()
def reduce(timeout_s: Annotated[float, typer.Option(help="time limit for the ranks to meet")] = 40.0) -> None:
    """All-reduce a tensor over all tasks of a Slurm step, by NCCL on GPUs and by gloo without; prints JSON lines."""
    from harness.launch import place_in_slurm
    from harness.launch.preflight import run_checks

    if "SLURM_PROCID" not in os.environ:
        fix = "start it with srun, as the batch scripts of `harness submit` do"
        raise ConfigError("this is not a task of a Slurm step", where="SLURM_PROCID", fix=fix)
    place, rank = place_in_slurm(), os.environ["SLURM_PROCID"]
    os.environ.update(RANK=rank, WORLD_SIZE=os.environ["SLURM_NTASKS"], LOCAL_RANK=os.environ["SLURM_LOCALID"])

    def check() -> dict[str, Any]:
        from harness.megatron.job import check_all_reduce

        return check_all_reduce(timeout_s=timeout_s)

    run_checks({"all-reduce": check}, node=place.node, rank=int(rank), timeout_s=timeout_s)
    os._exit(0)  # a thread that waits for another rank would keep the interpreter from ending
