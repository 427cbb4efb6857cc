"""Commands before and at the start of a job: plan, submit, and the preflight checks that batch scripts run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness.checks import bounded, check_numbers
from harness.cli.settings import class_of, complete_names, list_experiments
from harness.errors import ConfigError
from harness.launch import PreflightConfig, SubmitConfig
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


@dataclass
class TimeLimit:
    """Time limit of a step of the preflight.

    Attributes:
        timeout_s: seconds that each check may take, and ranks have to meet.
    """

    timeout_s: float = bounded(40.0, lowest=5, highest=3600)

    def __post_init__(self) -> None:
        check_numbers(self, "cluster.preflight")


@dataclass
class StepLimits:
    """Limits of a step.

    Attributes:
        preflight: its time limit.
    """

    preflight: TimeLimit = field(default_factory=TimeLimit)


@dataclass
class NodeLimits:
    """Requirements on the nodes of a job.

    Attributes:
        gpus_per_node: GPUs of a node; 0 for nodes without GPUs.
        preflight: requirements on every node: its `min_*` and `max_*` settings are used.
    """

    gpus_per_node: int = bounded(0)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)

    def __post_init__(self) -> None:
        check_numbers(self, "cluster")


@dataclass
class LiveFolders:
    """Live data of the run.

    Attributes:
        path: folders of chunks.
    """

    path: list[str] = field(default_factory=list)


@dataclass
class DataFolders:
    """Data of the run.

    Attributes:
        path: datasets.
        live: live data.
    """

    path: list[str] = field(default_factory=list)
    live: LiveFolders = field(default_factory=LiveFolders)


@dataclass
class FirstWeights:
    """Weights that the run starts from.

    Attributes:
        init_from: their folder; null for none.
    """

    init_from: str | None = None


@dataclass
class ProbeSettings:
    """Settings of `harness preflight probe`: those of the run that name what every node has to reach.

    Attributes:
        data: data of the run.
        model: weights of the run.
        cluster: limits of the step.
    """

    data: DataFolders = field(default_factory=DataFolders)
    model: FirstWeights = field(default_factory=FirstWeights)
    cluster: StepLimits = field(default_factory=StepLimits)


@dataclass
class JudgeSettings:
    """Settings of `harness preflight judge`.

    Attributes:
        srun: file with the errors of the step's `srun --label`; null for none.
        failed: file to write the nodes to that the job can leave out; null for none.
        tasks_per_node: tasks of the step on each node.
        code: digest of the harness's code and configs that every node has to have; empty for any.
        cluster: requirements on the nodes.
    """

    srun: str | None = None
    failed: str | None = None
    tasks_per_node: int = bounded(1, lowest=1)
    code: str = ""
    cluster: NodeLimits = field(default_factory=NodeLimits)

    def __post_init__(self) -> None:
        check_numbers(self, "")


@dataclass
class ReduceSettings:
    """Settings of `harness preflight reduce`.

    Attributes:
        cluster: limits of the step.
    """

    cluster: StepLimits = field(default_factory=StepLimits)


# The flags of scripts that earlier versions rendered, and that may wait in a queue.
_PROBE_FLAGS: dict[str, str | int] = {
    "--run-dir": 0,
    "--data": "data.path=",
    "--live": "data.live.path=",
    "--weights": "model.init_from",
}


@preflight_app.command(cls=class_of(ProbeSettings, _PROBE_FLAGS))
def probe(
    context: typer.Context, run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run's folder")]
) -> None:
    """Check this node, as one task of a Slurm step with one task a node; prints JSON lines."""
    from harness.launch import place_in_slurm
    from harness.launch.preflight import node_checks, run_checks

    settings: ProbeSettings = context.obj
    data, timeout_s = settings.data, settings.cluster.preflight.timeout_s
    place = place_in_slurm()
    checks = node_checks(
        place,
        run_dir=run_dir,
        data=data.path,
        weights=settings.model.init_from,
        live=data.live.path,
        timeout_s=timeout_s,
    )
    run_checks(checks, node=place.node, timeout_s=timeout_s)
    # A thread that hangs in the kernel would keep the interpreter from ending.
    os._exit(0)


@preflight_app.command(cls=class_of(JudgeSettings, {"--nodes": 0, "--gpus": "cluster.gpus_per_node"}))
def judge(
    context: typer.Context,
    nodes: Annotated[str, typer.Argument(help="names of the job's nodes, separated by commas")],
) -> None:
    """Read the nodes' JSON lines from stdin and name the nodes with problems.

    Exit code 1 if there are any, 3 if the job can run without the nodes that have them.
    """
    from harness.launch.preflight import Limits, culprits, judge_nodes

    settings: JudgeSettings = context.obj
    required, srun = settings.cluster.preflight, settings.srun
    shared = {limit.name: getattr(required, limit.name) for limit in fields(Limits) if hasattr(required, limit.name)}
    limits = Limits(gpus=settings.cluster.gpus_per_node, code=settings.code, **shared)
    errors = Path(srun).read_text(errors="replace").splitlines() if srun and Path(srun).exists() else []
    names = nodes.split(",")
    faults, summary = judge_nodes(sys.stdin, names, limits, srun=errors, tasks_per_node=settings.tasks_per_node)
    for fault in faults:
        print(f"preflight: {fault}")
    if not faults:
        print(f"preflight: {summary}")
    without = culprits(faults, names)
    if settings.failed and without:
        Path(settings.failed).write_text(
            "".join(f"{node} {' '.join(what.split())}\n" for node, what in without.items())
        )
        raise typer.Exit(3)
    raise typer.Exit(1 if faults else 0)


@preflight_app.command(cls=class_of(ReduceSettings))
def reduce(context: typer.Context) -> None:
    """All-reduce a tensor over all tasks of a Slurm step, by NCCL on GPUs and by gloo without; prints JSON lines."""
    from harness.launch import place_in_slurm
    from harness.launch.preflight import run_checks

    if "SLURM_PROCID" not in os.environ:
        fix = "start it with srun, as the batch scripts of `harness submit` do"
        raise ConfigError("this is not a task of a Slurm step", where="SLURM_PROCID", fix=fix)
    timeout_s = context.obj.cluster.preflight.timeout_s
    place, rank = place_in_slurm(), os.environ["SLURM_PROCID"]
    os.environ.update(RANK=rank, WORLD_SIZE=os.environ["SLURM_NTASKS"], LOCAL_RANK=os.environ["SLURM_LOCALID"])

    def check() -> dict[str, Any]:
        from harness.megatron.job import check_all_reduce

        return check_all_reduce(timeout_s=timeout_s)

    run_checks({"all-reduce": check}, node=place.node, rank=int(rank), timeout_s=timeout_s)
    os._exit(0)  # a thread that waits for another rank would keep the interpreter from ending
