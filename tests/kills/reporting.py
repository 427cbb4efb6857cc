"""The kills of a night in its report, which `harness parity summarize` joins with the others."""

from __future__ import annotations

import fcntl
import platform
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.parity.result import REPORT_FILE, CellResult, Check, ParityReport, read_report, write_report


def report_kills(reports: Path, name: str, kills: int, calls: int) -> None:
    """Add a command that was killed so many times, and finished each time as without a kill, to the night's report."""
    cell = CellResult(
        name=f"{name}: {kills} kills in {calls} calls",
        check="kills",
        axes={"command": name, "kills": f"{kills}", "calls": f"{calls}"},
        reference=None,
        status="same",
        command=f"pytest -m nightly tests/kills -k '{name}'",
        checks=[Check("data", True, 0.0, None, "finished by the same command after each kill, byte for byte")],
    )
    folder = reports / "kills"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # several processes of one night write here
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / REPORT_FILE
        facts = {"machine": platform.node()}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        report = ParityReport("kills", created, "pytest -m nightly tests/kills", facts, [])
        if path.exists():
            report = read_report(path)
        others = [one for one in report.cells if one.axes["command"] != name]
        write_report(replace(report, cells=[*others, cell]), path)
