"""`harness preflight`: what a batch script asks of its nodes before the first step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

preflight_app = typer.Typer(
    name="preflight",
    help="Ask every node of a job whether training can start on it; batch scripts of `harness submit` do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@preflight_app.command()
def probe(
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="of the run")],
    data: Annotated[list[str] | None, typer.Option(metavar="PATH", help="a dataset that is trained on")] = None,
    weights: Annotated[str | None, typer.Option(metavar="DIR", help="weights that the model begins with")] = None,
    live: Annotated[str | None, typer.Option(metavar="DIR", help="of live chunks")] = None,
    timeout_s: Annotated[float, typer.Option(help="until a check that hangs is told")] = 40.0,
) -> None:
    """Check the node that this runs on, as one task of a Slurm step with one a node; prints JSON lines."""
    from harness.launch import place_in_slurm
    from harness.launch.preflight import node_checks, run_checks

    place = place_in_slurm()
    checks = node_checks(place, run_dir=run_dir, data=data or [], weights=weights, live=live, timeout_s=timeout_s)
    run_checks(checks, node=place.node, timeout_s=timeout_s)
    # A thread that hangs in the kernel would keep the interpreter from ending.
    os._exit(0)


@preflight_app.command()
def judge(
    nodes: Annotated[str, typer.Option(help="of the job, with commas")],
    gpus: Annotated[int, typer.Option(help="of a node")] = 0,
    min_shm_mib: Annotated[int, typer.Option(help="of /dev/shm")] = 0,
    min_disk_gib: Annotated[float, typer.Option(help="free for the run's folder")] = 0.0,
    max_clock_offset_s: Annotated[float, typer.Option(help="from the first node")] = float("inf"),
    code: Annotated[str, typer.Option(help="digest of the harness's code and configs")] = "",
) -> None:
    """Read on stdin what the nodes said and name those that are wrong; exit code 1 where there are any."""
    from harness.launch.preflight import Limits, judge_nodes

    limits = Limits(gpus, min_shm_mib, min_disk_gib, max_clock_offset_s, code)
    findings, right = judge_nodes(sys.stdin, nodes.split(","), limits)
    for finding in findings:
        print(f"preflight: {finding}")
    if not findings:
        print(f"preflight: {right}")
    raise typer.Exit(1 if findings else 0)
