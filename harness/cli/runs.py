"""The commands of `harness` that are about runs: what one takes, its job, its end, its weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness.cli.preflight import preflight_app
from harness.errors import ConfigError

# Its commands stand beside those of `harness.cli.app`, under no name of their own.
runs_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@runs_app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help="a run's folder, or one of its checkpoints")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a new folder")],
    adapter: Annotated[bool, typer.Option("--adapter", help="LoRA's adapters alone, as peft loads them")] = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads: weights, config.json, and the data's tokenizer."""
    from harness.megatron import prepare_process

    prepare_process()
    from harness.megatron import export_checkpoint as export_weights

    done = export_weights(source, out, adapters_only=adapter)
    print(f"{out}: {done.num_weights:,} weights of step {done.step}, {done.num_bytes / 1e9:,.3f} GB")
    if not done.has_tokenizer:
        print("  without a tokenizer: the run's data does not name one, or is not on this machine")


@runs_app.command()
def plan(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="a file of configs/experiment, or sft")],
    overrides: Annotated[list[str] | None, typer.Argument(help="settings of the recipe")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="GPUs of all nodes together; the experiment's own number, or 8")
    ] = None,
    gpu_gib: Annotated[float | None, typer.Option(help="memory of a GPU: exit code 1 where the run does not fit")] = 80,
    peak_tflops: Annotated[float, typer.Option(help="of a GPU, dense; 989 is an H100's in bfloat16")] = 989,
    mfu: Annotated[
        float | None, typer.Option(help="share of the peak that training reaches, as measured; estimated without")
    ] = None,
    packs: Annotated[int | None, typer.Option(min=1, help="plan for so many packs, and not for the dataset")] = None,
    pack_size: Annotated[int, typer.Option(min=2, help="their tokens")] = 8192,
    sequence_tokens: Annotated[int, typer.Option(min=2, help="of each conversation in them")] = 1024,
) -> None:
    """Say what a run would take, before anyone books a node: memory, microbatches, tokens, MFU, time."""
    from harness.config import CONFIGS
    from harness.launch import recipe_settings
    from harness.plan import ROOM, AssumedPacks, Machine, plan_run

    if mfu is not None and not 0 < mfu <= 1:
        raise ConfigError(f"an MFU of {mfu:g}", where="--mfu", fix="a share above 0, at most 1")
    is_file = (CONFIGS / "experiment" / f"{experiment}.yaml").exists()
    module = "recipes.sft" if is_file else f"recipes.{experiment}"
    named = [f"experiment={experiment}"] if is_file else []
    settings = recipe_settings(module, [*named, *(overrides or [])])
    planned = plan_run(
        settings,
        ranks=ranks,
        machine=Machine(peak_flops=peak_tflops * 1e12),
        mfu=mfu,
        packs=None if packs is None else AssumedPacks(packs, pack_size, sequence_tokens),
    )
    gpu_bytes = None if gpu_gib is None else gpu_gib * 2**30
    Console(soft_wrap=True).print(planned.render(gpu_bytes=gpu_bytes))
    fits = gpu_bytes is None or planned.memory.total <= (1 - ROOM) * gpu_bytes
    raise typer.Exit(0 if fits else 1)


@runs_app.command()
def chat(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder, a checkpoint, or an exported model")],
    prompt: Annotated[str | None, typer.Option(help="ask this alone; without it, ask in the terminal")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="of one answer")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token")] = 0.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
) -> None:
    """Talk to the model of a run."""
    from harness.megatron import prepare_process

    prepare_process()
    from harness.megatron import Chat, exported, talk

    with exported(source) as folder:
        conversation = Chat(folder, max_tokens=max_tokens, temperature=temperature, seed=seed)
        if prompt is None:
            talk(conversation)
        else:
            print(conversation.answer(prompt))


@runs_app.command()
def requeue(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run's folder")],
    exit_code: Annotated[int, typer.Option(help="that the run ended with")],
    max_same: Annotated[int, typer.Option(min=1, help="tries that may fail in the same way at the same step")] = 3,
) -> None:
    """Note how a run ended, and say whether to start it again: exit code 0 for yes, 1 for no."""
    from harness.train import decide

    if not run_dir.is_dir():
        raise ConfigError("there is no such run", where=str(run_dir), fix="name the run's folder")
    decision = decide(run_dir, exit_code=exit_code, max_same=max_same)
    print(f"{run_dir}: {decision.message}")
    raise typer.Exit(0 if decision.requeue else 1)


@preflight_app.command()
def reduce(timeout_s: Annotated[float, typer.Option(help="until ranks that do not meet are told")] = 40.0) -> None:
    """Add up a tensor over all tasks of a Slurm step, by NCCL on GPUs and by gloo without; prints JSON lines."""
    from harness.launch import place_in_slurm
    from harness.launch.preflight import run_checks

    place, rank = place_in_slurm(), os.environ["SLURM_PROCID"]
    os.environ.update(RANK=rank, WORLD_SIZE=os.environ["SLURM_NTASKS"], LOCAL_RANK=os.environ["SLURM_LOCALID"])

    def check() -> dict[str, Any]:
        from harness.megatron.job import check_all_reduce

        return check_all_reduce(timeout_s=timeout_s)

    run_checks({"all-reduce": check}, node=place.node, rank=int(rank), timeout_s=timeout_s)
    os._exit(0)  # a thread that waits for another rank would keep the interpreter from ending


@runs_app.command()
def submit(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="a file of configs/experiment, or a recipe: sft, pretrain")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SETTING=VALUE]...", help="of the recipe; cluster.X of the cluster")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    cluster: Annotated[str, typer.Option(help="a file of configs/cluster")] = "local_cpu",
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="go on with this run, on any number of nodes")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the script and leave nothing behind")] = False,
) -> None:
    """Start a run as a Slurm job that checkpoints, requeues and resumes by itself."""
    from harness.config import CONFIGS, compose_config
    from harness.launch import SubmitConfig, plan_job, render, split_overrides, submit_job

    of_cluster, of_recipe = split_overrides(overrides or [])
    shown = "configs/cluster has a file a cluster, harness/launch/cluster.py says what each setting means"
    chosen = compose_config("submit", SubmitConfig, [f"cluster={cluster}", *of_cluster], fix=shown).cluster
    experiments = CONFIGS / "experiment"
    job = plan_job(experiment, of_recipe, nodes=nodes, cluster=chosen, experiments=experiments, run_dir=run_dir)
    text = render(job, chosen)
    if dry_run:
        print(text, end="")
        print(f"by hand: mkdir -p {job.logs} && sbatch FILE", file=sys.stderr)
        return
    done = submit_job(job, text)
    print(f"job {done.job_id}, script {done.script}")
    print(f"log {job.logs}/{job.name}-{done.job_id}.out")
