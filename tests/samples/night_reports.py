"""The points that a night tried (kills, faults, values), in its report."""

from __future__ import annotations

import fcntl
import platform
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from parity_reports import read_report

from harness.parity.result import REPORT_FILE, CellResult, Check, ParityReport, to_json
from harness.storage import write_atomically


def add_points(folder: Path, check: str, name: str, points: int, *, of: str, test: str, outcome: str) -> None:
    """Add to the report in a folder that a test tried so many points, and what held at each of them."""
    command = f"pytest -m nightly '{test}'"
    cell = CellResult(
        name=f"{name}: {points} {of}",
        check=check,
        axes={"command": name, "points": f"{points}", "of": of},
        reference=None,
        status="same",
        command=command,
        checks=[Check("data", True, 0.0, None, outcome)],
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # several processes of one night write here
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / REPORT_FILE
        facts = {"machine": platform.node()}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        report = ParityReport(check, created, "pytest -m nightly", facts, [])
        if path.exists():
            report = read_report(path)
        others = [one for one in report.cells if one.command != command]
        write_atomically(path, to_json(replace(report, cells=[*others, cell])).encode())
