"""`harness compare`, and `harness parity`: the matrix of `recipes.parity`, and baselines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from harness.checks import CheckedSettings, bounded
from harness.cli.runs import recipe_entry
from harness.cli.settings import AsJson, argument, class_of, print_json
from harness.errors import ConfigError, HarnessError, os_errors_as
from harness.parity.compare import CurveDifference, RunComparison, Tolerances, relative_difference
from harness.printing import count_of, open_console, print_line
from harness.tables import Table

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
    help="Prove that other settings give the same losses: `harness parity check=layouts` trains and compares "
    "many layouts, and `harness parity --cfg` prints the settings. The commands compare runs with baselines.",
)
compare_app = typer.Typer()
Name = Annotated[str, argument("NAME", "name of the baseline")]
Run = Annotated[Path, argument("RUN", "folder of a run with trainer.record_digests=true")]


@dataclass
class RecordSettings:
    """Settings of `harness parity record`.

    Attributes:
        baselines: folder of the baselines.
        tolerances: tolerances to store with the baseline for later runs.
    """

    baselines: str = _BASELINES
    tolerances: Tolerances = field(
        default_factory=partial(Tolerances, 1e-5, 1e-4, "other machines and versions round differently")
    )


@dataclass
class CompareSettings:
    """Settings of `harness parity against` and `harness parity update`.

    Attributes:
        baselines: folder of the baselines.
        out: folder for the report in JSON, HTML and JUnit format; null writes none.
    """

    baselines: str = _BASELINES
    out: str | None = None


@parity_app.command(
    name=_MATRIX, hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
def matrix(arguments: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None) -> None:
    """Train the cases of a check and compare them; the same as `python -m harness.recipes.parity`."""
    recipe_entry("parity")(arguments or [])


@parity_app.command(cls=class_of(RecordSettings))
def record(context: typer.Context, name: Name, run: Run) -> None:
    """Store a run's digests and losses, with device, versions and tolerances, as a new baseline."""
    from harness import parity

    settings: RecordSettings = context.obj
    print_line(f"baseline {parity.record(name, run, Path(settings.baselines), settings.tolerances)}")


@parity_app.command(cls=class_of(CompareSettings))
def against(context: typer.Context, name: Name, run: Run) -> None:
    """Compare a run with a baseline; exit code 1 if it differs, or if there is no such baseline."""
    from harness import parity

    report = parity.against(name, run, Path(context.obj.baselines), command=parity.command_line())
    _show(report, context.obj.out)
    raise typer.Exit(0 if report.verdict == "same" else 1)


@parity_app.command(cls=class_of(CompareSettings))
def update(context: typer.Context, name: Name, run: Run) -> None:
    """Replace a baseline with a run, and print which checks changed, and by how much."""
    from harness import parity

    report = parity.update(name, run, Path(context.obj.baselines), command=parity.command_line())
    _show(report, context.obj.out)
    checks = report.cells[-1].checks
    moved = [check for check in checks if not check.passed]
    for check in moved:
        by = "" if check.largest is None else f" by up to {check.largest:.1e}"
        print_line(f"{check.name} changed{by}")
    print_line(f"baseline {name} was replaced with this run: {len(moved)} of {count_of(len(checks), 'check')} changed")


@dataclass
class CompareRunsSettings(CheckedSettings):
    """Settings of `harness compare`.

    Attributes:
        out: PNG file for the curves of all runs.
        tolerance: maximum relative difference of a loss or validation loss at any step. The default is several times
            the noise measured between layouts on a CPU in float32; use 1e-5 on GPUs, and 0 to require bit-identical
            losses.
    """

    out: str = "compare.png"
    tolerance: float = bounded(Tolerances().loss, lowest=0, highest=1, key="tolerance.loss")


@compare_app.command(cls=class_of(CompareRunsSettings))
def compare(
    context: typer.Context,
    runs: Annotated[list[Path], argument("RUN RUN...", "folders of two or more runs")],
    as_json: AsJson = False,
) -> None:
    """Compare the loss curves of runs with those of the first; exit code 1 if a loss differs.

    Prints the differences over the common steps and the settings that differ, and plots all curves. The runs may still
    be training.
    """
    from harness.parity.compare import compare_curves, read_curves
    from harness.storage import write_atomically
    from harness.train.metrics import draw_runs

    settings: CompareRunsSettings = context.obj
    if len(runs) < 2:
        raise ConfigError("one run cannot be compared", where=str(runs[0]), fix=f"harness compare {runs[0]} OTHER")
    reference, *others = map(read_curves, runs)
    compared = [compare_curves(reference, run, tolerance=settings.tolerance) for run in others]
    plot = draw_runs({run.name: run.steps for run in (reference, *others)}, title="loss of runs")
    with os_errors_as(HarnessError, "the plot cannot be written", where=settings.out, fix="set out= to another file"):
        write_atomically(Path(settings.out), plot)
    if as_json:
        plain = [{**asdict(one), "is_same": one.first is None} for one in compared]
        # JSON has no NaN and no infinity.
        print_json(json.loads(json.dumps({"plot": settings.out, "runs": plain}), parse_constant=lambda _: None))
    else:
        for one in compared:
            _print_comparison(one, tolerance=settings.tolerance)
        print_line(f"curves: {settings.out}")
    raise typer.Exit(0 if all(one.first is None for one in compared) else 1)


def _print_comparison(compared: RunComparison, *, tolerance: float) -> None:
    steps, both = compared.curves[0].steps, ("reference", "run")  # their names can be wider than a terminal
    console = open_console(width=100)
    print_line(
        f"{compared.run} compared with {compared.reference} over {count_of(len(steps), 'step')}, "
        f"{steps[0]} to {steps[-1]}; relative differences:"
    )
    head = ("curve", *both, "at step", "largest", "at step", "mean")
    console.print(Table(head, [_row(curve) for curve in compared.curves], "lrrrrrr").to_terminal())
    if compared.settings:
        differing = compared.settings.items()
        rows = [(name, *("null" if value is None else str(value) for value in values)) for name, values in differing]
        console.print(Table(("different setting", *both), rows).to_terminal())
    if compared.other_data is None:
        print_line("data: every common step has the same numbers of tokens and packs")
    else:
        print_line(f"data: from step {compared.other_data:,} on, steps have different numbers of tokens or packs")
    if (curve := compared.first) is None:
        print_line(f"same: no loss has a relative difference above {tolerance:g}")
        return
    assert curve.first is not None
    step, before, after = curve.first
    size = relative_difference(before, after)
    print_line(
        f"different: {curve.curve} first differs at step {step:,}: {before!r} and {after!r}, a relative difference of "
        f"{size:.1e} with a tolerance of {tolerance:g}"
    )


def _row(curve: CurveDifference) -> list[str]:
    values = [f"{value:.4f}" for value in curve.last]
    largest = [f"{curve.largest:.1e}", f"{curve.largest_step:,}", f"{curve.mean:.1e}"]
    return [curve.curve, *values, f"{curve.steps[-1]:,}", *largest]


def _show(report: ParityReport, out: str | None) -> None:
    from harness.parity.pages import publish

    publish(report, open_console(width=200), None if out is None else Path(out))
