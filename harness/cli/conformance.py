"""`harness conformance TARGET`: check another trainer, or this one, as verdicts and as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.settings import argument, option
from harness.errors import ConfigError, os_errors_as
from harness.printing import print_line, print_text


def run_conformance(
    target: Annotated[str, argument("[TARGET]", "a class: FILE.py[:CLASS] or MODULE:CLASS", show_default=False)] = "",
    command: Annotated[
        str, option("--command", "command to check instead of TARGET, with placeholders", metavar="TEXT")
    ] = "",
    python: Annotated[
        str, option("--python", "Python interpreter of the trainer's environment", metavar="FILE")
    ] = sys.executable,
    checks: Annotated[str, option("--checks", "checks to run, separated by commas", metavar="NAMES")] = "",
    save: Annotated[Path | None, option("--save", "write the results as JSON", metavar="FILE")] = None,
    folder: Annotated[
        Path | None, option("--dir", "keep logs and files in this new folder (default: a temporary one)")
    ] = None,
    shows: Annotated[bool, option("--list", "explain the checks without running them")] = False,
) -> None:
    """Check how a trainer packs, masks, averages, orders and resumes, on a CPU, with a small model.

    The exit code is 1 if a check fails.
    """
    from harness.conformance import CHECKS, OUTCOMES, ConformanceVerdict, TargetProcess

    if shows:
        for check in CHECKS.values():
            print_text(f"{check.name}\n{textwrap.indent(textwrap.fill(check.about, 100), '  ')}")
            print_text(f"  seen in {', '.join(check.threads)}\n")
        return
    if bool(target) == bool(command):
        fix = "harness conformance my_trainer.py; `--list` explains the checks"
        raise ConfigError("give either a TARGET or a --command", where="harness conformance", fix=fix)

    def report(verdict: ConformanceVerdict) -> None:
        print_line(f"{verdict.outcome:14}{verdict.check:44}{verdict.text}", flush=True)

    refused = {"where": " ".join(map(str, filter(None, (python, folder, save)))), "fix": "choose other files"}
    with os_errors_as(ConfigError, "the checks cannot be run", **refused), tempfile.TemporaryDirectory() as temporary:
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise ConfigError("the folder is not empty", where=f"--dir {folder}", fix="name a new folder")
        if save is not None:
            save.parent.mkdir(parents=True, exist_ok=True)
            save.touch()
        process = TargetProcess(target, folder or Path(temporary), command=command, python=python)
        names = [name.strip() for name in checks.split(",")] if checks else list(CHECKS)
        verdicts, versions = process.run(names, report), process.versions()
    counts = {name: sum(one.outcome == name for one in verdicts) for name in OUTCOMES}
    print_line(", ".join(f"{count} {name}" for name, count in counts.items()))
    if save is not None:
        save.write_text(json.dumps({**versions, "verdicts": [asdict(one) for one in verdicts]}, indent=2) + "\n")
    if counts["FAIL"] or counts["ERROR"]:
        raise typer.Exit(1)


conformance_app = typer.Typer()
conformance_app.command(name="conformance")(run_conformance)
