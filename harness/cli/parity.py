"""`harness parity`: baselines, the nights of a matrix, and the nodes of a night. The matrix is `recipes.parity`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harness.parity import ParityReport

parity_app = typer.Typer(
    name="parity",
    help="Hold runs against baselines, follow a matrix over the nights, join the reports of many nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="of the baseline")]
Run = Annotated[Path, typer.Option("--run", metavar="DIR", help="a run with trainer.record_digests=true")]
Baselines = Annotated[Path, typer.Option("--baselines", metavar="DIR", help="where baselines are kept")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="write the report here: JSON, HTML, Markdown, JUnit")
]
_HERE = Path("tests/golden/baselines")


@parity_app.command()
def record(
    name: Name,
    run: Run,
    baselines: Baselines = _HERE,
    loss: Annotated[float, typer.Option(min=0, help="largest relative difference of a loss")] = 1e-5,
    grad_norm: Annotated[float, typer.Option(min=0, help="largest relative difference of a gradient norm")] = 1e-4,
    reason: Annotated[str, typer.Option(help="why these tolerances")] = "other machines and versions round otherwise",
) -> None:
    """Keep a run's digests and losses, with device, versions and tolerances, as a new baseline."""
    from harness.parity import Tolerances
    from harness.parity import record as record_baseline

    print(f"baseline {record_baseline(name, run, baselines, Tolerances(loss, grad_norm, reason))}")


@parity_app.command()
def against(name: Name, run: Run, baselines: Baselines = _HERE, out: Out = None) -> None:
    """Hold a run against a baseline; exit code 1 where it differs, or where there is no such baseline."""
    from harness.parity import against as hold_against
    from harness.parity import command_line

    report = hold_against(name, run, baselines, command=command_line())
    _tell(report, out)
    raise typer.Exit(0 if report.verdict == "same" else 1)


@parity_app.command()
def update(name: Name, run: Run, baselines: Baselines = _HERE, out: Out = None) -> None:
    """Replace a baseline by a run, and say what moved and by how much."""
    from harness.parity import command_line
    from harness.parity import update as update_baseline

    report = update_baseline(name, run, baselines, command=command_line())
    _tell(report, out)
    checks = report.cells[-1].checks
    moved = [check for check in checks if not check.passed]
    for check in moved:
        by = "" if check.largest is None else f" by up to {check.largest:.1e}"
        print(f"{check.name} moved{by}")
    print(f"baseline {name} is this run now: {len(moved)} of {len(checks)} checks moved")


@parity_app.command()
def history(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the nights' reports, in folders of any names")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="where history.html goes; DIR itself")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="of the loss that is followed; the last one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Draw loss, speed and memory over the nights; exit code 1 where the newest night left a band."""
    from harness.parity import read_history
    from harness.parity.pages import render_history

    found = read_history(folder, step=step)
    render_history(found, out or folder)
    latest = found.left_now
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        for metric, night in latest:
            value = "no value" if night.value is None else f"{night.value:g}"
            print(f"{metric.cell}, {metric.name}: {value} left its band, {night.low:g} to {night.high:g}")
        nights = len({night.created for metric in found.metrics for night in metric.nights})
        print(f"{nights} nights, {len(found.metrics)} metrics, {len(latest)} out of their band in the newest night")
        print(f"page {(out or folder) / 'history.html'}")
    raise typer.Exit(1 if latest else 0)


@parity_app.command()
def summarise(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="one a node, with its report in it or below")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where the one report goes")] = Path("runs/summary"),
) -> None:
    """Join the reports of many nodes into one; exit code 1 where a node found a difference, or has no report."""
    from harness.parity import command_line
    from harness.parity import summarise as join_reports

    report = join_reports(folders, command=command_line())
    _tell(report, out)
    raise typer.Exit(0 if report.verdict == "same" else 1)


def _tell(report: ParityReport, out: Path | None) -> None:
    import sys

    from rich.console import Console

    from harness.errors import ConfigError
    from harness.parity import REPORT_FILE, show, write_report
    from harness.parity.pages import render_all

    console = Console() if sys.stdout.isatty() else Console(width=200)
    show(report, console)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_report(report, out / REPORT_FILE)
            render_all(report, out)
        except OSError as error:
            raise ConfigError(
                f"the report cannot be written: {error.strerror}", where=str(out), fix="name another folder: --out"
            ) from error
        console.print(f"report {out / 'report.html'}", soft_wrap=True, highlight=False)
