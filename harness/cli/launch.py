"""Commands before a job: models, plan and submit."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.checks import CheckedSettings, bounded
from harness.cli.settings import AsJson, argument, class_of, list_experiments, option, print_json, require_training
from harness.errors import ConfigError, os_errors_as
from harness.launch.cluster import SubmitConfig
from harness.printing import count_of, open_console, print_line, print_text
from harness.settings import explain_settings, render_settings
from harness.tables import Table

if TYPE_CHECKING:
    from harness.arguments import Options
    from harness.plan import RunConfig
    from harness.plan.catalog import ModelReport
    from harness.plan.run_plan import RunPlan
    from harness.plan.search import LayoutSearch

launch_app = typer.Typer()
# Of a search for settings that name no data; layouts compare alike for any number.
_ASSUMED_PACKS = 100_000


@dataclass
class AssumedData(CheckedSettings, section="data"):
    """Packs that do not exist yet.

    Attributes:
        pack_size: number of tokens in each pack.
    """

    pack_size: int = bounded(8192, lowest=2)


@dataclass
class PlanSettings(CheckedSettings):
    """Settings of `harness plan`; `parallel.ranks` of the recipe is the number of GPUs of all nodes, 8 by default.

    Attributes:
        gpu_gib: memory of a GPU in GiB; the exit code is 1 if the run does not fit. Null skips the check.
        peak_tflops: dense peak of a GPU in TFLOP/s; the default is that of an H100 in bfloat16.
        mfu: measured model FLOPs utilization; null estimates it.
        node_gb_s: bandwidth in GB/s, in each direction, of collectives between the GPUs of a node (`harness
            preflight`).
        port_gb_s: bandwidth in GB/s, in each direction, of collectives over the network port of each GPU.
        gpus_per_node: number of GPUs per node.
        file_system_gb_s: total rate in GB/s at which the ranks write a checkpoint; null omits its time.
        packs: number of packs of `data.pack_size`; null uses the dataset of the settings, or 100,000 packs in a search.
        sequence_tokens: number of tokens in each conversation of these packs.
        expert_load: number of tokens on the rank with the busiest experts, relative to an even distribution. The report
            of a run shows the load per expert, which is higher than that of a rank with several experts.
        top: number of layouts that `harness plan auto` lists.
        waves: PNG file for a picture of a batch: the ranks that share each row over the time of a step, and the work of
            every rank; null draws none.
        rehearse: also build the first, middle and last rank of the job on this machine at a small width, and train each
            for one step without the others. Requires the extra `train`, but no GPU.
    """

    gpu_gib: float | None = bounded(80, above=0, highest=1_000_000)
    peak_tflops: float = bounded(989, above=0, highest=1_000_000_000)
    mfu: float | None = bounded(None, above=0, highest=1)
    node_gb_s: float = bounded(340, above=0, highest=1_000_000)
    port_gb_s: float = bounded(40, above=0, highest=1_000_000)
    gpus_per_node: int = bounded(8, lowest=1, highest=1_000_000)
    file_system_gb_s: float | None = bounded(None, above=0, highest=1_000_000_000)
    packs: int | None = bounded(None, lowest=1, highest=10**12)
    sequence_tokens: int = bounded(1024, lowest=2)
    expert_load: float = bounded(1.0, lowest=1, highest=1_000_000)
    top: int = bounded(10, lowest=1, highest=1_000_000)
    waves: str | None = None
    rehearse: bool = False
    data: AssumedData = field(default_factory=AssumedData)


@launch_app.command()
def models(
    model: Annotated[str | None, argument("[MODEL]", "folder, or name on the Hub")] = None, as_json: AsJson = False
) -> None:
    """List the supported families of models, or check whether MODEL is supported; exit code 1 if it is not.

    Only the config.json of MODEL is read.
    """
    from harness.plan.catalog import REFUSED_FEATURES, describe_model, list_families, list_missing

    if model is not None:
        report = describe_model(model)
        if as_json:
            print_json(asdict(report))
        else:
            _print_model(report)
        raise typer.Exit(1 if report.refusals else 0)
    families, missing = list_families(), list_missing()
    if as_json:
        print_json({"families": families, "refused": missing, "features": REFUSED_FEATURES})
        return
    console = open_console(width=120)
    rows = [[text if isinstance(text, str) else ", ".join(text) for text in one.values()] for one in families]
    head = ("family (model_type)", "architecture", "presets (model=NAME)", "in addition to Llama's layers")
    console.print(Table(head, rows).to_terminal())
    print_line("")
    refused = [(", ".join(names), need) for need, names in missing.items()]
    console.print(Table(("refused model_type", "what these models need"), refused).to_terminal())
    print_line("")
    print_text("refused in every family:\n" + "\n".join(f"  {feature}" for feature in REFUSED_FEATURES))
    print_line("`harness models MODEL` checks the config.json of a folder or of a model on the Hugging Face Hub")


def _print_model(report: ModelReport) -> None:
    named = f"model_type {report.model_type}" + (f", {report.architecture}" if report.architecture else "")
    if report.refusals:
        print_line(f"{report.model} ({named}) cannot be trained:")
        for refusal in report.refusals:
            print_line(f"  {refusal}")
        print_line("`harness models` lists the families that can")
        return
    print_line(f"{report.model} ({named}) can be trained: model.init_from={report.model}")
    active = f", {report.active_parameters / 1e9:,.2f} B of them for each token"
    has_idle = report.active_parameters < report.parameters
    print_line(f"  {report.parameters / 1e9:,.2f} B parameters" + active * has_idle)
    for name, value in report.settings.items():
        print_line(f"  model.{name}={value if isinstance(value, str) else json.dumps(value)}")
    if report.mtp_layers:
        print_line(f"  multi-token prediction layers: {report.mtp_layers}, trained with model.mtp_layers=1 or more")


@launch_app.command(cls=class_of(PlanSettings, takes_recipe=True))
def plan(
    context: typer.Context,
    experiment: Annotated[
        str,
        argument(
            "EXPERIMENT",
            "a file of configs/experiment, or sft; auto to search layouts",
            names=lambda: ["auto", *list_experiments()],
        ),
    ],
) -> None:
    """Estimate memory, time, MFU, microbatches and checkpoint sizes of a run, without a GPU.

    `harness plan auto model=llama3_8b parallel.ranks=8` lists the layouts of a model that fit, fastest first.
    """
    from harness.config import compose_run
    from harness.plan import SftConfig
    from harness.plan.run_plan import AssumedPacks, plan_run
    from harness.plan.search import search_layouts
    from harness.plan.work import Machine

    settings: PlanSettings = context.obj[0]
    options: Options = context.obj[1]
    names = [setting.key for setting in explain_settings(PlanSettings)]
    searches = experiment == "auto"
    recipe = "sft" if searches else experiment
    command = f"{context.command_path} {experiment}"
    config = compose_run(recipe, options.overrides, config_dir=options.config_dir, command=command, also=names).config
    if options.show:
        print_text(render_settings(settings) + render_settings(config), end="")
        return
    usual = SftConfig().data
    names_data = not isinstance(config, SftConfig) or config.data != usual or Path(usual.path).exists()
    assumes_data = searches and settings.packs is None and not names_data
    _refuse_unused(settings, searches=searches, reads_data=settings.packs is None and not assumes_data)
    gpu_bytes = settings.gpu_gib and settings.gpu_gib * 2**30
    num_packs = _ASSUMED_PACKS if assumes_data else settings.packs
    inputs: dict[str, Any] = {
        "machine": Machine(
            peak_flops=settings.peak_tflops * 1e12,
            node_bytes_per_s=settings.node_gb_s * 1e9,
            fabric_bytes_per_s=settings.port_gb_s * 1e9,
            ranks=settings.gpus_per_node,
        ),
        "packs": num_packs and AssumedPacks(num_packs, settings.data.pack_size, settings.sequence_tokens),
        "expert_load": settings.expert_load,
    }
    if searches:
        _print_layouts(search_layouts(config, gpu_bytes=gpu_bytes, **inputs), settings, gpu_bytes, assumes_data, inputs)
        return
    planned = plan_run(config, mfu=settings.mfu, places=settings.waves is not None, **inputs)
    file_system = settings.file_system_gb_s and settings.file_system_gb_s * 1e9
    open_console().print(planned.render(gpu_bytes=gpu_bytes, file_system_bytes_per_s=file_system))
    fits = planned.memory.fits(gpu_bytes)
    if gpu_bytes is not None and not fits:
        _suggest(config, planned.ranks, gpu_bytes, settings.mfu, inputs)
    _draw_waves(planned, settings.waves)
    if settings.rehearse:
        _rehearse(config, planned.ranks)
    raise typer.Exit(0 if fits else 1)


def _suggest(
    config: RunConfig, ranks: int, gpu_bytes: float, mfu: float | None, inputs: dict[str, Any], layout: str = ""
) -> None:
    """Print settings with which a run that does not fit does: savings, adapters, and without a layout the fastest."""
    from harness.plan.run_plan import plan_run
    from harness.plan.search import search_layouts, suggest_settings

    print_line("searching for settings and layouts that fit ...", file=sys.stderr)
    fit = suggest_settings(config, lambda run: plan_run(run, ranks=ranks, mfu=mfu, **inputs).memory.fits(gpu_bytes))
    lines = [f"{layout} {line}".strip() for line in fit]
    with suppress(ConfigError):  # of data that is not here
        divided = replace(config, parallel=replace(config.parallel, ranks=ranks))
        found = [] if layout else search_layouts(divided, gpu_bytes=gpu_bytes, **inputs).fitting
        lines += [shlex.join(one.overrides) for one in found[:1]]
    for line in lines:
        print_line(f"it fits with: {line}")
    if not lines:
        print_line("no memory savings or layout fits these ranks: use more ranks, shorter rows or a smaller model")


def _print_layouts(
    found: LayoutSearch, settings: PlanSettings, gpu_bytes: float | None, assumes_data: bool, inputs: dict[str, Any]
) -> None:
    open_console(width=140).print(found.render(gpu_bytes=gpu_bytes, top=settings.top))
    if assumes_data:
        print_line(
            f"assumed: packs of {settings.data.pack_size:,} tokens in conversations of {settings.sequence_tokens:,}; "
            "set data.pack_size and sequence_tokens, or data.path"
        )
    for note in found.smallest.plan.notes:
        print_line(f"assumed: {note}")
    if not found.fitting and gpu_bytes is not None:
        one = found.smallest
        print_text(f"no layout fits: the smallest needs {one.plan.memory.explain(gpu_bytes)}")
        _suggest(one.config, one.plan.ranks, gpu_bytes, settings.mfu, inputs, shlex.join(one.overrides))
        raise typer.Exit(1)
    best = found.fitting[0]
    print_line(f"the fastest: {shlex.join(best.overrides)}")
    if best.plan.parts["context"] > 0.02 * best.plan.step_s:
        print_line("schedule=dynamic_context shares only long sequences; `harness plan` compares it with that layout")


def _refuse_unused(settings: PlanSettings, *, searches: bool, reads_data: bool) -> None:
    names = ("mfu", "rehearse", "waves", "file_system_gb_s") if searches else ("top",)
    reasons = dict.fromkeys(names, "`harness plan auto` lists layouts" if searches else "one layout is planned")
    if reads_data:
        why = "packs is not set: the sequences of the dataset are planned"
        reasons |= {"sequence_tokens": why, "data.pack_size": why}
    default = PlanSettings()
    for name, reason in reasons.items():
        value, usual = (attrgetter(name)(one) for one in (settings, default))
        if value != usual:
            raise ConfigError(f"{reason}, and {name} would have no effect", where=f"{name}={value}", fix="omit it")


def _draw_waves(planned: RunPlan, path: str | None) -> None:
    if path is None:
        return
    if planned.batch is None:
        what = planned.why_no_work or "schedule=as_packed trains packs as they are"
        raise ConfigError(f"no batch can be drawn: {what}", where=f"waves={path}", fix="omit it")
    with os_errors_as(ConfigError, "the picture cannot be written", where=path, fix="specify a PNG file in a folder"):
        planned.batch.draw(Path(path))
    print_line(f"a batch on its ranks: {path}")


def _rehearse(config: RunConfig, world_size: int) -> None:
    require_training("a rehearsal")
    from harness.megatron import prepare_process

    prepare_process()
    from harness.megatron.run.rehearsal import rehearse

    print_line(f"rehearsal at a small width on a CPU, of {count_of(world_size, 'rank')} one at a time:")
    sizes: dict[str, Any] = {"world_size": world_size, "shares_rows": config.shares_rows}
    for done in rehearse(config.model, config.parallel, optimizer=config.optimizer, **sizes):
        print_line(f"  {done.describe()}", flush=True)


@launch_app.command(cls=class_of(SubmitConfig, takes_recipe=True, is_composed=True))
def submit(
    context: typer.Context,
    experiment: Annotated[
        str, argument("EXPERIMENT", "a file of configs/experiment, or a recipe: sft, pretrain", names=list_experiments)
    ],
    dry_run: Annotated[bool, option("--dry-run", "print the script without submitting it")] = False,
) -> None:
    """Submit a run as a Slurm job that checkpoints, requeues and resumes automatically.

    Settings of the job are nodes=N, cluster=NAME (a file of configs/cluster), cluster.KEY=VALUE and run_dir=DIR, which
    resumes a run; all others are those of the recipe.
    """
    from harness.config import compose_config, compose_run
    from harness.launch.queue import read_excluded
    from harness.launch.script import render
    from harness.launch.submit import check_arguments, plan_job, refuse_second_job, submit_job
    from harness.plan.search import check_memory

    own, options = context.obj
    check_arguments([*own, *options.overrides])
    job_settings = compose_config("submit", SubmitConfig, own, config_dir=options.config_dir)
    cluster = job_settings.cluster
    names = [setting.key for setting in explain_settings(SubmitConfig)]
    command = f"{context.command_path} {experiment}"
    run = compose_run(experiment, options.overrides, config_dir=options.config_dir, command=command, also=names)
    if options.show:
        print_text(render_settings(job_settings) + render_settings(run.config), end="")
        return
    nodes, run_dir = job_settings.nodes, job_settings.run_dir
    job = plan_job(run.module, run.arguments, run.config, nodes=nodes, cluster=cluster, run_dir=run_dir)
    # What so many ranks, or their GPUs, cannot hold is refused here, and not after hours in a queue.
    ranks = nodes * cluster.ranks_per_node
    run.config.check(ranks)
    if cluster.gpus_per_node and cluster.gpu_gib is not None:
        check_memory(run.config, ranks, gpu_gib=cluster.gpu_gib)
    failed = read_excluded(Path(job.run_dir))
    if failed:
        excluded = f"excluded because they failed (remove the line to include them): {', '.join(failed)}"
        print_line(excluded, file=sys.stderr)
        # Checked as what the user wrote is: anybody may have written the file.
        cluster = replace(cluster, exclude=",".join([*filter(None, [cluster.exclude]), *failed]))
    text = render(job, cluster)
    if dry_run:
        print_text(text, end="")
        print_line(f"to submit it: mkdir -p {job.logs} && sbatch FILE", file=sys.stderr)
        return
    if run_dir is not None:
        refuse_second_job(Path(job.run_dir))
    job_id = submit_job(job, text, is_private=bool(cluster.env))
    print_line(f"job {job_id}, script {job.script}")
    print_line(f"log {job.logs}/{job.name}-{job_id}.out")
