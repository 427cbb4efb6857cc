"""`harness bench NAME [KEY=VALUE]...`: measure this machine, as tables and as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.bench import BENCHES
from harness.bench.sizes import Sizes
from harness.checks import require_choice
from harness.cli.settings import argument, option, parse_settings
from harness.errors import ConfigError, HarnessError, os_errors_as
from harness.printing import count_of, open_console, print_line, print_text
from harness.settings import explain_settings, to_yaml

if TYPE_CHECKING:
    from harness.bench.figures import BenchReport, Progress

_LOG_COLUMNS = 110
_LIST = "\n\n".join(f"{name}: {bench.about}" for name, bench in BENCHES.items())
HELP = f"""Measure speed on this machine, mostly as ratios within one run.

{_LIST}

`harness bench NAME --cfg` prints the settings of a benchmark."""


def run_bench(
    name: Annotated[str, argument("NAME", ", ".join(BENCHES), show_default=False)],
    settings: Annotated[list[str] | None, argument("[KEY=VALUE]...", "benchmark sizes")] = None,
    quick: Annotated[
        bool, option("--quick", "small sizes that take a few seconds, to check the benchmark itself")
    ] = False,
    as_json: Annotated[bool, option("--json", "print JSON for programs instead of tables")] = False,
    save: Annotated[Path | None, option("--save", "write the JSON to this file too", metavar="FILE")] = None,
    check: Annotated[bool, option("--check", "exit with code 1 if a target is missed")] = False,
    folder: Annotated[Path | None, option("--dir", "folder for the data (default: the temporary folder)")] = None,
    keep: Annotated[bool, option("--keep", "keep the data in --dir, and reuse data that is there")] = False,
    show: Annotated[bool, option("--cfg", "print the settings without measuring")] = False,
) -> None:
    require_choice(name, BENCHES, setting="harness bench")
    chosen, command = BENCHES[name], f"harness bench {name}"
    words = [f"path={word}" if "path" in chosen.full and "=" not in word else word for word in settings or []]
    sizes = parse_settings(Sizes, words, command=command, base=chosen.sizes(quick=quick))
    if unknown := [word for word in words if word.partition("=")[0] not in chosen.full]:
        raise ConfigError(f"{name} has no setting {unknown[0]}", where=command, fix=f"use {', '.join(chosen.full)}")
    if show:
        for setting in (one for one in explain_settings(Sizes) if one.key in chosen.full):
            print_text(f"# {setting.text}\n{to_yaml({setting.key: getattr(sizes, setting.key)})}", end="")
        return
    from harness.bench.workspace import Workspace

    with Workspace(folder, keep=keep) as workspace:
        report = run_measurement(lambda progress: chosen.measure(sizes, workspace, progress), as_json=as_json)
    if save is not None:
        with os_errors_as(ConfigError, "the results cannot be written", where=save, fix="choose another file"):
            save.parent.mkdir(parents=True, exist_ok=True)
            save.write_text(_to_json(report) + "\n")
    if broken := report.failed:
        fix = "the notes list the reasons, with .log files next to them; run it again to repeat only these"
        what = f"{count_of(len(broken), 'part')} could not be measured: {', '.join(broken)}"
        raise HarnessError(what, where=command, fix=fix)
    missed = [f"{report.subject}: {figure.name}" for figure in report.missed]
    if missed and check:
        print_line(f"missed {count_of(len(missed), 'target')}: {'; '.join(missed)}", file=sys.stderr)
        raise typer.Exit(1)


def run_measurement(measure: Callable[[Progress], BenchReport], *, as_json: bool) -> BenchReport:
    """Run a measurement and print its report, as tables or as JSON."""
    from harness.bench.figures import render_report

    start, errors = time.perf_counter(), open_console(stderr=True)
    with errors.status("measuring") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not errors.is_terminal:
                errors.print(f"[{time.perf_counter() - start:6.1f} s] {text}")

        report = measure(progress)
    report.seconds = time.perf_counter() - start
    if as_json:
        print_text(_to_json(report))
    else:
        # A log is not wrapped to the 80 columns that rich assumes without a terminal.
        open_console(width=_LOG_COLUMNS).print(render_report(report), end="\n\n")
    return report


def _to_json(report: BenchReport) -> str:
    return json.dumps({"reports": [report.to_dict()]}, indent=2)


bench_app = typer.Typer()
bench_app.command(name="bench", no_args_is_help=True, help=HELP)(run_bench)
