"""`harness parity`: the matrix of `recipes.parity`, baselines, the nights of a matrix, and the nodes of a night."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from harness.cli.runs import recipe_entry
from harness.cli.settings import class_of
from harness.parity.compare import Tolerances
from harness.printing import open_console, print_line

if TYPE_CHECKING:
    from harness.parity import ParityReport

_BASELINES = "tests/golden/baselines"
_MATRIX = "matrix"


class _ParityGroup(TyperGroup):
    """Commands of which the matrix, the main one, needs no name: `harness parity check=layouts`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names_command = bool(args) and (args[0] == "--help" or not {"=", "-"} & set(args[0]))
        unparsed: list[str] = super().parse_args(ctx, args if names_command else [_MATRIX, *args])
        return unparsed


parity_app = typer.Typer(
    cls=_ParityGroup,
    help="Prove that other settings train the same: `harness parity check=layouts` runs the matrix, and "
    "`harness parity --cfg` prints its settings. Further commands compare runs with baselines, follow a matrix over "
    "the nights, and join the reports of many nodes.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="of the baseline")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run with trainer.record_digests=true")]


def _wide() -> Tolerances:
    return Tolerances(1e-5, 1e-4, "other machines and versions round otherwise")


@dataclass
class RecordSettings:
    """Settings of `harness parity record`.

    Attributes:
        baselines: folder of the baselines.
        tolerances: kept with the baseline, for later runs.
    """

    baselines: str = _BASELINES
    tolerances: Tolerances = field(default_factory=_wide)


@dataclass
class CompareSettings:
    """Settings of `harness parity against` and `harness parity update`.

    Attributes:
        baselines: folder of the baselines.
        out: folder to write the report to, as JSON, HTML, Markdown and JUnit; null for none.
    """

    baselines: str = _BASELINES
    out: str | None = None


@dataclass
class SummarizeSettings:
    """Settings of `harness parity summarize`.

    Attributes:
        out: folder of the joined report.
    """

    out: str = "runs/summary"


@parity_app.command(
    name=_MATRIX, hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
def matrix(arguments: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None) -> None:
    """Run the matrix; the same as `python -m harness.recipes.parity`."""
    recipe_entry("parity")(arguments or [])


@parity_app.command(cls=class_of(RecordSettings))
def record(context: typer.Context, name: Name, run: Run) -> None:
    """Keep a run's digests and losses, with device, versions and tolerances, as a new baseline."""
    from harness import parity

    settings: RecordSettings = context.obj
    print_line(f"baseline {parity.record(name, run, Path(settings.baselines), settings.tolerances)}")


@parity_app.command(cls=class_of(CompareSettings))
def against(context: typer.Context, name: Name, run: Run) -> None:
    """Compare a run with a baseline; exit code 1 where it differs, or where there is no such baseline."""
    from harness import parity

    report = parity.against(name, run, Path(context.obj.baselines), command=parity.command_line())
    _show(report, context.obj.out)
    raise typer.Exit(0 if report.verdict == "same" else 1)


@parity_app.command(cls=class_of(CompareSettings))
def update(context: typer.Context, name: Name, run: Run) -> None:
    """Replace a baseline by a run, and report what moved and by how much."""
    from harness import parity

    report = parity.update(name, run, Path(context.obj.baselines), command=parity.command_line())
    _show(report, context.obj.out)
    checks = report.cells[-1].checks
    moved = [check for check in checks if not check.passed]
    for check in moved:
        by = "" if check.largest is None else f" by up to {check.largest:.1e}"
        print_line(f"{check.name} moved{by}")
    print_line(f"baseline {name} is this run now: {len(moved)} of {len(checks)} checks moved")


@parity_app.command(cls=class_of(SummarizeSettings))
def summarize(
    context: typer.Context,
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="one per node, its report in it or below")],
) -> None:
    """Join the reports of many nodes into one; exit code 1 where a node found a difference, or has no report."""
    from harness import parity

    report = parity.summarize(folders, command=parity.command_line())
    _show(report, context.obj.out)
    raise typer.Exit(0 if report.verdict == "same" else 1)


def _show(report: ParityReport, out: str | None) -> None:
    from harness.parity.pages import publish

    publish(report, open_console(width=200), None if out is None else Path(out))
