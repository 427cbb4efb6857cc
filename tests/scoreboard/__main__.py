"""Check released trainers and write what they do to `docs/scoreboard`, as JSON and as a page.

python -m tests.scoreboard              # all of them; environments are made when they are missing
python -m tests.scoreboard trl plain    # replace the rows of some
python -m tests.scoreboard trl --checks evaluation-mean    # print one cell and write nothing; --add writes it
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.conformance import CHECKS, ConformanceVerdict, TargetProcess
from harness.errors import HarnessError
from tests.integrations.environments import ROOT
from tests.scoreboard.environments import ENVIRONMENTS
from tests.scoreboard.page import write_page

WRITTEN = ROOT / "docs" / "scoreboard" / "scoreboard.json"
_TARGETS = Path(__file__).parent / "targets"
_SHARED = _TARGETS / "hugging_face.py"
# Some write caches, models and telemetry of their own to the network or wait for it.
_LIMIT_S = 600.0


def targets() -> dict[str, Path]:
    """Return the file of each trainer in the order of the rows."""
    found = {name: _TARGETS / f"{name.replace('-', '_')}_target.py" for name in ENVIRONMENTS}
    if (ours := _TARGETS / "ours.py").exists():
        found["ours"] = ours
    return {**found, "plain": ROOT / "tests" / "samples" / "plain_trainer.py"}


def notes_of(path: Path) -> dict[str, str]:
    """Return the dictionary NOTES of a target, and of the module that it shares, without importing its trainer."""
    text = path.read_text()
    notes = notes_of(_SHARED) if "from hugging_face import" in text else {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "NOTES" and node.value:
            notes |= ast.literal_eval(node.value)
    if unknown := sorted(set(notes) - set(CHECKS)):
        sys.exit(f"{path}: NOTES has no check {unknown[0]!r}")
    return notes


def row_of(name: str, path: Path, names: list[str], folder: Path) -> dict[str, Any]:
    """Run checks on a trainer in its environment and return its row."""
    python = sys.executable
    if name in ENVIRONMENTS:
        ENVIRONMENTS[name].make()
        python = str(ENVIRONMENTS[name].python)
    process = TargetProcess(str(path), folder / name, python=python, limit_s=_LIMIT_S)
    verdicts = process.run(names, _print)
    notes = notes_of(path)
    cells = {
        verdict.check: {
            **{key: value for key, value in asdict(verdict).items() if key != "check"},
            "text": verdict.text.replace(f"{folder}/", ""),
            "note": notes.get(verdict.check, ""),
            "command": f"python -m tests.scoreboard {name} --checks {verdict.check}",
        }
        for verdict in verdicts
    }
    versions = process.versions()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"trainer": name, "version": versions.get("version", ""), "date": today, "verdicts": cells}


def _added_to(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the scoreboard with the cells of another one of the same version added or replaced."""
    (old,) = [one for one in json.loads(WRITTEN.read_text())["rows"] if one["trainer"] == row["trainer"]]
    if old["version"] != row["version"]:
        sys.exit(f"{row['trainer']}: the row is of version {old['version']}, this is {row['version']}: run all checks")
    return _refreshed({**old, "verdicts": {**old["verdicts"], **row["verdicts"]}})


def _print(verdict: ConformanceVerdict) -> None:
    sys.stdout.write(f"{verdict.outcome:13} {verdict.check:30} {verdict.text} ({verdict.seconds:.0f} s)\n")
    sys.stdout.flush()


def write_rows(rows: list[dict[str, Any]], path: Path = WRITTEN) -> None:
    """Replace rows in the scoreboard and keep the others, in the order of the trainers."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {row["trainer"]: row for row in [*old, *rows]}
    checks = [
        {"name": check.name, "about": check.about, "ranks": check.ranks, "threads": list(check.threads)}
        for check in CHECKS.values()
    ]
    kept = [by_name[name] for name in targets() if name in by_name]
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {"checks": checks, "rows": kept}
    path.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results, path.with_name("index.html"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scoreboard")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(targets())}; default: all")
    parser.add_argument("--checks", help="print the verdicts of some checks, separated by commas, and write nothing")
    parser.add_argument("--add", action="store_true", help="write the cells of `--checks` into existing rows")
    parser.add_argument("--dir", type=Path, help="keep logs and files in this new folder")
    parser.add_argument("--refresh", action="store_true", help="read notes and descriptions again and run nothing")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in targets()]:
        parser.error(f"there is no trainer {unknown[0]!r}; choose from {', '.join(targets())}")
    names = given.checks.split(",") if given.checks else list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"there is no check {unknown[0]!r}; choose from {', '.join(CHECKS)}")
    if given.refresh:
        write_rows([_refreshed(row) for row in json.loads(WRITTEN.read_text())["rows"]])
        return
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as temporary:
        folder = given.dir or Path(temporary)
        for name in given.names or targets():
            sys.stdout.write(f"{name}\n")
            try:
                row = row_of(name, targets()[name], names, folder)
            except HarnessError as error:
                sys.exit(f"{name}: {error}")
            if given.add or not given.checks:
                write_rows([_added_to(row) if given.checks else row])


def _refreshed(row: dict[str, Any]) -> dict[str, Any]:
    path = targets().get(row["trainer"])
    notes = notes_of(path) if path else {}
    cells = row["verdicts"]
    cells = {name: {**cells[name], "note": notes.get(name, "")} for name in CHECKS if name in cells}
    return {**row, "verdicts": cells}


if __name__ == "__main__":
    main()
